//! A folded pair of layers: its layout, which the twin and the kernels share, and a copy of it on the host.
//!
//! The unit is a **page**: 32 tokens of one sequence and KV head, decided whole. A page is *folded* (one slot per row, a
//! magnitude word, side rows for what stays raw) or, when it would keep nearly all rows raw, *raw* (two side rows per row).

use bytemuck::{Pod, Zeroable};

use super::config::{Counts, DirectionPlanes, MergeOptions, Mode};
use crate::error::{Error, Result};
use crate::tensor::{DType, Shape};

/// Tokens of a page.
pub const PAGE: usize = 32;
/// The smallest normal f16; smaller magnitudes would be stored with few bits or flushed to zero.
const F16_MIN_NORMAL: f32 = 6.103_515_6e-5;
/// The largest f16.
pub(crate) const F16_MAX: f32 = 65504.0;
/// The most layers that are folded onto one direction.
pub const MAX_GROUP: usize = 8;

/// Which layer of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layer {
    /// The layer nearer the input.
    Lower,
    /// The layer above it.
    Upper,
}

impl Layer {
    /// Its place in the pair.
    pub(crate) const fn member(self) -> usize {
        self as usize
    }
}

/// One page's entry in the page table, 12 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Page {
    /// First slot, or [`Page::RAW`].
    pub slots: u32,
    /// First side row.
    pub side: u32,
    /// Bit `i` is set iff row `i` is kept raw; all rows of a raw page are.
    pub retained: u32,
}

impl Page {
    /// `slots` of a raw page.
    pub const RAW: u32 = u32::MAX;

    /// Whether the page stayed two raw pages.
    #[must_use]
    pub const fn is_raw(&self) -> bool {
        self.slots == Self::RAW
    }
}

/// Sizes of a folded pair, or larger group, of tensors, one of K or V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Shape of each layer's tensor.
    pub shape: Shape,
    /// Element type of the input, and of what is restored.
    pub dtype: DType,
    /// How the pair is stored.
    pub mode: Mode,
    /// Layers folded together: 2 for a pair.
    pub layers: usize,
    /// How directions are coded, where they are.
    pub planes: Option<DirectionPlanes>,
    /// Whether retained rows stand in the side alone, so that slots hold nothing but directions.
    pub(crate) apart: bool,
}

impl Layout {
    /// The layout of a pair.
    ///
    /// # Errors
    /// [`Error::Shape`] when the shapes differ or the head dimension is outside 1 to 512, [`Error::DType`] when the
    /// element types differ, [`Error::Limit`] when rows or words do not fit 32-bit indices.
    pub fn new(lower: (Shape, DType), upper: (Shape, DType), mode: Mode) -> Result<Self> {
        upper.0.check_equal("upper layer", lower.0)?;
        if lower.1 != upper.1 {
            let (want, have) = (lower.1.to_string(), upper.1.to_string());
            return Err(Error::DType { what: "upper layer".to_owned(), want, have });
        }
        Self::group(lower.0, lower.1, mode, 2)
    }

    /// The layout of a group of `layers` tensors of one shape.
    ///
    /// # Errors
    /// [`Error::Shape`] when the head dimension is outside 1 to 512, [`Error::Range`] when there are fewer than 2 or more
    /// than 8 layers, or more than 2 in [`Mode::Compat`], [`Error::Limit`] when rows or words do not fit 32-bit indices.
    pub fn group(shape: Shape, dtype: DType, mode: Mode, layers: usize) -> Result<Self> {
        shape.check_dim("keys or values of a pair")?;
        let most = if mode == Mode::Compat { 2 } else { MAX_GROUP };
        if !(2..=most).contains(&layers) {
            return Err(Error::range("layers folded together", format!("2 to {most}"), layers));
        }
        let layout = Self { shape, dtype, mode, layers, planes: None, apart: false };
        // At most a slot of f16 and a raw row of f32 for every layer's row, the magnitudes, and the page table.
        let row = layout.shape.dim.div_ceil(2) + layers * (layout.shape.dim + 1);
        let words = layout.pages() as u64 * (PAGE * row + 3) as u64;
        if words > u64::from(u32::MAX) {
            return Err(Error::Limit { what: "32-bit word index", need: words, have: u64::from(u32::MAX) });
        }
        Ok(layout)
    }

