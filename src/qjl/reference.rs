//! QJL in f64 from the formulas, slow and plain: the judge of the CPU twin and of the kernels, with no code of either.

#![allow(clippy::indexing_slicing, reason = "an instrument of tests; shapes are checked on entry")]

use half::f16;

use super::{KeyScale, Projection, QuantizedValues, SketchedKeys, check_projection};
use crate::attention::{AttendOptions, Geometry};
use crate::error::Result;
use crate::tensor::TensorView;

/// `S row` of `[head_dim]` numbers, `[sketch_dim]`. Hadamard from its entries: `H_ij = (-1)^popcount(i & j)`.
#[must_use]
pub fn project(projection: &Projection, row: &[f64]) -> Vec<f64> {
    let (m, d) = (projection.sketch_dim(), projection.head_dim().min(row.len()));
    if let Some(matrix) = projection.matrix() {
        return (0..m).map(|j| (0..d).map(|c| f64::from(matrix[j * d + c]) * row[c]).sum()).collect();
    }
    let Some(signs) = projection.signs() else { return Vec::new() };
    let words = d.div_ceil(32);
    let sign = |block: usize, round: usize, c: usize| {
        let word = signs[(block * 2 + round) * words + c / 32];
        if word >> (c % 32) & 1 == 1 { -1.0 } else { 1.0 }
    };
    let entry = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let transform =
        |x: &[f64]| -> Vec<f64> { (0..d).map(|i| (0..d).map(|j| entry(i, j) * x[j]).sum()).collect() };
    let mut y = Vec::with_capacity(m);
    for block in 0..m.div_ceil(d) {
        let first: Vec<f64> = (0..d).map(|c| sign(block, 0, c) * row[c]).collect();
        let first = transform(&first);
        let second: Vec<f64> = (0..d).map(|c| sign(block, 1, c) * first[c] / (d as f64).sqrt()).collect();
        y.extend(transform(&second));
    }
    y.truncate(m);
    y
}

/// `nu` of a finite key and its projection `y = S k`, before rounding and clamping to f16.
#[must_use]
pub fn key_scale(scale: KeyScale, key: &[f64], y: &[f64]) -> f64 {
    let total: f64 = y.iter().map(|y| y.abs()).sum();
    match scale {
        KeyScale::Norm => key.iter().map(|k| k * k).sum::<f64>().sqrt(),
        KeyScale::Mse => total / y.len() as f64,
        KeyScale::Unbiased if total == 0.0 => 0.0,
        KeyScale::Unbiased => y.iter().map(|y| y * y).sum::<f64>() / total,
    }
}

/// Scale and codes of a finite value row: `max|v| / 127` in f16, from 2^-14 to 65504 unless the row is zeros, and
/// `v / scale` rounded half to even, -127 to 127.
#[must_use]
pub fn value_codes(row: &[f64]) -> (f16, Vec<i8>) {
    let largest = row.iter().fold(0.0f64, |max, v| max.max(v.abs()));
    if largest == 0.0 {
        return (f16::ZERO, vec![0; row.len()]);
    }
    let scale = f16::from_f64((largest / 127.0).clamp(2f64.powi(-14), 65504.0));
    let code = |v: &f64| (v / scale.to_f64()).round_ties_even().clamp(-127.0, 127.0) as i8;
    (scale, row.iter().map(code).collect())
}

/// Scores of stored keys: see [`super::cpu::scores`].
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) or [`Error::HeadRatio`](crate::Error::HeadRatio) when shapes do not fit.
pub fn scores(
    queries: &TensorView<'_>,
    keys: &SketchedKeys,
    projection: &Projection,
    scale: KeyScale,
) -> Result<Vec<f64>> {
    let g = Geometry::of(queries.shape(), keys.shape)?;
    check_projection(keys.shape, keys.sketch_dim, projection)?;
    keys.check()?;
    let m = keys.sketch_dim;
    let gain = if scale == KeyScale::Norm { f64::from(projection.factor()) } else { 1.0 };
    let mut scores = Vec::with_capacity(g.output(g.tokens)?.elements());
    for (b, h, i) in queries.shape().iter_rows() {
        let sq = row(queries, b, h, i).map(|q| project(projection, &q));
        for t in 0..g.tokens {
            let index = keys.shape.row(b, h / g.group, t);
            let nu = keys.scale[index].to_f64();
            let bit = |j: usize| keys.words[index * keys.words_per_row() + j / 32] >> (j % 32) & 1 == 1;
            scores.push(match &sq {
                Some(sq) if nu.is_finite() => {
                    let sum: f64 = (0..m).map(|j| if bit(j) { sq[j] } else { -sq[j] }).sum();
                    gain / m as f64 * nu * sum
                }
                _ => 0.0,
            });
        }
    }
    Ok(scores)
}

