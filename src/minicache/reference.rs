//! MiniCache in f64, written from the formulas (MiniCache, arXiv 2405.14366, section 3): obvious, slow, the judge of twin
//! and kernels. It shares no code with them.

#![allow(clippy::indexing_slicing, reason = "indices run over shapes that were checked on entry")]

use super::config::{Cause, MergeOptions, Mode, Retention};
use super::folded::check_merge;
use crate::error::Result;
use crate::tensor::{DType, TensorView};

/// Below this length of `dir_lower + dir_upper` two rows count as opposite.
const OPPOSITE: f64 = 1.0 / 1024.0;
/// Magnitudes that f16 holds as normal numbers.
const F16_NORMAL: std::ops::RangeInclusive<f64> = 0.00006103515625..=65504.0;
/// Rows whose largest number lies outside, 2^-100 to 2^100, are not measured in f32.
const MEASURABLE: std::ops::RangeInclusive<f64> = 7.888_609_052_210_118e-31..=1.267_650_600_228_229_4e30;
/// An Anchor ratio may be rounded up to f16 by this factor's inverse.
const RATIO_HEADROOM: f64 = 1.0 - 1.0 / 2048.0;

/// A pair of rows, measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Cosine of the two rows, clamped to `[-1, 1]`; 0 when either is zero or not measured in f32.
    pub cosine: f64,
    /// Norms of the lower and the upper row.
    pub magnitudes: [f64; 2],
    /// The shared direction, of norm 1 (0 when both rows are zero, or there is none).
    pub direction: Vec<f64>,
    /// Why the pair cannot be merged, whatever the rule says.
    pub fault: Option<Cause>,
}

/// A merged pair of tensors: for every row, in `[batch, heads, tokens]` order, why it is raw, and the rows restored.
#[derive(Clone, Debug, PartialEq)]
pub struct Merged {
    /// The measured rows.
    pub rows: Vec<Row>,
    /// `None` where the row is merged.
    pub causes: Vec<Option<Cause>>,
    /// The lower layer restored, `[batch, heads, tokens, dim]`, not rounded.
    pub lower: Vec<f64>,
    /// The upper layer restored.
    pub upper: Vec<f64>,
}

/// The norm of a row and its direction: `dir = x / |x|`, zero for a zero row.
#[must_use]
pub fn magnitude_direction(row: &[f64]) -> (f64, Vec<f64>) {
    let magnitude = row.iter().map(|x| x * x).sum::<f64>().sqrt();
    let direction = row.iter().map(|x| if magnitude > 0.0 { x / magnitude } else { 0.0 }).collect();
    (magnitude, direction)
}

/// Spherical interpolation of two unit vectors at `t`, renormalised; linear where they are parallel; a zero vector yields
/// to the other. `None` where they are opposite.
#[must_use]
pub fn slerp(lower: &[f64], upper: &[f64], t: f64) -> Option<Vec<f64>> {
    let is_zero = |v: &[f64]| v.iter().all(|&x| x == 0.0);
    if is_zero(lower) {
        return Some(upper.to_vec());
    }
    if is_zero(upper) {
        return Some(lower.to_vec());
    }
    let chord = lower.iter().zip(upper).map(|(a, b)| (a + b) * (a + b)).sum::<f64>().sqrt();
    if chord < OPPOSITE {
        return None;
    }
    let angle = lower.iter().zip(upper).map(|(a, b)| a * b).sum::<f64>().clamp(-1.0, 1.0).acos();
    let (a, b) =
        if angle.sin() < 1e-6 { (1.0 - t, t) } else { (((1.0 - t) * angle).sin(), (t * angle).sin()) };
    let mixed: Vec<f64> = lower.iter().zip(upper).map(|(x, y)| a * x + b * y).collect();
    Some(magnitude_direction(&mixed).1)
}

/// Measures a pair of rows whose numbers came as `dtype`.
#[must_use]
pub fn measure(lower: &[f64], upper: &[f64], mode: Mode, t: f64, dtype: DType) -> Row {
    if lower.iter().chain(upper).any(|x| !x.is_finite()) {
        let direction = vec![0.0; lower.len()];
        return Row { cosine: 0.0, magnitudes: [0.0; 2], direction, fault: Some(Cause::NonFinite) };
    }
    let (mag_lower, dir_lower) = magnitude_direction(lower);
    let (mag_upper, dir_upper) = magnitude_direction(upper);
    if [lower, upper].iter().any(|row| peak(row) > 0.0 && !MEASURABLE.contains(&peak(row))) {
        let (magnitudes, direction) = ([mag_lower, mag_upper], vec![0.0; lower.len()]);
        return Row { cosine: 0.0, magnitudes, direction, fault: Some(Cause::Range) };
    }
    let cosine = dir_lower.iter().zip(&dir_upper).map(|(a, b)| a * b).sum::<f64>().clamp(-1.0, 1.0);
    let interpolated = slerp(&dir_lower, &dir_upper, if mode == Mode::Anchor { 0.0 } else { t });
    let unanchored = mode == Mode::Anchor && mag_lower == 0.0 && mag_upper > 0.0;
    let fault = if interpolated.is_none() || unanchored {
        Some(Cause::Antiparallel)
    } else {
        let direction = interpolated.as_deref().unwrap_or_default();
        out_of_range([mag_lower, mag_upper], lower, direction, mode, dtype).then_some(Cause::Range)
    };
    let direction = interpolated.unwrap_or_else(|| vec![0.0; lower.len()]);
    Row { cosine, magnitudes: [mag_lower, mag_upper], direction, fault }
}

