//! Sign planes beside the original QJL, int8, int4 and KIVI-like codes (arXiv 2402.02750), on a capture's queries.

mod cost;
mod estimate;
mod judge;
mod rivals;
mod types;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use estimate::{ModelShape, estimate};
pub use judge::HeadAttention;
pub use types::{AttentionErrors, LayerMethods, MethodFigures, PlanesFigures, PlanesRequest, TableSource};

pub(super) use judge::Judge;

use super::Method;
use super::queries::{Queries, Slice};
use super::work::At;
use crate::attention;
use crate::capture::Capture;
use crate::error::{Error, Result};
use crate::qjl::cache::{Coding, codec};
use crate::qjl::planes::{CALIBRATION_TOKENS, Calibration, Centring, Codec, Tables};
use crate::qjl::{Projection, QuantizedValues};
use crate::rope::{Positions, Rope};
use crate::tensor::Tensor;
use cost::{Cost, Tokens};
use judge::Estimate;

/// What the attention of a layer's captured queries becomes when these keys and values stand in for its own.
pub(crate) fn replaced(
    capture: &Capture,
    index: usize,
    keys: &Tensor,
    values: &Tensor,
) -> Result<AttentionErrors> {
    let (own, layer) = (capture.keys(index)?, capture.layers.get(index));
    let Some((queries, layer)) = Queries::of(capture, index, own).zip(layer) else {
        return Ok(AttentionErrors::default());
    };
    let slice = queries.whole()?;
    let judge = Judge::new(&slice, &layer.values, 0)?;
    let scores = attention::exact_scores(&judge.asked(), &keys.view())?;
    let values = values.view().to_f32();
    Ok(judge.errors(&Estimate { scores: &scores, values: &values, output: None }, 0))
}

/// Tokens of a block mean where the model's RoPE is not known.
const BLOCK: u32 = 64;

/// What an engine found of a layer's planes on the captured queries.
#[derive(Default)]
pub(super) struct PlanesSketch {
    /// Estimated scores of every token, `[batch, query_heads, queries, tokens]`.
    pub(super) scores: Vec<f32>,
    /// Attention outputs, one for each codec.
    pub(super) outputs: Vec<Vec<f32>>,
}

/// What the original QJL makes of a layer's queries: scores of every token, and the values that it attends to.
pub(super) struct LayerSketch {
    pub(super) scores: Vec<f32>,
    pub(super) values: QuantizedValues,
}

/// What an engine is to do with a layer.
pub(super) struct PlanesTask<'a> {
    /// Codecs that differ in how many recent tokens they keep raw.
    pub(super) codecs: &'a [Codec],
    pub(super) tables: &'a Tables,
    /// Position of each sequence's first token.
    pub(super) starts: &'a [u32],
}

/// A code that was asked for, with the sinks and the window of the request still to be put in.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    pub(super) method: Method,
    coding: Coding,
}

impl Asked {
    const fn name(&self) -> &'static str {
        match self.method {
            Method::Preset(preset) => preset.name(),
            _ => "custom",
        }
    }
}

impl PlanesRequest {
    /// Presets, then the custom code.
    fn asked(&self) -> impl Iterator<Item = Asked> {
        let presets = self.presets.iter();
        let presets = presets.map(|&p| Asked { method: Method::Preset(p), coding: p.coding() });
        let custom = self.custom.map(Coding::Planes);
        presets.chain(custom.map(|coding| Asked { method: Method::Custom, coding }))
    }
}

/// Sign planes in the making.
pub(super) struct Planes<'a> {
    capture: &'a Capture,
    request: &'a PlanesRequest,
    tokens: Tokens,
    starts: Vec<u32>,
    centring: Centring,
    layers: Vec<LayerMethods>,
    /// Projections drawn so far, by preset and channels.
    projections: BTreeMap<(&'static str, usize), Arc<Projection>>,
    /// Of each preset, bytes of its rotations or projections by their channels.
    rotations: Vec<BTreeMap<usize, u64>>,
}

fn starts(capture: &Capture) -> Vec<u32> {
    capture.info.position_start.clone().unwrap_or_else(|| vec![0; capture.batch()])
}

impl<'a> Planes<'a> {
    pub(super) fn new(capture: &'a Capture, request: &'a PlanesRequest) -> Result<Self> {
        if let Some(other) = &request.calibration {
            check_calibration(capture, other)?;
        }
        let lengths = (0..capture.batch()).map(|sequence| capture.length(sequence));
        let known = Rope::from_capture(capture, 0)?.is_some();
        Ok(Self {
            capture,
            request,
            tokens: Tokens::new(lengths, request.sinks, request.recent),
            starts: starts(capture),
            centring: if known { Centring::PreRope } else { Centring::BlockMean(BLOCK) },
            layers: Vec::new(),
            projections: BTreeMap::new(),
            rotations: vec![BTreeMap::new(); request.asked().count()],
        })
    }

    pub(super) fn starts(&self) -> &[u32] {
        &self.starts
    }

