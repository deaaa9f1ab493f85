//! MiniCache pairs in canonical form: no page table and no padding. A page's slots and side rows follow those of the
//! page before, so that bitmaps and raw pages say where everything stands.

use safetensors::Dtype;

use super::tensors::{Reader, Tensors, half_bytes, word_bytes};
use super::{Part, Restored, Store};
use crate::capture::Capture;
use crate::container::to_file_dtype;
use crate::error::{Error, Result};
use crate::minicache::{Folded, Layer, Layout, MergeOptions, Page, Totals, cpu};
use crate::tensor::DType;
use half::f16;

/// Folds every sequence of every pair, and stores the other layers as they are.
pub(super) fn fold(
    store: &mut Store,
    capture: &Capture,
    options: &MergeOptions,
    pairs: &[[usize; 2]],
) -> Result<()> {
    for sequence in 0..store.head.batch {
        let start = store.start(sequence).unwrap_or(options.first_position);
        let options = options.clone().first_position(start);
        for (layer, part) in each_part(store.head.layers.len()) {
            let rows = store.view(part.of(capture, layer)?, sequence)?;
            match pairs.iter().find(|pair| pair.contains(&layer)) {
                None => store.put_raw(part, layer, sequence, &rows),
                Some(&[lower, upper]) if lower == layer => {
                    let above = store.view(part.of(capture, upper)?, sequence)?;
                    put(
                        &mut store.tensors,
                        &part.prefix(sequence, layer),
                        &cpu::merge(&rows, &above, &options)?,
                    );
                }
                Some(_) => {}
            }
        }
    }
    Ok(())
}

/// Reads every sequence of every layer, and restores it where it is to go somewhere.
pub(super) fn walk(
    store: &Store,
    options: &MergeOptions,
    pairs: &[[usize; 2]],
    reader: &mut Reader<'_>,
    mut restored: Option<&mut Restored>,
) -> Result<()> {
    for sequence in 0..store.head.batch {
        for (layer, part) in each_part(store.head.layers.len()) {
            let prefix = part.prefix(sequence, layer);
            let (shape, dtype) = store.rows(part, layer, sequence)?;
            match pairs.iter().find(|pair| pair.contains(&layer)) {
                None => {
                    let sizes = [shape.heads, shape.tokens, shape.dim];
                    let rows = reader.read(&format!("{prefix}.rows"), to_file_dtype(dtype), &sizes)?;
                    if let Some(restored) = &mut restored {
                        restored.put(part, layer, sequence, rows);
                    }
                }
                Some(&[lower, upper]) if lower == layer => {
                    let layout =
                        Layout::new((shape, dtype), (shape, dtype), options.mode)?.coded(options.planes);
                    let folded = read(reader, &prefix, layout)?;
                    let Some(restored) = &mut restored else { continue };
                    for (layer, which) in [(lower, Layer::Lower), (upper, Layer::Upper)] {
                        restored.put(part, layer, sequence, cpu::restore(&folded, which)?.bytes());
                    }
                }
                Some(_) => {}
            }
        }
    }
    Ok(())
}

/// Keys and values of each layer.
pub(super) fn each_part(layers: usize) -> impl Iterator<Item = (usize, Part)> {
    (0..layers).flat_map(|layer| Part::BOTH.map(|part| (layer, part)))
}

/// `[heads, pages]`.
fn page_sizes(layout: &Layout) -> [usize; 2] {
    [layout.shape.heads, layout.pages_per_head()]
}

/// Type and numbers of a slot: the words of coded directions, else channels.
fn slot_row(layout: &Layout) -> (Dtype, usize) {
    match layout.planes {
        Some(_) => (Dtype::U32, layout.slot_words()),
        None => (to_file_dtype(layout.slot_dtype()), layout.shape.dim),
    }
}

/// Bytes of a slot, without what pads its last word.
fn slot_bytes(layout: &Layout) -> usize {
    match layout.planes {
        Some(_) => 4 * layout.slot_words(),
        None => layout.shape.dim * layout.slot_dtype().size(),
    }
}

/// Stores a folded pair or group: slots, magnitudes and side rows in the order of the pages, wherever they stand.
pub(crate) fn put(tensors: &mut Tensors, prefix: &str, folded: &Folded) {
    let layout = &folded.layout;
    let (dim, per_slot) = (layout.shape.dim, layout.magnitudes_per_slot());
    let half = |index: usize| {
        let word = folded.magnitudes.get(index / 2).copied().unwrap_or(0);
        f16::from_bits((word >> (index % 2 * 16)) as u16)
    };
    let (mut slots, mut magnitudes, mut count) = (Vec::new(), Vec::new(), 0);
    for (index, page) in folded.pages.iter().enumerate().filter(|(_, page)| !page.is_raw()) {
        let rows = layout.page_rows(index);
        let first = page.slots as usize;
        count += rows;
        put_rows(&mut slots, &folded.slots, first..first + rows, layout.slot_words(), slot_bytes(layout));
        magnitudes.extend((first * per_slot..(first + rows) * per_slot).map(half));
    }
    let (mut side, side_rows) = (Vec::new(), folded.totals.side as usize);
    for (index, page) in folded.pages.iter().enumerate() {
        let rows = layout.page_rows(index);
        let retained = page.retained & u32::MAX.checked_shr(32 - rows as u32).unwrap_or(0);
        let count = match page.is_raw() {
            true => layout.layers * rows,
            false => layout.page_side(rows, retained.count_ones() as usize),
        };
        let first = page.side as usize;
        put_rows(
            &mut side,
            &folded.side,
            first..first + count,
            layout.side_words(),
            dim * layout.dtype.size(),
        );
    }
    let name = |suffix: &str| format!("{prefix}.{suffix}");
    let pages = page_sizes(layout);
    tensors.put(
        name("retained"),
        Dtype::U32,
        &pages,
        word_bytes(folded.pages.iter().map(|page| page.retained)),
    );
    let raw = folded.pages.iter().map(|page| u8::from(page.is_raw())).collect();
    tensors.put(name("raw_pages"), Dtype::U8, &pages, raw);
    let (dtype, width) = slot_row(layout);
    tensors.put(name("slots"), dtype, &[count, width], slots);
    if per_slot > 0 {
        tensors.put(name("magnitudes"), Dtype::F16, &[count, per_slot], half_bytes(&magnitudes));
    }
    tensors.put(name("side"), to_file_dtype(layout.dtype), &[side_rows, dim], side);
}

