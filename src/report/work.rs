//! A report in the making: which engine is asked for what.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

#[cfg(feature = "gpu")]
use super::gpu;
use super::layer::{self, Attended};
use super::pair::{self, Both, SpanFold};
use super::planes::{
    HeadAttention, Judge, LayerMethods, LayerSketch, Planes, PlanesFigures, PlanesSketch, PlanesTask,
};
use super::queries::{Queries, SLICE, Slice};
use super::rows::{PairRows, RowFigures};
use super::span::Span;
use super::types::{LayerFigures, Pair, PairFigures, SkippedPair};
use super::{Engine, Method, ReportOptions, cpu};
use crate::capture::{Capture, Layer};
use crate::error::{Error, Result};
use crate::minicache::Row;
use crate::qjl::{KeyScale, Projection, QuantizedValues};
use crate::tensor::Tensor;

/// A layer of the capture, with its index and its keys.
#[derive(Clone, Copy)]
pub(super) struct At<'a> {
    pub(super) index: usize,
    pub(super) layer: &'a Layer,
    pub(super) keys: &'a Tensor,
}

/// The engine at work.
enum Device {
    Cpu,
    #[cfg(feature = "gpu")]
    Gpu(gpu::Kernels),
}

impl Device {
    async fn fold(
        &mut self,
        lower: At<'_>,
        upper: At<'_>,
        spans: &[Span],
        options: &ReportOptions,
    ) -> Result<[Vec<SpanFold>; 2]> {
        match self {
            Self::Cpu => {
                let fold = |both: Both<'_>| cpu::fold(both, spans, &options.merge);
                Ok([fold([lower.keys, upper.keys])?, fold([&lower.layer.values, &upper.layer.values])?])
            }
            #[cfg(feature = "gpu")]
            Self::Gpu(kernels) => kernels.fold(lower, upper, spans, &options.merge).await,
        }
    }

    /// Rows of keys and values, span by span.
    async fn similarity(
        &mut self,
        lower: At<'_>,
        upper: At<'_>,
        spans: &[Span],
        options: &ReportOptions,
    ) -> Result<[Vec<Vec<Row>>; 2]> {
        match self {
            Self::Cpu => {
                let rows = |both: Both<'_>| cpu::similarity(both, spans, &options.merge);
                Ok([rows([lower.keys, upper.keys])?, rows([&lower.layer.values, &upper.layer.values])?])
            }
            #[cfg(feature = "gpu")]
            Self::Gpu(kernels) => kernels.similarity(lower, upper, spans, &options.merge).await,
        }
    }

    async fn sketch<'a>(
        &mut self,
        at: At<'_>,
        projection: &'a Projection,
        scale: KeyScale,
    ) -> Result<Sketch<'a>> {
        match self {
            Self::Cpu => {
                Ok(Sketch::Cpu(Box::new(cpu::Sketch::new(at.keys, &at.layer.values, projection, scale)?)))
            }
            #[cfg(feature = "gpu")]
            Self::Gpu(kernels) => Ok(Sketch::Gpu(Box::new(kernels.sketch(at, projection, scale).await?))),
        }
    }

    async fn planes(&mut self, at: At<'_>, slice: &Slice<'_>, task: &PlanesTask<'_>) -> Result<PlanesSketch> {
        match self {
            Self::Cpu => cpu::sign_planes(slice, &at.layer.values, task),
            #[cfg(feature = "gpu")]
            Self::Gpu(kernels) => kernels.planes(at, slice, task).await,
        }
    }

    /// Bytes that a tensor over queries may have.
    fn slice_bytes(&self) -> u64 {
        match self {
            Self::Cpu => SLICE,
            #[cfg(feature = "gpu")]
            Self::Gpu(kernels) => kernels.slice_bytes(),
        }
    }
}

/// A sketched layer, ready for queries.
#[allow(clippy::large_enum_variant, reason = "one exists at a time")]
pub(super) enum Sketch<'a> {
    Cpu(Box<cpu::Sketch<'a>>),
    #[cfg(feature = "gpu")]
    Gpu(Box<gpu::Sketch>),
}