    /// The same with directions coded, where they are.
    #[must_use]
    pub const fn coded(self, planes: Option<DirectionPlanes>) -> Self {
        Self { planes, apart: planes.is_some(), ..self }
    }

    /// The same with directions in f16, where rows stand before they are coded.
    pub(crate) const fn whole(self) -> Self {
        Self { planes: None, ..self }
    }

    /// Pages of one sequence and head.
    #[must_use]
    pub const fn pages_per_head(&self) -> usize {
        self.shape.tokens.div_ceil(PAGE)
    }

    /// Pages in all.
    #[must_use]
    pub const fn pages(&self) -> usize {
        self.shape.batch * self.shape.heads * self.pages_per_head()
    }

    /// Index of the page that holds a row.
    #[must_use]
    pub const fn page(&self, batch: usize, head: usize, token: usize) -> usize {
        (batch * self.shape.heads + head) * self.pages_per_head() + token / PAGE
    }

    /// Rows of a page: 32, or fewer in the last of a head.
    #[must_use]
    pub const fn page_rows(&self, page: usize) -> usize {
        let pages = self.pages_per_head();
        if pages == 0 {
            return 0;
        }
        let left = self.shape.tokens - page % pages * PAGE;
        if left < PAGE { left } else { PAGE }
    }

    /// Element type of a slot: f16, or the input's where the slot *is* the lower layer (Anchor).
    #[must_use]
    pub const fn slot_dtype(&self) -> DType {
        match self.mode {
            Mode::Anchor => self.dtype,
            Mode::Shared | Mode::Compat => DType::F16,
        }
    }

    /// The norms that may merge, beside 0: those that f16 holds as normal numbers. Of a coded direction the code's scalar goes into
    /// the magnitude, which shrinks to a thirtieth at the least, and rounding adds to what is restored.
    pub(crate) const fn storable(&self) -> [f32; 2] {
        match self.planes {
            Some(_) => [64.0 * F16_MIN_NORMAL, F16_MAX * (1.0 - 1.0 / 256.0)],
            None => [F16_MIN_NORMAL, F16_MAX],
        }
    }

    /// What a level of a coded direction counts: a power of two not below `1 / sqrt(dim)`. Levels are odd, so that a row of them is
    /// as long as `sqrt(dim)` at the least, and a magnitude that takes the code's scalar over a level's count in never grows.
    pub(crate) const fn level_unit(&self) -> f32 {
        1.0 / (1u32 << (self.shape.dim.ilog2() / 2)) as f32
    }

    /// 32-bit words of one slot: of a coded direction the codes of its channels one after the other, least significant bit
    /// first.
    #[must_use]
    pub const fn slot_words(&self) -> usize {
        match self.planes {
            Some(planes) => (self.shape.dim * planes.bits as usize).div_ceil(32),
            None => (self.shape.dim * self.slot_dtype().size()).div_ceil(4),
        }
    }

    /// 32-bit words of one side row.
    #[must_use]
    pub const fn side_words(&self) -> usize {
        (self.shape.dim * self.dtype.size()).div_ceil(4)
    }

    /// f16 magnitudes of one slot: every layer's (Shared), the upper layers' ratios (Anchor) or none (Compat).
    #[must_use]
    pub const fn magnitudes_per_slot(&self) -> usize {
        match self.mode {
            Mode::Shared => self.layers,
            Mode::Anchor => self.layers - 1,
            Mode::Compat => 0,
        }
    }

    /// Whether a retained row of one layer sits in the slot itself, so that only the other's goes to the side.
    #[must_use]
    pub fn reuses_slots(&self) -> bool {
        !self.apart && (self.slot_dtype() == self.dtype || self.mode == Mode::Compat)
    }

    /// Side rows of a retained row of a folded page: every layer's, but for one that sits in the slot.
    #[must_use]
    pub fn side_per_retained(&self) -> usize {
        if self.reuses_slots() { self.layers - 1 } else { self.layers }
    }

    /// Slots of a folded page of `rows`: rounded up to even, so that two f16 magnitudes share a word.
    #[must_use]
    pub const fn page_slots(rows: usize) -> usize {
        rows.next_multiple_of(2)
    }

