//! Attention over a folded pair: scores and sums from direction and magnitude, nothing restored.

use std::sync::Arc;

use super::super::folded::{Folded, Layer, PAGE};
use super::{Stored, expand, rotation, row_bytes, stored};
use crate::attention::{AttendOptions, Geometry, Rows, attend_rows};
use crate::error::{Error, Result};
use crate::qjl::planes::Rotation;
use crate::tensor::{TensorView, decode};

/// Attention of one layer over folded keys and values, `[batch, query_heads, queries, value_dim]` in f32. `queries` are
/// `[batch, query_heads, queries, key_dim]`; `lengths` one per sequence (default: all tokens).
///
/// A merged row is `magnitude * direction` in f32, not rounded to the input's type as [`restore`](super::restore) does. A row
/// that holds a non-finite number is masked.
///
/// # Errors
/// [`Error::Shape`], [`Error::HeadRatio`] or [`Error::Range`] when shapes, lengths or options do not fit.
pub fn attend(
    queries: &TensorView<'_>,
    keys: &Folded,
    values: &Folded,
    which: Layer,
    lengths: Option<&[u32]>,
    options: &AttendOptions<'_>,
) -> Result<Vec<f32>> {
    let g = Geometry::of(queries.shape(), keys.layout.shape)?;
    g.check_values(values.layout.shape)?;
    keys.check()?;
    values.check()?;
    if keys.layout.dtype != values.layout.dtype {
        let (want, have) = (keys.layout.dtype.to_string(), values.layout.dtype.to_string());
        return Err(Error::DType { what: "folded values".to_owned(), want, have });
    }
    let [keys, values] = [keys, values].map(|folded| FoldedRows::new(folded, which.member()));
    attend_rows(g, queries, &keys, &values, lengths, options)
}

/// Rows of one layer of a folded pair.
struct FoldedRows<'a> {
    folded: &'a Folded,
    member: usize,
    /// Of coded directions.
    rotation: Option<Arc<Rotation>>,
}

impl<'a> FoldedRows<'a> {
    fn new(folded: &'a Folded, member: usize) -> Self {
        Self { folded, member, rotation: rotation(folded) }
    }
}

impl Rows for FoldedRows<'_> {
    fn width(&self) -> usize {
        self.folded.layout.shape.dim
    }

    fn read(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32> {
        read_row(self.folded, (batch, head, token), self.member, self.rotation.as_deref(), row)
    }
}

/// Reads a row in the direction's scale and says its magnitude; a row that holds a non-finite number is zeros and `None`.
/// `rotation` is that of coded directions.
pub(crate) fn read_row(
    folded: &Folded,
    (batch, head, token): (usize, usize, usize),
    member: usize,
    rotation: Option<&Rotation>,
    row: &mut [f32],
) -> Option<f32> {
    let layout = &folded.layout;
    let (words, dtype, magnitude) =
        match stored(folded, layout.page(batch, head, token), token % PAGE, member) {
            Stored::Raw(words) => (words, layout.dtype, 1.0),
            Stored::Slot(words, magnitude) => (words, layout.slot_dtype(), magnitude),
            Stored::Coded(words, bits, magnitude) => {
                expand(words, layout, bits, rotation?, row);
                return Some(magnitude);
            }
        };
    decode(&row_bytes(words, layout, dtype), dtype, row);
    if row.iter().all(|x| x.is_finite()) {
        return Some(magnitude);
    }
    row.fill(0.0);
    None
}
