//! Sign planes in f64 from the formulas, slow and plain: the judge of the CPU twin and of the kernels, with no code of
//! either.

#![allow(clippy::indexing_slicing, reason = "an instrument of tests; shapes are checked on entry")]

use super::super::reference::{project, row, softmax};
use super::{
    Centring, Codec, HeadTables, MIN_RMS, PlaneCodes, Rotation, STEP_FACTORS, STEPS, Stored, Tables,
};
use crate::attention::{AttendOptions, Geometry};
use crate::error::Result;
use crate::rope::Rope;
use crate::tensor::TensorView;

/// Entry `(i, j)` of each round of a rotation, or of its matrix.
fn rounds(rotation: &Rotation) -> Vec<Box<dyn Fn(usize, usize) -> f64 + '_>> {
    let n = rotation.channels();
    if let Some(matrix) = rotation.matrix() {
        return vec![Box::new(move |i, j| f64::from(matrix[i * n + j]))];
    }
    let words = rotation.signs().unwrap_or(&[]).chunks(n.div_ceil(32));
    let round = |signs: &'_ [u32], i: usize, j: usize| {
        let minus = (i & j).count_ones() + (signs[j / 32] >> (j % 32) & 1);
        if minus.is_multiple_of(2) { 1.0 } else { -1.0 }
    };
    let root = (n as f64).sqrt();
    words
        .map(|signs| Box::new(move |i, j| round(signs, i, j) / root) as Box<dyn Fn(usize, usize) -> f64>)
        .collect()
}

/// `R x` of `n` numbers, from the entries of Hadamard's matrix `(-1)^popcount(i & j)`.
#[must_use]
pub fn rotate(rotation: &Rotation, x: &[f64]) -> Vec<f64> {
    rounds(rotation)
        .iter()
        .fold(x.to_vec(), |x, r| (0..x.len()).map(|i| (0..x.len()).map(|j| r(i, j) * x[j]).sum()).collect())
}

/// `R^T y` of `n` numbers.
#[must_use]
pub fn rotate_back(rotation: &Rotation, y: &[f64]) -> Vec<f64> {
    rounds(rotation)
        .iter()
        .rev()
        .fold(y.to_vec(), |y, r| (0..y.len()).map(|j| (0..y.len()).map(|i| r(i, j) * y[i]).sum()).collect())
}

/// A row turned to a position.
#[must_use]
pub fn turned(rope: &Rope, x: &[f64], position: u32) -> Vec<f64> {
    let mut y = x.to_vec();
    for ((a, b), frequency) in rope.pairs().zip(rope.inv_freq()) {
        let angle = f64::from(position) * frequency;
        y[a] = x[a] * angle.cos() - x[b] * angle.sin();
        y[b] = x[b] * angle.cos() + x[a] * angle.sin();
    }
    y
}

/// `q . RoPE_t(mu)` by angles: `sum A cos + B sin` over pairs, `A = q_a mu_a + q_b mu_b`, `B = q_b mu_a - q_a mu_b`, and
/// `q mu` over channels that do not turn.
#[must_use]
pub fn mean_term(rope: Option<&Rope>, q: &[f64], mu: &[f64], position: u32) -> f64 {
    let still = rope.map_or(0, Rope::rotary_dim);
    let constant: f64 = (still..q.len()).map(|c| q[c] * mu[c]).sum();
    let Some(rope) = rope else { return constant };
    let pair = |((a, b), frequency): ((usize, usize), &f64)| {
        let angle = f64::from(position) * frequency;
        (q[a] * mu[a] + q[b] * mu[b]) * angle.cos() + (q[b] * mu[a] - q[a] * mu[b]) * angle.sin()
    };
    constant + rope.pairs().zip(rope.inv_freq()).map(pair).sum::<f64>()
}

/// Codes and `nu` of a rotated row `y`, before `nu` is rounded and clamped to f16.
#[must_use]
pub fn codes(planes: u8, y: &[f64]) -> (Vec<u8>, f64) {
    let norm = y.iter().map(|y| y * y).sum::<f64>().sqrt();
    let top = f64::from((1u32 << planes) - 1);
    let level = |c: &u8| 2.0 * f64::from(*c) - top;
    let length = |codes: &[u8]| codes.iter().map(|c| level(c).powi(2)).sum::<f64>();
    if planes == 1 {
        let signs: Vec<u8> = y.iter().map(|&y| u8::from(y >= 0.0)).collect();
        let nu = norm / length(&signs).sqrt();
        return (signs, nu);
    }
    let rms = (norm / (y.len() as f64).sqrt()).max(f64::from(MIN_RMS));
    let mut best = (-1.0, Vec::new());
    for factor in STEP_FACTORS {
        let step = f64::from(factor) * f64::from(STEPS[usize::from(planes) - 1]) * rms;
        let code = |y: &f64| ((y / step).floor() + f64::from(1u32 << (planes - 1))).clamp(0.0, top) as u8;
        let tried: Vec<u8> = y.iter().map(code).collect();
        let along: f64 = y.iter().zip(&tried).map(|(y, c)| y * level(c)).sum();
        let fit = along * along / length(&tried);
        if fit > best.0 {
            best = (fit, tried);
        }
    }
    let nu = norm / length(&best.1).sqrt();
    (best.1, nu)
}