    /// Side rows of a folded page of `rows`, `retained` of which are raw.
    #[must_use]
    pub fn page_side(&self, rows: usize, retained: usize) -> usize {
        match self.mode {
            Mode::Compat => rows,
            _ => self.side_per_retained() * retained,
        }
    }

    /// The sizes of a fold in [`Mode::Compat`], which keeps every lower row and a slot for every upper one whatever is decided.
    #[cfg(feature = "gpu")]
    pub(crate) fn compat_totals(&self) -> Totals {
        let rows = (0..self.pages()).map(|page| self.page_rows(page));
        let (slots, side) =
            rows.fold((0, 0), |(slots, side), rows| (slots + Self::page_slots(rows), side + rows));
        Totals { slots: slots as u32, side: side as u32, ..Totals::default() }
    }

    /// Bytes of the input tensors.
    #[must_use]
    pub const fn bytes_before(&self) -> usize {
        self.layers * self.shape.bytes(self.dtype)
    }
}

/// What a fold will hold, known once the rows are decided: sizes the host must allocate, and the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Slots.
    pub slots: u32,
    /// Side rows.
    pub side: u32,
    /// Pages that stayed raw.
    pub raw_pages: u32,
    /// Rows merged and retained.
    pub counts: Counts,
}

impl Totals {
    /// Bytes of page table, slots, magnitudes and side rows, as they are allocated.
    #[must_use]
    pub const fn bytes(&self, layout: &Layout) -> u64 {
        self.words(layout) as u64 * 4
    }

    const fn words(&self, layout: &Layout) -> usize {
        self.sections(layout).side as usize + self.side as usize * layout.side_words()
    }

    /// Where the sections of the store begin.
    #[must_use]
    pub const fn sections(&self, layout: &Layout) -> Sections {
        let slots = (layout.pages() * size_of::<Page>() / 4) as u32;
        let magnitudes = slots + self.slots * layout.slot_words() as u32;
        let side = magnitudes + self.slots * layout.magnitudes_per_slot() as u32 / 2;
        Sections { pages: 0, slots, magnitudes, side }
    }
}

/// Where the sections of a store begin, in words: a folded pair is one buffer that holds the page table, the slots, the
/// magnitudes and the side rows, so that attention over K and V binds two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Sections {
    /// The page table, `[batch, heads, pages]` entries of three words.
    pub pages: u32,
    /// `[slots, slot_words]`.
    pub slots: u32,
    /// Two f16 magnitudes a word.
    pub magnitudes: u32,
    /// `[side rows, side_words]`.
    pub side: u32,
}

impl Sections {
    /// Whether each begins at a whole vec4; rows of whole vec4s then do as well.
    #[cfg(feature = "gpu")]
    pub(crate) const fn start_at_vectors(&self) -> bool {
        (self.pages | self.slots | self.magnitudes | self.side).is_multiple_of(4)
    }
}

/// A folded pair on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folded {
    /// Sizes.
    pub layout: Layout,
    /// The page table, `[batch, heads, pages]`.
    pub pages: Vec<Page>,
    /// `[slots, slot_words]`: two f16 or bf16 channels a word, the even one low, or one f32; of coded directions the codes of
    /// all channels, least significant bit first.
    pub slots: Vec<u32>,
    /// Two f16 a word, `[slots, magnitudes_per_slot]`; of a Shared slot the lower layer's stands low.
    pub magnitudes: Vec<u32>,
    /// `[side rows, side_words]`, rows as they came.
    pub side: Vec<u32>,
    /// Sizes and counts.
    pub totals: Totals,
}

impl Folded {
    /// A folded pair from the words of a store.
    ///
    /// # Errors
    /// [`Error::TooShort`] when the words are not exactly what layout and totals need.
    pub fn from_words(layout: Layout, totals: Totals, words: &[u32]) -> Result<Self> {
        let need = totals.words(&layout);
        let section = |start: u32, end: u32| words.get(start as usize..end as usize).unwrap_or_default();
        let at = totals.sections(&layout);
        if words.len() != need {
            let (need, have) = (need as u64 * 4, words.len() as u64 * 4);
            return Err(Error::TooShort { what: "folded pair".to_owned(), need, have });
        }
        let page = |&[slots, side, retained]: &[u32; 3]| Page { slots, side, retained };
        Ok(Self {
            layout,
            pages: section(at.pages, at.slots).as_chunks::<3>().0.iter().map(page).collect(),
            slots: section(at.slots, at.magnitudes).to_vec(),
            magnitudes: section(at.magnitudes, at.side).to_vec(),
            side: section(at.side, need as u32).to_vec(),
            totals,
        })
    }

