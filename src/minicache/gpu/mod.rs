//! MiniCache on the GPU: each private function records the kernel of the same name in `shaders/minicache/`.

mod buffers;
mod params;
mod variants;

pub use buffers::{Decision, FoldedBuffers, Rows};

use buffers::Awaited;
pub(crate) use variants::variants;

use params::{ArrangeParams, MergeParams, RestoreParams, RetainParams, SimilarityParams, ThresholdParams};
use variants::{arrange_variant, retain_variant, similarity_variant, store_variant, threshold_variant};

use super::config::{MergeOptions, Retention};
use super::folded::{Cut, Layer, Layout, PAGE, Page, check_merge};
use crate::error::{Error, Result};
use crate::gpu::{BoundView, Dispatch, Gpu, Kernel, KvView, ReadBack, Recording, ViewUse, Window};

/// Lanes that share a row in `similarity`.
const LANES: u32 = 16;
/// Bytes of a row in the similarity kernel's output.
const ROW_BYTES: u64 = 24;
/// Merged rows and the causes, as `retain` counts them.
const CAUSES: u32 = 6;
/// Where the layout's totals follow in the status buffer.
const TOTALS_AT: u32 = 8;
const STATUS_BYTES: u64 = 48;

/// MiniCache's operations, recorded into the caller's encoder.
///
/// Merging takes two recordings, since how many rows stay raw is known only to the GPU: [`encode_decide`](Self::encode_decide)
/// measures and decides, its totals come back, and [`encode_merge`](Self::encode_merge) fills buffers of exactly that size.
#[derive(Clone, Debug)]
pub struct Ops {
    gpu: Gpu,
}

