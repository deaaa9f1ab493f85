//! What a cache of a whole model says of itself.

use std::fmt;

use serde::Serialize;

use super::policy::LayerPolicy;

/// What a cache holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FoldReport {
    /// Of every layer.
    pub layers: Vec<FoldedLayer>,
    /// Bytes held: stores, tables, rotations, raw rows and the room beside them.
    pub bytes: u64,
    /// Bytes that the rows need, without the room beside them.
    pub payload_bytes: u64,
    /// Bytes that the rows held had when they came.
    pub raw_bytes: u64,
}

/// What a cache holds of one layer, over all sequences.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FoldedLayer {
    /// How it is kept, and why.
    pub policy: LayerPolicy,
    /// Its sliding window.
    pub window: Option<u32>,
    /// Tokens held.
    pub tokens: usize,
    /// Those of them that are folded; the others are raw.
    pub folded: usize,
}

/// Runs of layers that are alike, a line each, and the bytes.
impl fmt::Display for FoldReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = 0;
        for run in self.layers.chunk_by(|a, b| a == b) {
            let Some(layer) = run.first() else { continue };
            let last = first + run.len() - 1;
            if first == last {
                write!(f, "layer {first}")?;
            } else {
                write!(f, "layers {first} to {last}")?;
            }
            write!(f, ": {}, {} of {} tokens folded", layer.policy.fold, layer.folded, layer.tokens)?;
            if let Some(window) = layer.window {
                write!(f, ", window {window}")?;
            }
            if let Some(reason) = &layer.policy.reason {
                write!(f, " ({reason})")?;
            }
            writeln!(f)?;
            first = last + 1;
        }
        let ratio = self.raw_bytes as f64 / self.payload_bytes.max(1) as f64;
        write!(
            f,
            "{} bytes held, {} needed, for {}: ratio {ratio:.4}",
            self.bytes, self.payload_bytes, self.raw_bytes
        )
    }
}
