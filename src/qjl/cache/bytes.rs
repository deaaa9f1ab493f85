//! What a cache holds and needs, in bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Serialize;

use super::coders::{Coders, row_bits};
use super::ledger::Ledger;
use crate::cache::LayerShape;

/// A sum over things that several may share.
#[derive(Debug, Default)]
pub(crate) struct Unique {
    seen: BTreeSet<usize>,
    total: u64,
}

impl Unique {
    /// Adds what `thing` holds, once.
    pub(crate) fn add<T>(&mut self, thing: &Arc<T>, bytes: impl FnOnce() -> u64) {
        if self.seen.insert(Arc::as_ptr(thing).addr()) {
            self.total += bytes();
        }
    }

    pub(crate) const fn total(&self) -> u64 {
        self.total
    }
}

/// Bytes of a layer's tables: a mean in f16, a balance in f32 and a place in 16 bits for every channel.
const TABLE_BYTES: usize = 8;

/// Tokens of blocks, for those that sequences share the most that one of them sees.
#[derive(Debug, Default)]
struct Seen(BTreeMap<usize, usize>);

impl Seen {
    fn add<T>(&mut self, block: &Arc<T>, tokens: usize) {
        let most = self.0.entry(Arc::as_ptr(block).addr()).or_default();
        *most = tokens.max(*most);
    }

    fn tokens(&self) -> usize {
        self.0.values().sum()
    }
}

/// Bytes that the rows of a ledger need; `tables` says which tables a track made.
pub(crate) fn payload<B, C, X: Clone + Default, T>(
    ledger: &Ledger<B, C, X>,
    coders: &Coders,
    tables: impl Fn(&X) -> Option<*const T>,
) -> u64 {
    let mut bytes: u64 = coders.all.iter().map(|codec| codec.bytes() as u64).sum();
    for (index, layer) in ledger.layers.iter().enumerate() {
        let Ok(codec) = coders.get(index) else { continue };
        let (mut coded, mut raw, mut own) = (Seen::default(), Seen::default(), BTreeSet::new());
        for track in ledger.tracks(index) {
            track.visible_coded().for_each(|(block, tokens)| coded.add(&block.codes, tokens.len()));
            track.visible_raw().for_each(|piece| raw.add(piece.rows, piece.tokens));
            own.extend(tables(&track.extra).map(<*const T>::addr));
        }
        bytes += (row_bits(codec) * (coded.tokens() * layer.kv_heads) as f64 / 8.0).ceil() as u64;
        bytes += (raw.tokens() * layer.token_bytes()) as u64;
        let tables = own.len() + usize::from(ledger.options.tables.is_some());
        bytes += (tables * layer.kv_heads * layer.key_dim * TABLE_BYTES) as u64;
    }
    bytes
}

/// The figures of `QJLKVCache` (VeloxQuant-MLX) for one layer, as it counts them: not bytes of any buffer. It charges a byte for
/// every sign, and has no raw rows, tables or blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OriginalAccounting {
    /// Tokens that have not left, of all sequences.
    pub tokens: usize,
    /// `m + 2` bytes for each token and KV head.
    pub key_bytes: usize,
    /// `value_dim + 2` bytes for each token and KV head.
    pub value_bytes: usize,
}

impl OriginalAccounting {
    /// The original's `memory_bytes`: of keys and values.
    #[must_use]
    pub const fn memory_bytes(&self) -> usize {
        self.key_bytes + self.value_bytes
    }
}

/// The original's figures for every layer; `None` where rows are not sketched.
pub(crate) fn original<B, C, X: Clone + Default>(
    ledger: &Ledger<B, C, X>,
    coders: &Coders,
) -> Option<Vec<OriginalAccounting>> {
    let account = |(index, layer): (usize, &LayerShape)| {
        let bits = coders.get(index).ok()?.projection()?.sketch_dim();
        let [tokens, _] = ledger.layer_tokens(index);
        let rows = tokens * layer.kv_heads;
        let (key_bytes, value_bytes) = (rows * (bits + 2), rows * (layer.value_dim + 2));
        Some(OriginalAccounting { tokens, key_bytes, value_bytes })
    };
    ledger.layers.iter().enumerate().map(account).collect()
}