impl Ops {
    /// Operations on this device. Kernels are compiled when first recorded.
    #[must_use]
    pub fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone() }
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
        let layout = pair_layout(lower, upper, options)?;
        let mut recording = Recording::new(&self.gpu);
        let rows = self.similarity(&mut recording, &layout, lower, upper, options)?;
        let cuts = self.threshold(&mut recording, &rows, options)?;
        let status = self.gpu.storage("status", STATUS_BYTES)?;
        let bitmaps = self.gpu.storage("bitmaps", layout.pages() as u64 * 4)?;
        self.retain(&mut recording, &rows, &cuts, &bitmaps, &status, options)?;
        let pages = self.gpu.storage("page table", (layout.pages() * size_of::<Page>()) as u64)?;
        self.arrange(&mut recording, &layout, &bitmaps, &pages, &status, options)?;
        let totals = ReadBack::prepare(&self.gpu, &status)?;
        recording.record(encoder);
        let totals = Awaited::Coming(totals.record(encoder));
        Ok(Decision { rows, lower: lower.clone(), upper: upper.clone(), pages, totals })
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
        let (layout, totals) = (decision.rows.layout, decision.known_totals()?);
        let bytes = totals.bytes(&layout);
        let store = if bytes == 0 { None } else { Some(self.gpu.storage("folded pair", bytes)?) };
        let folded = FoldedBuffers { layout, totals, store };
        let mut recording = Recording::new(&self.gpu);
        self.merge(&mut recording, decision, &folded)?;
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
        self.restore(&mut recording, folded, which, output)?;
        recording.record(encoder);
        Ok(())
    }

    fn similarity(
        &self,
        recording: &mut Recording<'_>,
        layout: &Layout,
        lower: &KvView,
        upper: &KvView,
        options: &MergeOptions,
    ) -> Result<Rows> {
        let shape = layout.shape;
        let buffer = self.gpu.storage("rows", shape.rows() as u64 * ROW_BYTES)?;
        let rows = Rows { gpu: self.gpu.clone(), layout: *layout, buffer };
        if shape.rows() == 0 {
            return Ok(rows);
        }
        let (lower, upper) = bind_pair(lower, upper, &self.gpu)?;
        let variant = similarity_variant(layout, lower.paired && upper.paired)
            .with_subgroups(self.gpu.caps().shuffle_width());
        let workgroups = (shape.rows() as u64).div_ceil(u64::from(variant.workgroup() / LANES));
        recording.add(Dispatch {
            variant,
            params: SimilarityParams {
                rows: shape.rows() as u32,
                tokens: shape.tokens as u32,
                heads: shape.heads as u32,
                t: options.slerp_t,
                lower: lower.layout,
                upper: upper.layout,
            },
            buffers: &[(&lower).into(), (&upper).into(), Window::whole(&rows.buffer)],
            workgroups,
        })?;
        Ok(rows)
    }

    /// The verdicts: computed where the rule looks at a whole sequence, known at once otherwise.
    fn threshold(
        &self,
        recording: &mut Recording<'_>,
        rows: &Rows,
        options: &MergeOptions,
    ) -> Result<wgpu::Buffer> {
        let shape = rows.layout.shape;
        let all = |cut: Cut| self.gpu.upload("cuts", bytemuck::cast_slice(&vec![cut; shape.batch.max(1)]));
        let (amount, fraction) = match options.retention {
            Retention::Never => return all(Cut::NOTHING),
            Retention::Cosine(threshold) => return all(Cut::below(threshold)),
            Retention::Range(gamma) => (gamma, false),
            Retention::Fraction(rho) => (rho, true),
        };
        let cuts = self.gpu.storage("cuts", (shape.batch.max(1) * size_of::<Cut>()) as u64)?;
        recording.add(Dispatch {
            variant: threshold_variant(rows.layout.mode, fraction),
            params: ThresholdParams {
                sequence_rows: (shape.heads * shape.tokens) as u32,
                tokens: shape.tokens as u32,
                sinks: options.sink_tokens(),
                amount,
            },
            buffers: &[Window::whole(&rows.buffer), Window::whole(&cuts)],
            workgroups: if shape.rows() == 0 { 0 } else { shape.batch as u64 },
        })?;
        Ok(cuts)
    }

    fn retain(
        &self,
        recording: &mut Recording<'_>,
        rows: &Rows,
        cuts: &wgpu::Buffer,
        bitmaps: &wgpu::Buffer,
        status: &wgpu::Buffer,
        options: &MergeOptions,
    ) -> Result<()> {
        let layout = rows.layout;
        let variant = retain_variant(layout.mode);
        let pages_per_workgroup = u64::from(variant.workgroup()) / PAGE as u64;
        recording.add(Dispatch {
            variant,
            params: RetainParams {
                pages: layout.pages() as u32,
                pages_per_head: layout.pages_per_head() as u32,
                tokens: layout.shape.tokens as u32,
                heads: layout.shape.heads as u32,
                sinks: options.sink_tokens(),
            },
            buffers: &[&rows.buffer, cuts, bitmaps, status].map(Window::whole),
            workgroups: (layout.pages() as u64).div_ceil(pages_per_workgroup),
        })
    }

    fn arrange(
        &self,
        recording: &mut Recording<'_>,
        layout: &Layout,
        bitmaps: &wgpu::Buffer,
        pages: &wgpu::Buffer,
        status: &wgpu::Buffer,
        options: &MergeOptions,
    ) -> Result<()> {
        let last_rows = layout.pages_per_head().checked_sub(1).map_or(0, |last| layout.page_rows(last));
        recording.add(Dispatch {
            variant: arrange_variant(layout),
            params: ArrangeParams {
                pages: layout.pages() as u32,
                pages_per_head: layout.pages_per_head() as u32,
                last_rows: last_rows as u32,
                full_limit: options.raw_limit(PAGE),
                last_limit: options.raw_limit(last_rows),
            },
            buffers: &[bitmaps, pages, status].map(Window::whole),
            workgroups: u64::from(layout.pages() > 0),
        })
    }

    fn merge(
        &self,
        recording: &mut Recording<'_>,
        decision: &Decision,
        folded: &FoldedBuffers,
    ) -> Result<()> {
        let layout = folded.layout;
        let Some(store) = &folded.store else { return Ok(()) };
        let (lower, upper) = bind_pair(&decision.lower, &decision.upper, &self.gpu)?;
        let variant = store_variant(Kernel::Merge, &layout);
        let pairs = (layout.pages() * PAGE * layout.shape.dim.div_ceil(2)) as u64;
        recording.add(Dispatch {
            workgroups: pairs.div_ceil(u64::from(variant.workgroup())),
            variant,
            params: MergeParams {
                pages: layout.pages() as u32,
                pages_per_head: layout.pages_per_head() as u32,
                tokens: layout.shape.tokens as u32,
                heads: layout.shape.heads as u32,
                sections: folded.totals.sections(&layout),
                lower: lower.layout,
                upper: upper.layout,
            },
            buffers: &[
                (&lower).into(),
                (&upper).into(),
                Window::whole(&decision.rows.buffer),
                Window::whole(&decision.pages),
                Window::whole(store),
            ],
        })
    }

    fn restore(
        &self,
        recording: &mut Recording<'_>,
        folded: &FoldedBuffers,
        which: Layer,
        output: &KvView,
    ) -> Result<()> {
        let layout = folded.layout;
        let Some(store) = &folded.store else { return Ok(()) };
        let (output, view) = output.bind_output("restored layer", &self.gpu)?;
        let variant = store_variant(Kernel::Restore, &layout);
        recording.add(Dispatch {
            workgroups: u64::from(view.words).div_ceil(u64::from(variant.workgroup())),
            variant,
            params: RestoreParams {
                view,
                sections: folded.totals.sections(&layout),
                pages_per_head: layout.pages_per_head() as u32,
                layer: u32::from(which == Layer::Upper),
                padding: [0; 2],
            },
            buffers: &[Window::whole(store), output],
        })
    }
}

fn pair_layout(lower: &KvView, upper: &KvView, options: &MergeOptions) -> Result<Layout> {
    check_merge((lower.shape(), lower.dtype()), (upper.shape(), upper.dtype()), options)
}

fn bind_pair(lower: &KvView, upper: &KvView, gpu: &Gpu) -> Result<(BoundView, BoundView)> {
    Ok((lower.bind("lower layer", ViewUse::Read, gpu)?, upper.bind("upper layer", ViewUse::Read, gpu)?))
}
