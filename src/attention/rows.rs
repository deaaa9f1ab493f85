//! Scoring and attending over any rows that can be read as f32: the loops that every CPU twin shares.

#![allow(clippy::indexing_slicing, reason = "shapes are checked on entry; the loops stay inside them")]

use std::ops::Range;

use super::{AttendOptions, Geometry};
use crate::error::Result;
use crate::parallel;
use crate::tensor::TensorView;

/// Tokens that share one maximum and one rescaling of the online softmax, as a GPU workgroup takes them.
const TILE: usize = 64;

/// Where the running maximum starts, and the logit of a masked key. Finite, so that no difference of two is NaN.
pub(super) const LOWEST: f32 = -3.402_823e38;

/// Rows of a store as f32 numbers times one weight: what scoring and attending need of queries, keys and values.
pub(crate) trait Rows: Sync {
    /// Numbers in a row.
    fn width(&self) -> usize;

    /// Reads a row and says its weight; `None` is a row that must not be seen, whose numbers are then zeros.
    fn read(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32>;

    /// The score of a key row that [`Rows::read`] gave with this weight, for a query row of the same width.
    fn score(&self, query: &[f32], row: &[f32], weight: f32) -> f32 {
        weight * dot(query, row)
    }
}

impl Rows for TensorView<'_> {
    fn width(&self) -> usize {
        self.shape().dim
    }

    fn read(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32> {
        self.read_row(batch, head, token, row);
        if row.iter().all(|x| x.is_finite()) {
            return Some(1.0);
        }
        row.fill(0.0);
        None
    }
}

impl<R: Rows + ?Sized> Rows for &R {
    fn width(&self) -> usize {
        (**self).width()
    }

    fn read(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32> {
        (**self).read(batch, head, token, row)
    }

    fn score(&self, query: &[f32], row: &[f32], weight: f32) -> f32 {
        (**self).score(query, row, weight)
    }
}

/// Up to [`TILE`] consecutive rows of one head.
struct Tile {
    width: usize,
    numbers: Vec<f32>,
    weights: Vec<Option<f32>>,
}

impl Tile {
    fn new(width: usize) -> Self {
        Self { width, numbers: vec![0.0; TILE * width], weights: Vec::with_capacity(TILE) }
    }

    fn load(&mut self, source: &impl Rows, batch: usize, head: usize, tokens: Range<usize>) {
        self.weights.clear();
        for (token, row) in tokens.zip(self.numbers.chunks_exact_mut(self.width)) {
            self.weights.push(source.read(batch, head, token, row));
        }
    }

