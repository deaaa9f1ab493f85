//! MiniCache on the GPU: each private function records the kernel of the same name in `shaders/minicache/`.

mod buffers;
mod coded;
mod params;
mod record;
mod variants;

pub use buffers::{Decision, FoldedBuffers, Rows};
pub(crate) use variants::variants;

use buffers::Awaited;
pub(in crate::minicache) use buffers::{Decided, parse_totals};
use coded::Coders;
pub(in crate::minicache) use coded::{Values, coded_tiling};

use super::config::MergeOptions;
use super::folded::{Layer, Layout, check_merge};
use crate::attention::gpu::{Pass, whole};
use crate::attention::{AttendOptions, Geometry};
use crate::error::{Error, Result};
use crate::gpu::{BoundView, Gpu, KvView, ReadBack, Recording, ViewUse};

/// Lanes that share a row in `similarity`.
const LANES: u32 = 16;
/// Bytes of a row in the similarity kernel's output.
pub(in crate::minicache) const ROW_BYTES: u64 = 24;
/// Merged rows and the causes, as `retain` counts them.
const CAUSES: u32 = 6;
/// Where the layout's totals follow in the status buffer.
const TOTALS_AT: u32 = 8;
pub(in crate::minicache) const STATUS_BYTES: u64 = 48;

/// MiniCache's operations, recorded into the caller's encoder.
///
/// Merging takes two recordings, since how many rows stay raw is known only to the GPU: [`encode_decide`](Self::encode_decide)
/// measures and decides, its totals come back, and [`encode_merge`](Self::encode_merge) fills buffers of exactly that size.
#[derive(Clone, Debug)]
pub struct Ops {
    gpu: Gpu,
    coders: Coders,
}

impl Ops {
    /// Operations on this device. Kernels are compiled when first recorded.
    #[must_use]
    pub fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone(), coders: Coders::default() }
    }

    /// Records the similarity probe over every row of a pair.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] when the views are no pair, [`Error::Range`] for bad options, the errors of a
    /// view that cannot be bound, [`Error::Limit`] and [`Error::OutOfMemory`].
    pub fn encode_similarity(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        lower: &KvView,
        upper: &KvView,
        options: &MergeOptions,
    ) -> Result<Rows> {
        let layout = pair_layout(lower, upper, options)?;
        let mut recording = Recording::new(&self.gpu);
        let rows = self.similarity(&mut recording, &layout, lower, upper, options)?;
        recording.record(encoder);
        Ok(rows)
    }

    /// Records the measuring and deciding of every row, and the read-back of the totals.
    ///
    /// # Errors
    /// As [`encode_similarity`](Self::encode_similarity).
    pub fn encode_decide(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        lower: &KvView,
        upper: &KvView,
        options: &MergeOptions,
    ) -> Result<Decision> {
        let mut recording = Recording::new(&self.gpu);
        let decided = self.decide(&mut recording, [lower, upper], options, None)?;
        let totals = ReadBack::prepare(&self.gpu, &[&decided.status])?;
        recording.record(encoder);
        let totals = Awaited::Coming(totals.record(encoder));
        Ok(Decision { decided, totals })
    }

    /// Records the fold of a decided pair into a buffer made for it. Its [totals](Decision::totals) have been awaited.
    ///
    /// # Errors
    /// [`Error::Device`] when the totals have not come, [`Error::Limit`] when a store exceeds one binding, [`Error::OutOfMemory`].
    pub fn encode_merge(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        decision: &Decision,
    ) -> Result<FoldedBuffers> {
        let totals = decision.known_totals()?;
        let mut recording = Recording::new(&self.gpu);
        let folded = self.merge(&mut recording, &decision.decided, totals)?;
        recording.record(encoder);
        Ok(folded)
    }

    /// Records the restoring of one layer into `output`, which has the shape and element type that the pair came in.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::DType`] when `output` is of another kind, the errors of a view that cannot be bound or
    /// written, [`Error::Limit`].
    pub fn encode_restore(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        folded: &FoldedBuffers,
        which: Layer,
        output: &KvView,
    ) -> Result<()> {
        let layout = folded.layout;
        output.shape().check_equal("restored layer", layout.shape)?;
        if output.dtype() != layout.dtype {
            let (want, have) = (layout.dtype.to_string(), output.dtype().to_string());
            return Err(Error::DType { what: "restored layer".to_owned(), want, have });
        }
        let mut recording = Recording::new(&self.gpu);
        self.restore(&mut recording, folded, which.member(), output)?;
        recording.record(encoder);
        Ok(())
    }

    /// Records attention of one layer over folded keys and values into `output`, `[batch, query_heads, queries, value_dim]` of
    /// any element type: scores from direction and magnitude, nothing restored. `queries` are
    /// `[batch, query_heads, queries, key_dim]` of any type; `lengths` one per sequence (default: all tokens).
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::HeadRatio`], [`Error::DType`] or [`Error::Range`] when shapes, types, lengths or options do
    /// not fit, the errors of a view that cannot be bound or written, [`Error::Limit`], [`Error::OutOfMemory`].
    #[allow(clippy::too_many_arguments, reason = "attention has this many inputs, each of another kind")]
    pub fn encode_attend(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        queries: &KvView,
        keys: &FoldedBuffers,
        values: &FoldedBuffers,
        which: Layer,
        lengths: Option<&[u32]>,
        options: &AttendOptions<'_>,
        output: &KvView,
    ) -> Result<()> {
        let geometry = Geometry::of(queries.shape(), keys.layout.shape)?;
        geometry.check_values(values.layout.shape)?;
        let kind = |layout: &Layout| format!("{} {:?}, coded {:?}", layout.dtype, layout.mode, layout.planes);
        if kind(&keys.layout) != kind(&values.layout) {
            return Err(Error::shape("folded values", kind(&keys.layout), kind(&values.layout)));
        }
        let value_dim = values.layout.shape.dim;
        output.shape().check_equal("attention output", geometry.output(value_dim)?)?;
        let mut recording = Recording::new(&self.gpu);
        if keys.layout.planes.is_some() {
            let spans = whole(&geometry.lengths(lengths)?);
            let (views, folded) = ((queries, output), ([keys, values], which.member()));
            self.attend_both(&mut recording, geometry, views, folded, &spans, options)?;
            recording.record(encoder);
            return Ok(());
        }
        let pass = Pass::new(&self.gpu, geometry, value_dim, lengths, options)?;
        if output.shape().elements() > 0 {
            self.attend(&mut recording, &pass, queries, [keys, values], which.member())?;
            pass.combine(&mut recording, &self.gpu, options, output)?;
        }
        recording.record(encoder);
        Ok(())
    }
}

fn pair_layout(lower: &KvView, upper: &KvView, options: &MergeOptions) -> Result<Layout> {
    check_merge((lower.shape(), lower.dtype()), (upper.shape(), upper.dtype()), options)
}

fn bind_pair(lower: &KvView, upper: &KvView, gpu: &Gpu) -> Result<(BoundView, BoundView)> {
    Ok((lower.bind("lower layer", ViewUse::Read, gpu)?, upper.bind("upper layer", ViewUse::Read, gpu)?))
}