fn peak(row: &[f64]) -> f64 {
    row.iter().fold(0.0, |p, x| p.max(x.abs()))
}

/// Whether a stored magnitude or a restored number leaves its type.
fn out_of_range(magnitudes: [f64; 2], lower: &[f64], direction: &[f64], mode: Mode, dtype: DType) -> bool {
    let stored = |m: f64| m == 0.0 || F16_NORMAL.contains(&m);
    match mode {
        Mode::Shared => !magnitudes.into_iter().all(stored),
        Mode::Anchor => {
            let ratio = if magnitudes[1] == 0.0 { 0.0 } else { magnitudes[1] / magnitudes[0] };
            !stored(ratio) || ratio * peak(lower) > f64::from(dtype.largest()) * RATIO_HEADROOM
        }
        Mode::Compat => magnitudes[1] * peak(direction) > f64::from(DType::F16.largest()),
    }
}

/// The rows of one sequence that the rule keeps raw, by row index; `candidates` are the rows it may choose from.
#[must_use]
pub fn rule(cosines: &[f64], candidates: &[usize], retention: Retention) -> Vec<usize> {
    let below = |threshold: f64| candidates.iter().copied().filter(|&i| cosines[i] < threshold).collect();
    match retention {
        Retention::Never => Vec::new(),
        Retention::Cosine(threshold) => below(f64::from(threshold)),
        Retention::Range(gamma) => {
            let low = candidates.iter().map(|&i| cosines[i]).fold(f64::INFINITY, f64::min);
            let high = candidates.iter().map(|&i| cosines[i]).fold(f64::NEG_INFINITY, f64::max);
            below(low + f64::from(gamma) * (high - low))
        }
        Retention::Fraction(rho) => {
            let mut order = candidates.to_vec();
            order.sort_by(|&i, &j| cosines[i].total_cmp(&cosines[j]).then(i.cmp(&j)));
            // The product is rounded once to f32, so that a tenth of ten rows is one row although 0.1_f32 > 0.1.
            order.truncate(((f64::from(rho) * candidates.len() as f64) as f32).ceil() as usize);
            order
        }
    }
}

/// Merges a pair of tensors row by row and restores both.
///
/// # Errors
/// As [`merge`](super::cpu::merge).
pub fn merge(lower: &TensorView<'_>, upper: &TensorView<'_>, options: &MergeOptions) -> Result<Merged> {
    let layout = check_merge((lower.shape(), lower.dtype()), (upper.shape(), upper.dtype()), options)?;
    let (shape, dtype, mode) = (layout.shape, layout.dtype, layout.mode);
    let wide = |view: &TensorView<'_>| view.to_f32().into_iter().map(f64::from).collect::<Vec<_>>();
    let (lower, upper) = (wide(lower), wide(upper));
    let t = f64::from(options.slerp_t);
    let row = |all: &[f64], i: usize| all[i * shape.dim..(i + 1) * shape.dim].to_vec();
    let rows: Vec<Row> =
        (0..shape.rows()).map(|i| measure(&row(&lower, i), &row(&upper, i), mode, t, dtype)).collect();

    let causes = causes(&rows, shape.heads * shape.tokens, shape.tokens, options);
    let mut merged = Merged { rows, causes, lower: Vec::new(), upper: Vec::new() };
    for (i, cause) in merged.causes.iter().enumerate() {
        let (a, b, measured) = (row(&lower, i), row(&upper, i), &merged.rows[i]);
        let scaled = |which: usize| measured.direction.iter().map(move |e| measured.magnitudes[which] * e);
        match (cause, mode) {
            (None, Mode::Shared) => merged.lower.extend(scaled(0)),
            _ => merged.lower.extend(&a),
        }
        match (cause, mode) {
            (None, Mode::Anchor) if measured.magnitudes[1] == 0.0 => {
                merged.upper.extend(a.iter().map(|_| 0.0))
            }
            (None, Mode::Anchor) => {
                merged.upper.extend(a.iter().map(|x| x * (measured.magnitudes[1] / measured.magnitudes[0])));
            }
            (None, _) => merged.upper.extend(scaled(1)),
            (Some(_), _) => merged.upper.extend(&b),
        }
    }
    Ok(merged)
}

/// The first cause that keeps each row raw; sequences hold `sequence_rows` rows, heads `tokens`.
fn causes(rows: &[Row], sequence_rows: usize, tokens: usize, options: &MergeOptions) -> Vec<Option<Cause>> {
    let is_sink = |i: usize| i % tokens < options.sink_tokens() as usize;
    let both_zero = |row: &Row| row.magnitudes == [0.0, 0.0] && options.mode != Mode::Compat;
    let mut causes: Vec<Option<Cause>> = Vec::with_capacity(rows.len());
    for sequence in rows.chunks(sequence_rows.max(1)) {
        let cosines: Vec<f64> = sequence.iter().map(|r| r.cosine).collect();
        let candidates: Vec<usize> = (0..sequence.len())
            .filter(|&i| {
                sequence[i].fault != Some(Cause::NonFinite) && !is_sink(i) && !both_zero(&sequence[i])
            })
            .collect();
        let ruled = rule(&cosines, &candidates, options.retention);
        causes.extend(sequence.iter().enumerate().map(|(i, row)| match row.fault {
            Some(Cause::NonFinite) => Some(Cause::NonFinite),
            _ if is_sink(i) => Some(Cause::Sink),
            _ if ruled.contains(&i) => Some(Cause::Rule),
            fault => fault,
        }));
    }
    causes
}
