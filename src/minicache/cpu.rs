//! MiniCache in f32 on the CPU: each function is the twin of the kernel of the same name in `shaders/minicache/`, with the
//! same order of operations.

#![allow(clippy::indexing_slicing, reason = "indices run over shapes that were checked on entry")]

mod attend;
mod code;
mod group;
mod join;
mod restore;

pub use attend::attend;
pub(crate) use attend::read_row;
use code::expand;
pub(crate) use code::{check_digests, refill, rotation, rotation_digests};
pub(crate) use group::Probe;
pub use group::{GroupRow, group_merge, group_similarity};
pub use join::join;
pub(crate) use restore::read_bytes;
use restore::{Stored, row_bytes, stored};
pub use restore::{restore, restore_member};

use half::f16;

use super::config::{Cause, MergeOptions, Mode, Retention};
use super::cut::{Cut, Frame, order_key};
use super::folded::{F16_MAX, Folded, Layout, PAGE, Page, Totals, check_merge};
use super::slerp;
use crate::error::Result;
use crate::tensor::{DType, TensorView, decode, encode};

/// Lanes that share a row, in twin and kernel.
const LANES: usize = 16;
/// Rows whose largest number lies outside stay raw: the inverse of their norm, or a weight, would leave f32's normal range,
/// which devices may flush to zero.
const MEASURABLE: std::ops::RangeInclusive<f32> = 7.888_609e-31..=1.267_650_6e30;
/// An Anchor ratio may be rounded up to f16 by this factor's inverse.
const RATIO_HEADROOM: f32 = 1.0 - 1.0 / 2048.0;

/// What [`similarity`] finds for one row of a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Row {
    /// Cosine of the two rows, clamped to `[-1, 1]`; 0 when either is zero, not finite, or has its largest number outside
    /// 2^-100 to 2^100, which makes the fault [`Cause::Range`].
    pub cosine: f32,
    /// Norm of the lower row; where the pair is outside that range, its largest number.
    pub lower: f32,
    /// The same of the upper row.
    pub upper: f32,
    /// The shared direction is `weight_lower * lower row + weight_upper * upper row`.
    pub weight_lower: f32,
    /// See `weight_lower`.
    pub weight_upper: f32,
    /// Why the pair cannot be merged, whatever the rule says.
    pub fault: Option<Cause>,
}

impl Row {
    /// Whether both rows are zero.
    #[must_use]
    pub fn both_zero(&self) -> bool {
        self.fault != Some(Cause::NonFinite) && self.lower == 0.0 && self.upper == 0.0
    }
}

/// Sums `f` over the channels of two rows as the kernel does: channel pair `p` belongs to lane `p % 16`, lanes are added as a
/// butterfly.
fn lane_sum(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<{ 2 * LANES }>(), b.as_chunks::<{ 2 * LANES }>());
    for (x, y) in a.iter().zip(b) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(x[2 * lane], y[2 * lane]) + f(x[2 * lane + 1], y[2 * lane + 1]);
        }
    }
    let rest = a_rest.chunks(2).zip(b_rest.chunks(2));
    for (sum, (x, y)) in lanes.iter_mut().zip(rest) {
        *sum += x.iter().zip(y).map(|(&x, &y)| f(x, y)).fold(0.0, |sum, term| sum + term);
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
        }
    }
    lanes[0]
}