impl Sketch<'_> {
    /// The values that attention reads.
    pub(super) fn values(&self) -> &QuantizedValues {
        match self {
            Self::Cpu(sketch) => &sketch.values,
            #[cfg(feature = "gpu")]
            Self::Gpu(sketch) => &sketch.values,
        }
    }

    /// Estimated scores of a slice of queries, and what they attend to.
    pub(super) async fn attend(&self, slice: &Slice<'_>) -> Result<Attended> {
        match self {
            Self::Cpu(sketch) => sketch.attend(slice),
            #[cfg(feature = "gpu")]
            Self::Gpu(sketch) => sketch.attend(slice).await,
        }
    }
}

/// Keys and values of two layers, the lower one first.
fn both<'a>(lower: At<'a>, upper: At<'a>) -> [Both<'a>; 2] {
    [[lower.keys, upper.keys], [&lower.layer.values, &upper.layer.values]]
}

/// A report in the making.
pub(super) struct Work<'a> {
    capture: &'a Capture,
    options: &'a ReportOptions,
    spans: Vec<Span>,
    /// By the keys' dimension.
    projections: BTreeMap<usize, Projection>,
    planes: Option<Planes<'a>>,
    device: Device,
}

impl<'a> Work<'a> {
    pub(super) fn new(capture: &'a Capture, options: &'a ReportOptions, engine: &Engine) -> Result<Self> {
        let device = match engine {
            Engine::Cpu => Device::Cpu,
            #[cfg(feature = "gpu")]
            Engine::Gpu(gpu) => Device::Gpu(gpu::Kernels::new(gpu)),
        };
        let planes = options.planes.as_ref().map(|request| Planes::new(capture, request)).transpose()?;
        let (spans, projections) = (Span::of(capture), BTreeMap::new());
        Ok(Self { capture, options, spans, projections, planes, device })
    }

