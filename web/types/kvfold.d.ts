// Records of kvfold's bindings. Figures are spelled as in docs/report.schema.json; shapes are
// [batch, heads, tokens, head_dim]. A figure that cannot be computed is null.

export interface CreateOptions {
  /** auto: WebGPU on hardware, else the CPU twins. */
  backend?: "auto" | "webgpu" | "cpu";
}

export interface Adapter {
  backend: "webgpu" | "cpu";
  /** The adapter's name, null on the CPU. */
  name: string | null;
  /** Whether a program on the CPU computes: right, but no measure of a GPU's speed. */
  software: boolean;
  /** Why it is not WebGPU, for programs and for people. */
  cause: "asked" | "insecure" | "missing" | "no_adapter" | "software" | "device" | null;
  reason: string | null;
  /** What the device can do, as `kvfold adapters --json` prints it. */
  caps: Record<string, string | number | boolean | number[] | null> | null;
}

/** What every call that computes takes. */
export interface Call {
  signal?: AbortSignal;
  onProgress?: (progress: { done: number; of: number }) => void;
}

export interface LoadOptions {
  signal?: AbortSignal;
  onProgress?: (progress: { loaded: number; total: number }) => void;
}

/** The error of every call: `code` stays the same between versions. */
export interface KvfoldError extends Error {
  name: "KvfoldError";
  code:
    | "alignment" | "cancelled" | "device" | "device_lost" | "digest" | "dtype" | "head_ratio" | "internal" | "io"
    | "limit" | "metadata" | "missing_tensor" | "no_adapter" | "no_capture" | "no_device" | "non_finite"
    | "null_adapter" | "options" | "out_of_memory" | "overflow" | "range" | "safetensors" | "shape" | "source"
    | "too_short" | "unknown_tensor" | "usage";
}

export interface Memory {
  /** Bytes allocated now. */
  live: number;
  /** Bytes of the module's memory. */
  module: number;
}

export interface CaptureInfo {
  model: string | null;
  layers: {
    kv_heads: number;
    query_heads: number | null;
    key_dim: number;
    value_dim: number;
    dtype: "f16" | "bf16" | "f32";
    /** Tokens of the first sequence at which queries were captured, half-open. */
    query_positions: [number, number] | null;
  }[];
  batch: number;
  /** Tokens of the longest sequence. */
  tokens: number;
  lengths: number[];
  /** Bytes of keys and values, padding included. */
  bytes: number;
  file_bytes: number;
  /** Whether the file says what the model's RoPE is. */
  rope_known: boolean;
  /** Whether every layer has keys after RoPE, without which nothing can be measured. */
  has_keys: boolean;
  token_ids: boolean;
}

export type Preset = "near-lossless" | "balanced" | "compact" | "extreme" | "qjl-orth" | "qjl";
export type Retention = "never" | { cosine: number } | { range: number } | { fraction: number };
export type Centring = "none" | "pre-rope" | { "block-mean": number };

/** A code in sign planes of one's own. */
export interface CustomPlanes {
  /** Bits of a key's channel, 1 to 5: of all, or of the half that matters most. */
  planes_hi: number;
  /** Bits of a key's other half, 0 to 5; null codes all channels alike. */
  planes_lo?: number | null;
  /** Bits of a value's channel, 1 to 5. */
  value_planes: number;
  centring?: Centring | null;
}

/** What is left out is the library's default. */
export interface Options {
  mode?: "shared" | "anchor" | "compat";
  retention?: Retention;
  /** Short for `retention: { cosine }`. */
  threshold?: number;
  slerp_t?: number;
  sinks?: number;
  raw_page_share?: number;
  /** Bits of a channel of the shared directions, 1 to 5; f16 where left out. */
  direction_bits?: number;
  start_frac?: number;
  projection?: "gaussian" | "orthogonal" | "hadamard";
  /** Sign bits of a key, its head dimension where left out. */
  sketch_dim?: number;
  key_scale?: "norm" | "mse" | "unbiased";
  seed?: number;
  /** Presets to measure. */
  presets?: Preset[];
  custom?: CustomPlanes;
  /** Last tokens that stay raw under sign planes and their rivals. */
  recent?: number;
}

export interface AttendOptions {
  layer: number;
  /** A query head. */
  head: number;
  sequence?: number;
  /** `qjl`, `custom` (with `custom`), or one of `presets`. */
  method?: "qjl" | "custom" | Preset;
}

export interface FoldOptions {
  /** A preset or `custom`; QJL by `projection`, `sketch_dim`, `key_scale` and `seed`; or MiniCache. */
  method?: "planes" | "qjl" | "minicache";
  /** The preset; without it `custom`, else balanced. */
  preset?: Preset;
}

/** Rows of one tensor, arrays in the order [batch, heads, tokens]. */
export interface RowFigures {
  batch: number;
  heads: number;
  tokens: number;
  /** NaN in padding. */
  cosines: Float32Array;
  /** 1 where the row is kept raw, for any cause; empty from `probe`. */
  retained: Uint8Array;
}

/** Null where the two layers are no pair. */
export interface PairRows {
  lower: number;
  upper: number;
  keys: RowFigures | null;
  values: RowFigures | null;
}

export interface Distribution {
  mean: number | null;
  p5: number | null;
  p95: number | null;
}