    fn row(&self, index: usize) -> &[f32] {
        &self.numbers[index * self.width..(index + 1) * self.width]
    }
}

/// The queries that read one KV head, `[group * queries, width]`, weights applied; false where a query is not finite.
fn group_queries(g: Geometry, source: &impl Rows, batch: usize, kv_head: usize) -> (Vec<f32>, Vec<bool>) {
    let width = source.width();
    let mut rows = vec![0.0; g.group * g.queries * width];
    let places = (0..g.group).flat_map(|i| (0..g.queries).map(move |token| (kv_head * g.group + i, token)));
    let finite = places
        .zip(rows.chunks_exact_mut(width))
        .map(|((head, token), row)| {
            let weight = source.read(batch, head, token, row)?;
            row.iter_mut().for_each(|x| *x *= weight);
            Some(())
        })
        .map(|seen| seen.is_some())
        .collect();
    (rows, finite)
}

/// `weight_t * (q . row_t)` of every query and key, `[batch, query_heads, queries, tokens]`; 0 for rows not seen.
pub(crate) fn score_rows(g: Geometry, queries: &impl Rows, keys: &impl Rows) -> Result<Vec<f32>> {
    let mut scores = vec![0.0; g.output(g.tokens)?.elements()];
    if scores.is_empty() {
        return Ok(scores);
    }
    let per_head = scores.chunks_exact_mut(g.group * g.queries * g.tokens);
    parallel::for_each(g.kv_heads().zip(per_head), |((batch, head), scores)| {
        let mut tile = Tile::new(keys.width());
        let (rows, _) = group_queries(g, queries, batch, head);
        for start in (0..g.tokens).step_by(TILE) {
            let tokens = start..g.tokens.min(start + TILE);
            tile.load(keys, batch, head, tokens.clone());
            for (query, scores) in rows.chunks_exact(tile.width).zip(scores.chunks_exact_mut(g.tokens)) {
                for (i, score) in scores[tokens.clone()].iter_mut().enumerate() {
                    *score = tile.weights[i].map_or(0.0, |weight| keys.score(query, tile.row(i), weight));
                }
            }
        }
    });
    Ok(scores)
}

/// A softmax in the making: the largest logit so far and the sum of `exp(logit - max)`.
struct Online {
    /// First tokens that are seen besides.
    pinned: usize,
    seen: Range<usize>,
    max: f32,
    sum: f32,
}

/// Keys and values of up to [`TILE`] tokens from `start`.
struct KvTile {
    start: usize,
    keys: Tile,
    values: Tile,
}

impl Online {
    /// Takes the tokens of one tile, `logit` of a key row and its weight: `out` and `sum` are rescaled to the new maximum, then the tile is added.
    fn take(&mut self, tile: &KvTile, logit: impl Fn(&[f32], f32) -> f32, out: &mut [f32]) {
        let inside = |token: usize| token.saturating_sub(tile.start).min(tile.keys.weights.len());
        let span = inside(self.seen.start)..inside(self.seen.end);
        let span = (0..inside(self.pinned).min(span.start)).chain(span);
        let mut logits = [LOWEST; TILE];
        let mut tile_max = LOWEST;
        for i in span.clone() {
            if let (Some(weight), Some(_)) = (tile.keys.weights[i], tile.values.weights[i]) {
                logits[i] = logit(tile.keys.row(i), weight);
                tile_max = tile_max.max(logits[i]);
            }
        }
        let max = self.max.max(tile_max);
        let rescale = (self.max - max).exp();
        self.max = max;
        self.sum *= rescale;
        out.iter_mut().for_each(|x| *x *= rescale);
        for i in span.filter(|&i| logits[i] > LOWEST) {
            let Some(weight) = tile.values.weights[i] else { continue };
            let p = (logits[i] - max).exp();
            self.sum += p;
            let weight = p * weight;
            out.iter_mut().zip(tile.values.row(i)).for_each(|(x, v)| *x += weight * v);
        }
    }
}

impl Online {
    /// Takes a logit that has a weight and no value.
    fn take_sink(&mut self, logit: f32, out: &mut [f32]) {
        let max = self.max.max(logit);
        let rescale = (self.max - max).exp();
        self.max = max;
        self.sum = self.sum * rescale + (logit - max).exp();
        out.iter_mut().for_each(|x| *x *= rescale);
    }
}

/// Attention over rows, online over tiles of [`TILE`] tokens: `[batch, query_heads, queries, values.width()]`.
pub(crate) fn attend_rows(
    g: Geometry,
    queries: &impl Rows,
    keys: &impl Rows,
    values: &impl Rows,
    lengths: Option<&[u32]>,
    options: &AttendOptions<'_>,
) -> Result<Vec<f32>> {
    options.validate()?;
    g.check_sinks(options)?;
    let lengths = g.lengths(lengths)?;
    let value_dim = values.width();
    let mut out = vec![0.0; g.output(value_dim)?.elements()];
    if out.is_empty() {
        return Ok(out);
    }
    let scale = options.scale_for(g.key_dim);
    let per_head = out.chunks_exact_mut(g.group * g.queries * value_dim);
    parallel::for_each(g.kv_heads().zip(per_head), |((batch, head), out)| {
        let mut tile = KvTile { start: 0, keys: Tile::new(keys.width()), values: Tile::new(value_dim) };
        let (rows, finite) = group_queries(g, queries, batch, head);
        let length = lengths[batch];
        let mut states: Vec<Online> = (0..g.group * g.queries)
            .map(|i| {
                let seen = options.visible(length, g.queries, i % g.queries);
                let seen = if finite[i] { seen } else { 0..0 };
                Online { pinned: options.pinned.min(seen.end), seen, max: LOWEST, sum: 0.0 }
            })
            .collect();
        let first =
            states.iter().filter(|s| !s.seen.is_empty()).map(|s| s.seen.start).min().unwrap_or(length);
        let pinned = states.iter().map(|s| s.pinned).max().unwrap_or(0).next_multiple_of(TILE);
        let behind = (first / TILE * TILE).max(pinned)..length;
        for start in (0..pinned).step_by(TILE).chain(behind.step_by(TILE)) {
            let tokens = start..length.min(start + TILE);
            tile.start = start;
            tile.keys.load(keys, batch, head, tokens.clone());
            tile.values.load(values, batch, head, tokens);
            let each =
                states.iter_mut().zip(rows.chunks_exact(keys.width())).zip(out.chunks_exact_mut(value_dim));
            for ((state, query), out) in each {
                let logit = |row: &[f32], weight| options.logit(scale, keys.score(query, row, weight));
                state.take(&tile, logit, out);
            }
        }
        let each = states.iter_mut().zip(out.chunks_exact_mut(value_dim)).enumerate();
        for (i, (state, out)) in each.filter(|(_, (state, _))| state.sum > 0.0) {
            if let Some(logits) = options.sink_logits {
                state.take_sink(logits[head * g.group + i / g.queries], out);
            }
            out.iter_mut().for_each(|x| *x /= state.sum);
        }
    });
    Ok(out)
}

/// Dot product in eight interleaved sums, so that it vectorises; as many elements as both have.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_eights, a_rest) = a.as_chunks::<8>();
    let (b_eights, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0f32; 8];
    for (x, y) in a_eights.iter().zip(b_eights) {
        for lane in 0..8 {
            sums[lane] += x[lane] * y[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    let [a, b, c, d, e, f, g, h] = sums;
    (((a + e) + (c + g)) + ((b + f) + (d + h))) + rest
}
