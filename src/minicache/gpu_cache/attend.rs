//! Reading a layer: attention over folded runs and raw blocks in one softmax, and the rows restored.

use super::super::cache::Held;
use super::MiniCache;
use crate::attention::gpu::{Ops as ExactOps, SegmentPasses};
use crate::attention::{AttendOptions, Geometry};
use crate::cache::Segment;
use crate::error::{Error, Result};
use crate::gpu::block::copy;
use crate::gpu::{KvView, Recording};
use crate::tensor::Shape;

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
        let held = self.ledger.segments(layer);
        let segments: Vec<Segment> = held.iter().map(|(segment, _)| *segment).collect();
        let passes = SegmentPasses::new(&self.gpu, geometry, shape.value_dim, &lengths, &segments, options)?;
        let mut recording = Recording::new(&self.gpu);
        if output.shape().elements() > 0 {
            let exact = ExactOps::new(&self.gpu);
            for ((segment, held), pass) in held.iter().zip(&passes.passes) {
                match held {
                    Held::Raw(block, at) => {
                        let [keys, values] = block.views(*at, segment.tokens);
                        exact.exact(&mut recording, pass, [queries, &keys, &values])?;
                    }
                    Held::Folded(run, member) => {
                        let [keys, values] = &run.folds;
                        let folds = [&keys.buffers, &values.buffers];
                        self.ops.attend(&mut recording, pass, queries, folds, *member)?;
                    }
                }
            }
            passes.combine(&mut recording, &self.gpu, options, output)?;
        }
        recording.record(encoder);
        Ok(())
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