/// Appends the bytes of rows of so many words each, without what pads the last word.
fn put_rows(
    bytes: &mut Vec<u8>,
    words: &[u32],
    rows: std::ops::Range<usize>,
    width: usize,
    row_bytes: usize,
) {
    for row in words.chunks_exact(width).skip(rows.start).take(rows.len()) {
        bytes.extend(row.iter().flat_map(|word| word.to_le_bytes()).take(row_bytes));
    }
}

/// Reads a folded pair or group. What it allocates is a small multiple of the tensors read.
pub(crate) fn read(reader: &mut Reader<'_>, prefix: &str, layout: Layout) -> Result<Folded> {
    let name = |suffix: &str| format!("{prefix}.{suffix}");
    let sizes = page_sizes(&layout);
    let retained = reader.words(&name("retained"), &sizes)?;
    let raw = reader.read(&name("raw_pages"), Dtype::U8, &sizes)?;
    let (pages, totals, count) = arrange(&layout, &retained, raw, prefix)?;
    let dim = layout.shape.dim;
    let per_slot = layout.magnitudes_per_slot();
    let (dtype, width) = slot_row(&layout);
    let slots = reader.read(&name("slots"), dtype, &[count, width])?;
    let magnitudes =
        if per_slot > 0 { reader.halves(&name("magnitudes"), &[count, per_slot])? } else { Vec::new() };
    let side_rows = totals.side as usize;
    let side = reader.read(&name("side"), to_file_dtype(layout.dtype), &[side_rows, dim])?;

    let mut folded = Folded {
        slots: vec![0; totals.slots as usize * layout.slot_words()],
        magnitudes: vec![0; (totals.slots as usize * per_slot).div_ceil(2)],
        side: get_rows(side, layout.side_words(), dim * layout.dtype.size()),
        layout,
        pages,
        totals,
    };
    let rows = get_rows(slots, layout.slot_words(), slot_bytes(&layout));
    let mut rows = rows.chunks_exact(layout.slot_words());
    let mut magnitudes = magnitudes.into_iter();
    for (index, page) in folded.pages.iter().enumerate().filter(|(_, page)| !page.is_raw()) {
        let first = page.slots as usize;
        let places = folded.slots.chunks_exact_mut(layout.slot_words()).skip(first);
        let count = layout.page_rows(index);
        for (place, row) in places.take(count).zip(rows.by_ref()) {
            place.copy_from_slice(row);
        }
        for (place, half) in (first * per_slot..(first + count) * per_slot).zip(magnitudes.by_ref()) {
            if let Some(word) = folded.magnitudes.get_mut(place / 2) {
                *word |= u32::from(half.to_bits()) << (place % 2 * 16);
            }
        }
    }
    folded.check()?;
    Ok(folded)
}

/// Words of rows of so many bytes each; what pads the last word is 0.
fn get_rows(bytes: &[u8], width: usize, row_bytes: usize) -> Vec<u32> {
    let mut words = Vec::with_capacity(bytes.len() / row_bytes * width);
    for row in bytes.chunks_exact(row_bytes) {
        words.extend(
            row.chunks(DType::F32.size())
                .map(|chunk| chunk.iter().rev().fold(0u32, |word, &byte| word << 8 | u32::from(byte))),
        );
    }
    words
}

/// Page table, totals and rows in slots, from bitmaps and raw pages.
fn arrange(
    layout: &Layout,
    retained: &[u32],
    raw: &[u8],
    prefix: &str,
) -> Result<(Vec<Page>, Totals, usize)> {
    let mut totals = Totals::default();
    let mut pages = Vec::with_capacity(retained.len());
    let mut count = 0;
    for (index, (&retained, &raw)) in retained.iter().zip(raw).enumerate() {
        let rows = layout.page_rows(index);
        let all = u32::MAX.checked_shr(32 - rows as u32).unwrap_or(0);
        let side = totals.side;
        let slots = match raw {
            1 if retained == u32::MAX => {
                totals.side += (layout.layers * rows) as u32;
                totals.raw_pages += 1;
                totals.counts.rule += rows as u32;
                Page::RAW
            }
            0 if retained & !all == 0 => {
                let kept = retained.count_ones();
                let first = totals.slots;
                totals.slots += Layout::page_slots(rows) as u32;
                totals.side += layout.page_side(rows, kept as usize) as u32;
                totals.counts.rule += kept;
                totals.counts.merged += rows as u32 - kept;
                count += rows;
                first
            }
            _ => {
                let want = format!("a bitmap of {rows} rows, or a raw page's of all bits");
                let have = format!("{retained:#010x} with raw {raw}");
                return Err(Error::shape(format!("{prefix}.retained, page {index}"), want, have));
            }
        };
        pages.push(Page { slots, side, retained });
    }
    Ok((pages, totals, count))
}
