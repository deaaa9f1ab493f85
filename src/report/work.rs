//! A report in the making: which engine is asked for what.

use std::collections::BTreeMap;

#[cfg(feature = "gpu")]
use super::gpu;
use super::layer::{self, Attended};
use super::pair::{self, Both, SpanFold};
use super::planes::{LayerSketch, Planes, PlanesFigures, PlanesSketch, PlanesTask};
use super::queries::{Queries, SLICE, Slice};
use super::span::Span;
use super::types::{LayerFigures, Pair, PairFigures, SkippedPair};
use super::{Engine, ReportOptions, cpu};
use crate::capture::{Capture, Layer};
use crate::error::Result;
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

    /// Folds two neighbouring layers.
    pub(super) async fn pair(&mut self, lower: At<'a>, upper: At<'a>, planned: bool) -> Result<Pair> {
        let keys = [lower.keys, upper.keys];
        let values = [&lower.layer.values, &upper.layer.values];
        if let Some(skipped) = pair::mismatch(keys, values) {
            let (lower, upper) = (lower.index, upper.index);
            return Ok(Pair::Skipped(SkippedPair { lower, upper, planned, skipped }));
        }
        let [folded_keys, folded_values] = self.device.fold(lower, upper, &self.spans, self.options).await?;
        let figures = |folds: &[SpanFold], both: Both<'_>| {
            pair::figures(folds, &self.spans, both, self.options.threshold())
        };
        let figures = PairFigures {
            lower: lower.index,
            upper: upper.index,
            planned,
            keys: figures(&folded_keys, keys)?,
            values: figures(&folded_values, values)?,
        };
        Ok(Pair::Folded(Box::new(figures)))
    }

    /// Sketches a layer.
    pub(super) async fn layer(&mut self, at: At<'a>) -> Result<LayerFigures> {
        let key_dim = at.keys.shape().dim;
        if !self.projections.contains_key(&key_dim) {
            self.projections.insert(key_dim, self.options.draw(key_dim)?);
        }
        let tokens = (0..self.capture.batch()).map(|sequence| self.capture.length(sequence)).sum();
        let sketch_dim = self.options.sketch_dim.unwrap_or(key_dim);
        let mut figures = layer::sizes(at.index, at.layer, at.keys, sketch_dim, tokens);
        let queries = Queries::of(self.capture, at.index, at.keys);
        let mut sketched = None;
        if let (Some(queries), Some(projection)) = (queries, self.projections.get(&key_dim)) {
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
        self.methods(at, sketch_dim, sketched.as_ref()).await?;
        Ok(figures)
    }

    /// Measures a layer under sign planes and their rivals.
    async fn methods(
        &mut self,
        at: At<'a>,
        sketch_dim: usize,
        sketched: Option<&(Slice<'a>, LayerSketch)>,
    ) -> Result<()> {
        let Some(planes) = &mut self.planes else { return Ok(()) };
        let mut found = Vec::new();
        for &preset in planes.presets() {
            let codecs = planes.codecs(preset, at)?;
            let [codec, _] = &codecs;
            let tables = planes.tables(at, codec.options())?;
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

    /// What sign planes and their rivals came to, if they were asked for.
    pub(super) fn planes(&mut self) -> Option<PlanesFigures> {
        let projection_bytes = self.projection_bytes();
        self.planes.take().map(|planes| planes.finish(projection_bytes))
    }
}
