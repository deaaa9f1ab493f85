//! Coding what is no longer recent.

use std::sync::Arc;

use super::super::super::planes::{CALIBRATION_TOKENS, Calibration, Codec, Tables};
use super::super::track::{Compacted, Fill, MakeCodes};
use super::{CpuQjlCache, HostCodes, HostTrack, MIN_BLOCK};
use crate::cache::LayerShape;
use crate::cache::host::{HostBlock, HostBlocks};
use crate::cache::tail::Tail;
use crate::error::Result;
use crate::rope::Positions;
use crate::tensor::TensorView;

struct MakeHostCodes<'a> {
    codec: &'a Codec,
    layer: &'a LayerShape,
}

impl MakeCodes<HostCodes> for MakeHostCodes<'_> {
    fn make(&mut self, capacity: usize) -> Result<HostCodes> {
        HostCodes::new(self.codec, self.layer, capacity)
    }

    fn copy(&mut self, codes: &HostCodes, _: usize) -> Result<HostCodes> {
        Ok(codes.clone())
    }
}

/// A track to come, and what has to be written into its blocks.
struct Pending {
    track: HostTrack,
    pages: Vec<(Fill, HostCodes)>,
    moved: Option<Compacted<HostBlock>>,
}

pub(super) fn commit(cache: &mut CpuQjlCache, all: bool) -> Result<()> {
    let mut pending = Vec::new();
    for (sequence, tracks) in cache.ledger.sequences.iter().enumerate() {
        for (layer, track) in tracks.iter().enumerate() {
            if let Some(next) = next(cache, layer, track, all)? {
                pending.push((sequence, layer, next));
            }
        }
    }
    for (sequence, layer, Pending { track, pages, moved }) in pending {
        for (_, page) in &pages {
            for (total, new) in cache.status.iter_mut().zip(page.status()) {
                total.non_finite += new.non_finite;
                total.zero += new.zero;
                total.overflow += new.overflow;
            }
        }
        let Some(held) = cache.ledger.sequences.get_mut(sequence).and_then(|tracks| tracks.get_mut(layer))
        else {
            continue;
        };
        *held = track;
        for (fill, page) in pages {
            let block = held.coded.get_mut(fill.block);
            if let Some(codes) = block.and_then(|block| Arc::get_mut(&mut block.codes)) {
                codes.put(&page, fill.at);
            }
        }
        if let Some((tail, moves)) = moved {
            held.tail = tail;
            for part in moves {
                let [keys, values] = part.from.views(part.row, part.tokens)?;
                held.tail.put(part.start, [&keys, &values], 0, 0, part.tokens);
            }
        }
    }
    Ok(())
}

/// What becomes of a track; `None` where it stays as it is.
fn next(cache: &CpuQjlCache, layer: usize, track: &HostTrack, all: bool) -> Result<Option<Pending>> {
    let (rules, shape) = (&cache.ledger.rules, cache.ledger.layer(layer)?);
    let codec = cache.coders.get(layer)?;
    let mut from = track.clone();
    let learns = cache.ledger.options.learns();
    if learns && from.extra.tables.is_none() && from.len(rules) >= CALIBRATION_TOKENS {
        from.extra.tables = Some(Arc::new(learn(cache, codec, shape, track)?));
        from.extra.energies = Vec::new();
    }
    from.evict(rules);
    let mut pending = Pending { track: from, pages: Vec::new(), moved: None };
    let end = pending.track.codable(rules, all);
    if end > pending.track.tail.first() && (!learns || pending.track.extra.tables.is_some()) {
        let identity;
        let calibrated = cache.ledger.options.tables.as_ref().and_then(|tables| tables.get(layer));
        let tables = match (&pending.track.extra.tables, calibrated) {
            (Some(own), _) => own,
            (None, Some(shared)) => shared,
            (None, None) => {
                identity = Tables::identity(shape.kv_heads, shape.key_dim);
                &identity
            }
        };
        let mut make = MakeHostCodes { codec, layer: shape };
        let (coded, fills) = pending.track.coded(rules, (end, all), &mut make)?;
        for fill in fills {
            let positions = track.runs.of(fill.tokens.clone());
            let encode = |keys: &TensorView<'_>, values: &TensorView<'_>| {
                HostCodes::encode(codec, [keys, values], &positions, tables)
            };
            let page = with_rows(&pending.track.tail, fill.tokens.clone(), *shape, encode)?;
            pending.pages.push((fill, page));
        }
        pending.track = coded;
    }
    let mut make = HostBlocks { shape: *shape, least: if all { 0 } else { MIN_BLOCK }, unit: 32 };
    pending.moved = pending.track.compacted(all, &mut make)?;
    Ok(Some(pending))
}

/// The tables that the first tokens of a track give.
fn learn(cache: &CpuQjlCache, codec: &Codec, shape: &LayerShape, track: &HostTrack) -> Result<Tables> {
    let tokens = cache.ledger.rules.sinks..CALIBRATION_TOKENS;
    let positions = track.runs.of(tokens.clone());
    with_rows(&track.tail, tokens.clone(), *shape, |keys, _| {
        let mut from = Calibration::new(keys, Positions::Explicit(&positions)).tokens(0..tokens.len());
        from.rope = codec.rope();
        Tables::learn(&from, &track.extra.energies, codec.options())
    })
}

/// Calls `with` the raw rows of these tokens, gathered in one place where blocks part them.
fn with_rows<T>(
    tail: &Tail<HostBlock>,
    tokens: std::ops::Range<usize>,
    shape: LayerShape,
    with: impl FnOnce(&TensorView<'_>, &TensorView<'_>) -> Result<T>,
) -> Result<T> {
    let pieces: Vec<_> = tail.pieces_of(tokens.start, tokens.end).collect();
    if let [piece] = pieces.as_slice() {
        let [keys, values] = piece.rows.views(piece.at, piece.tokens)?;
        return with(&keys, &values);
    }
    let mut gathered = HostBlock::new(shape, tokens.len())?;
    for piece in pieces {
        let [keys, values] = piece.rows.views(piece.at, piece.tokens)?;
        gathered.write([&keys, &values], 0, 0, piece.start - tokens.start, piece.tokens);
    }
    let [keys, values] = gathered.views(0, tokens.len())?;
    with(&keys, &values)
}
