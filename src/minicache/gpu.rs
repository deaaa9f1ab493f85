//! MiniCache on the GPU: each private function records the kernel of the same name in `shaders/minicache/`.

use bytemuck::{Pod, Zeroable};

use super::config::{Counts, MergeOptions, Mode, Retention};
use super::folded::{Cut, Folded, Layer, Layout, PAGE, Page, Totals, check_merge};
use crate::error::{Error, Result};
use crate::gpu::{
    BoundView, Const, Dispatch, Gpu, Kernel, KvView, Module, ReadBack, Recording, Variant, ViewUse, Window,
};
use crate::tensor::DType;

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

/// Rows measured by [`Ops::encode_similarity`], on the device.
#[derive(Clone, Debug)]
pub struct Rows {
    gpu: Gpu,
    layout: Layout,
    buffer: wgpu::Buffer,
}

/// Rows decided by [`Ops::encode_decide`], on the device; their totals are on the way to the host.
#[derive(Debug)]
pub struct Decision {
    rows: Rows,
    lower: KvView,
    upper: KvView,
    pages: wgpu::Buffer,
    totals: Option<ReadBack>,
}

/// A folded pair on the device: exact buffers, `None` where there is nothing to hold.
#[derive(Clone, Debug)]
pub struct FoldedBuffers {
    /// Sizes.
    pub layout: Layout,
    /// Slots, side rows, raw pages and counts.
    pub totals: Totals,
    pages: Option<wgpu::Buffer>,
    slots: Option<wgpu::Buffer>,
    magnitudes: Option<wgpu::Buffer>,
    side: Option<wgpu::Buffer>,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SimilarityParams {
    rows: u32,
    tokens: u32,
    heads: u32,
    t: f32,
    lower: [u32; 4],
    upper: [u32; 4],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ThresholdParams {
    sequence_rows: u32,
    tokens: u32,
    sinks: u32,
    amount: f32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RetainParams {
    pages: u32,
    pages_per_head: u32,
    tokens: u32,
    heads: u32,
    sinks: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ArrangeParams {
    pages: u32,
    pages_per_head: u32,
    last_rows: u32,
    full_limit: u32,
    last_limit: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MergeParams {
    pages: u32,
    pages_per_head: u32,
    tokens: u32,
    heads: u32,
    lower: [u32; 4],
    upper: [u32; 4],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RestoreParams {
    words: u32,
    rows: u32,
    tokens: u32,
    heads: u32,
    pages_per_head: u32,
    layer: u32,
    pitch: u32,
    contiguous: u32,
    output: [u32; 4],
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
        recording.record(encoder);
        let totals = Some(ReadBack::schedule(&self.gpu, encoder, &status)?);
        Ok(Decision { rows, lower: lower.clone(), upper: upper.clone(), pages, totals })
    }

    /// Records the fold of a decided pair into buffers made for it.
    ///
    /// # Errors
    /// [`Error::Limit`] when a store exceeds one binding, [`Error::OutOfMemory`].
    pub fn encode_merge(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        decision: &Decision,
        totals: Totals,
    ) -> Result<FoldedBuffers> {
        let layout = decision.rows.layout;
        let slots = u64::from(totals.slots);
        let store = |label: &str, bytes: u64| {
            if bytes == 0 { Ok(None) } else { self.gpu.storage(label, bytes).map(Some) }
        };
        let folded = FoldedBuffers {
            layout,
            totals,
            pages: (layout.pages() > 0).then(|| decision.pages.clone()),
            slots: store("slots", slots * layout.slot_words() as u64 * 4)?,
            magnitudes: store("magnitudes", slots * layout.magnitudes_per_slot() as u64 * 2)?,
            side: store("side rows", u64::from(totals.side) * layout.side_words() as u64 * 4)?,
        };
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
        let native = self.gpu.caps().f16 && layout.dtype == DType::F16;
        let variant = similarity_variant(layout, lower.paired && upper.paired, native)
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
            buffers: &[Some((&lower).into()), Some((&upper).into()), Some(Window::whole(&rows.buffer))],
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
            buffers: &[Some(Window::whole(&rows.buffer)), Some(Window::whole(&cuts))],
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
            buffers: &[&rows.buffer, cuts, bitmaps, status].map(|buffer| Some(Window::whole(buffer))),
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
            buffers: &[bitmaps, pages, status].map(|buffer| Some(Window::whole(buffer))),
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
        if layout.pages() == 0 {
            return Ok(());
        }
        let (lower, upper) = bind_pair(&decision.lower, &decision.upper, &self.gpu)?;
        let variant = store_variant(Kernel::Merge, &layout);
        let pairs = (layout.pages() * PAGE * layout.shape.dim.div_ceil(2)) as u64;
        let whole = |buffer: &Option<wgpu::Buffer>| buffer.as_ref().map(Window::whole);
        recording.add(Dispatch {
            workgroups: pairs.div_ceil(u64::from(variant.workgroup())),
            variant,
            params: MergeParams {
                pages: layout.pages() as u32,
                pages_per_head: layout.pages_per_head() as u32,
                tokens: layout.shape.tokens as u32,
                heads: layout.shape.heads as u32,
                lower: lower.layout,
                upper: upper.layout,
            },
            buffers: &[
                Some((&lower).into()),
                Some((&upper).into()),
                Some(Window::whole(&decision.rows.buffer)),
                whole(&folded.pages),
                whole(&folded.slots),
                whole(&folded.magnitudes),
                whole(&folded.side),
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
        let shape = layout.shape;
        if shape.rows() == 0 {
            return Ok(());
        }
        let contiguous = output.is_contiguous();
        let output = output.bind("restored layer", ViewUse::Write, &self.gpu)?;
        let per_word = 4 / layout.dtype.size();
        let pitch = if contiguous { shape.dim } else { shape.dim.next_multiple_of(per_word) };
        let words = (shape.rows() * pitch).div_ceil(per_word);
        let variant = store_variant(Kernel::Restore, &layout);
        let whole = |buffer: &Option<wgpu::Buffer>| buffer.as_ref().map(Window::whole);
        recording.add(Dispatch {
            workgroups: (words as u64).div_ceil(u64::from(variant.workgroup())),
            variant,
            params: RestoreParams {
                words: words as u32,
                rows: shape.rows() as u32,
                tokens: shape.tokens as u32,
                heads: shape.heads as u32,
                pages_per_head: layout.pages_per_head() as u32,
                layer: u32::from(which == Layer::Upper),
                pitch: pitch as u32,
                contiguous: u32::from(contiguous),
                output: output.layout,
            },
            buffers: &[
                whole(&folded.pages),
                whole(&folded.slots),
                whole(&folded.magnitudes),
                whole(&folded.side),
                Some((&output).into()),
            ],
        })
    }
}

fn pair_layout(lower: &KvView, upper: &KvView, options: &MergeOptions) -> Result<Layout> {
    check_merge((lower.shape(), lower.dtype()), (upper.shape(), upper.dtype()), options)
}

fn bind_pair(lower: &KvView, upper: &KvView, gpu: &Gpu) -> Result<(BoundView, BoundView)> {
    Ok((lower.bind("lower layer", ViewUse::Read, gpu)?, upper.bind("upper layer", ViewUse::Read, gpu)?))
}

fn mode_constants(mode: Mode) -> Const {
    Const::U32("MODE", mode as u32)
}

fn similarity_variant(layout: &Layout, aligned: bool, native_f16: bool) -> Variant {
    let load = if native_f16 { Module::LoadNativeF16 } else { Module::Load(layout.dtype) };
    let constants = [
        Const::U32("HEAD_DIM", layout.shape.dim as u32),
        Const::U32("LANES", LANES),
        Const::Bool("ALIGNED", aligned),
        Const::Max("DTYPE_MAX", layout.dtype),
        mode_constants(layout.mode),
    ];
    Variant::new(Kernel::Similarity, &[Module::Float, load, Module::MiniCacheRow, Module::Slerp], &constants)
}

fn threshold_variant(mode: Mode, fraction: bool) -> Variant {
    let constants = [Const::Bool("FRACTION", fraction), mode_constants(mode)];
    Variant::new(Kernel::Threshold, &[Module::Float, Module::MiniCacheRow], &constants)
}

fn page_constant() -> Const {
    Const::U32("PAGE", PAGE as u32)
}

fn retain_variant(mode: Mode) -> Variant {
    let constants = [page_constant(), Const::U32("CAUSES", CAUSES), mode_constants(mode)];
    Variant::new(Kernel::Retain, &[Module::Float, Module::MiniCacheRow], &constants)
}

fn side_per_retained(layout: &Layout) -> Const {
    Const::U32("SIDE_PER_RETAINED", if layout.reuses_slots() { 1 } else { 2 })
}

fn arrange_variant(layout: &Layout) -> Variant {
    let constants = [
        page_constant(),
        Const::U32("TOTALS_AT", TOTALS_AT),
        side_per_retained(layout),
        mode_constants(layout.mode),
    ];
    Variant::new(Kernel::Arrange, &[Module::MiniCacheRow], &constants)
}

/// `merge` and `restore`, which write and read a store.
fn store_variant(kernel: Kernel, layout: &Layout) -> Variant {
    let constants = [
        page_constant(),
        Const::U32("HEAD_DIM", layout.shape.dim as u32),
        Const::U32("SLOT_WORDS", layout.slot_words() as u32),
        Const::U32("SIDE_WORDS", layout.side_words() as u32),
        Const::Bool("SLOT_IS_INPUT", layout.slot_dtype() == layout.dtype),
        side_per_retained(layout),
        mode_constants(layout.mode),
    ];
    let modules = [
        Module::Float,
        Module::Load(layout.dtype),
        Module::Bits(layout.dtype),
        Module::MiniCacheRow,
        Module::MiniCachePage,
    ];
    Variant::new(kernel, &modules, &constants)
}

/// Every variant some adapter can take, for a selection of head dimensions.
pub(crate) fn variants() -> Vec<Variant> {
    let modes = [Mode::Shared, Mode::Anchor, Mode::Compat];
    let mut variants: Vec<Variant> = modes.iter().map(|&mode| retain_variant(mode)).collect();
    variants.extend(modes.iter().flat_map(|&mode| [false, true].map(|f| threshold_variant(mode, f))));
    for (dim, dtype, mode) in [1, 64, 80, 511, 512]
        .into_iter()
        .flat_map(|dim| DType::ALL.map(|dtype| (dim, dtype)))
        .flat_map(|(dim, dtype)| modes.map(|mode| (dim, dtype, mode)))
    {
        let shape = crate::tensor::Shape { batch: 1, heads: 1, tokens: PAGE, dim };
        let layout = Layout { shape, dtype, mode };
        variants.extend([Kernel::Merge, Kernel::Restore].map(|kernel| store_variant(kernel, &layout)));
        variants.push(arrange_variant(&layout));
        for aligned in [false, dim % 2 == 0] {
            for native_f16 in [false, dtype == DType::F16] {
                let variant = similarity_variant(&layout, aligned, native_f16);
                let widths = [None, Some(4), Some(8), Some(32)];
                variants.extend(widths.map(|width| variant.clone().with_subgroups(width)));
            }
        }
    }
    variants.sort_unstable();
    variants.dedup();
    variants
}

impl Rows {
    /// Schedules the read-back of the measured rows.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back(&self, encoder: &mut wgpu::CommandEncoder) -> Result<ReadBack> {
        ReadBack::schedule(&self.gpu, encoder, &self.buffer)
    }

    /// The rows in a read-back's bytes, as the twin gives them.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Vec<super::Row> {
        let row = |words: &[u32; 6]| {
            let [cosine, lower, upper, weight_lower, weight_upper, fault] = *words;
            super::Row {
                cosine: f32::from_bits(cosine),
                lower: f32::from_bits(lower),
                upper: f32::from_bits(upper),
                weight_lower: f32::from_bits(weight_lower),
                weight_upper: f32::from_bits(weight_upper),
                fault: super::Cause::from_code(fault),
            }
        };
        words(bytes).as_chunks::<6>().0.iter().map(row).collect()
    }
}

/// Little-endian words of a read-back.
fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

impl Decision {
    /// The measured rows.
    #[must_use]
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// The totals, once the submit that carries the decision has run. They come once.
    ///
    /// # Errors
    /// [`Error::Device`] or [`Error::DeviceLost`] when they do not come, or were taken before.
    pub async fn totals(&mut self) -> Result<Totals> {
        let taken =
            || Error::Device { what: "totals".to_owned(), cause: "they were taken before".to_owned() };
        let bytes = self.totals.take().ok_or_else(taken)?.await?;
        let status = words(&bytes);
        let at = |index: u32| status.get(index as usize).copied().unwrap_or_default();
        let counts = Counts {
            merged: at(0),
            non_finite: at(1),
            sink: at(2),
            rule: at(3),
            antiparallel: at(4),
            range: at(5),
        };
        Ok(Totals { slots: at(TOTALS_AT), side: at(TOTALS_AT + 1), raw_pages: at(TOTALS_AT + 2), counts })
    }
}

impl FoldedBuffers {
    fn buffers(&self) -> [Option<&wgpu::Buffer>; 4] {
        [self.pages.as_ref(), self.slots.as_ref(), self.magnitudes.as_ref(), self.side.as_ref()]
    }

    /// Bytes of the buffers that hold the pair.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffers().into_iter().flatten().map(wgpu::Buffer::size).sum()
    }

    /// Schedules the read-back of everything stored; [`Self::parse`] makes a [`Folded`] of the bytes.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<[Option<ReadBack>; 4]> {
        let mut read_backs = [None, None, None, None];
        for (read_back, buffer) in read_backs.iter_mut().zip(self.buffers()) {
            *read_back = buffer.map(|buffer| ReadBack::schedule(gpu, encoder, buffer)).transpose()?;
        }
        Ok(read_backs)
    }

    /// The folded pair on the host, from the bytes of a read-back.
    ///
    /// # Errors
    /// What the read-backs say.
    pub async fn parse(&self, read_backs: [Option<ReadBack>; 4]) -> Result<Folded> {
        let mut stores: [Vec<u32>; 4] = Default::default();
        for (store, read_back) in stores.iter_mut().zip(read_backs) {
            if let Some(read_back) = read_back {
                *store = words(&read_back.await?);
            }
        }
        let [pages, slots, magnitudes, side] = stores;
        let page = |&[slots, side, retained]: &[u32; 3]| Page { slots, side, retained };
        let pages = pages.as_chunks::<3>().0.iter().map(page).collect();
        Ok(Folded { layout: self.layout, pages, slots, magnitudes, side, totals: self.totals })
    }
}
