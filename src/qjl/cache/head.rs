//! What a saved cache says of itself beside its tensors: one JSON object.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::options::{CacheOptions, Coding};
use super::runs::Runs;
use crate::cache::LayerShape;
use crate::capture::RopeLayout;
use crate::error::{Error, Result};
use crate::qjl::ProjectionKind;
use crate::rope::Rope;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Head {
    pub(super) layers: Vec<LayerShape>,
    pub(super) coding: Coding,
    pub(super) ropes: Vec<Option<SavedRope>>,
    /// The kind of a projection that the host gave.
    pub(super) projection: Option<SavedProjection>,
    /// Whether all sequences share the layers' tables.
    pub(super) shared_tables: bool,
    pub(super) capacity: Option<usize>,
    pub(super) pin_sinks: bool,
    /// Files of caches that may allocate need not say so.
    #[serde(default)]
    pub(super) fixed: bool,
    /// Digests of rotations by their channels, and of projections by their coder.
    pub(super) digests: BTreeMap<String, String>,
    /// Odd keys, and odd values: not finite, zero, clamped.
    pub(super) status: [[u32; 3]; 2],
    pub(super) sequences: Vec<Vec<SavedTrack>>,
}

/// A RoPE; frequencies by the bits of their f64, which decimal text may not keep.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedRope {
    rotary_dim: usize,
    interleaved: bool,
    inv_freq: Vec<u64>,
}

impl SavedRope {
    pub(crate) fn of(rope: &Rope) -> Self {
        Self {
            rotary_dim: rope.rotary_dim(),
            interleaved: *rope.layout() == RopeLayout::Interleaved,
            inv_freq: rope.inv_freq().iter().map(|frequency| frequency.to_bits()).collect(),
        }
    }

    pub(crate) fn restore(&self) -> Result<Rope> {
        let layout = if self.interleaved { RopeLayout::Interleaved } else { RopeLayout::HalfSplit };
        let inv_freq = self.inv_freq.iter().map(|&bits| f64::from_bits(bits)).collect();
        Rope::new(self.rotary_dim, self.rotary_dim, inv_freq, layout)
    }
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedProjection {
    pub(super) kind: ProjectionKind,
    pub(super) seed: Option<u64>,
    pub(super) head_dim: usize,
    pub(super) sketch_dim: usize,
}

/// A track, all but its rows.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedTrack {
    pub(super) evicted: usize,
    /// Tokens whose queries are in the energies, or came without.
    pub(super) counted: usize,
    pub(super) runs: Runs,
    pub(super) sinks: SavedTail,
    /// First token, tokens, and room of every coded block.
    pub(super) coded: Vec<[usize; 3]>,
    pub(super) tail: SavedTail,
    pub(super) tables: bool,
    pub(super) energies: bool,
}

/// Raw rows: first token, end, and of every block its first token and the tokens that it has room for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedTail {
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) blocks: Vec<[usize; 2]>,
}

impl SavedTail {
    /// Checks that blocks follow each other and hold all rows.
    pub(super) fn check(&self) -> Result<()> {
        let mut next = None;
        let mut whole = self.first <= self.end;
        for &[start, capacity] in &self.blocks {
            whole &= next.is_none_or(|next| next == start) && capacity > 0;
            next = start.checked_add(capacity);
            whole &= next.is_some();
        }
        let start = self.blocks.first().map_or(self.end, |&[start, _]| start);
        whole &= self.first == self.end || start <= self.first && next.is_some_and(|next| self.end <= next);
        if whole {
            return Ok(());
        }
        let want = format!("blocks that hold the tokens from {} to {}", self.first, self.end);
        Err(Error::range("blocks of raw rows", want, format_args!("{:?}", self.blocks)))
    }
}

impl Head {
    pub(super) fn parse(text: &str, key: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|cause| Error::Metadata {
            key: key.to_owned(),
            want: "the JSON object of a saved cache".to_owned(),
            have: cause.to_string(),
        })
    }

    /// The options, projection and tables left out.
    pub(super) fn options(&self) -> Result<CacheOptions> {
        let ropes = self.ropes.iter().map(|rope| rope.as_ref().map(SavedRope::restore).transpose());
        let mut options = CacheOptions::new(self.coding).ropes(ropes.collect::<Result<_>>()?);
        (options.capacity, options.pin_sinks, options.fixed) = (self.capacity, self.pin_sinks, self.fixed);
        Ok(options)
    }
}
