//! Queries, coded keys and coded values as the rows that scoring and attending loop over.

#![allow(clippy::indexing_slicing, reason = "shapes are checked on entry; the loops stay inside them")]

use std::ops::Range;

use half::f16;

use super::cpu::{gather, level, read_codes, rotation, spans, token_angles, top_code};
use super::{Centring, Codec, HeadTables, PlaneCodes, Tables};
use crate::attention::{Rows, dot};
use crate::rope::Rope;
use crate::tensor::{Shape, TensorView};

/// The means of keys at their positions.
pub(in crate::qjl) struct Centres<'a> {
    codec: &'a Codec,
    shape: Shape,
    tables: &'a Tables,
    means: &'a [f16],
    /// `[batch, tokens, pairs]`; empty where the mean does not turn.
    angles: Vec<[f32; 2]>,
}

impl<'a> Centres<'a> {
    pub(in crate::qjl) fn new(
        codec: &'a Codec,
        shape: Shape,
        positions: &[u32],
        means: &'a [f16],
        tables: &'a Tables,
    ) -> Self {
        let angles = codec.mean_rope().map_or_else(Vec::new, |rope| token_angles(rope, positions));
        Self { codec, shape, tables, means, angles }
    }

    fn angles(&self, b: usize, t: usize) -> &[[f32; 2]] {
        let pairs = self.codec.mean_rope().map_or(0, |rope| rope.inv_freq().len());
        let start = (b * self.shape.tokens + t) * pairs;
        &self.angles[start..start + pairs]
    }

    /// The mean that a key was coded against.
    pub(super) fn read(&self, b: usize, h: usize, t: usize, mean: &mut [f32]) {
        match self.codec.options().centring {
            Centring::None => mean.fill(0.0),
            Centring::BlockMean(_) => self.read_block(b, h, t, mean),
            Centring::PreRope => {
                let mu = self.tables.head(b, h).mu;
                mean.iter_mut().zip(mu).for_each(|(mean, mu)| *mean = mu.to_f32());
                if let Some(rope) = self.codec.mean_rope() {
                    rope.rotate(mean, self.angles(b, t));
                }
            }
        }
    }

    /// The block mean of a token; zeros where there are none.
    fn read_block(&self, b: usize, h: usize, t: usize, mean: &mut [f32]) {
        let Some(block) = self.codec.block() else { return mean.fill(0.0) };
        let blocks = self.shape.tokens.div_ceil(block);
        let start = ((b * self.shape.heads + h) * blocks + t / block) * self.shape.dim;
        mean.iter_mut().zip(&self.means[start..]).for_each(|(mean, m)| *mean = m.to_f32());
    }
}

/// Where the parts of a query's row, and of the key's row that it meets, stand:
///
/// | | query | coded key | raw key |
/// |---|---|---|---|
/// | `plain` | `q` | block mean, or 0 | `k` |
/// | `code` | `q'`, or `g/m S q` where keys are sketched | codes | 0 |
/// | `scalar` | `sum q'` of each segment | `nu` of each segment | 0 |
/// | `cos`, `sin` | `A`, `B` of each pair | cosine and sine of its angle | 0 |
/// | `coded` | the mean's part of channels that do not turn | 1 | 0 |
#[derive(Clone, Copy)]
pub(in crate::qjl) struct Fields {
    dim: usize,
    codes: usize,
    segments: usize,
    pairs: usize,
}

impl Fields {
    pub(in crate::qjl) fn new(codec: &Codec) -> Self {
        let pairs = codec.mean_rope().map_or(0, |rope| rope.inv_freq().len());
        let (codes, segments) = (codec.keys().channels(), codec.keys().segments().len());
        Self { dim: codec.key_dim(), codes, segments, pairs }
    }

    const fn plain(self) -> Range<usize> {
        0..self.dim
    }

    const fn code(self) -> Range<usize> {
        self.dim..self.dim + self.codes
    }

    const fn scalar(self, segment: usize) -> usize {
        self.dim + self.codes + segment
    }

    const fn cos(self) -> usize {
        self.scalar(self.segments)
    }

