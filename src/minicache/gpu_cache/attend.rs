//! Reading a layer: attention over folded runs and raw blocks in one softmax, and the rows restored.

use super::super::cache::Held;
use super::super::config::DirectionPlanes;
use super::super::gpu::{Values, coded_tiling};
use super::MiniCache;
use crate::attention::gpu::{Ops as ExactOps, Parts, RowKind, SegmentPasses, Tiling};
use crate::attention::{AttendOptions, Geometry};
use crate::cache::Segment;
use crate::error::{Error, Result};
use crate::gpu::block::copy;
use crate::gpu::{Gpu, KvView, Recording};
use crate::tensor::Shape;

/// What all passes of one call share.
struct Call<'a> {
    layer: usize,
    geometry: Geometry,
    value_dim: usize,
    lengths: &'a [usize],
    options: &'a AttendOptions<'a>,
}

impl Call<'_> {
    fn passes(&self, gpu: &Gpu, kind: RowKind, segments: &[(Segment, Tiling)]) -> Result<SegmentPasses> {
        SegmentPasses::new(gpu, self.geometry, self.value_dim, self.lengths, (kind, segments), self.options)
    }
}

impl MiniCache {
    /// Records attention of one layer into `output`, `[sequences, query_heads, queries, value_dim]` of any element type: query
    /// `i` of `n` of a sequence stands at position `length - n + i`. `queries` are
    /// `[sequences, query_heads, queries, key_dim]` of any type. Folded rows are read as direction and magnitude.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::HeadRatio`] or [`Error::Range`] when layer, shapes or options do not fit, the errors of a view
    /// that cannot be bound or written, [`Error::Limit`], [`Error::OutOfMemory`]. Nothing is recorded then.
    pub fn attend(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: usize,
        queries: &KvView,
        output: &KvView,
        options: &AttendOptions<'_>,
    ) -> Result<()> {
        let shape = self.ledger.shape(layer)?;
        let lengths = self.ledger.lengths(layer);
        let tokens = lengths.iter().copied().max().unwrap_or(0);
        let keys = Shape::new(self.sequences(), shape.kv_heads, tokens, shape.key_dim)?;
        let geometry = Geometry::of(queries.shape(), keys)?;
        output.shape().check_equal("attention output", geometry.output(shape.value_dim)?)?;
        let call = Call { layer, geometry, value_dim: shape.value_dim, lengths: &lengths, options };
        let mut recording = Recording::new(&self.gpu);
        let folded = self.ledger.segments(layer).iter().any(|(_, held)| matches!(held, Held::Folded(..)));
        match self.ledger.options.merge.planes {
            Some(planes) if folded => self.attend_coded(&mut recording, &call, planes, queries, output)?,
            _ => self.attend_whole(&mut recording, &call, queries, output)?,
        }
        recording.record(encoder);
        Ok(())
    }

    /// Attention where directions are whole: one softmax over folded runs and raw blocks.
    fn attend_whole(
        &self,
        recording: &mut Recording<'_>,
        call: &Call<'_>,
        queries: &KvView,
        output: &KvView,
    ) -> Result<()> {
        let held = self.ledger.segments(call.layer);
        let tiling = Tiling::rows(call.geometry, call.value_dim);
        let segments: Vec<_> = held.iter().map(|(segment, _)| (*segment, tiling)).collect();
        let passes = call.passes(&self.gpu, RowKind::Raw, &segments)?;
        if output.shape().elements() == 0 {
            return Ok(());
        }
        let exact = ExactOps::new(&self.gpu);
        for ((segment, held), pass) in held.iter().zip(&passes.passes) {
            match held {
                Held::Raw(block, at) => {
                    let [keys, values] = block.views(*at, segment.tokens);
                    exact.exact(recording, pass, [queries, &keys, &values])?;
                }
                Held::Folded(run, member) => {
                    let [keys, values] = &run.folds;
                    let folds = [&keys.buffers, &values.buffers];
                    self.ops.attend(recording, pass, queries, folds, *member)?;
                }
            }
        }
        passes.combine(recording, &self.gpu, call.options, output)
    }