/// A finite key as its segments see it before they rotate it: `(k - mean) / sigma`, in order where keys are split. The
/// mean is `RoPE_t(mu)`, or the given block mean.
#[must_use]
pub fn prepared_key(
    codec: &Codec,
    tables: HeadTables<'_>,
    key: &[f64],
    position: u32,
    block: Option<&[f64]>,
) -> Vec<f64> {
    let mean = mean_key(codec, tables, position, block);
    let x = |c: usize| (key[c] - mean[c]) / f64::from(tables.sigma[c]);
    (0..key.len()).map(|i| x(channel(codec, tables, i))).collect()
}

fn channel(codec: &Codec, tables: HeadTables<'_>, place: usize) -> usize {
    if codec.keys().is_split() { usize::from(tables.order[place]) } else { place }
}

fn mean_key(codec: &Codec, tables: HeadTables<'_>, position: u32, block: Option<&[f64]>) -> Vec<f64> {
    match (block, codec.mean_rope()) {
        (Some(block), _) => block.to_vec(),
        (None, Some(rope)) => turned(rope, &mu(codec, tables), position),
        (None, None) => mu(codec, tables),
    }
}

/// The mean before RoPE; zeros where the options do not ask for it.
fn mu(codec: &Codec, tables: HeadTables<'_>) -> Vec<f64> {
    let centred = codec.options().centring == Centring::PreRope;
    tables.mu.iter().map(|m| if centred { m.to_f64() } else { 0.0 }).collect()
}

/// `nu L` of a stored row, all segments; `None` where the row is masked.
fn levels(codes: &PlaneCodes, index: usize) -> Option<Vec<f64>> {
    let mut row = Vec::new();
    for (segment, stored) in codes.layout.segments().iter().zip(&codes.segments) {
        let (b, words) = (usize::from(segment.planes), segment.words());
        if b == 0 {
            row.extend(vec![0.0; segment.channels]);
            continue;
        }
        let nu = stored.nu[index].to_f64();
        let bit = |k: usize| f64::from(stored.words[index * words + k / 32] >> (k % 32) & 1);
        let code = |i: usize| (0..b).map(|j| bit(b * i + j) * f64::from(1u32 << j)).sum::<f64>();
        // Eight bits are a two's complement and stand for themselves.
        let byte = |i: usize| code(i) - if bit(b * i + b - 1) > 0.0 { 256.0 } else { 0.0 };
        let top = f64::from((1u32 << b) - 1);
        let level = |i: usize| if b == 8 { byte(i) } else { 2.0 * code(i) - top };
        row.extend((0..segment.channels).map(|i| nu * level(i)));
    }
    row.iter().all(|x| x.is_finite()).then_some(row)
}

/// The segments of a row through their rotations, forwards or back; those without bits stay.
fn by_segment(
    codec: &Codec,
    codes: &PlaneCodes,
    row: &[f64],
    turn: fn(&Rotation, &[f64]) -> Vec<f64>,
) -> Vec<f64> {
    let (mut out, mut start) = (Vec::new(), 0);
    for segment in codes.layout.segments() {
        let part = &row[start..start + segment.channels];
        start += segment.channels;
        match codec.rotations().get(segment.channels).filter(|_| segment.planes > 0) {
            Some(rotation) => out.extend(turn(rotation, part)),
            None => out.extend_from_slice(part),
        }
    }
    out
}

/// A stored block mean.
fn block_mean(codec: &Codec, codes: &PlaneCodes, b: usize, h: usize, t: usize) -> Option<Vec<f64>> {
    let block = codec.block()?;
    let (shape, blocks) = (codes.shape, codes.shape.tokens.div_ceil(block));
    let start = ((b * shape.heads + h) * blocks + t / block) * shape.dim;
    Some(codes.means[start..start + shape.dim].iter().map(|m| m.to_f64()).collect())
}