    const fn sin(self) -> usize {
        self.cos() + self.pairs
    }

    const fn coded(self) -> usize {
        self.sin() + self.pairs
    }

    pub(in crate::qjl) const fn width(self) -> usize {
        self.coded() + 1
    }

    /// `q . k` of a raw row; of a coded one `nu (2 <q', c> - (2^b - 1) sum q')` of each segment and the mean's part.
    pub(in crate::qjl) fn score(self, codec: &Codec, query: &[f32], row: &[f32]) -> f32 {
        if row[self.coded()] == 0.0 {
            return dot(&query[self.plain()], &row[self.plain()]);
        }
        let mut score = 0.0;
        for (s, (segment, channels)) in spans(codec.keys().segments()).enumerate() {
            if segment.planes > 0 {
                let along = dot(&query[self.code()][channels.clone()], &row[self.code()][channels]);
                let nu = row[self.scalar(s)];
                score += nu * (2.0 * along - top_code(segment.planes) * query[self.scalar(s)]);
            }
        }
        if codec.block().is_some() {
            score += dot(&query[self.plain()], &row[self.plain()]);
        }
        score + dot(&query[self.cos()..], &row[self.cos()..])
    }
}

/// Queries as [`Fields`] has them.
pub(in crate::qjl) struct PlaneQueries<'a> {
    pub(in crate::qjl) codec: &'a Codec,
    pub(in crate::qjl) queries: &'a TensorView<'a>,
    pub(in crate::qjl) tables: &'a Tables,
    /// Query heads that share one KV head.
    pub(in crate::qjl) group: usize,
    pub(in crate::qjl) fields: Fields,
}

impl PlaneQueries<'_> {
    /// `A`, `B` and the constant of the mean's part.
    fn mean_terms(&self, mu: &[f16], row: &mut [f32]) {
        let f = self.fields;
        let (q, terms) = row.split_at_mut(f.dim);
        let (cos, sin, coded) = (f.cos() - f.dim, f.sin() - f.dim, f.coded() - f.dim);
        let mu = |c: usize| mu[c].to_f32();
        for (i, (a, b)) in self.codec.mean_rope().into_iter().flat_map(Rope::pairs).enumerate() {
            terms[cos + i] = q[a] * mu(a) + q[b] * mu(b);
            terms[sin + i] = q[b] * mu(a) - q[a] * mu(b);
        }
        let turned = self.codec.mean_rope().map_or(0, Rope::rotary_dim);
        terms[coded] = (turned..f.dim).map(|c| q[c] * mu(c)).sum();
    }
}

impl Rows for PlaneQueries<'_> {
    fn width(&self) -> usize {
        self.fields.width()
    }

    fn read(&self, b: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32> {
        let f = self.fields;
        row.fill(0.0);
        self.queries.read(b, head, token, &mut row[f.plain()])?;
        let tables = self.tables.head(b, head / self.group);
        if let Some(sketch) = self.codec.sketch() {
            let (query, signs) = row.split_at_mut(f.dim);
            let signs = &mut signs[..f.codes];
            sketch.projection.project(query, signs);
            signs.iter_mut().for_each(|x| *x *= sketch.factor());
            row[f.scalar(0)] = row[f.code()].iter().sum();
        } else {
            self.rotate(tables, row);
        }
        if self.codec.options().centring == Centring::PreRope {
            self.mean_terms(tables.mu, row);
        }
        Some(1.0)
    }
}

impl PlaneQueries<'_> {
    /// `q'` and its sums.
    fn rotate(&self, tables: HeadTables<'_>, row: &mut [f32]) {
        let f = self.fields;
        let weighed: Vec<f32> = row[f.plain()].iter().zip(tables.sigma).map(|(q, sigma)| q * sigma).collect();
        gather(self.codec, tables.order, &weighed, &mut row[f.code()]);
        for (s, (segment, channels)) in spans(self.codec.keys().segments()).enumerate() {
            let Some(rotation) = rotation(self.codec, segment) else { continue };
            let turned = &mut row[f.code()][channels];
            rotation.apply(turned);
            row[f.scalar(s)] = turned.iter().sum();
        }
    }
}

