//! Groups of more than two layers on one direction: the normalised mean of the rows' directions. A pair is the case of two.

use super::super::config::{Cause, MergeOptions, Mode};
use super::super::folded::{Folded, Layout, PAGE, check_arc, check_merge};
use super::super::slerp::OPPOSITE;
use super::{
    MEASURABLE, RATIO_HEADROOM, Row, empty, lane_sum, ratio, refill, retain, similarity, store_row, threshold,
};
use crate::error::{Error, Result};
use crate::tensor::TensorView;

/// What [`group_similarity`] finds for one row of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupRow {
    /// What decides: the smallest cosine of any two, the lowest layer's norm, the largest of the others, and the fault; no
    /// weights.
    pub row: Row,
    /// Norm of every layer's row, and its weight: the shared direction is the sum of weight times row.
    pub scales: Vec<[f32; 2]>,
}

/// Checks a group and gives its layout.
fn check(members: &[TensorView<'_>], options: &MergeOptions) -> Result<Layout> {
    options.validate()?;
    let first = members.first().ok_or_else(|| Error::range("layers folded together", "2 or more", 0))?;
    let layout =
        Layout::group(first.shape(), first.dtype(), options.mode, members.len())?.coded(options.planes);
    for member in members {
        Layout::new((first.shape(), first.dtype()), (member.shape(), member.dtype()), options.mode)?;
    }
    check_arc(options, members.len())?;
    Ok(layout)
}

/// The probe of a group: cosine, norms, weights and faults of every row, in `[batch, heads, tokens]` order. `members` are the
/// layers' tensors, lowest first; all of one shape and element type.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`] when they are not; [`Error::Range`] for a number of layers outside 2 to 8 or bad options;
/// [`Error::Limit`].
pub fn group_similarity(members: &[TensorView<'_>], options: &MergeOptions) -> Result<Vec<GroupRow>> {
    let layout = check(members, options)?;
    let mut rows = vec![vec![0.0; layout.shape.dim]; members.len()];
    let measured = layout.shape.iter_rows().map(|(batch, head, token)| {
        rows.iter_mut().zip(members).for_each(|(row, member)| member.read_row(batch, head, token, row));
        measure(&rows, &layout)
    });
    Ok(measured.collect())
}

/// Measures one row of every layer.
fn measure(rows: &[Vec<f32>], layout: &Layout) -> GroupRow {
    let faulty = |row: Row| GroupRow { row, scales: vec![[0.0; 2]; rows.len()] };
    if rows.iter().flatten().any(|x| !x.is_finite()) {
        return faulty(Row { fault: Some(Cause::NonFinite), ..Row::default() });
    }
    let peaks: Vec<f32> = rows.iter().map(|row| row.iter().fold(0.0f32, |p, x| p.max(x.abs()))).collect();
    let largest = |numbers: &[f32]| numbers.iter().fold(0.0f32, |p, x| p.max(*x));
    if peaks.iter().any(|p| *p > 0.0 && !MEASURABLE.contains(p)) {
        let fault = Some(Cause::Range);
        return faulty(Row { lower: peaks[0], upper: largest(&peaks[1..]), fault, ..Row::default() });
    }
    // Scaling by the peak before squaring keeps the squares inside f32.
    let inverse = |x: f32| if x > 0.0 { 1.0 / x } else { 0.0 };
    let (mut units, mut norms) = (Vec::new(), Vec::new());
    for (row, &peak) in rows.iter().zip(&peaks) {
        let scale = inverse(peak);
        let length = lane_sum(row, row, |x, _| (x * scale) * (x * scale)).sqrt();
        units.push(scale * inverse(length));
        norms.push(peak * length);
    }
    let mut cosine = 1.0f32;
    for (b, a) in (0..rows.len()).flat_map(|b| (0..b).map(move |a| (b, a))) {
        let product = |x: f32, y: f32| (x * units[a]) * (y * units[b]);
        cosine = cosine.min(lane_sum(&rows[a], &rows[b], product));
    }
    let mut sum = vec![0.0f32; layout.shape.dim];
    for (row, unit) in rows.iter().zip(&units) {
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * unit);
    }
    let chord = lane_sum(&sum, &sum, |x, _| x * x).sqrt();
    let mut row = Row {
        cosine: cosine.clamp(-1.0, 1.0),
        lower: norms[0],
        upper: largest(&norms[1..]),
        ..Row::default()
    };
    let unanchored = layout.mode == Mode::Anchor && peaks[0] == 0.0 && row.upper > 0.0;
    row.fault = if chord < OPPOSITE && !row.both_zero() || unanchored {
        Some(Cause::Antiparallel)
    } else {
        out_of_range(&norms, peaks[0], layout).then_some(Cause::Range)
    };
    let weights = units.iter().map(|unit| unit * inverse(chord));
    GroupRow {
        row,
        scales: norms.iter().copied().zip(weights).map(|(norm, weight)| [norm, weight]).collect(),
    }
}

/// Whether a stored magnitude or a restored number would leave its type.
fn out_of_range(norms: &[f32], peak: f32, layout: &Layout) -> bool {
    let [least, most] = layout.storable();
    let stored = |m: f32| m == 0.0 || (least..=most).contains(&m);
    if layout.mode == Mode::Shared {
        return !norms.iter().all(|&norm| stored(norm));
    }
    norms[1..]
        .iter()
        .map(|&norm| ratio(norm, norms[0]))
        .any(|ratio| !stored(ratio) || ratio * peak > layout.dtype.largest() * RATIO_HEADROOM)
}

/// Folds a group of tensors, one of K or V of every layer.
///
/// # Errors
/// As [`group_similarity`].
pub fn group_merge(members: &[TensorView<'_>], options: &MergeOptions) -> Result<Folded> {
    let probe = Probe::of_group(members, options)?;
    let causes = retain(&probe.rows, &threshold(&probe.rows, &probe.layout, options), &probe.layout, options);
    Ok(probe.fold(members, &causes, options))
}

/// Measured rows of a pair or a group, to be decided and folded.
pub(crate) struct Probe {
    pub(crate) layout: Layout,
    pub(crate) rows: Vec<Row>,
    /// Of every row, norm and weight of every layer.
    scales: Vec<Vec<[f32; 2]>>,
}

impl Probe {
    /// Measures two layers as a pair and more as a group.
    pub(crate) fn of(members: &[TensorView<'_>], options: &MergeOptions) -> Result<Self> {
        let [lower, upper] = members else { return Self::of_group(members, options) };
        let layout = check_merge((lower.shape(), lower.dtype()), (upper.shape(), upper.dtype()), options)?;
        let rows = similarity(lower, upper, options)?;
        let scales = |row: &Row| vec![[row.lower, row.weight_lower], [row.upper, row.weight_upper]];
        Ok(Self { layout, scales: rows.iter().map(scales).collect(), rows })
    }

    fn of_group(members: &[TensorView<'_>], options: &MergeOptions) -> Result<Self> {
        let layout = check(members, options)?;
        let (rows, scales) =
            group_similarity(members, options)?.into_iter().map(|row| (row.row, row.scales)).unzip();
        Ok(Self { layout, rows, scales })
    }

    /// Folds the measured rows, once they are decided.
    pub(crate) fn fold(
        &self,
        members: &[TensorView<'_>],
        causes: &[Option<Cause>],
        options: &MergeOptions,
    ) -> Folded {
        let mut folded = empty(causes, self.layout.whole(), options);
        for (scales, (batch, head, token)) in self.scales.iter().zip(self.layout.shape.iter_rows()) {
            let rows = members.iter().map(|member| member.row_bytes(batch, head, token));
            let page = self.layout.page(batch, head, token);
            store_row(&mut folded, page, token % PAGE, &rows.collect::<Vec<_>>(), scales);
        }
        match self.layout.planes {
            Some(planes) => refill(folded, planes),
            None => folded,
        }
    }
}
