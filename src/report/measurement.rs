//! A report in steps.

use super::planes::HeadAttention;
use super::rows::PairRows;
use super::work::{At, Work};
use super::{CaptureShape, Engine, LayerFigures, LayerMethods, Pair, Report, ReportOptions, totals};
use crate::capture::Capture;
use crate::error::{Error, Result};
use crate::qjl::cache::NamedCoding;

/// A report in steps, for programs that show every figure as it comes, measure only a part, or do something else between
/// two steps. [`report`](super::report) takes them all.
pub struct Measurement<'a> {
    capture: &'a Capture,
    options: &'a ReportOptions,
    engine: &'a Engine,
    layers: Vec<At<'a>>,
    plan: Vec<bool>,
    work: Work<'a>,
}

/// Whose estimate of attention is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// QJL with the projection of the options.
    Qjl,
    /// A preset.
    Preset(NamedCoding),
    /// Sign planes by [`PlanesRequest::custom`](super::PlanesRequest::custom).
    Custom,
}

impl<'a> Measurement<'a> {
    /// Checks capture and options.
    ///
    /// # Errors
    /// As [`report`](super::report) says of captures and options.
    pub fn new(capture: &'a Capture, options: &'a ReportOptions, engine: &'a Engine) -> Result<Self> {
        options.validate()?;
        capture.check()?;
        let plan = totals::plan(capture.layers.len(), options.start_frac)?;
        let work = Work::new(capture, options, engine)?;
        Ok(Self { capture, options, engine, layers: work.layers()?, plan, work })
    }

    /// Folds the layers `upper - 1` and `upper`.
    ///
    /// # Errors
    /// [`Error::Range`] when there is no such pair; on a device as [`report`](super::report).
    pub async fn pair(&mut self, upper: usize) -> Result<Pair> {
        let (lower, at, planned) = self.two(upper)?;
        Ok(self.work.pair(lower, at, planned).await?.0)
    }

    /// [`pair`](Self::pair), and what became of every row; no rows of a pair that is skipped.
    ///
    /// # Errors
    /// As [`pair`](Self::pair).
    pub async fn pair_with_rows(&mut self, upper: usize) -> Result<(Pair, Option<PairRows>)> {
        let (lower, at, planned) = self.two(upper)?;
        self.work.pair(lower, at, planned).await
    }

    /// The cosines of the layers `upper - 1` and `upper`, without folding them; `None` where they are no pair.
    /// [`RowFigures::retained`](super::RowFigures::retained) is empty.
    ///
    /// # Errors
    /// As [`pair`](Self::pair).
    pub async fn cosines(&mut self, upper: usize) -> Result<Option<PairRows>> {
        let (lower, at, _) = self.two(upper)?;
        self.work.cosines(lower, at).await
    }

    /// Sketches a layer, and codes it in sign planes where the options ask for them.
    ///
    /// # Errors
    /// [`Error::Range`] when there is no such layer; on a device as [`report`](super::report).
    pub async fn layer(&mut self, index: usize) -> Result<LayerFigures> {
        let at = self.at(index)?;
        self.work.layer(at).await
    }

    /// A layer's sizes, with no figure that takes queries: nothing is computed.
    ///
    /// # Errors
    /// [`Error::Range`] when there is no such layer.
    pub fn sizes(&self, index: usize) -> Result<LayerFigures> {
        Ok(self.work.sizes(self.at(index)?))
    }

    /// What [`layer`](Self::layer) last found of sign planes; `None` before, or where they were not asked for.
    #[must_use]
    pub fn methods(&self) -> Option<&LayerMethods> {
        self.work.methods()
    }

    /// Exact and estimated attention of one query head's captured queries.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] in a layer without queries, [`Error::Range`] when there is no such layer, sequence or head,
    /// or the method was not asked for; on a device as [`report`](super::report).
    pub async fn attention(
        &mut self,
        layer: usize,
        sequence: usize,
        head: usize,
        method: Method,
    ) -> Result<HeadAttention> {
        let at = self.at(layer)?;
        let shape = self.capture.queries(layer)?.shape();
        for (what, have, all) in [("sequence", sequence, shape.batch), ("query head", head, shape.heads)] {
            if have >= all {
                return Err(Error::range(what, format!("below {all}"), have));
            }
        }
        self.work.attention(at, sequence, head, method).await
    }

    /// The report of these pairs and layers. What is left out of them counts nowhere; the bytes of MiniCache are right
    /// when all pairs are there and the [`sizes`](Self::sizes), at least, of all layers.
    #[must_use]
    pub fn finish(mut self, pairs: Vec<Pair>, layers: Vec<LayerFigures>) -> Report {
        let count = self.capture.layers.len();
        let totals = totals::totals(&pairs, &layers, self.work.projection_bytes());
        let verdict = totals::verdict(&pairs, &totals.minicache, count, self.options);
        let (backend, adapter, software) = self.engine.describe();
        Report {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend,
            adapter,
            software,
            fallback: None,
            model: self.capture.info.model.clone(),
            options: self.options.into(),
            shape: CaptureShape { layers: count, batch: self.capture.batch(), tokens: self.capture.tokens() },
            pairs,
            layers,
            planes: self.work.planes(),
            totals,
            verdict,
        }
    }

    fn at(&self, index: usize) -> Result<At<'a>> {
        let missing = || Error::range("layer", format!("below {}", self.layers.len()), index);
        self.layers.get(index).copied().ok_or_else(missing)
    }

    /// Both layers of a pair, and whether the plan pairs them.
    fn two(&self, upper: usize) -> Result<(At<'a>, At<'a>, bool)> {
        let Some(lower) = upper.checked_sub(1) else {
            return Err(Error::range("upper layer", "at least 1", upper));
        };
        let planned = self.plan.get(upper).copied().unwrap_or_default();
        Ok((self.at(lower)?, self.at(upper)?, planned))
    }
}