/// The key that a code stands for; `None` where the row is masked.
#[must_use]
pub fn decoded_key(
    codec: &Codec,
    codes: &PlaneCodes,
    tables: &Tables,
    (b, h, t): (usize, usize, usize),
) -> Option<Vec<f64>> {
    let x = by_segment(codec, codes, &levels(codes, codes.shape.row(b, h, t))?, rotate_back);
    let tables = tables.head(b, h);
    let block = block_mean(codec, codes, b, h, t);
    let mut key = mean_key(codec, tables, codes.positions[b * codes.shape.tokens + t], block.as_deref());
    for (i, x) in x.iter().enumerate() {
        let c = channel(codec, tables, i);
        key[c] += f64::from(tables.sigma[c]) * x;
    }
    Some(key)
}

/// The value that a code stands for; `None` where the row is masked.
#[must_use]
pub fn decoded_value(
    codec: &Codec,
    codes: &PlaneCodes,
    (b, h, t): (usize, usize, usize),
) -> Option<Vec<f64>> {
    Some(by_segment(codec, codes, &levels(codes, codes.shape.row(b, h, t))?, rotate_back))
}

/// Scores of stored keys: see [`super::cpu::scores`].
///
/// # Errors
/// As [`super::cpu::scores`].
pub fn scores(
    codec: &Codec,
    queries: &TensorView<'_>,
    keys: &PlaneCodes,
    tables: &Tables,
) -> Result<Vec<f64>> {
    let g = codec.check_scores(queries.shape(), keys, tables)?;
    all_scores(codec, queries, keys, tables, g, |_, _, _| None)
}

/// Scores of raw rows where `raw` says so (`Some` of what the row holds if it is finite), else of codes.
fn all_scores(
    codec: &Codec,
    queries: &TensorView<'_>,
    keys: &PlaneCodes,
    tables: &Tables,
    g: Geometry,
    raw: impl Fn(usize, usize, usize) -> Option<Option<Vec<f64>>>,
) -> Result<Vec<f64>> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut scores = Vec::with_capacity(g.output(g.tokens)?.elements());
    for (b, h, i) in queries.shape().iter_rows() {
        let kv = h / g.group;
        let head = tables.head(b, kv);
        let mu = mu(codec, head);
        let query = row(queries, b, h, i).map(|q| {
            if let Some(sketch) = codec.sketch() {
                let factor = f64::from(sketch.factor());
                let signs = project(&sketch.projection, &q).iter().map(|y| factor * y).collect();
                return (q, signs);
            }
            let balanced = |place: usize| {
                let c = channel(codec, head, place);
                q[c] * f64::from(head.sigma[c])
            };
            let balanced: Vec<f64> = (0..q.len()).map(balanced).collect();
            let turned = by_segment(codec, keys, &balanced, rotate);
            (q, turned)
        });
        for t in 0..g.tokens {
            let score = query.as_ref().and_then(|(q, turned)| {
                if let Some(key) = raw(b, kv, t) {
                    return Some(dot(q, &key?));
                }
                let code = dot(turned, &levels(keys, keys.shape.row(b, kv, t))?);
                let position = keys.positions[b * g.tokens + t];
                let mean = block_mean(codec, keys, b, kv, t)
                    .map_or_else(|| mean_term(codec.mean_rope(), q, &mu, position), |mean| dot(q, &mean));
                Some(code + mean)
            });
            scores.push(score.unwrap_or(0.0));
        }
    }
    Ok(scores)
}

/// Attention over stored rows: see [`super::cpu::attend`].
///
/// # Errors
/// As [`super::cpu::attend`].
pub fn attend(
    codec: &Codec,
    queries: &TensorView<'_>,
    store: &Stored<'_>,
    lengths: Option<&[u32]>,
    options: &AttendOptions<'_>,
) -> Result<Vec<f64>> {
    let g = codec.check_attend(queries.shape(), store)?;
    let length = g.lengths(lengths)?;
    let is_raw = |b: usize, t: usize| codec.is_raw(t, length[b]);
    let raw = |b: usize, h: usize, t: usize| is_raw(b, t).then(|| row(store.keys, b, h, t));
    let scores = all_scores(codec, queries, store.key_codes, store.tables, g, raw)?;
    let value = |b: usize, h: usize, t: usize| {
        if is_raw(b, t) {
            return row(store.keys, b, h, t).and_then(|_| row(store.values, b, h, t));
        }
        levels(store.key_codes, store.key_codes.shape.row(b, h, t))?;
        decoded_value(codec, store.value_codes, (b, h, t))
    };
    softmax(g, queries, &scores, value, store.values.shape().dim, lengths, options)
}
