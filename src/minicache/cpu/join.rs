//! Joining two folded pairs along their tokens.

use super::super::folded::{Folded, Layout, PAGE, Page, Totals};
use crate::error::{Error, Result};
use crate::tensor::Shape;

/// One folded pair that holds the tokens of `first` and then those of `second`: what is stored of a row does not change.
///
/// # Errors
/// [`Error::Shape`] when the two differ in anything but their tokens, or `first` does not end with a whole page.
pub fn join(first: &Folded, second: &Folded) -> Result<Folded> {
    let layout = joined_layout(&first.layout, &second.layout)?;
    let (offset_slots, offset_side) = (first.totals.slots, first.totals.side);
    let moved = |page: &Page| Page {
        slots: if page.is_raw() { Page::RAW } else { page.slots + offset_slots },
        side: page.side + offset_side,
        retained: page.retained,
    };
    let heads = |folded: &Folded| folded.layout.pages_per_head().max(1);
    let firsts = first.pages.chunks(heads(first)).map(Some).chain(std::iter::repeat(None));
    let seconds = second.pages.chunks(heads(second)).map(Some).chain(std::iter::repeat(None));
    let pages = firsts.zip(seconds).take(layout.shape.batch * layout.shape.heads).flat_map(|(a, b)| {
        let kept = a.unwrap_or_default().iter().copied();
        kept.chain(b.unwrap_or_default().iter().map(moved)).collect::<Vec<_>>()
    });
    Ok(Folded {
        layout,
        pages: pages.collect(),
        slots: [first.slots.as_slice(), &second.slots].concat(),
        magnitudes: [first.magnitudes.as_slice(), &second.magnitudes].concat(),
        side: [first.side.as_slice(), &second.side].concat(),
        totals: joined_totals(&first.totals, &second.totals),
    })
}

/// The layout of two folded pairs joined.
pub(crate) fn joined_layout(first: &Layout, second: &Layout) -> Result<Layout> {
    let tokens = first.shape.tokens + second.shape.tokens;
    let second_shape = Shape { tokens: first.shape.tokens, ..second.shape };
    second_shape.check_equal("second folded pair", first.shape)?;
    if first.dtype != second.dtype || first.mode != second.mode {
        let kind = |layout: &Layout| format!("{} {:?}", layout.dtype, layout.mode);
        return Err(Error::shape("second folded pair", kind(first), kind(second)));
    }
    if !first.shape.tokens.is_multiple_of(PAGE) {
        return Err(Error::shape("first folded pair", "whole pages of 32 tokens", first.shape.tokens));
    }
    let pair = (Shape { tokens, ..first.shape }, first.dtype);
    Layout::new(pair, pair, first.mode)
}

/// The totals of two folded pairs joined.
pub(crate) fn joined_totals(first: &Totals, second: &Totals) -> Totals {
    Totals {
        slots: first.slots + second.slots,
        side: first.side + second.side,
        raw_pages: first.raw_pages + second.raw_pages,
        counts: first.counts.plus(&second.counts),
    }
}
