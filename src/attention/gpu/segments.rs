//! One call over many stores: a dispatch for each, whose partial results stand in one buffer.

use std::ops::Range;

use super::{
    AttentionParams, MAX_PARTIAL_BYTES, Parts, Pass, RowKind, Tiling, combine, partial_stride, partials,
    whole,
};
use crate::attention::{AttendOptions, Geometry};
use crate::cache::Segment;
use crate::error::Result;
use crate::gpu::{Gpu, KvView, Recording, index32};
use crate::tensor::checked_bytes;

/// A segment, how it is divided, its first split, its splits and the tokens of one.
type Placed<'a> = (&'a Segment, Tiling, usize, usize, usize);

/// Makes the passes of one call, which share spans and partial results.
struct Passes {
    common: AttentionParams,
    rows: usize,
    all_splits: usize,
    spans: wgpu::Buffer,
    partials: wgpu::Buffer,
}

impl Passes {
    #[allow(clippy::too_many_arguments, reason = "passes share this many things, each of another kind")]
    fn new(
        gpu: &Gpu,
        kind: RowKind,
        g: Geometry,
        value_dim: usize,
        lengths: &[usize],
        splits_of: &[usize],
        [written, adds]: [bool; 2],
        options: &AttendOptions<'_>,
    ) -> Result<Self> {
        let rows = g.query_heads * g.queries;
        let all_splits = splits_of.iter().copied().max().unwrap_or(0).max(1);
        Ok(Self {
            common: AttentionParams { adds: adds.into(), ..AttentionParams::new(g, options)? },
            rows,
            all_splits,
            spans: gpu.upload("spans", bytemuck::cast_slice(&whole(lengths)))?,
            partials: partials(gpu, kind, [g.batch * rows, all_splits], value_dim, written)?,
        })
    }

    fn pass(&self, (segment, tiling, first_split, splits, split): Placed<'_>) -> Result<Pass> {
        let params = AttentionParams {
            rows: index32(self.rows)?,
            first_row: index32(segment.sequence * self.rows)?,
            tokens: index32(segment.tokens)?,
            live_end: index32(segment.tokens)?,
            start: index32(segment.start)?,
            splits: index32(splits)?,
            split: index32(split)?,
            all_splits: index32(self.all_splits)?,
            first_split: index32(first_split)?,
            ..self.common
        };
        let (spans, partials) = (self.spans.clone(), self.partials.clone());
        let (units, workgroups) = (tiling.units(), (tiling.units() * splits) as u64);
        Ok(Pass { params, spans, partials, units, workgroups })
    }
}

/// The passes of a call over many stores, each of which holds one segment.
pub(crate) struct SegmentPasses {
    /// One for each segment.
    pub(crate) passes: Vec<Pass>,
    pub(crate) parts: Parts,
}

impl SegmentPasses {
    /// A pass for each segment, which says how it is divided, `g.tokens` not looked at. Where the partial results of all splits
    /// would take too much room, later segments add to those of earlier ones.
    pub(crate) fn new(
        gpu: &Gpu,
        g: Geometry,
        value_dim: usize,
        lengths: &[usize],
        (kind, segments): (RowKind, &[(Segment, Tiling)]),
        options: &AttendOptions<'_>,
    ) -> Result<Self> {
        options.validate()?;
        g.check_sinks(options)?;
        let rows = g.query_heads * g.queries;
        let bytes =
            checked_bytes("partial results", &[g.batch, rows, partial_stride(value_dim) as usize], 16)?;
        let most = (MAX_PARTIAL_BYTES / bytes.max(1)).max(1);
        let mut used = vec![0; lengths.len()];
        let mut places = Vec::with_capacity(segments.len());
        for &(ref segment, tiling) in segments {
            let (splits, split) = tiling.split(segment.tokens, g.batch);
            let (splits, split) = if splits > most {
                (most, segment.tokens.div_ceil(most * tiling.tokens) * tiling.tokens)
            } else {
                (splits, split)
            };
            let Some(used) = used.get_mut(segment.sequence) else { continue };
            let first = if *used + splits > most { 0 } else { *used };
            *used = (*used).max(first + splits);
            places.push((segment, tiling, first, splits, split));
        }
        let all = Passes::new(gpu, kind, g, value_dim, lengths, &used, [false, true], options)?;
        let passes = places.into_iter().map(|placed| all.pass(placed)).collect::<Result<_>>()?;
        Ok(Self { passes, parts: Parts { splits: index32(all.all_splits)?, partials: all.partials } })
    }