    pub(super) fn asked(&self) -> impl Iterator<Item = Asked> + use<'a> {
        self.request.asked()
    }

    /// The layer taken last.
    pub(super) fn last(&self) -> Option<&LayerMethods> {
        self.layers.last()
    }

    /// Codecs of a code for a layer: as asked for, and without a recent window.
    pub(super) fn codecs(&mut self, asked: &Asked, at: At<'_>) -> Result<[Codec; 2]> {
        let rope = Rope::from_capture(self.capture, at.index)?;
        let known = self.centring == Centring::PreRope;
        let coding = if known { asked.coding } else { asked.coding.without_rope(BLOCK) };
        let dims = [at.keys.shape().dim, at.layer.values.shape().dim];
        let drawn = (asked.name(), dims[0]);
        let coded = codec(&coding, dims, rope, &BTreeMap::new(), self.projections.get(&drawn))?;
        if let Some(projection) = coded.projection() {
            self.projections.entry(drawn).or_insert_with(|| Arc::clone(projection));
        }
        let keeping = |recent| coded.clone().keeping(self.request.sinks, recent);
        Ok([keeping(self.request.recent), keeping(0)])
    }

    /// Tables of a layer.
    pub(super) fn tables(&self, at: At<'_>, codec: &Codec) -> Result<Tables> {
        let source = self.request.calibration.as_deref().unwrap_or(self.capture);
        let keys = source.keys(at.index)?.view();
        // Padding is no key: as many tokens as the shortest sequence that has any to give.
        let sinks = codec.options().sinks as usize;
        let lengths = (0..source.batch()).map(|sequence| source.length(sequence));
        let Some(shortest) = lengths.filter(|&length| length > sinks).min() else {
            return Ok(Tables::identity(keys.shape().heads, keys.shape().dim));
        };
        let (rope, starts) = (Rope::from_capture(self.capture, at.index)?, starts(source));
        let queries = source.layers.get(at.index).and_then(|layer| layer.queries.as_ref());
        let queries = queries.map(crate::tensor::Tensor::view);
        let mut from = Calibration::new(&keys, Positions::Start(&starts))
            .tokens(sinks..shortest.min(CALIBRATION_TOKENS.max(sinks + 1)));
        (from.queries, from.rope) = (queries.as_ref(), rope.as_ref());
        codec.calibrate(&from)
    }

    /// Takes a layer's presets, each with codec, tables and, where there are queries, what an engine found.
    pub(super) fn layer(
        &mut self,
        at: At<'_>,
        queries: Option<(&Slice<'_>, &LayerSketch)>,
        sketch_dim: usize,
        found: Vec<(Codec, Tables, Option<PlanesSketch>)>,
    ) -> Result<()> {
        let (keys, values) = (at.keys.shape(), at.layer.values.shape());
        let sinks = self.request.sinks;
        let judge = queries.map(|(queries, _)| Judge::new(queries, &at.layer.values, sinks)).transpose()?;
        let mut presets = Vec::with_capacity(found.len());
        let asked = self.request.asked();
        for ((asked, (codec, tables, sketch)), rotations) in asked.zip(found).zip(&mut self.rotations) {
            let mut figures = self.tokens.figures(asked.name(), Cost::of(&codec), keys, values);
            let needed = codec.keeps_tables();
            figures.table_bytes = if needed { tables.bytes() as u64 } else { 0 };
            rotations.extend(codec.rotations().iter().map(|r| (r.channels(), r.bytes() as u64)));
            rotations.extend(codec.projection().map(|p| (p.head_dim(), p.bytes() as u64)));
            if let (Some(judge), Some(sketch)) = (&judge, &sketch) {
                let errors = |output: usize, recent| {
                    let output = sketch.outputs.get(output).map(Vec::as_slice);
                    judge.errors(&Estimate { scores: &sketch.scores, values: &[], output }, recent)
                };
                figures.errors = errors(0, self.request.recent);
                figures.errors_without_recent = errors(1, 0);
            }
            figures.close();
            presets.push(figures);
        }
        let judged = judge.as_ref().zip(queries.map(|(_, sketch)| sketch));
        let rivals = rivals::figures(at, sketch_dim, &self.tokens, self.request, judged)?;
        self.layers.push(LayerMethods { layer: at.index, presets, rivals });
        Ok(())
    }

    /// All figures; `projection_bytes` are those of the original's projections.
    pub(super) fn finish(mut self, projection_bytes: u64) -> PlanesFigures {
        self.layers.sort_by_key(|layer| layer.layer);
        let total = |of: fn(&LayerMethods) -> &[MethodFigures], index: usize, rotation_bytes: u64| {
            let layers: Vec<&MethodFigures> = self.layers.iter().filter_map(|l| of(l).get(index)).collect();
            MethodFigures::total(&layers, rotation_bytes)
        };
        let presets = self.rotations.iter().enumerate();
        let rivals = self.layers.first().map_or(0, |layer| layer.rivals.len());
        PlanesFigures {
            sinks: self.request.sinks,
            recent: self.request.recent,
            centring: self.centring,
            tables: if self.request.calibration.is_some() { TableSource::File } else { TableSource::Capture },
            tokens: self.tokens.all(),
            coded_tokens: self.tokens.coded(),
            presets: presets.map(|(i, bytes)| total(|l| &l.presets, i, bytes.values().sum())).collect(),
            // The first rival is the original; the others have nothing that layers share.
            rivals: (0..rivals)
                .map(|i| total(|l| &l.rivals, i, if i == 0 { projection_bytes } else { 0 }))
                .collect(),
            layers: self.layers,
        }
    }
}

/// Checks that tables made from `other` serve `capture`.
fn check_calibration(capture: &Capture, other: &Capture) -> Result<()> {
    other.check()?;
    let (want, have) = (capture.layers.len(), other.layers.len());
    if want != have {
        return Err(Error::shape("calibration layers", want, have));
    }
    for layer in 0..want {
        let (keys, from) = (capture.keys(layer)?.shape(), other.keys(layer)?.shape());
        let fits = (keys.heads, keys.dim) == (from.heads, from.dim) && [1, keys.batch].contains(&from.batch);
        if !fits {
            let want = format!("[1 or {}, {}, tokens, {}]", keys.batch, keys.heads, keys.dim);
            return Err(Error::shape(format!("calibration keys of layer {layer}"), want, from));
        }
    }
    Ok(())
}
