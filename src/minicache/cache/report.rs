//! What a cache says of itself.

use serde::Serialize;

use super::super::config::Counts;
use super::super::plan::Role;
use super::ledger::Ledger;
use super::sequence::Backing;
use crate::cache::tail::Tail;

/// What a cache holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CacheReport {
    /// Of every layer.
    pub layers: Vec<LayerReport>,
    /// Bytes of live buffers; see [`payload_bytes`](Self::payload_bytes).
    pub bytes: u64,
    /// Bytes that the rows held need: folded runs, and raw rows without the room that is left in their blocks.
    pub payload_bytes: u64,
    /// Bytes that the same tokens would take raw.
    pub raw_bytes: u64,
}

/// What a cache holds of one layer, over all sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LayerReport {
    /// The layer's part in its group.
    pub role: Role,
    /// Its group.
    pub group: usize,
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Tokens of them that are folded; the others wait raw.
    pub folded: usize,
    /// Key rows merged, and retained by first cause.
    pub keys: Counts,
    /// Value rows likewise.
    pub values: Counts,
}

/// The figures of `MiniCacheKVCache` (VeloxQuant-MLX) for one layer, as it counts them: not bytes of any buffer. It charges a
/// merged row nothing, both layers' magnitudes to every row, and values by the rows that *keys* retained.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OriginalAccounting {
    /// The layer's part in its group.
    pub role: Role,
    /// Its group.
    pub group: usize,
    /// The original's `compressed_key_bytes`.
    pub compressed_key_bytes: usize,
    /// The original's `compressed_value_bytes`.
    pub compressed_value_bytes: usize,
    /// The original's `fp16_key_bytes`.
    pub fp16_key_bytes: usize,
    /// The original's `fp16_value_bytes`.
    pub fp16_value_bytes: usize,
    /// Key rows retained.
    pub retained: u32,
    /// Key rows merged.
    pub merged: u32,
    /// `retained / (retained + merged)`, 0 where there are none.
    pub retention_rate: f64,
}

impl<S: Backing> Ledger<S> {
    pub(crate) fn layer_reports(&self) -> Vec<LayerReport> {
        (0..self.layers.len()).filter_map(|layer| self.layer_report(layer)).collect()
    }

    /// Tokens of a layer, and those of them that are folded, over all sequences.
    pub(crate) fn layer_tokens(&self, layer: usize) -> [usize; 2] {
        self.layer_report(layer).map_or([0, 0], |report| [report.tokens, report.folded])
    }

    fn layer_report(&self, layer: usize) -> Option<LayerReport> {
        let (role, heads) = (self.plan.get(layer)?, self.layers.get(layer)?.kv_heads);
        let mut counts = [Counts::default(); 2];
        let mut folded = 0;
        let member = self.member(layer);
        for sequence in &self.sequences {
            let runs = member.and_then(|(group, _)| sequence.groups.get(group)).map_or(&[][..], |g| &g.runs);
            let runs = runs.iter().map(|run| (run.tokens, &run.verdicts));
            let decided = sequence.decided.get(layer).map_or(&[][..], Vec::as_slice);
            for (tokens, verdicts) in runs.chain(decided.iter().map(|part| (part.tokens, &part.verdicts))) {
                for (sum, verdict) in counts.iter_mut().zip(verdicts) {
                    *sum = sum.plus(&verdict.count(heads, tokens));
                }
                folded += tokens;
            }
        }
        let [keys, values] = counts;
        let tokens = self.lengths(layer).iter().sum();
        Some(LayerReport { role: role.role, group: role.group, tokens, folded, keys, values })
    }

    /// Bytes that the tokens held would take raw.
    pub(crate) fn raw_bytes(&self) -> u64 {
        let layers = self.layers.iter().enumerate();
        layers.map(|(i, shape)| (self.lengths(i).iter().sum::<usize>() * shape.token_bytes()) as u64).sum()
    }

    /// Bytes of the raw rows held, without the room left in their blocks; rows that sequences share count once for each.
    pub(crate) fn raw_payload(&self) -> u64 {
        let tails = self.sequences.iter().flat_map(|sequence| sequence.tails.iter().zip(&self.layers));
        let raw = |tail: &Tail<S::Block>| tail.pieces().map(|piece| piece.tokens).sum::<usize>();
        tails.map(|(tail, shape)| (raw(tail) * shape.token_bytes()) as u64).sum()
    }

    /// The original's figures for every layer.
    pub(crate) fn original_accounting(&self) -> Vec<OriginalAccounting> {
        let layers = self.layer_reports().into_iter().zip(&self.layers);
        let account = |(report, shape): (LayerReport, &crate::cache::LayerShape)| {
            let rows = report.tokens * shape.kv_heads;
            let (retained, merged) = (report.keys.retained(), report.keys.merged);
            let kept = if report.role == Role::Merge { retained as usize } else { rows };
            let all = f64::from(retained) + f64::from(merged);
            OriginalAccounting {
                role: report.role,
                group: report.group,
                compressed_key_bytes: 2 * kept * shape.key_dim + 2 * rows,
                compressed_value_bytes: 2 * kept * shape.value_dim + 2 * rows,
                fp16_key_bytes: 2 * rows * shape.key_dim,
                fp16_value_bytes: 2 * rows * shape.value_dim,
                retained,
                merged,
                retention_rate: if all > 0.0 { f64::from(retained) / all } else { 0.0 },
            }
        };
        layers.map(account).collect()
    }
}
