//! What a report is asked to do.

use serde::{Deserialize, Serialize};

use super::planes::PlanesRequest;
use crate::error::{Error, Result};
use crate::minicache::{MergeOptions, Mode, Retention};
use crate::qjl::{KeyScale, MAX_SKETCH_DIM, Projection, ProjectionKind};

/// The threshold that similarity is counted against where the retention rule has none of its own.
const THRESHOLD: f32 = 0.9;

/// Options of [`report`](super::report). The defaults are the papers' own settings.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ReportOptions {
    /// How neighbouring layers are folded.
    pub merge: MergeOptions,
    /// Where in the depth of the model the plan of the totals begins to pair layers, 0 to 1; 0.5 by default (MiniCache,
    /// section 3.2).
    pub start_frac: f64,
    /// How the rows of QJL's projection are drawn; Gaussian by default (QJL, section 3).
    pub projection: ProjectionKind,
    /// Sign bits of a key; its head dimension by default.
    pub sketch_dim: Option<usize>,
    /// The scalar beside the signs.
    pub key_scale: KeyScale,
    /// Seed of the projection; 42 by default.
    pub seed: u64,
    /// What is asked of sign planes; nothing by default.
    pub planes: Option<PlanesRequest>,
}

impl Default for ReportOptions {
    fn default() -> Self {
        Self {
            merge: MergeOptions::default(),
            start_frac: 0.5,
            projection: ProjectionKind::Gaussian,
            sketch_dim: None,
            key_scale: KeyScale::default(),
            seed: 42,
            planes: None,
        }
    }
}

impl ReportOptions {
    /// Sets [`merge`](Self::merge).
    #[must_use]
    pub fn merge(mut self, merge: MergeOptions) -> Self {
        self.merge = merge;
        self
    }

    /// Sets [`start_frac`](Self::start_frac).
    #[must_use]
    pub fn start_frac(mut self, start_frac: f64) -> Self {
        self.start_frac = start_frac;
        self
    }

    /// Sets [`projection`](Self::projection).
    #[must_use]
    pub fn projection(mut self, projection: ProjectionKind) -> Self {
        self.projection = projection;
        self
    }

    /// Sets [`sketch_dim`](Self::sketch_dim).
    #[must_use]
    pub fn sketch_dim(mut self, sketch_dim: usize) -> Self {
        self.sketch_dim = Some(sketch_dim);
        self
    }

    /// Sets [`key_scale`](Self::key_scale).
    #[must_use]
    pub fn key_scale(mut self, key_scale: KeyScale) -> Self {
        self.key_scale = key_scale;
        self
    }

    /// Sets [`seed`](Self::seed).
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets [`planes`](Self::planes).
    #[must_use]
    pub fn planes(mut self, planes: PlanesRequest) -> Self {
        self.planes = Some(planes);
        self
    }

    /// Checks every number against its range. What depends on the capture (a Hadamard projection needs a power of two of
    /// channels) is checked when the report is made.
    ///
    /// # Errors
    /// [`Error::Range`] naming the option.
    pub fn validate(&self) -> Result<()> {
        self.merge.validate()?;
        if !(0.0..=1.0).contains(&self.start_frac) {
            return Err(Error::range("start_frac", "0 to 1", self.start_frac));
        }
        if let Some(m) = self.sketch_dim.filter(|m| !(1..=MAX_SKETCH_DIM).contains(m)) {
            return Err(Error::range("sketch_dim", format!("1 to {MAX_SKETCH_DIM}"), m));
        }
        if self.projection == ProjectionKind::Loaded {
            return Err(Error::range("projection", "gaussian, orthogonal or hadamard", self.projection));
        }
        Ok(())
    }

    /// The cosine from which rows are counted as `above_threshold`: the rule's own where it is
    /// [`Retention::Cosine`], else 0.9.
    #[must_use]
    pub fn threshold(&self) -> f32 {
        if let Retention::Cosine(threshold) = self.merge.retention { threshold } else { THRESHOLD }
    }

    /// The projection for keys of this dimension.
    pub(super) fn draw(&self, key_dim: usize) -> Result<Projection> {
        Projection::new(self.projection, key_dim, self.sketch_dim.unwrap_or(key_dim), self.seed)
    }
}

/// The options as a report repeats them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OptionsEcho {
    /// How a pair is stored.
    pub mode: Mode,
    /// Which rows stay raw.
    pub retention: Retention,
    /// The cosine from which rows are counted as above the threshold.
    pub threshold: f32,
    /// Where on the arc between two directions the shared one lies.
    pub slerp_t: f32,
    /// Tokens at the start of a sequence that stay raw.
    pub sinks: u32,
    /// A page with a larger share of raw rows stays raw as a whole.
    pub raw_page_share: f32,
    /// Bits of a channel of the shared directions; `None` where they are in f16.
    pub direction_bits: Option<u8>,
    /// Where in the depth of the model the plan begins to pair layers.
    pub start_frac: f64,
    /// How the rows of the projection are drawn.
    pub projection: ProjectionKind,
    /// Sign bits of a key, `None` for its head dimension.
    pub sketch_dim: Option<usize>,
    /// The scalar beside the signs.
    pub key_scale: KeyScale,
    /// Seed of the projection.
    pub seed: u64,
}

impl From<&ReportOptions> for OptionsEcho {
    fn from(options: &ReportOptions) -> Self {
        let merge = &options.merge;
        Self {
            mode: merge.mode,
            retention: merge.retention,
            threshold: options.threshold(),
            slerp_t: merge.slerp_t,
            sinks: merge.sinks,
            raw_page_share: merge.raw_page_share,
            direction_bits: merge.planes.map(|planes| planes.bits),
            start_frac: options.start_frac,
            projection: options.projection,
            sketch_dim: options.sketch_dim,
            key_scale: options.key_scale,
            seed: options.seed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_named() {
        let refused = [
            (ReportOptions::default().start_frac(1.5), "start_frac: wanted 0 to 1, had 1.5"),
            (ReportOptions::default().start_frac(f64::NAN), "start_frac: wanted 0 to 1, had NaN"),
            (ReportOptions::default().sketch_dim(0), "sketch_dim: wanted 1 to 8192, had 0"),
            (
                ReportOptions::default().projection(ProjectionKind::Loaded),
                "projection: wanted gaussian, orthogonal or hadamard, had loaded",
            ),
            (
                ReportOptions::default().merge(MergeOptions::default().slerp_t(2.0)),
                "slerp_t: wanted 0 to 1, had 2",
            ),
        ];
        for (options, message) in refused {
            assert_eq!(options.validate().unwrap_err().to_string(), message);
        }
        assert!(ReportOptions::default().validate().is_ok());
    }

    #[test]
    fn similarity_is_counted_against_the_rule_or_the_default() {
        let with = |retention| ReportOptions::default().merge(MergeOptions::default().retention(retention));
        assert_eq!(with(Retention::Cosine(0.7)).threshold(), 0.7);
        assert_eq!(with(Retention::Never).threshold(), 0.9);
    }
}