/// Rows of a sequence that stay raw.
pub(in crate::qjl) struct Raw<'a> {
    pub(super) codec: &'a Codec,
    pub(super) rows: &'a TensorView<'a>,
    /// One for each sequence.
    pub(super) length: &'a [usize],
}

impl Raw<'_> {
    fn holds(&self, b: usize, t: usize) -> bool {
        self.codec.is_raw(t, self.length[b])
    }
}

/// Keys as [`Fields`] has them.
pub(in crate::qjl) struct PlaneKeys<'a> {
    pub(in crate::qjl) codes: &'a PlaneCodes,
    pub(in crate::qjl) centres: Centres<'a>,
    pub(in crate::qjl) fields: Fields,
    /// `None` where all keys are read from their codes.
    pub(in crate::qjl) raw: Option<Raw<'a>>,
}

impl Rows for PlaneKeys<'_> {
    fn width(&self) -> usize {
        self.fields.width()
    }

    fn read(&self, b: usize, h: usize, t: usize, row: &mut [f32]) -> Option<f32> {
        let f = self.fields;
        row.fill(0.0);
        if let Some(raw) = self.raw.as_ref().filter(|raw| raw.holds(b, t)) {
            return raw.rows.read(b, h, t, &mut row[f.plain()]);
        }
        let (head, scalars) = row.split_at_mut(f.scalar(0));
        if read_codes(self.codes, self.codes.shape.row(b, h, t), &mut head[f.code()], scalars).is_none() {
            row.fill(0.0);
            return None;
        }
        if self.centres.codec.block().is_some() {
            self.centres.read_block(b, h, t, &mut row[f.plain()]);
        }
        for (i, &[cos, sin]) in self.centres.angles(b, t).iter().enumerate() {
            (row[f.cos() + i], row[f.sin() + i]) = (cos, sin);
        }
        row[f.coded()] = 1.0;
        Some(1.0)
    }

    fn score(&self, query: &[f32], row: &[f32], _: f32) -> f32 {
        self.fields.score(self.centres.codec, query, row)
    }
}

/// Values as `[raw, levels]`: raw rows first, and rotated ones apart from them. Levels rather than codes are summed: codes
/// are all positive, and over thousands of tokens their sum would lose what is left after `(2^b - 1) sum w` is taken
/// off. A kernel that sums codes takes it off tile by tile.
pub(in crate::qjl) struct PlaneValues<'a> {
    pub(in crate::qjl) codes: &'a PlaneCodes,
    /// `None` where all values are read from their codes.
    pub(in crate::qjl) raw: Option<Raw<'a>>,
}

/// Appends one query's output, of the sums of [`PlaneValues`]: `raw + R^T levels`.
pub(in crate::qjl) fn finish(codec: &Codec, parts: &mut [f32], out: &mut Vec<f32>) {
    let (raw, levels) = parts.split_at_mut(codec.value_dim());
    for (segment, channels) in spans(codec.values().segments()) {
        if let Some(rotation) = rotation(codec, segment) {
            rotation.apply_transposed(&mut levels[channels]);
        }
    }
    out.extend(raw.iter().zip(levels).map(|(raw, coded)| *raw + *coded));
}

impl Rows for PlaneValues<'_> {
    fn width(&self) -> usize {
        2 * self.codes.shape.dim
    }

    fn read(&self, b: usize, h: usize, t: usize, row: &mut [f32]) -> Option<f32> {
        let dim = self.codes.shape.dim;
        row.fill(0.0);
        if let Some(raw) = self.raw.as_ref().filter(|raw| raw.holds(b, t)) {
            return raw.rows.read(b, h, t, &mut row[..dim]);
        }
        let (mut nu, levels) = ([0.0], &mut row[dim..]);
        if read_codes(self.codes, self.codes.shape.row(b, h, t), levels, &mut nu).is_none() {
            row.fill(0.0);
            return None;
        }
        for (segment, channels) in spans(self.codes.layout.segments()) {
            levels[channels].iter_mut().for_each(|c| *c = level(segment.planes, *c));
        }
        Some(nu[0])
    }
}
