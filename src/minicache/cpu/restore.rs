//! Restoring rows from a folded pair or group.

use half::f16;

use super::super::config::Mode;
use super::super::folded::{Folded, Layer, Layout, PAGE};
use super::{expand, rotation, side_row};
use crate::error::{Error, Result};
use crate::qjl::planes::Rotation;
use crate::tensor::{DType, Tensor, decode, encode};

/// Restores one layer of a folded pair in the element type it came in: raw rows bit for bit (but for [`Mode::Compat`]'s
/// upper layer, which is f16), merged rows as `magnitude * direction`.
///
/// # Errors
/// [`Error::Shape`] when a store or page does not fit the layout and totals.
pub fn restore(folded: &Folded, which: Layer) -> Result<Tensor> {
    restore_member(folded, which.member())
}

/// Restores one of the layers folded together, counted from the lowest.
///
/// # Errors
/// As [`restore`]; [`Error::Range`] when there is no such layer.
pub fn restore_member(folded: &Folded, member: usize) -> Result<Tensor> {
    let layout = folded.layout;
    folded.check()?;
    if member >= layout.layers {
        return Err(Error::range("layer of a group", format!("less than {}", layout.layers), member));
    }
    let mut bytes = Vec::with_capacity(layout.shape.bytes(layout.dtype));
    let rotation = rotation(folded);
    layout.shape.iter_rows().for_each(|row| read_bytes(folded, row, member, rotation.as_deref(), &mut bytes));
    Tensor::new(bytes, layout.dtype, layout.shape)
}

/// Appends the bytes of one restored row; `rotation` is that of coded directions.
pub(crate) fn read_bytes(
    folded: &Folded,
    (batch, head, token): (usize, usize, usize),
    member: usize,
    rotation: Option<&Rotation>,
    bytes: &mut Vec<u8>,
) {
    let layout = &folded.layout;
    let scaled = |numbers: &mut [f32], magnitude: f32, bytes: &mut Vec<u8>| {
        numbers.iter_mut().for_each(|x| *x *= magnitude);
        encode(numbers, layout.dtype, bytes);
    };
    match stored(folded, layout.page(batch, head, token), token % PAGE, member) {
        Stored::Raw(words) => bytes.extend_from_slice(&row_bytes(words, layout, layout.dtype)),
        Stored::Slot(words, magnitude) => {
            let mut numbers = vec![0.0; layout.shape.dim];
            decode(&row_bytes(words, layout, layout.slot_dtype()), layout.slot_dtype(), &mut numbers);
            scaled(&mut numbers, magnitude, bytes);
        }
        Stored::Coded(words, bits, magnitude) => {
            let mut numbers = vec![0.0; layout.shape.dim];
            if let Some(rotation) = rotation {
                expand(words, layout, bits, rotation, &mut numbers);
            }
            // A device expands slots to f16 before it restores them.
            numbers.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
            scaled(&mut numbers, magnitude, bytes);
        }
    }
}

/// A stored row of one layer.
pub(super) enum Stored<'a> {
    /// In the input's type.
    Raw(&'a [u32]),
    /// In the slots' type, times a magnitude.
    Slot(&'a [u32], f32),
    /// In codes of so many bits, times a magnitude.
    Coded(&'a [u32], u8, f32),
}

/// Where row `row` of page `index` is stored for one of the layers.
pub(super) fn stored(folded: &Folded, index: usize, row: usize, member: usize) -> Stored<'_> {
    let (layout, page) = (&folded.layout, &folded.pages[index]);
    if let Some(side) = side_row(layout, page, row, layout.page_rows(index), member) {
        return Stored::Raw(&folded.side[side * layout.side_words()..(side + 1) * layout.side_words()]);
    }
    let slot = page.slots as usize + row;
    let words = &folded.slots[slot * layout.slot_words()..(slot + 1) * layout.slot_words()];
    let half =
        |index: usize| f16::from_bits((folded.magnitudes[index / 2] >> (index % 2 * 16)) as u16).to_f32();
    match layout.mode {
        Mode::Anchor if member == 0 => Stored::Raw(words),
        Mode::Shared if page.retained >> row & 1 == 1 => Stored::Raw(words),
        Mode::Compat if layout.slot_dtype() == layout.dtype => Stored::Raw(words),
        Mode::Shared => {
            let magnitude = half(slot * layout.layers + member);
            match layout.planes {
                Some(planes) => Stored::Coded(words, planes.bits, magnitude),
                None => Stored::Slot(words, magnitude),
            }
        }
        Mode::Anchor => Stored::Slot(words, half(slot * (layout.layers - 1) + member - 1)),
        Mode::Compat => Stored::Slot(words, 1.0),
    }
}

/// The bytes of a row of words, without what pads the last.
pub(super) fn row_bytes(words: &[u32], layout: &Layout, dtype: DType) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(layout.shape.dim * dtype.size());
    bytes
}