/// Measures one pair of rows.
fn measure(lower: &[f32], upper: &[f32], layout: &Layout, t: f32) -> Row {
    let mode = layout.mode;
    if lower.iter().chain(upper).any(|x| !x.is_finite()) {
        return Row { fault: Some(Cause::NonFinite), ..Row::default() };
    }
    let peak = |row: &[f32]| row.iter().fold(0.0f32, |p, x| p.max(x.abs()));
    let (peak_lower, peak_upper) = (peak(lower), peak(upper));
    if [peak_lower, peak_upper].iter().any(|p| *p > 0.0 && !MEASURABLE.contains(p)) {
        return Row { lower: peak_lower, upper: peak_upper, fault: Some(Cause::Range), ..Row::default() };
    }
    // Scaling by the peak before squaring keeps the squares inside f32.
    let inverse = |x: f32| if x > 0.0 { 1.0 / x } else { 0.0 };
    let (scale_lower, scale_upper) = (inverse(peak_lower), inverse(peak_upper));
    let length = |row: &[f32], scale: f32| lane_sum(row, row, |x, _| (x * scale) * (x * scale)).sqrt();
    let (length_lower, length_upper) = (length(lower, scale_lower), length(upper, scale_upper));
    let unit_lower = scale_lower * inverse(length_lower);
    let unit_upper = scale_upper * inverse(length_upper);

    let square = |x: f32| x * x;
    let cosine = lane_sum(lower, upper, |x, y| (x * unit_lower) * (y * unit_upper)).clamp(-1.0, 1.0);
    let sum = lane_sum(lower, upper, |x, y| square(x * unit_lower + y * unit_upper)).sqrt();
    let difference = lane_sum(lower, upper, |x, y| square(x * unit_lower - y * unit_upper)).sqrt();

    let magnitudes = [peak_lower * length_lower, peak_upper * length_upper];
    let weights = slerp::weights(peak_lower == 0.0, peak_upper == 0.0, sum, difference, t);
    let mut row = Row {
        cosine,
        lower: magnitudes[0],
        upper: magnitudes[1],
        weight_lower: weights.lower * unit_lower,
        weight_upper: weights.upper * unit_upper,
        fault: None,
    };
    let unanchored = mode == Mode::Anchor && peak_lower == 0.0 && peak_upper > 0.0;
    row.fault = if sum < slerp::OPPOSITE && !row.both_zero() || unanchored {
        Some(Cause::Antiparallel)
    } else {
        let (a, b) = (row.weight_lower, row.weight_upper);
        let peak_direction = lower.iter().zip(upper).fold(0.0f32, |p, (x, y)| p.max((a * x + b * y).abs()));
        out_of_range(&row, peak_lower, peak_direction, layout).then_some(Cause::Range)
    };
    row
}

/// Whether a stored magnitude or a restored number would leave its type.
fn out_of_range(row: &Row, peak_lower: f32, peak_direction: f32, layout: &Layout) -> bool {
    let [least, most] = layout.storable();
    let stored = |m: f32| m == 0.0 || (least..=most).contains(&m);
    match layout.mode {
        Mode::Shared => !stored(row.lower) || !stored(row.upper),
        Mode::Anchor => {
            let ratio = ratio(row.upper, row.lower);
            !stored(ratio) || ratio * peak_lower > layout.dtype.largest() * RATIO_HEADROOM
        }
        Mode::Compat => row.upper * peak_direction > F16_MAX,
    }
}

/// `|upper| / |lower|`, 0 for a zero upper row.
fn ratio(upper: f32, lower: f32) -> f32 {
    if upper == 0.0 { 0.0 } else { upper / lower }
}

/// The probe: cosine, norms and faults of every row pair, in `[batch, heads, tokens]` order.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType) or [`Error::Limit`](crate::Error::Limit) when the tensors are no pair, [`Error::Range`](crate::Error::Range) for bad options.
pub fn similarity(
    lower: &TensorView<'_>,
    upper: &TensorView<'_>,
    options: &MergeOptions,
) -> Result<Vec<Row>> {
    let layout = check_merge((lower.shape(), lower.dtype()), (upper.shape(), upper.dtype()), options)?;
    let mut rows = Vec::with_capacity(layout.shape.rows());
    let (mut a, mut b) = (vec![0.0; layout.shape.dim], vec![0.0; layout.shape.dim]);
    for (batch, head, token) in layout.shape.iter_rows() {
        lower.read_row(batch, head, token, &mut a);
        upper.read_row(batch, head, token, &mut b);
        rows.push(measure(&a, &b, &layout, options.slerp_t));
    }
    Ok(rows)
}

/// The rule's verdict for each sequence.
#[must_use]
pub fn threshold(rows: &[Row], layout: &Layout, options: &MergeOptions) -> Vec<Cut> {
    let (sequence_rows, tokens) = (layout.shape.heads * layout.shape.tokens, layout.shape.tokens);
    let sinks = options.sink_tokens() as usize;
    let candidate = |i: usize, row: &Row| {
        row.fault != Some(Cause::NonFinite)
            && i % tokens >= sinks
            && (options.mode == Mode::Compat || !row.both_zero())
    };
    let cut = |sequence: &[Row]| {
        let candidates = || sequence.iter().enumerate().filter(|(i, row)| candidate(*i, row));
        match options.retention {
            Retention::Never => Cut::NOTHING,
            Retention::Cosine(threshold) => Cut::below(threshold),
            Retention::Range(gamma) => {
                let low = candidates().map(|(_, r)| r.cosine).fold(f32::MAX, f32::min);
                let high = candidates().map(|(_, r)| r.cosine).fold(f32::MIN, f32::max);
                if low > high { Cut::NOTHING } else { Cut::below(low + gamma * (high - low)) }
            }
            Retention::Fraction(rho) => {
                let mut order: Vec<_> = candidates().map(|(i, r)| (order_key(r.cosine), i as u32)).collect();
                let keep = (rho * order.len() as f32).ceil() as usize;
                order.sort_unstable();
                let last = keep.checked_sub(1).and_then(|last| order.get(last));
                last.map_or(Cut::NOTHING, |&(key, index)| Cut { key, index })
            }
        }
    };
    rows.chunks(sequence_rows.max(1)).map(cut).collect()
}