export interface FoldFigures {
  cosine: Distribution;
  rows: number;
  above_threshold: number;
  retained: number;
  causes: {
    non_finite: number;
    sink: number;
    rule: number;
    antiparallel: number;
    range: number;
    raw_page: number;
  };
  relative_error: number | null;
  relative_error_merged: number | null;
  bytes_before: number;
  bytes_after: number;
}

export interface FoldedPair {
  lower: number;
  upper: number;
  /** Whether the plan behind the totals pairs these two. */
  planned: boolean;
  keys: FoldFigures;
  values: FoldFigures;
}

export interface SkippedPair {
  lower: number;
  upper: number;
  planned: boolean;
  skipped: string;
}

export type Pair = FoldedPair | SkippedPair;

export interface Bytes {
  bytes_before: number;
  bytes_after: number;
  ratio: number | null;
}

export interface Totals extends Bytes {
  minicache: Bytes & { planned_pairs: number; skipped_pairs: number; rows: number; merged: number };
  qjl: Bytes & { projection_bytes: number };
}

export interface OptionsEcho {
  mode: "shared" | "anchor" | "compat";
  retention: Retention;
  threshold: number;
  slerp_t: number;
  sinks: number;
  raw_page_share: number;
  direction_bits: number | null;
  start_frac: number;
  projection: "gaussian" | "orthogonal" | "hadamard";
  sketch_dim: number | null;
  key_scale: "norm" | "mse" | "unbiased";
  seed: number;
}

export interface MergeResult {
  options: OptionsEcho;
  shape: { layers: number; batch: number; tokens: number };
  pairs: Pair[];
  /** MiniCache's; those of `qjl` are sizes. */
  totals: Totals;
  /** Why nothing merges; null where something does. */
  verdict: string | null;
  /** Where asked for. */
  rows?: PairRows[];
}

export interface KeyFigures {
  key_bits_per_channel: number | null;
  score_correlation: number | null;
  output_relative_error: number | null;
}

export interface LayerFigures {
  layer: number;
  shape: { kv_heads: number; query_heads: number | null; key_dim: number; value_dim: number; tokens: number };
  bytes: number;
  qjl: KeyFigures & { sketch_dim: number; key_bytes: number; value_bytes: number };
  baselines: { int8: KeyFigures; int4: KeyFigures };
}

export interface AttentionErrors {
  output_relative_error: number | null;
  weights_kl: number | null;
  top1_agreement: number | null;
}

export interface MethodFigures {
  name: string;
  key_bits_per_channel: number | null;
  value_bits_per_channel: number | null;
  code_bytes: number;
  raw_bytes: number;
  table_bytes: number;
  rotation_bytes: number;
  bytes: number;
  f16_bytes: number;
  ratio: number | null;
  errors: AttentionErrors;
  errors_without_recent: AttentionErrors;
}

export interface PlanesFigures {
  sinks: number;
  recent: number;
  centring: Centring;
  tables: "capture" | "file";
  tokens: number;
  coded_tokens: number;
  presets: MethodFigures[];
  rivals: MethodFigures[];
  layers: { layer: number; presets: MethodFigures[]; rivals: MethodFigures[] }[];
}

export interface SketchResult {
  options: OptionsEcho;
  layers: LayerFigures[];
  planes: PlanesFigures | null;
  qjl: Bytes & { projection_bytes: number };
}

/** docs/report.schema.json. */
export interface Report {
  version: string;
  backend: string;
  adapter: string | null;
  software: boolean;
  fallback: string | null;
  model: string | null;
  options: OptionsEcho;
  shape: { layers: number; batch: number; tokens: number };
  pairs: Pair[];
  layers: LayerFigures[];
  planes: PlanesFigures | null;
  totals: Totals;
  verdict: string | null;
}

/** Arrays are [queries, tokens], NaN where a query does not see the token. */
export interface HeadAttention {
  queries: number;
  tokens: number;
  /** The token at which the first query stands. */
  first_query: number;
  /** scale * (q . k). */
  exact_scores: Float32Array;
  /** The same of coded keys, tokens that stay raw included. */
  estimated_scores: Float32Array;
  exact_weights: Float32Array;
  /** With sinks and recent tokens raw. */
  estimated_weights: Float32Array;
}

export interface StoreReport {
  method: string;
  bytes_before: number;
  bytes_after: number;
  ratio: number | null;
  shared_bytes: number;
  kept_bytes: number;
  key_relative_error: number | null;
  value_relative_error: number | null;
  layers: {
    layer: number;
    pair: number | null;
    bytes_before: number;
    bytes_after: number;
    ratio: number | null;
    key_relative_error: number | null;
    value_relative_error: number | null;
  }[];
}

export interface FoldResult {
  /** The file. */
  bytes: Uint8Array;
  report: StoreReport;
}

export interface Check {
  kernel: string;
  rows: string;
  apart: number | null;
  bound: number;
  failure: string | null;
  passed: boolean;
}

export interface Timing {
  kernel: string;
  /** Calls in each submit, 1 to 16; 0 without a device. */
  batch: number;
  /** Of one call: the median submit over its calls. Null without a device. */
  milliseconds: number | null;
  /** Of the twin on the CPU. */
  twin_milliseconds: number;
}

export interface ModelShape {
  layers: number;
  kv_heads: number;
  head_dim: number;
  tokens: number;
}