/// Attention over stored keys and values: see [`super::cpu::attend`].
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::HeadRatio`](crate::Error::HeadRatio) or
/// [`Error::Range`](crate::Error::Range) when shapes, lengths or options do not fit.
pub fn attend(
    queries: &TensorView<'_>,
    keys: &SketchedKeys,
    values: &QuantizedValues,
    projection: &Projection,
    key_scale: KeyScale,
    lengths: Option<&[u32]>,
    options: &AttendOptions<'_>,
) -> Result<Vec<f64>> {
    let g = Geometry::of(queries.shape(), keys.shape)?;
    g.check_values(values.shape)?;
    values.check()?;
    let scores = scores(queries, keys, projection, key_scale)?;
    let value = |b: usize, h: usize, t: usize| {
        let index = values.shape.row(b, h, t);
        let words = &values.words[index * values.words_per_row()..];
        let scale = values.scale[index].to_f64();
        let code = |c: usize| f64::from((words[c / 4] >> (8 * (c % 4)) & 0xff) as u8 as i8);
        (keys.scale[index].is_finite() && scale.is_finite())
            .then(|| (0..values.shape.dim).map(|c| code(c) * scale).collect())
    };
    softmax(g, queries, &scores, value, values.shape.dim, lengths, options)
}

/// Exact attention over raw rows: see [`crate::attention::exact`].
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::HeadRatio`](crate::Error::HeadRatio) or
/// [`Error::Range`](crate::Error::Range) when shapes, lengths or options do not fit.
pub fn exact(
    queries: &TensorView<'_>,
    keys: &TensorView<'_>,
    values: &TensorView<'_>,
    lengths: Option<&[u32]>,
    options: &AttendOptions<'_>,
) -> Result<Vec<f64>> {
    let g = Geometry::of(queries.shape(), keys.shape())?;
    g.check_values(values.shape())?;
    let mut scores = Vec::with_capacity(g.output(g.tokens)?.elements());
    for (b, h, i) in queries.shape().iter_rows() {
        for t in 0..g.tokens {
            let both = row(queries, b, h, i).zip(row(keys, b, h / g.group, t));
            scores.push(both.map_or(0.0, |(q, k)| q.iter().zip(&k).map(|(q, k)| q * k).sum()));
        }
    }
    let value = |b: usize, h: usize, t: usize| row(keys, b, h, t).and_then(|_| row(values, b, h, t));
    softmax(g, queries, &scores, value, values.shape().dim, lengths, options)
}

/// A row in f64; `None` when it holds a non-finite number.
pub(super) fn row(tensor: &TensorView<'_>, b: usize, h: usize, t: usize) -> Option<Vec<f64>> {
    let mut row = vec![0.0; tensor.shape().dim];
    tensor.read_row(b, h, t, &mut row);
    row.iter().all(|x| x.is_finite()).then(|| row.iter().map(|&x| f64::from(x)).collect())
}

/// Scale, soft cap, mask, softmax and weighted sum, straight from the definitions; `value` is `None` for masked rows.
pub(super) fn softmax(
    g: Geometry,
    queries: &TensorView<'_>,
    scores: &[f64],
    value: impl Fn(usize, usize, usize) -> Option<Vec<f64>>,
    value_dim: usize,
    lengths: Option<&[u32]>,
    options: &AttendOptions<'_>,
) -> Result<Vec<f64>> {
    options.validate()?;
    g.check_sinks(options)?;
    let lengths = g.lengths(lengths)?;
    let scale = f64::from(options.scale_for(g.key_dim));
    let mut out = Vec::with_capacity(g.output(value_dim)?.elements());
    for (index, (b, h, i)) in queries.shape().iter_rows().enumerate() {
        let length = lengths[b] as i64;
        let position = length - g.queries as i64 + i as i64;
        let finite = row(queries, b, h, i).is_some();
        let mut seen: Vec<(f64, Vec<f64>)> = Vec::new();
        for t in 0..length {
            let back = position - t;
            let in_window = options.window.is_none_or(|window| (0..i64::from(window)).contains(&back));
            if !finite || position < 0 || (options.causal && back < 0) || !in_window {
                continue;
            }
            let x = scale * scores[index * g.tokens + t as usize];
            let x = options.soft_cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh());
            seen.extend(value(b, h / g.group, t as usize).map(|v| (x, v)));
        }
        let sink = options.sink_logits.map_or(f64::MIN, |logits| f64::from(logits[h]));
        let max = seen.iter().fold(sink, |max, (x, _)| max.max(*x));
        let sunk = if options.sink_logits.is_some() { (sink - max).exp() } else { 0.0 };
        let sum: f64 = sunk + seen.iter().map(|(x, _)| (x - max).exp()).sum::<f64>();
        let column = |c: usize| seen.iter().map(|(x, v)| (x - max).exp() / sum * v[c]).sum();
        out.extend((0..value_dim).map(|c| -> f64 { column(c) }));
    }
    Ok(out)
}
