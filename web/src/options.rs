//! What a call may ask for: the records of `web/types/kvfold.d.ts`.

use kvfold::minicache::{DirectionPlanes, MergeOptions, Mode, Retention};
use kvfold::qjl::cache::{Coding, NamedCoding, SketchOptions};
use kvfold::qjl::planes::{Centring, PlanesOptions};
use kvfold::qjl::{KeyScale, ProjectionKind};
use kvfold::report::{PlanesRequest, ReportOptions};
use serde::Deserialize;
use serde::de::IgnoredAny;

/// Options of every call that measures. What is left out is the library's default.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Options {
    mode: Option<Mode>,
    retention: Option<Retention>,
    threshold: Option<f32>,
    slerp_t: Option<f32>,
    sinks: Option<u32>,
    raw_page_share: Option<f32>,
    direction_bits: Option<u8>,
    start_frac: Option<f64>,
    projection: Option<ProjectionKind>,
    pub(crate) sketch_dim: Option<usize>,
    key_scale: Option<KeyScale>,
    seed: Option<u64>,
    presets: Option<Vec<NamedCoding>>,
    custom: Option<Custom>,
    recent: Option<u32>,
    /// Whether `merge` tells what became of every row.
    pub(crate) rows: bool,
    /// The layers of `sketch`, all where left out; the one of `attend`.
    pub(crate) layers: Option<Vec<usize>>,
    /// Of `attend`.
    pub(crate) layer: usize,
    /// Of `attend`.
    pub(crate) sequence: usize,
    /// Of `attend`.
    pub(crate) head: usize,
    /// Of `attend`: `qjl`, `custom` or a preset. Of `fold`: `planes`, `qjl` or `minicache`.
    pub(crate) method: Option<String>,
    /// Of `fold`: the preset whose bits are taken.
    pub(crate) preset: Option<NamedCoding>,
    #[serde(rename = "signal")]
    _signal: Option<IgnoredAny>,
    #[serde(rename = "onProgress")]
    _on_progress: Option<IgnoredAny>,
}

/// A code in sign planes of one's own.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Custom {
    planes_hi: u8,
    #[serde(default)]
    planes_lo: Option<u8>,
    value_planes: u8,
    #[serde(default)]
    centring: Option<Centring>,
}

impl Custom {
    fn options(self) -> PlanesOptions {
        let mut options = PlanesOptions::default().key_planes(self.planes_hi).value_planes(self.value_planes);
        options.planes_lo = self.planes_lo;
        options.centring(self.centring.unwrap_or_default())
    }
}

impl Options {
    /// How pairs are merged, and where in the depth of the model pairing begins.
    pub(crate) fn merge(&self) -> (MergeOptions, f64) {
        let mut merge = MergeOptions::default();
        if let Some(mode) = self.mode {
            merge.mode = mode;
        }
        if let Some(retention) = self.threshold.map(Retention::Cosine).or(self.retention) {
            merge.retention = retention;
        }
        for (to, from) in
            [(&mut merge.slerp_t, self.slerp_t), (&mut merge.raw_page_share, self.raw_page_share)]
        {
            *to = from.unwrap_or(*to);
        }
        merge.sinks = self.sinks.unwrap_or(merge.sinks);
        merge.planes = self.direction_bits.map(|bits| DirectionPlanes::default().bits(bits));
        (merge, self.start_frac.unwrap_or(ReportOptions::default().start_frac))
    }

    /// The options of a report.
    pub(crate) fn report(&self) -> ReportOptions {
        let (merge, start_frac) = self.merge();
        let mut options = ReportOptions::default().merge(merge).start_frac(start_frac);
        options.projection = self.projection.unwrap_or(options.projection);
        options.sketch_dim = self.sketch_dim;
        options.key_scale = self.key_scale.unwrap_or(options.key_scale);
        options.seed = self.seed.unwrap_or(options.seed);
        if self.presets.is_some() || self.custom.is_some() {
            options.planes = Some(self.planes(options.merge.sinks));
        }
        options
    }

    /// What is asked of sign planes.
    pub(crate) fn planes(&self, sinks: u32) -> PlanesRequest {
        let mut planes =
            PlanesRequest::default().sinks(sinks).presets(self.presets.clone().unwrap_or_default());
        planes.custom = self.custom.map(Custom::options);
        planes.recent = self.recent.unwrap_or(planes.recent);
        planes
    }

    /// The sketch that a fold stores: QJL by these options, nothing raw where they do not say.
    pub(crate) fn sketch(&self, key_dim: usize) -> SketchOptions {
        let (report, mut sketch) = (self.report(), SketchOptions::default());
        if let Some(bits) = report.sketch_dim {
            sketch.rate = bits as f64 / key_dim as f64;
        }
        (sketch.projection, sketch.scale, sketch.seed) = (report.projection, report.key_scale, report.seed);
        sketch.sinks(self.sinks.unwrap_or(0)).recent(self.recent.unwrap_or(0))
    }

    /// The code that a fold stores.
    pub(crate) fn code(&self) -> Coding {
        let coding = match (self.preset, self.custom) {
            (None, Some(custom)) => Coding::Planes(custom.options()),
            (preset, _) => preset.unwrap_or_default().coding(),
        };
        coding.keeping(self.sinks.unwrap_or(coding.sinks()), self.recent.unwrap_or(coding.recent()))
    }
}

/// Options of `Session.create`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct CreateOptions {
    pub(crate) backend: Backend,
}

/// Who is to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Backend {
    /// A GPU where there is one, else the CPU.
    #[default]
    Auto,
    /// WebGPU, on a software adapter too.
    Webgpu,
    /// The CPU twins.
    Cpu,
}
