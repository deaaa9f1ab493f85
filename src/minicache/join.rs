//! Joining two folded pairs along their tokens: what is stored of a row does not change, only where pages point.

use super::folded::{Layout, PAGE, Page, Totals};
use crate::error::{Error, Result};
use crate::tensor::Shape;

/// A folded pair without its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outline<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) totals: &'a Totals,
    /// `[batch, heads, pages]`.
    pub(crate) pages: &'a [Page],
}

/// What two folded pairs are when the second's tokens follow the first's. Slots, magnitudes and side rows are the first's and
/// then the second's.
#[derive(Clone, Debug)]
pub(crate) struct Joined {
    pub(crate) layout: Layout,
    pub(crate) totals: Totals,
    pub(crate) pages: Vec<Page>,
}

impl Joined {
    /// # Errors
    /// [`Error::Shape`] when the two differ in anything but their tokens, or the first does not end with a whole page;
    /// [`Error::Limit`] when both together exceed 32-bit indices.
    pub(crate) fn of(first: Outline<'_>, second: Outline<'_>) -> Result<Self> {
        let layout = joined_layout(first.layout, second.layout)?;
        let moved = |page: &Page| Page {
            slots: if page.is_raw() { Page::RAW } else { page.slots + first.totals.slots },
            side: page.side + first.totals.side,
            retained: page.retained,
        };
        let head = |of: Outline<'_>, head: usize| {
            let pages = of.layout.pages_per_head();
            head * pages..(head + 1) * pages
        };
        let mut pages = Vec::with_capacity(layout.pages());
        for index in 0..layout.shape.batch * layout.shape.heads {
            pages.extend_from_slice(first.pages.get(head(first, index)).unwrap_or_default());
            pages.extend(second.pages.get(head(second, index)).unwrap_or_default().iter().map(moved));
        }
        let (a, b) = (first.totals, second.totals);
        let totals = Totals {
            slots: a.slots + b.slots,
            side: a.side + b.side,
            raw_pages: a.raw_pages + b.raw_pages,
            counts: a.counts.plus(&b.counts),
        };
        Ok(Self { layout, totals, pages })
    }
}

fn joined_layout(first: &Layout, second: &Layout) -> Result<Layout> {
    let same = Shape { tokens: first.shape.tokens, ..second.shape };
    same.check_equal("second folded pair", first.shape)?;
    let kind = |layout: &Layout| {
        format!("{} {:?} of {} layers, coded {:?}", layout.dtype, layout.mode, layout.layers, layout.planes)
    };
    if kind(first) != kind(second) {
        return Err(Error::shape("second folded pair", kind(first), kind(second)));
    }
    if !first.shape.tokens.is_multiple_of(PAGE) {
        return Err(Error::shape("first folded pair", "whole pages of 32 tokens", first.shape.tokens));
    }
    let tokens = first.shape.tokens + second.shape.tokens;
    Ok(Layout::group(Shape { tokens, ..first.shape }, first.dtype, first.mode, first.layers)?
        .coded(first.planes))
}
