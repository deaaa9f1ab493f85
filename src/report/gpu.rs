//! A report's numbers from the kernels: every layer is copied to the device once, a pair takes two submits, a layer one and
//! another for each slice of its queries.

mod planes;

use std::collections::{BTreeMap, VecDeque};

use super::layer::Attended;
use super::pair::SpanFold;
use super::queries::{SLICE, Slice};
use super::span::Span;
use super::work::At;
use crate::error::Result;
use crate::gpu::{Gpu, KvView, ReadBack, words};
use crate::minicache::gpu::{Decision, Ops as MiniCache, Rows};
use crate::minicache::{Layer as Which, Layout, MergeOptions, Page, Row, Totals};
use crate::qjl::gpu::{Ops as Qjl, ProjectionBuffer, QuantizedValueBuffers, SketchedKeyBuffers};
use crate::qjl::{KeyScale, Projection, QuantizedValues};
use crate::tensor::{DType, Shape, Strides, Tensor};

/// Layers kept on the device: those of the pair at work.
const RESIDENT: usize = 2;

/// The kernels, and what they hold on the device.
pub(super) struct Kernels {
    gpu: Gpu,
    minicache: MiniCache,
    qjl: Qjl,
    layers: VecDeque<(usize, LayerViews)>,
    projections: BTreeMap<usize, ProjectionBuffer>,
}

/// A layer on the device.
#[derive(Clone)]
struct LayerViews {
    keys: KvView,
    values: KvView,
}

/// A sketched layer: on the device, and the values' codes on the host too.
pub(super) struct Sketch {
    gpu: Gpu,
    ops: Qjl,
    projection: ProjectionBuffer,
    keys: SketchedKeyBuffers,
    buffers: QuantizedValueBuffers,
    pub(super) values: QuantizedValues,
}

/// A span's decision on its way, with the rows it was made from.
struct Deciding {
    layout: Layout,
    decision: Decision,
    rows: ReadBack,
    pages: ReadBack,
}

/// A span's fold on its way.
struct Folding {
    layout: Layout,
    rows: Vec<Row>,
    pages: Vec<Page>,
    totals: Totals,
    bytes: u64,
    restored: [ReadBack; 2],
}

impl Kernels {
    pub(super) fn new(gpu: &Gpu) -> Self {
        Self {
            gpu: gpu.clone(),
            minicache: MiniCache::new(gpu),
            qjl: Qjl::new(gpu),
            layers: VecDeque::new(),
            projections: BTreeMap::new(),
        }
    }

    /// The layer on the device, copied there unless it still is.
    fn resident(&mut self, at: At<'_>) -> Result<LayerViews> {
        if let Some((_, views)) = self.layers.iter().find(|(index, _)| *index == at.index) {
            return Ok(views.clone());
        }
        let views =
            LayerViews { keys: upload(&self.gpu, at.keys)?, values: upload(&self.gpu, &at.layer.values)? };
        if self.layers.len() == RESIDENT {
            self.layers.pop_front();
        }
        self.layers.push_back((at.index, views.clone()));
        Ok(views)
    }

    /// Folds and restores a pair's keys and values.
    pub(super) async fn fold(
        &mut self,
        lower: At<'_>,
        upper: At<'_>,
        spans: &[Span],
        options: &MergeOptions,
    ) -> Result<[Vec<SpanFold>; 2]> {
        let (lower, upper) = (self.resident(lower)?, self.resident(upper)?);
        let both = [[&lower.keys, &upper.keys], [&lower.values, &upper.values]];
        let calls = both.into_iter().flat_map(|both| spans.iter().map(move |span| (both, span)));
        let deciding = self.gpu.submit(|encoder| {
            calls.map(|(both, span)| self.decide(encoder, both, span, options)).collect::<Result<Vec<_>>>()
        })?;
        let mut decided = Vec::with_capacity(deciding.len());
        for mut call in deciding {
            let totals = call.decision.totals().await?;
            let found = (Rows::parse(&call.rows.await?), Decision::parse_pages(&call.pages.await?));
            decided.push((call.layout, call.decision, found, totals));
        }
        let folding = self.gpu.submit(|encoder| {
            let fold =
                |(layout, decision, found, totals)| self.merge(encoder, layout, &decision, found, totals);
            decided.into_iter().map(fold).collect::<Result<Vec<_>>>()
        })?;
        let mut keys = Vec::with_capacity(folding.len());
        for call in folding {
            keys.push(call.finish().await?);
        }
        let values = keys.split_off(spans.len());
        Ok([keys, values])
    }

    /// Measures a pair's keys and values.
    pub(super) async fn similarity(
        &mut self,
        lower: At<'_>,
        upper: At<'_>,
        spans: &[Span],
        options: &MergeOptions,
    ) -> Result<[Vec<Vec<Row>>; 2]> {
        let (lower, upper) = (self.resident(lower)?, self.resident(upper)?);
        let both = [[&lower.keys, &upper.keys], [&lower.values, &upper.values]];
        let calls = both.into_iter().flat_map(|both| spans.iter().map(move |span| (both, span)));
        let reading = self.gpu.submit(|encoder| {
            let read = |([lower, upper], span): ([&KvView; 2], &Span)| {
                let [lower, upper] = [lower, upper].map(|view| part(view, span));
                self.minicache.encode_similarity(encoder, &lower, &upper, options)?.read_back(encoder)
            };
            calls.map(read).collect::<Result<Vec<_>>>()
        })?;
        let mut keys = Vec::with_capacity(reading.len());
        for rows in reading {
            keys.push(Rows::parse(&rows.await?));
        }
        let values = keys.split_off(spans.len());
        Ok([keys, values])
    }

