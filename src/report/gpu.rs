//! A report's numbers from the kernels: every layer is copied to the device once, a pair takes two submits, a layer one.

mod planes;

use std::collections::{BTreeMap, VecDeque};

use super::layer::{LayerSketch, Queries};
use super::pair::SpanFold;
use super::span::Span;
use super::work::At;
use crate::error::Result;
use crate::gpu::{Gpu, KvView, ReadBack, words};
use crate::minicache::gpu::{Decision, Ops as MiniCache, Rows};
use crate::minicache::{Layer as Which, Layout, MergeOptions, Page, Row, Totals};
use crate::qjl::gpu::{Ops as Qjl, ProjectionBuffer};
use crate::qjl::{KeyScale, Projection};
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
    queries: Option<KvView>,
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

    fn upload(&self, tensor: &Tensor) -> Result<KvView> {
        let buffer = self.gpu.upload("capture", tensor.bytes())?;
        Ok(KvView::new(&buffer, tensor.dtype(), tensor.shape()))
    }

    /// The layer on the device, copied there unless it still is.
    fn resident(&mut self, at: At<'_>) -> Result<LayerViews> {
        if let Some((_, views)) = self.layers.iter().find(|(index, _)| *index == at.index) {
            return Ok(views.clone());
        }
        let views = LayerViews {
            keys: self.upload(at.keys)?,
            values: self.upload(&at.layer.values)?,
            queries: at.layer.queries.as_ref().map(|queries| self.upload(queries)).transpose()?,
        };
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

    fn decide(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        [lower, upper]: [&KvView; 2],
        span: &Span,
        options: &MergeOptions,
    ) -> Result<Deciding> {
        let [lower, upper] = [lower, upper].map(|view| part(view, span));
        let kind = |view: &KvView| (view.shape(), view.dtype());
        let layout = Layout::new(kind(&lower), kind(&upper), options.mode)?;
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
            let output = self.output("restored", layout.dtype, layout.shape)?;
            self.minicache.encode_restore(encoder, &folded, which, &output)?;
            ReadBack::schedule(&self.gpu, encoder, output.buffer())
        };
        let restored = [restore(Which::Lower)?, restore(Which::Upper)?];
        Ok(Folding { layout, rows, pages, totals, bytes: folded.bytes(), restored })
    }

    /// A contiguous tensor for a kernel to write.
    fn output(&self, label: &str, dtype: DType, shape: Shape) -> Result<KvView> {
        let bytes = (shape.bytes(dtype) as u64).next_multiple_of(4);
        Ok(KvView::new(&self.gpu.storage(label, bytes)?, dtype, shape))
    }

    fn projection(&mut self, projection: &Projection) -> Result<ProjectionBuffer> {
        if let Some(buffer) = self.projections.get(&projection.head_dim()) {
            return Ok(buffer.clone());
        }
        let buffer = self.qjl.upload_projection(projection)?;
        self.projections.insert(projection.head_dim(), buffer.clone());
        Ok(buffer)
    }

    /// Sketches a layer and attends its queries.
    pub(super) async fn sketch(
        &mut self,
        at: At<'_>,
        queries: &Queries<'_>,
        projection: &Projection,
        scale: KeyScale,
    ) -> Result<LayerSketch> {
        let views = self.resident(at)?;
        let projection = self.projection(projection)?;
        let view = match &views.queries {
            Some(view) => view.clone(),
            None => self.upload(queries.queries)?,
        };
        let asked = view.shape();
        let scores = Shape::new(asked.batch, asked.heads, asked.tokens, views.keys.shape().tokens)?;
        let scores = self.output("scores", DType::F32, scores)?;
        let output = Shape::new(asked.batch, asked.heads, asked.tokens, views.values.shape().dim)?;
        let output = self.output("attention output", DType::F32, output)?;
        let (lengths, options) = (Some(queries.lengths.as_slice()), &queries.options);
        let (values, codes, scores, output) = self.gpu.submit(|encoder| {
            let keys = self.qjl.encode_quantize(encoder, &views.keys, &projection, scale)?;
            let values = self.qjl.encode_quantize_values(encoder, &views.values)?;
            self.qjl.encode_scores(encoder, &view, &keys, &projection, &scores)?;
            self.qjl.encode_attend(encoder, &view, &keys, &values, &projection, lengths, options, &output)?;
            let codes = values.read_back(&self.gpu, encoder)?;
            let scores = ReadBack::schedule(&self.gpu, encoder, scores.buffer())?;
            let output = ReadBack::schedule(&self.gpu, encoder, output.buffer())?;
            Ok((values, codes, scores, output))
        })?;
        Ok(LayerSketch {
            values: values.parse(codes).await?,
            scores: floats(&scores.await?),
            output: floats(&output.await?),
        })
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