    /// Attention where directions are coded: what comes of coded values is rotated, and has partial results of its own.
    fn attend_coded(
        &self,
        recording: &mut Recording<'_>,
        call: &Call<'_>,
        planes: DirectionPlanes,
        queries: &KvView,
        output: &KvView,
    ) -> Result<()> {
        let held = self.ledger.segments(call.layer);
        let (rows, twice) =
            (Tiling::rows(call.geometry, call.value_dim), coded_tiling(call.geometry, call.value_dim));
        let (mut coded, mut raw) = (Vec::new(), Vec::new());
        let (mut coded_runs, mut raw_rows) = (Vec::new(), Vec::new());
        for (segment, held) in &held {
            match held {
                Held::Raw(..) => raw.push((*segment, rows)),
                Held::Folded(run, _) => {
                    let [_, values] = &run.folds;
                    if Values::Coded.are_in(&values.buffers) {
                        coded.push((*segment, twice));
                        coded_runs.push(held);
                    }
                    if !Values::Raw.are_in(&values.buffers) {
                        continue;
                    }
                    raw.push((*segment, twice));
                }
            }
            raw_rows.push((segment, held));
        }
        let coded = call.passes(&self.gpu, RowKind::Coded, &coded)?;
        let raw = call.passes(&self.gpu, RowKind::Raw, &raw)?;
        if output.shape().elements() == 0 {
            return Ok(());
        }
        let turned = self.ops.turn(recording, queries, planes)?;
        let exact = ExactOps::new(&self.gpu);
        for ((segment, held), pass) in raw_rows.iter().zip(&raw.passes) {
            match held {
                Held::Raw(block, at) => {
                    let [keys, values] = block.views(*at, segment.tokens);
                    exact.exact(recording, pass, [queries, &keys, &values])?;
                }
                Held::Folded(run, member) => {
                    let folds = run.folds.each_ref().map(|fold| &fold.buffers);
                    self.ops.attend_coded(recording, pass, &turned, folds, (*member, Values::Raw))?;
                }
            }
        }
        for (held, pass) in coded_runs.iter().zip(&coded.passes) {
            let Held::Folded(run, member) = held else { continue };
            let folds = run.folds.each_ref().map(|fold| &fold.buffers);
            self.ops.attend_coded(recording, pass, &turned, folds, (*member, Values::Coded))?;
        }
        let found =
            Parts { splits: if coded.passes.is_empty() { 0 } else { coded.parts.splits }, ..coded.parts };
        self.ops.join_coded(recording, [&found, &raw.parts], (call.value_dim, planes), call.options, output)
    }

    /// Records the restoring of a layer's keys and values, as they are attended to, into `[sequences, kv_heads, tokens, dim]` of
    /// the layer's element type, for engines with attention of their own. `tokens` is at least the longest sequence's; what
    /// lies past a shorter one is left as it is. Rows must begin at whole words: even strides where elements have 16 bits.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::DType`] when an output is of another kind, the errors of a view that cannot be written,
    /// [`Error::Limit`].
    pub fn restore(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: usize,
        outputs: [&KvView; 2],
    ) -> Result<()> {
        let shape = self.ledger.shape(layer)?;
        let longest = self.ledger.lengths(layer).into_iter().max().unwrap_or(0);
        for ((what, output), dim) in
            ["restored keys", "restored values"].iter().zip(outputs).zip(shape.dims())
        {
            let tokens = output.shape().tokens.max(longest);
            let want = Shape::new(self.sequences(), shape.kv_heads, tokens, dim)?;
            output.shape().check_equal(what, want)?;
            if output.dtype() != shape.dtype {
                let (want, have) = (shape.dtype.to_string(), output.dtype().to_string());
                return Err(Error::DType { what: (*what).to_owned(), want, have });
            }
        }
        let mut recording = Recording::new(&self.gpu);
        for (segment, held) in self.ledger.segments(layer) {
            for (part, output) in outputs.into_iter().enumerate() {
                let output = output.part(segment.sequence, segment.start, segment.tokens);
                match held {
                    Held::Raw(block, at) => {
                        let views = block.views(at, segment.tokens);
                        let Some(from) = views.get(part) else { continue };
                        copy(&mut recording, &self.gpu, from, &output)?;
                    }
                    Held::Folded(run, member) => {
                        let Some(fold) = run.folds.get(part) else { continue };
                        self.ops.restore(&mut recording, &fold.buffers, member, &output)?;
                    }
                }
            }
        }
        recording.record(encoder);
        Ok(())
    }
}