    fn decide(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        [lower, upper]: [&KvView; 2],
        span: &Span,
        options: &MergeOptions,
    ) -> Result<Deciding> {
        let [lower, upper] = [lower, upper].map(|view| part(view, span));
        let kind = |view: &KvView| (view.shape(), view.dtype());
        let layout = Layout::new(kind(&lower), kind(&upper), options.mode)?.coded(options.planes);
        let decision = self.minicache.encode_decide(encoder, &lower, &upper, options)?;
        let rows = decision.rows().read_back(encoder)?;
        let pages = decision.read_back_pages(encoder)?;
        Ok(Deciding { layout, decision, rows, pages })
    }

    fn merge(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layout: Layout,
        decision: &Decision,
        (rows, pages): (Vec<Row>, Vec<Page>),
        totals: Totals,
    ) -> Result<Folding> {
        let folded = self.minicache.encode_merge(encoder, decision)?;
        let mut restore = |which| {
            let output = output(&self.gpu, "restored", layout.dtype, layout.shape)?;
            self.minicache.encode_restore(encoder, &folded, which, &output)?;
            ReadBack::schedule(&self.gpu, encoder, output.buffer())
        };
        let restored = [restore(Which::Lower)?, restore(Which::Upper)?];
        Ok(Folding { layout, rows, pages, totals, bytes: folded.bytes(), restored })
    }

    fn projection(&mut self, projection: &Projection) -> Result<ProjectionBuffer> {
        if let Some(buffer) = self.projections.get(&projection.head_dim()) {
            return Ok(buffer.clone());
        }
        let buffer = self.qjl.upload_projection(projection)?;
        self.projections.insert(projection.head_dim(), buffer.clone());
        Ok(buffer)
    }

    /// Bytes that a tensor over queries may have.
    pub(super) fn slice_bytes(&self) -> u64 {
        SLICE.min(self.gpu.caps().max_storage_buffer_binding_size)
    }

    /// Sketches a layer.
    pub(super) async fn sketch(
        &mut self,
        at: At<'_>,
        projection: &Projection,
        scale: KeyScale,
    ) -> Result<Sketch> {
        let views = self.resident(at)?;
        let projection = self.projection(projection)?;
        let (keys, values, codes) = self.gpu.submit(|encoder| {
            let keys = self.qjl.encode_quantize(encoder, &views.keys, &projection, scale)?;
            let values = self.qjl.encode_quantize_values(encoder, &views.values)?;
            let codes = values.read_back(&self.gpu, encoder)?;
            Ok((keys, values, codes))
        })?;
        let codes = values.parse(codes).await?;
        let (gpu, ops) = (self.gpu.clone(), self.qjl.clone());
        Ok(Sketch { gpu, ops, projection, keys, buffers: values, values: codes })
    }
}

impl Sketch {
    /// Scores a slice of queries and attends with it.
    pub(super) async fn attend(&self, slice: &Slice<'_>) -> Result<Attended> {
        let Self { gpu, ops, projection, keys, buffers, .. } = self;
        let Shape { batch, heads, tokens, .. } = slice.queries.shape();
        let asked = |dim| Shape::new(batch, heads, tokens, dim);
        let queries = upload(gpu, &slice.queries)?;
        let scores = output(gpu, "scores", DType::F32, asked(keys.shape().tokens)?)?;
        let attended = output(gpu, "attention output", DType::F32, asked(buffers.shape().dim)?)?;
        let (lengths, options) = (Some(slice.lengths.as_slice()), &slice.options);
        let (scores, attended) = gpu.submit(|encoder| {
            ops.encode_scores(encoder, &queries, keys, projection, &scores)?;
            ops.encode_attend(encoder, &queries, keys, buffers, projection, lengths, options, &attended)?;
            let scores = ReadBack::schedule(gpu, encoder, scores.buffer())?;
            Ok((scores, ReadBack::schedule(gpu, encoder, attended.buffer())?))
        })?;
        Ok(Attended { scores: floats(&scores.await?), output: floats(&attended.await?) })
    }
}

impl Folding {
    async fn finish(self) -> Result<SpanFold> {
        let Layout { shape, dtype, .. } = self.layout;
        let tensor = |mut bytes: Vec<u8>| {
            bytes.truncate(shape.bytes(dtype)); // the buffer is padded to whole words
            Tensor::new(bytes, dtype, shape)
        };
        let [lower, upper] = self.restored;
        Ok(SpanFold {
            layout: self.layout,
            rows: self.rows,
            pages: self.pages,
            totals: self.totals,
            bytes: self.bytes,
            restored: [tensor(lower.await?)?, tensor(upper.await?)?],
        })
    }
}

fn upload(gpu: &Gpu, tensor: &Tensor) -> Result<KvView> {
    let buffer = gpu.upload("capture", tensor.bytes())?;
    Ok(KvView::new(&buffer, tensor.dtype(), tensor.shape()))
}

/// A contiguous tensor for a kernel to write.
fn output(gpu: &Gpu, label: &str, dtype: DType, shape: Shape) -> Result<KvView> {
    let bytes = (shape.bytes(dtype) as u64).next_multiple_of(4);
    Ok(KvView::new(&gpu.storage(label, bytes)?, dtype, shape))
}

/// The span's rows of a view of the whole capture.
fn part(view: &KvView, span: &Span) -> KvView {
    let whole = view.shape();
    KvView::new(view.buffer(), view.dtype(), span.shape(whole))
        .at(span.offset(whole))
        .strides(Strides::contiguous(whole))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    words(bytes).into_iter().map(f32::from_bits).collect()
}