/// Decides every row: the first cause that keeps it raw, or `None` where it is merged.
#[must_use]
pub fn retain(rows: &[Row], cuts: &[Cut], layout: &Layout, options: &MergeOptions) -> Vec<Option<Cause>> {
    retain_in(rows, cuts, layout, options, Frame { first: 0, tokens: layout.shape.tokens })
}

/// [`retain`] by a rule that looked at other rows as well.
pub(crate) fn retain_in(
    rows: &[Row],
    cuts: &[Cut],
    layout: &Layout,
    options: &MergeOptions,
    frame: Frame,
) -> Vec<Option<Cause>> {
    let (heads, tokens) = (layout.shape.heads, layout.shape.tokens);
    let sinks = options.sink_tokens() as usize;
    let decide = |(i, row): (usize, &Row)| {
        let index = frame.index(i / tokens % heads, i % tokens);
        let cut = cuts[i / (heads * tokens)];
        let ruled = (order_key(row.cosine), index) <= (cut.key, cut.index);
        match row.fault {
            Some(Cause::NonFinite) => Some(Cause::NonFinite),
            _ if i % tokens < sinks => Some(Cause::Sink),
            None if row.both_zero() && layout.mode != Mode::Compat => None,
            _ if ruled => Some(Cause::Rule),
            fault => fault,
        }
    };
    rows.iter().enumerate().map(decide).collect()
}

/// Lays the pages out: which stay raw, and where each one's slots and side rows begin.
#[must_use]
pub fn arrange(causes: &[Option<Cause>], layout: &Layout, options: &MergeOptions) -> (Vec<Page>, Totals) {
    let mut totals = Totals::default();
    causes.iter().for_each(|&cause| totals.counts.add(cause));
    let tokens = layout.shape.tokens.max(1);
    let heads = causes.chunks(tokens).flat_map(|head| head.chunks(PAGE));
    let pages = heads.map(|rows| {
        let retained =
            rows.iter().enumerate().fold(0, |bits, (i, cause)| bits | u32::from(cause.is_some()) << i);
        let raw = layout.mode != Mode::Compat && retained.count_ones() > options.raw_limit(rows.len());
        if raw {
            let side = totals.side;
            totals.side += (layout.layers * rows.len()) as u32;
            totals.raw_pages += 1;
            return Page { slots: Page::RAW, side, retained: u32::MAX };
        }
        let page = Page { slots: totals.slots, side: totals.side, retained };
        totals.slots += Layout::page_slots(rows.len()) as u32;
        totals.side += layout.page_side(rows.len(), retained.count_ones() as usize) as u32;
        page
    });
    let pages = pages.collect();
    (pages, totals)
}

/// Folds a pair of tensors, one of K or V of two layers.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType) or [`Error::Limit`](crate::Error::Limit) when the tensors are no pair, [`Error::Range`](crate::Error::Range) for bad options.
pub fn merge(lower: &TensorView<'_>, upper: &TensorView<'_>, options: &MergeOptions) -> Result<Folded> {
    let members = [*lower, *upper];
    let probe = Probe::of(&members, options)?;
    let cuts = threshold(&probe.rows, &probe.layout, options);
    let causes = retain(&probe.rows, &cuts, &probe.layout, options);
    Ok(probe.fold(&members, &causes, options))
}

/// A folded pair or group whose rows are to be stored.
fn empty(causes: &[Option<Cause>], layout: Layout, options: &MergeOptions) -> Folded {
    let (pages, totals) = arrange(causes, &layout, options);
    let magnitudes = (totals.slots as usize * layout.magnitudes_per_slot()).div_ceil(2);
    Folded {
        layout,
        pages,
        slots: vec![0; totals.slots as usize * layout.slot_words()],
        magnitudes: vec![0; magnitudes],
        side: vec![0; totals.side as usize * layout.side_words()],
        totals,
    }
}

