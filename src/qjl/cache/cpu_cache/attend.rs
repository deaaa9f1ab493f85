//! Attention over what a sequence holds.

use super::super::super::planes::{Centres, Fields, PlaneKeys, PlaneQueries, PlaneValues, Tables, finish};
use super::rows::{Joined, Part, PartRows};
use super::{CpuQjlCache, HostCodes, HostTrack};
use crate::attention::{AttendOptions, Geometry, Rows, attend_rows, score_rows};
use crate::cache::LayerShape;
use crate::error::Result;
use crate::tensor::{Shape, TensorView};

pub(super) fn attend(
    cache: &CpuQjlCache,
    layer: usize,
    queries: &TensorView<'_>,
    options: &AttendOptions<'_>,
) -> Result<Vec<f32>> {
    let shape = cache.ledger.layer(layer)?;
    let keys = Shape { batch: cache.sequences(), heads: shape.kv_heads, tokens: 0, dim: shape.key_dim };
    let g = Geometry::of(queries.shape(), keys)?;
    options.validate()?;
    g.check_sinks(options)?;
    let options = &AttendOptions { pinned: cache.ledger.rules.pinned(), ..*options };
    let mut out = Vec::with_capacity(g.output(shape.value_dim)?.elements());
    for (sequence, track) in cache.ledger.tracks(layer).enumerate() {
        let g = Geometry { batch: 1, tokens: track.len(&cache.ledger.rules), ..g };
        let own = queries.part(sequence, 0, queries.shape().tokens);
        attend_sequence(cache, layer, g, track, &own, options, &mut out)?;
    }
    Ok(out)
}

/// Scores of every query and token, `[sequences, query_heads, queries, longest]`, neither scaled nor masked; 0 for tokens that a
/// sequence does not hold.
pub(super) fn scores(cache: &CpuQjlCache, layer: usize, queries: &TensorView<'_>) -> Result<Vec<f32>> {
    let shape = cache.ledger.layer(layer)?;
    let keys = Shape { batch: cache.sequences(), heads: shape.kv_heads, tokens: 0, dim: shape.key_dim };
    let g = Geometry::of(queries.shape(), keys)?;
    let lengths: Vec<usize> =
        cache.ledger.tracks(layer).map(|track| track.len(&cache.ledger.rules)).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let mut all = vec![0.0; g.output(longest)?.elements()];
    let rows = g.query_heads * g.queries;
    let per_sequence = all.chunks_exact_mut((rows * longest).max(1));
    for (sequence, (track, all)) in cache.ledger.tracks(layer).zip(per_sequence).enumerate() {
        let g = Geometry { batch: 1, tokens: track.len(&cache.ledger.rules), ..g };
        let own = queries.part(sequence, 0, queries.shape().tokens);
        let scores = with_keys(cache, layer, g.group, track, &own, |rows, keys| score_rows(g, &rows, &keys))?;
        for (to, from) in all.chunks_exact_mut(longest).zip(scores.chunks_exact(g.tokens.max(1))) {
            to.iter_mut().zip(from).for_each(|(to, &from)| *to = from);
        }
    }
    Ok(all)
}

fn attend_sequence(
    cache: &CpuQjlCache,
    layer: usize,
    g: Geometry,
    track: &HostTrack,
    queries: &TensorView<'_>,
    options: &AttendOptions<'_>,
    out: &mut Vec<f32>,
) -> Result<()> {
    let shape = cache.ledger.layer(layer)?;
    let codec = cache.coders.get(layer)?;
    let width = 2 * shape.value_dim;
    let values = joined(track, shape, 1, width, None, |HostCodes { values: codes, .. }| {
        Box::new(PlaneValues { codes, raw: None })
    })?;
    let mut parts = with_keys(cache, layer, g.group, track, queries, |rows, keys| {
        attend_rows(g, &rows, &keys, &values, None, options)
    })?;
    parts.chunks_exact_mut(width).for_each(|parts| finish(codec, parts, out));
    Ok(())
}

/// Calls `with` a sequence's queries and keys, as rows that meet each other.
fn with_keys<T>(
    cache: &CpuQjlCache,
    layer: usize,
    group: usize,
    track: &HostTrack,
    queries: &TensorView<'_>,
    with: impl FnOnce(&dyn Rows, &Joined<'_>) -> Result<T>,
) -> Result<T> {
    let shape = cache.ledger.layer(layer)?;
    let codec = cache.coders.get(layer)?;
    let identity = Tables::identity(shape.kv_heads, shape.key_dim);
    let calibrated = cache.ledger.options.tables.as_ref().and_then(|tables| tables.get(layer));
    let tables = track.extra.tables.as_deref().or(calibrated).unwrap_or(&identity);
    let fields = Fields::new(codec);
    let rows = PlaneQueries { codec, queries, tables, group, fields };
    let keys = joined(
        track,
        shape,
        0,
        fields.width(),
        Some((codec, fields)),
        |HostCodes { keys: codes, .. }| {
            let centres = Centres::new(codec, codes.shape, &codes.positions, &codes.means, tables);
            Box::new(PlaneKeys { codes, centres, fields, raw: None })
        },
    )?;
    with(&rows, &keys)
}

/// Keys (`which` 0) or values (1) of a track.
fn joined<'a>(
    track: &'a HostTrack,
    shape: &LayerShape,
    which: usize,
    width: usize,
    planes: Option<(&'a super::super::super::planes::Codec, Fields)>,
    coded: impl Fn(&'a HostCodes) -> Box<dyn Rows + 'a>,
) -> Result<Joined<'a>> {
    let mut parts = Vec::new();
    for (block, tokens) in track.visible_coded() {
        let at = tokens.start - block.start;
        let rows = PartRows::Coded(coded(&block.codes));
        parts.push(Part { start: tokens.start, end: tokens.end, at, rows });
    }
    for piece in track.visible_raw() {
        let views = piece.rows.views(piece.at, piece.tokens)?;
        let [keys, values] = views;
        let rows = PartRows::Raw(if which == 0 { keys } else { values });
        parts.push(Part { start: piece.start, end: piece.start + piece.tokens, at: 0, rows });
    }
    let [key_dim, value_dim] = shape.dims();
    Ok(Joined { width, dim: if which == 0 { key_dim } else { value_dim }, parts, planes })
}