    /// Records the combining of all splits into `output`.
    pub(crate) fn combine(
        &self,
        recording: &mut Recording<'_>,
        gpu: &Gpu,
        options: &AttendOptions<'_>,
        output: &KvView,
    ) -> Result<()> {
        combine(recording, gpu, &self.parts, options, output)
    }
}

/// The passes of a call over one kind of rows, and what they leave.
pub(crate) struct Stage {
    pub(crate) passes: Vec<Pass>,
    pub(crate) parts: Parts,
}

impl Stage {
    /// Bytes of what the passes of [`Pass::stage`] leave.
    pub(crate) fn bytes(g: Geometry, value_dim: usize, segments: &[Segment], tiling: Tiling) -> Result<u64> {
        let (_, splits_of) = one_after_the_other(segments, tiling, g.batch);
        let splits = splits_of.into_iter().max().unwrap_or(0);
        let sizes = [g.batch, g.query_heads * g.queries, splits, partial_stride(value_dim) as usize];
        Ok(checked_bytes("partial results", &sizes, 16)? as u64)
    }
}

/// Segments of so many sequences, each with splits of its own behind those of the one before; and the splits of every sequence.
fn one_after_the_other(
    segments: &[Segment],
    tiling: Tiling,
    sequences: usize,
) -> (Vec<Placed<'_>>, Vec<usize>) {
    let mut splits_of = vec![0; sequences];
    let mut placed = Vec::with_capacity(segments.len());
    for segment in segments {
        let (splits, split) = tiling.split(segment.tokens, sequences);
        let Some(before) = splits_of.get_mut(segment.sequence) else { continue };
        placed.push((segment, tiling, *before, splits, split));
        *before += splits;
    }
    (placed, splits_of)
}

impl Pass {
    /// Only these tokens of the store count.
    pub(crate) fn only(&mut self, live: Range<usize>) -> Result<()> {
        (self.params.live_first, self.params.live_end) = (index32(live.start)?, index32(live.end)?);
        Ok(())
    }

    /// The positions of the store's tokens follow each other from this one on.
    pub(crate) fn consecutive(&mut self, first: u32) {
        (self.params.position, self.params.consecutive) = (first, 1);
    }

    /// No window hides the store's tokens; one hides later tokens all the same.
    pub(crate) fn pinned(&mut self) {
        self.params.causal |= u32::from(self.params.window != u32::MAX);
        self.params.window = u32::MAX;
    }

    /// So many queries of every sequence and head stand behind those of the pass.
    pub(crate) fn before(&mut self, queries: usize) -> Result<()> {
        self.params.behind = index32(queries)?;
        Ok(())
    }

    /// Passes for the segments of one kind of rows, each of which has splits of its own.
    pub(crate) fn stage(
        gpu: &Gpu,
        g: Geometry,
        value_dim: usize,
        lengths: &[usize],
        (kind, segments, tiling): (RowKind, &[Segment], Tiling),
        options: &AttendOptions<'_>,
    ) -> Result<Stage> {
        options.validate()?;
        g.check_sinks(options)?;
        let (placed, splits_of) = one_after_the_other(segments, tiling, lengths.len());
        let splits = splits_of.iter().copied().max().unwrap_or(0);
        // Whether every part is written, by one pass.
        let written = splits_of.iter().all(|&of_one| of_one == splits && of_one > 0);
        let all = Passes::new(gpu, kind, g, value_dim, lengths, &splits_of, [written, false], options)?;
        let passes = placed.into_iter().map(|placed| all.pass(placed)).collect::<Result<_>>()?;
        Ok(Stage { passes, parts: Parts { splits: index32(splits)?, partials: all.partials } })
    }
}
