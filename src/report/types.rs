//! The figures of a report: what `kvfold report --json` prints, field by field. `docs/report.schema.json` describes them.

use serde::{Deserialize, Serialize};

use super::options::OptionsEcho;
use super::planes::PlanesFigures;
use crate::metrics::Distribution;

/// Everything that was measured of a capture. A figure that cannot be computed is `None`, JSON's null.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Report {
    /// Version of kvfold.
    pub version: String,
    /// `cpu`, or the backend of the adapter: `vulkan`, `metal`, `dx12` or `webgpu`.
    pub backend: String,
    /// The adapter's name; `None` for the CPU twins.
    pub adapter: Option<String>,
    /// Whether a program on the CPU computed this: right, but no measure of a GPU's speed.
    pub software: bool,
    /// Why the CPU twins computed this, where a device was to be found and was not, or gave out; else `None`.
    pub fallback: Option<String>,
    /// The model's name, where the capture says it.
    pub model: Option<String>,
    /// What was asked for.
    pub options: OptionsEcho,
    /// Sizes of the capture.
    pub shape: CaptureShape,
    /// Every two neighbouring layers, folded by MiniCache.
    pub pairs: Vec<Pair>,
    /// Every layer, sketched by QJL.
    pub layers: Vec<LayerFigures>,
    /// Sign planes and their rivals; `None` where they were not asked for.
    pub planes: Option<PlanesFigures>,
    /// Bytes of the whole cache.
    pub totals: Totals,
    /// A sentence that says why nothing merges; `None` where something does.
    pub verdict: Option<String>,
}

/// Sizes of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureShape {
    /// Layers captured.
    pub layers: usize,
    /// Sequences.
    pub batch: usize,
    /// Tokens of the longest sequence.
    pub tokens: usize,
}

/// Two neighbouring layers: folded, or the reason why they cannot be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Pair {
    /// Both keys and values were folded.
    Folded(Box<PairFigures>),
    /// The layers are no pair.
    Skipped(SkippedPair),
}

/// A pair that was folded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairFigures {
    /// Index of the layer nearer the input.
    pub lower: usize,
    /// Index of the layer above it.
    pub upper: usize,
    /// Whether the plan behind the totals pairs these two.
    pub planned: bool,
    /// The keys.
    pub keys: FoldFigures,
    /// The values.
    pub values: FoldFigures,
}

/// A pair that cannot be folded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedPair {
    /// Index of the layer nearer the input.
    pub lower: usize,
    /// Index of the layer above it.
    pub upper: usize,
    /// Whether the plan behind the totals pairs these two; they then count as raw.
    pub planned: bool,
    /// Why.
    pub skipped: String,
}

/// The keys or the values of a pair. Padding counts nowhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FoldFigures {
    /// Cosines of the two layers' rows, rows with a non-finite number left out; a zero row's is 0.
    pub cosine: Distribution,
    /// Rows of each layer.
    pub rows: u64,
    /// Rows whose cosine is at least the threshold.
    pub above_threshold: u64,
    /// Rows kept raw, for any cause.
    pub retained: u64,
    /// The retained rows by cause.
    pub causes: Causes,
    /// `|x - x'|_F / |x|_F` of both layers' restored rows, all of them.
    pub relative_error: Option<f64>,
    /// The same over merged rows alone.
    pub relative_error_merged: Option<f64>,
    /// Bytes of both layers as they came.
    pub bytes_before: u64,
    /// Bytes of page table, slots, magnitudes and raw rows.
    pub bytes_after: u64,
}

/// Rows kept raw, by the first cause that applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Causes {
    /// A number is not finite.
    pub non_finite: u64,
    /// The row is an attention sink.
    pub sink: u64,
    /// The retention rule says so.
    pub rule: u64,
    /// The rows have no common direction.
    pub antiparallel: u64,
    /// A number would leave its type's range.
    pub range: u64,
    /// Nothing of the above, but nearly all other rows of its page stay raw, and so does the page.
    pub raw_page: u64,
}

/// One layer under QJL and under the baselines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerFigures {
    /// Index of the layer.
    pub layer: usize,
    /// Sizes of the layer.
    pub shape: LayerShape,
    /// Bytes of keys and values as they came.
    pub bytes: u64,
    /// Keys as signs of a random projection, values in 8 bits.
    pub qjl: QjlFigures,
    /// Other ways of storing the keys, beside the very same 8-bit values.
    pub baselines: Baselines,
}

/// Sizes of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerShape {
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads, where queries were captured.
    pub query_heads: Option<usize>,
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// Tokens of the longest sequence.
    pub tokens: usize,
}

/// How well compressed keys serve the captured queries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeyFigures {
    /// Bits stored per channel of a key, scales included.
    pub key_bits_per_channel: Option<f64>,
    /// Pearson's correlation of estimated with exact scores `q . k`, over every key that a query sees, in all heads.
    pub score_correlation: Option<f64>,
    /// `|o - o'|_F / |o|_F` of the attention output, against exact attention over the keys and values as they came.
    pub output_relative_error: Option<f64>,
}

/// A layer under QJL.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct QjlFigures {
    /// What the baselines have too.
    #[serde(flatten)]
    pub figures: KeyFigures,
    /// Sign bits of a key.
    pub sketch_dim: usize,
    /// Bytes of sign words and scalars.
    pub key_bytes: u64,
    /// Bytes of 8-bit codes and scales.
    pub value_bytes: u64,
}

/// The keys in 8 and in 4 bits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baselines {
    /// Symmetric 8-bit keys, a scale per token: [`int8_row`](crate::metrics::int8_row).
    pub int8: KeyFigures,
    /// Asymmetric 4-bit keys, a scale and a zero per 32 channels of a token: [`int4_row`](crate::metrics::int4_row).
    pub int4: KeyFigures,
}

/// Bytes of the whole cache before and after. The first three figures are MiniCache's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Bytes before and after MiniCache.
    #[serde(flatten)]
    pub bytes: Bytes,
    /// MiniCache over the plan [`pair_layers_depth`](crate::minicache::pair_layers_depth) with groups of two: layers
    /// that stand alone, and pairs that were skipped, count as raw.
    pub minicache: MiniCacheTotals,
    /// QJL keys and 8-bit values in every layer.
    pub qjl: QjlTotals,
}

/// Bytes before and after a method.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bytes {
    /// As captured, padding left out.
    pub bytes_before: u64,
    /// As stored.
    pub bytes_after: u64,
    /// `bytes_before / bytes_after`.
    pub ratio: Option<f64>,
}

impl Bytes {
    pub(super) fn new(bytes_before: u64, bytes_after: u64) -> Self {
        let ratio = (bytes_after > 0).then(|| bytes_before as f64 / bytes_after as f64);
        Self { bytes_before, bytes_after, ratio }
    }
}

/// MiniCache over the plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MiniCacheTotals {
    /// Bytes before and after.
    #[serde(flatten)]
    pub bytes: Bytes,
    /// Pairs that the plan folds.
    pub planned_pairs: usize,
    /// Those of them that were skipped.
    pub skipped_pairs: usize,
    /// Rows of keys and values in the planned pairs, counted once for both layers.
    pub rows: u64,
    /// Rows of them that merge.
    pub merged: u64,
}

/// QJL in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct QjlTotals {
    /// Bytes before and after, the projection included.
    #[serde(flatten)]
    pub bytes: Bytes,
    /// Bytes of the projections, one for each head dimension among the layers.
    pub projection_bytes: u64,
}