    /// The words of a store: page table, slots, magnitudes and side rows.
    #[cfg(feature = "gpu")]
    pub(crate) fn to_words(&self) -> Vec<u32> {
        let table: &[u32] = bytemuck::cast_slice(&self.pages);
        [table, &self.slots, &self.magnitudes, &self.side].concat()
    }

    /// Checks that stores are as long as the totals say and that every page lies within them.
    ///
    /// # Errors
    /// [`Error::Shape`] naming the first that does not fit, [`Error::Range`] when directions cannot be coded as the layout says.
    pub fn check(&self) -> Result<()> {
        let (layout, totals) = (&self.layout, &self.totals);
        if let Some(planes) = &layout.planes {
            planes.validate(layout.mode)?;
        }
        let wanted = [
            ("page table", layout.pages(), self.pages.len()),
            ("slots", totals.slots as usize * layout.slot_words(), self.slots.len()),
            (
                "magnitudes",
                (totals.slots as usize * layout.magnitudes_per_slot()).div_ceil(2),
                self.magnitudes.len(),
            ),
            ("side rows", totals.side as usize * layout.side_words(), self.side.len()),
        ];
        for (what, want, have) in wanted {
            if want != have {
                return Err(Error::shape(what, want, have));
            }
        }
        for (index, page) in self.pages.iter().enumerate() {
            let rows = layout.page_rows(index);
            let (slots, side) = if page.is_raw() {
                (0, layout.layers * rows)
            } else {
                let retained = page.retained & u32::MAX.checked_shr(32 - rows as u32).unwrap_or(0);
                (u64::from(page.slots) + rows as u64, layout.page_side(rows, retained.count_ones() as usize))
            };
            let side = u64::from(page.side) + side as u64;
            if slots > u64::from(totals.slots) || side > u64::from(totals.side) {
                let want = format!("at most {} slots and {} side rows", totals.slots, totals.side);
                return Err(Error::shape(format!("page {index}"), want, format_args!("{slots} and {side}")));
            }
        }
        Ok(())
    }

    /// Rows that stand raw by a decision of their own; those that are raw with their page count by their causes.
    pub(crate) fn retained_rows(&self) -> usize {
        let rows = |(index, page): (usize, &Page)| {
            let all = u32::MAX.checked_shr(32 - self.layout.page_rows(index) as u32).unwrap_or(0);
            (page.retained & all).count_ones() as usize
        };
        self.pages.iter().enumerate().map(rows).sum()
    }

    /// Bytes of everything stored.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let words = self.slots.len() + self.magnitudes.len() + self.side.len();
        (words * 4 + self.pages.len() * size_of::<Page>()) as u64
    }
}

/// A point on the arc between two directions means nothing for three.
pub(crate) fn check_arc(options: &MergeOptions, layers: usize) -> Result<()> {
    if options.mode == Mode::Shared && layers > 2 && options.slerp_t != 0.5 {
        return Err(Error::range("slerp_t of a group of more than two", "0.5", options.slerp_t));
    }
    Ok(())
}

/// Checks what every merge needs and gives the layout.
pub(crate) fn check_merge(
    lower: (Shape, DType),
    upper: (Shape, DType),
    options: &MergeOptions,
) -> Result<Layout> {
    options.validate()?;
    Ok(Layout::new(lower, upper, options.mode)?.coded(options.planes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_too_large_for_32_bit_indices_is_a_limit() {
        let shape = Shape::new(1, 1, 1 << 26, 64).unwrap();
        let error = Layout::new((shape, DType::F16), (shape, DType::F16), Mode::Shared).unwrap_err();
        assert!(matches!(error, Error::Limit { need: 10_877_927_424, .. }), "{error}");
    }
}