/// Side row of the row `row` of one of the layers folded together, if it has one.
fn side_row(layout: &Layout, page: &Page, row: usize, rows: usize, member: usize) -> Option<usize> {
    let side = page.side as usize;
    if page.is_raw() {
        return Some(side + member * rows + row);
    }
    if layout.mode == Mode::Compat {
        return (member == 0).then_some(side + row);
    }
    if page.retained >> row & 1 == 0 {
        return None;
    }
    let rank = (page.retained & ((1u32 << row) - 1)).count_ones() as usize;
    let first = side + rank * layout.side_per_retained();
    let in_slot = if layout.mode == Mode::Anchor { 0 } else { layout.layers - 1 };
    match (layout.reuses_slots(), member) {
        (false, _) => Some(first + member),
        (true, _) if member == in_slot => None,
        (true, _) => Some(first + member - usize::from(layout.mode == Mode::Anchor)),
    }
}

/// Writes one row of a page: its slot, magnitudes and side rows. `bytes` are the layers' rows, `scales` their norms and their
/// weights in the direction.
fn store_row(folded: &mut Folded, page: usize, row: usize, bytes: &[&[u8]], scales: &[[f32; 2]]) {
    let layout = folded.layout;
    let entry = folded.pages[page];
    let rows = layout.page_rows(page);
    for (member, bytes) in bytes.iter().enumerate() {
        if let Some(side) = side_row(&layout, &entry, row, rows, member) {
            write_words(&mut folded.side, side * layout.side_words(), bytes);
        }
    }
    if entry.is_raw() {
        return;
    }
    let slot = entry.slots as usize + row;
    let retained = entry.retained >> row & 1 == 1;
    let stored = slot_bytes(&layout, retained, bytes, scales);
    write_words(&mut folded.slots, slot * layout.slot_words(), &stored);
    let per_slot = layout.magnitudes_per_slot();
    for place in 0..per_slot {
        let magnitude = match layout.mode {
            _ if retained => 1.0,
            Mode::Anchor => ratio(scales[place + 1][0], scales[0][0]),
            Mode::Shared | Mode::Compat => scales[place][0],
        };
        let index = slot * per_slot + place;
        let bits = u32::from(f16::from_f32(magnitude).to_bits());
        folded.magnitudes[index / 2] |= bits << (index % 2 * 16);
    }
}

/// The bytes of a slot: the direction, or a raw row that reuses it.
fn slot_bytes(layout: &Layout, retained: bool, rows: &[&[u8]], scales: &[[f32; 2]]) -> Vec<u8> {
    let numbers = |bytes: &[u8]| {
        let mut row = vec![0.0; layout.shape.dim];
        decode(bytes, layout.dtype, &mut row);
        row
    };
    let last = layout.layers - 1;
    let mut bytes = Vec::with_capacity(layout.slot_words() * 4);
    let scale = match (layout.mode, retained) {
        (Mode::Anchor, _) => return rows[0].to_vec(),
        (Mode::Shared | Mode::Compat, true) if layout.slot_dtype() == layout.dtype && !layout.apart => {
            return rows[last].to_vec();
        }
        (Mode::Shared, true) => return bytes,
        (Mode::Compat, true) => {
            encode(&numbers(rows[last]), DType::F16, &mut bytes);
            return bytes;
        }
        (Mode::Shared, false) => 1.0,
        (Mode::Compat, false) => scales[last][0],
    };
    let mut weighted = rows
        .iter()
        .zip(scales)
        .map(|(bytes, [_, weight])| numbers(bytes).into_iter().map(|x| weight * x).collect::<Vec<f32>>());
    let mut direction = weighted.next().unwrap_or_default();
    for row in weighted {
        direction.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    direction.iter_mut().for_each(|x| *x *= scale);
    encode(&direction, DType::F16, &mut bytes);
    bytes
}

/// Packs little-endian bytes into words from `start` on; a last half word is padded with zero.
fn write_words(words: &mut [u32], start: usize, bytes: &[u8]) {
    let (whole, rest) = bytes.as_chunks::<4>();
    let mut words = words[start..].iter_mut();
    // In this order: the iterator that is second gives up nothing when the first has ended.
    whole.iter().zip(words.by_ref()).for_each(|(&bytes, word)| *word = u32::from_le_bytes(bytes));
    if let (Some(word), false) = (words.next(), rest.is_empty()) {
        *word = rest.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
    }
}
