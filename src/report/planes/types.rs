//! The figures of sign planes and of what they are compared with.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::capture::Capture;
use crate::qjl::cache::NamedCoding;
use crate::qjl::planes::{Centring, PlanesOptions, Preset};

/// What is asked of sign planes.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PlanesRequest {
    /// The presets measured; those of sign planes and `qjl-orth` by default. Their sinks and recent tokens are not read.
    pub presets: Vec<NamedCoding>,
    /// A code of one's own, measured after the presets under the name `custom`; its `sinks` and `recent` are not read.
    /// [`Centring::PreRope`] becomes means of blocks where the capture does not say what the model's RoPE is.
    pub custom: Option<PlanesOptions>,
    /// First tokens that stay raw under every method; 4 by default.
    pub sinks: u32,
    /// Last tokens that stay raw under every method; 64 by default.
    pub recent: u32,
    /// Another capture of the same model from which tables are made; `None` makes them from the first tokens of the
    /// capture itself. It has the same layers, heads and key dimensions, and one sequence or as many.
    pub calibration: Option<Arc<Capture>>,
}

impl Default for PlanesRequest {
    fn default() -> Self {
        let options = Preset::default().options();
        // The original is measured among what presets are compared with.
        let presets = NamedCoding::ALL.into_iter().filter(|&named| named != NamedCoding::Qjl).collect();
        Self { presets, custom: None, sinks: options.sinks, recent: options.recent, calibration: None }
    }
}

impl PlanesRequest {
    /// Sets [`presets`](Self::presets).
    #[must_use]
    pub fn presets(mut self, presets: Vec<NamedCoding>) -> Self {
        self.presets = presets;
        self
    }

    /// Sets [`custom`](Self::custom).
    #[must_use]
    pub fn custom(mut self, options: PlanesOptions) -> Self {
        self.custom = Some(options);
        self
    }

    /// Sets [`sinks`](Self::sinks).
    #[must_use]
    pub fn sinks(mut self, sinks: u32) -> Self {
        self.sinks = sinks;
        self
    }

    /// Sets [`recent`](Self::recent).
    #[must_use]
    pub fn recent(mut self, recent: u32) -> Self {
        self.recent = recent;
        self
    }

    /// Sets [`calibration`](Self::calibration).
    #[must_use]
    pub fn calibration(mut self, capture: Arc<Capture>) -> Self {
        self.calibration = Some(capture);
        self
    }
}

/// Where the tables of sign planes came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TableSource {
    /// The first tokens of the capture itself.
    Capture,
    /// Another capture.
    File,
}

/// Sign planes and their rivals: every method keeps the same sinks and recent tokens raw.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlanesFigures {
    /// First tokens that stay raw.
    pub sinks: u32,
    /// Last tokens that stay raw, except in [`MethodFigures::errors_without_recent`].
    pub recent: u32,
    /// What planes subtract from keys: a pre-RoPE mean where the capture says what the model's RoPE is.
    pub centring: Centring,
    /// Where tables came from.
    pub tables: TableSource,
    /// Tokens of all sequences, padding left out.
    pub tokens: u64,
    /// Those of them that are coded.
    pub coded_tokens: u64,
    /// The presets asked for: bytes of all layers; bits and errors are means over layers.
    pub presets: Vec<MethodFigures>,
    /// `qjl`, `int8`, `int4`, `kivi4` and `kivi2`, likewise.
    pub rivals: Vec<MethodFigures>,
    /// The same of every layer.
    pub layers: Vec<LayerMethods>,
}

/// One layer under every method.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerMethods {
    /// Index of the layer.
    pub layer: usize,
    /// The presets asked for.
    pub presets: Vec<MethodFigures>,
    /// What they are compared with.
    pub rivals: Vec<MethodFigures>,
}

/// What a method takes and what it costs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MethodFigures {
    /// Name of the preset or rival.
    pub name: String,
    /// Bits per channel of a coded key: codes with their padding, scalars, zeros, block means.
    pub key_bits_per_channel: Option<f64>,
    /// Bits per channel of a coded value.
    pub value_bits_per_channel: Option<f64>,
    /// Bytes of codes and of what is stored beside them for each token or group of tokens.
    pub code_bytes: u64,
    /// Bytes of raw sinks and recent tokens, two for each number.
    pub raw_bytes: u64,
    /// Bytes of tables.
    pub table_bytes: u64,
    /// Bytes of rotations or projections, which all layers share: 0 in a layer.
    pub rotation_bytes: u64,
    /// Sum of the four.
    pub bytes: u64,
    /// Bytes of the same rows in f16.
    pub f16_bytes: u64,
    /// `f16_bytes / bytes`.
    pub ratio: Option<f64>,
    /// Errors with sinks and recent tokens raw.
    pub errors: AttentionErrors,
    /// Errors with raw sinks alone.
    pub errors_without_recent: AttentionErrors,
}

/// How attention on the captured queries differs from exact attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AttentionErrors {
    /// `|o - o'|_F / |o|_F` of the attention output.
    pub output_relative_error: Option<f64>,
    /// KL divergence of the estimated attention weights from the exact ones in nats, mean over heads and queries.
    pub weights_kl: Option<f64>,
    /// Share of heads and queries whose most attended token stays the same.
    pub top1_agreement: Option<f64>,
}

impl MethodFigures {
    /// Fills in what follows from the other bytes.
    pub(in crate::report) fn close(&mut self) {
        self.bytes = self.code_bytes + self.raw_bytes + self.table_bytes + self.rotation_bytes;
        self.ratio = (self.bytes > 0).then(|| self.f16_bytes as f64 / self.bytes as f64);
    }

    /// Bytes summed, bits and errors averaged, over the layers of a method.
    pub(super) fn total(layers: &[&Self], rotation_bytes: u64) -> Self {
        let sum = |of: fn(&Self) -> u64| layers.iter().map(|layer| of(layer)).sum::<u64>();
        let mean = |of: &dyn Fn(&Self) -> Option<f64>| {
            let found: Vec<f64> = layers.iter().filter_map(|layer| of(layer)).collect();
            (!found.is_empty()).then(|| found.iter().sum::<f64>() / found.len() as f64)
        };
        let errors = |of: fn(&Self) -> &AttentionErrors| AttentionErrors {
            output_relative_error: mean(&|layer| of(layer).output_relative_error),
            weights_kl: mean(&|layer| of(layer).weights_kl),
            top1_agreement: mean(&|layer| of(layer).top1_agreement),
        };
        let mut total = Self {
            name: layers.first().map(|layer| layer.name.clone()).unwrap_or_default(),
            key_bits_per_channel: mean(&|layer| layer.key_bits_per_channel),
            value_bits_per_channel: mean(&|layer| layer.value_bits_per_channel),
            code_bytes: sum(|layer| layer.code_bytes),
            raw_bytes: sum(|layer| layer.raw_bytes),
            table_bytes: sum(|layer| layer.table_bytes),
            f16_bytes: sum(|layer| layer.f16_bytes),
            rotation_bytes,
            errors: errors(|layer| &layer.errors),
            errors_without_recent: errors(|layer| &layer.errors_without_recent),
            ..Self::default()
        };
        total.close();
        total
    }
}
