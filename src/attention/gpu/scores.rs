//! Scores of raw keys, for callers who want no attention.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::{AttentionParams, Ops};
use crate::attention::Geometry;
use crate::error::Result;
use crate::gpu::{Const, Dispatch, Kernel, KvView, Module, Recording, Variant, ViewUse, index32};
use crate::tensor::DType;

/// Where the scores of one store go in an output of more.
#[derive(Clone, Debug)]
pub(crate) struct ScorePlace {
    /// The first query row of the call that the store's sequences have.
    pub(crate) first_row: usize,
    /// Tokens of the store that count.
    pub(crate) live: Range<usize>,
    /// Numbers of a row of the output, and the one that the store's first token becomes.
    pub(crate) pitch: usize,
    pub(crate) column: usize,
}

impl ScorePlace {
    /// Of a store that has the output for itself.
    pub(crate) const fn whole(g: Geometry) -> Self {
        Self { first_row: 0, live: 0..g.tokens, pitch: g.tokens, column: 0 }
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ScoresParams {
    attention: AttentionParams,
    query: [u32; 4],
    key: [u32; 4],
    tiles: u32,
    offset: u32,
    pitch: u32,
    column: u32,
}

pub(super) fn scores_variant(key_dim: usize, dtypes: [DType; 2], aligned: bool) -> Variant {
    let [query, stored] = dtypes;
    let constants = [
        Const::U32("HEAD_DIM", key_dim as u32),
        Const::U32("QUERY_DTYPE", query as u32),
        Const::Bool("KEYS_ALIGNED", aligned),
    ];
    let modules = [
        Module::Float,
        Module::Load(stored),
        Module::Pair,
        Module::AttentionParams,
        Module::Query,
        Module::QueryPairs,
        Module::RawRows,
        Module::RawPairs,
    ];
    Variant::new(Kernel::ExactScores, &modules, &constants)
}

impl Ops {
    /// Records the scores of one store's raw keys.
    pub(crate) fn exact_scores(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        [queries, keys]: [&KvView; 2],
        place: &ScorePlace,
        output: &KvView,
    ) -> Result<()> {
        let (query, key) = (
            queries.bind("queries", ViewUse::Read, &self.gpu)?,
            keys.bind("keys", ViewUse::Read, &self.gpu)?,
        );
        let bound = output.bind("scores", ViewUse::Write, &self.gpu)?;
        let tiles = g.tokens.div_ceil(Kernel::ExactScores.workgroup() as usize);
        let [offset, ..] = bound.layout;
        recording.add(Dispatch {
            variant: scores_variant(g.key_dim, [queries.dtype(), keys.dtype()], key.paired),
            params: ScoresParams {
                attention: AttentionParams::of_store(g, place, (0, 0))?,
                query: query.layout,
                key: key.layout,
                tiles: index32(tiles)?,
                offset,
                pitch: index32(place.pitch)?,
                column: index32(place.column)?,
            },
            buffers: &[(&query).into(), (&key).into(), (&bound).into()],
            workgroups: (g.batch * g.query_heads * g.queries * tiles) as u64,
        })
    }
}