    /// All layers with their keys, which must be those after RoPE.
    pub(super) fn layers(&self) -> Result<Vec<At<'a>>> {
        let capture = self.capture;
        let at = |(index, layer)| Ok(At { index, layer, keys: capture.keys(index)? });
        capture.layers.iter().enumerate().map(at).collect()
    }

    /// Bytes of the projections that layers were sketched with.
    pub(super) fn projection_bytes(&self) -> u64 {
        self.projections.values().map(|projection| projection.bytes() as u64).sum()
    }

    /// Folds two neighbouring layers; no rows where they are no pair.
    pub(super) async fn pair(
        &mut self,
        lower: At<'a>,
        upper: At<'a>,
        planned: bool,
    ) -> Result<(Pair, Option<PairRows>)> {
        let [keys, values] = both(lower, upper);
        let (below, above) = (lower.index, upper.index);
        if let Some(skipped) = pair::mismatch(keys, values) {
            return Ok((Pair::Skipped(SkippedPair { lower: below, upper: above, planned, skipped }), None));
        }
        let [folded_keys, folded_values] = self.device.fold(lower, upper, &self.spans, self.options).await?;
        let figures = |folds: &[SpanFold], both: Both<'_>| {
            pair::figures(folds, &self.spans, both, self.options.threshold())
        };
        let rows = |folds: &[SpanFold], [of, _]: Both<'_>| RowFigures::folded(of.shape(), folds, &self.spans);
        let rows = PairRows {
            lower: below,
            upper: above,
            keys: rows(&folded_keys, keys),
            values: rows(&folded_values, values),
        };
        let figures = PairFigures {
            lower: below,
            upper: above,
            planned,
            keys: figures(&folded_keys, keys)?,
            values: figures(&folded_values, values)?,
        };
        Ok((Pair::Folded(Box::new(figures)), Some(rows)))
    }

    /// Measures the rows of two neighbouring layers; `None` where they are no pair.
    pub(super) async fn cosines(&mut self, lower: At<'a>, upper: At<'a>) -> Result<Option<PairRows>> {
        let [keys, values] = both(lower, upper);
        if pair::mismatch(keys, values).is_some() {
            return Ok(None);
        }
        let rows = self.device.similarity(lower, upper, &self.spans, self.options).await?;
        let [keys, values] = [(&rows[0], keys), (&rows[1], values)]
            .map(|(rows, [of, _])| RowFigures::measured(of.shape(), rows, &self.spans));
        Ok(Some(PairRows { lower: lower.index, upper: upper.index, keys, values }))
    }

    /// A layer's sizes.
    pub(super) fn sizes(&self, at: At<'_>) -> LayerFigures {
        let tokens = (0..self.capture.batch()).map(|sequence| self.capture.length(sequence)).sum();
        let sketch_dim = self.options.sketch_dim.unwrap_or(at.keys.shape().dim);
        layer::sizes(at.index, at.layer, at.keys, sketch_dim, tokens)
    }

    /// The projection for a layer's keys, drawn when first asked for.
    fn projection(&mut self, at: At<'_>) -> Result<&Projection> {
        match self.projections.entry(at.keys.shape().dim) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let projection = self.options.draw(*entry.key())?;
                Ok(entry.insert(projection))
            }
        }
    }

    /// Sketches a layer.
    pub(super) async fn layer(&mut self, at: At<'a>) -> Result<LayerFigures> {
        self.projection(at)?;
        let mut figures = self.sizes(at);
        let sketch_dim = figures.qjl.sketch_dim;
        let queries = Queries::of(self.capture, at.index, at.keys);
        let mut sketched = None;
        if let (Some(queries), Some(projection)) = (queries, self.projections.get(&at.keys.shape().dim)) {
            let sketch = self.device.sketch(at, projection, self.options.key_scale).await?;
            let bytes = self.device.slice_bytes();
            layer::measure(&queries, &at.layer.values, &sketch, bytes, &mut figures).await?;
            if self.planes.is_some() {
                let whole = queries.whole()?;
                let attended = sketch.attend(&whole).await?;
                let found = LayerSketch { scores: attended.scores, values: sketch.values().clone() };
                sketched = Some((whole, found));
            }
        }
        self.code(at, sketch_dim, sketched.as_ref()).await?;
        Ok(figures)
    }

    /// Exact and estimated attention of one head.
    pub(super) async fn attention(
        &mut self,
        at: At<'a>,
        sequence: usize,
        head: usize,
        method: Method,
    ) -> Result<HeadAttention> {
        let (sinks, recent) =
            self.options.planes.as_ref().map_or((0, 0), |planes| (planes.sinks, planes.recent));
        let Some(queries) = Queries::of(self.capture, at.index, at.keys) else {
            return Ok(HeadAttention::default());
        };
        let whole = queries.whole()?;
        let scores = match method {
            Method::Qjl => {
                self.projection(at)?;
                let Some(projection) = self.projections.get(&at.keys.shape().dim) else {
                    return Ok(HeadAttention::default());
                };
                let sketch = self.device.sketch(at, projection, self.options.key_scale).await?;
                sketch.attend(&whole).await?.scores
            }
            Method::Preset(_) | Method::Custom => {
                let missing = || Error::range("method", "one that the options ask for", "another");
                let planes = self.planes.as_mut().ok_or_else(missing)?;
                let asked = planes.asked().find(|asked| asked.method == method).ok_or_else(missing)?;
                let codecs = planes.codecs(&asked, at)?;
                let tables = planes.tables(at, &codecs[0])?;
                let task = PlanesTask { codecs: &codecs, tables: &tables, starts: planes.starts() };
                self.device.planes(at, &whole, &task).await?.scores
            }
        };
        let judge = Judge::new(&whole, &at.layer.values, sinks)?;
        Ok(judge.head(sequence, head, &scores, recent))
    }

    /// Measures a layer under sign planes and their rivals.
    async fn code(
        &mut self,
        at: At<'a>,
        sketch_dim: usize,
        sketched: Option<&(Slice<'a>, LayerSketch)>,
    ) -> Result<()> {
        let Some(planes) = &mut self.planes else { return Ok(()) };
        let mut found = Vec::new();
        for asked in planes.asked() {
            let codecs = planes.codecs(&asked, at)?;
            let [codec, _] = &codecs;
            let tables = planes.tables(at, codec)?;
            let mut sketch = None;
            if let Some((slice, _)) = sketched {
                let task = PlanesTask { codecs: &codecs, tables: &tables, starts: planes.starts() };
                sketch = Some(self.device.planes(at, slice, &task).await?);
            }
            let [codec, _] = codecs;
            found.push((codec, tables, sketch));
        }
        planes.layer(at, sketched.map(|(slice, sketch)| (slice, sketch)), sketch_dim, found)
    }

    /// What sign planes and their rivals came to in the layer measured last.
    pub(super) fn methods(&self) -> Option<&LayerMethods> {
        self.planes.as_ref()?.last()
    }

    /// What sign planes and their rivals came to, if they were asked for.
    pub(super) fn planes(&mut self) -> Option<PlanesFigures> {
        let projection_bytes = self.projection_bytes();
        self.planes.take().map(|planes| planes.finish(projection_bytes))
    }
}
