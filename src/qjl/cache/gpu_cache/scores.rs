//! Scores of what every sequence holds, coded and raw.

use super::super::super::planes::gpu::{Ops as PlaneOps, PositionBuffer};
use super::QjlCache;
use super::attend::project;
use super::codes::DeviceCodes;
use crate::attention::Geometry;
use crate::attention::gpu::{Ops as Exact, ScorePlace};
use crate::error::{Error, Result};
use crate::gpu::{KvView, Recording};
use crate::tensor::Shape;

pub(super) fn scores(
    cache: &QjlCache,
    encoder: &mut wgpu::CommandEncoder,
    layer: usize,
    queries: &KvView,
    output: &KvView,
) -> Result<()> {
    let shape = *cache.ledger.layer(layer)?;
    let keys = Shape { batch: cache.sequences(), heads: shape.kv_heads, tokens: 0, dim: shape.key_dim };
    let g = Geometry::of(queries.shape(), keys)?;
    let longest = cache.ledger.tracks(layer).map(|track| track.len(&cache.ledger.rules)).max().unwrap_or(0);
    let pitch = output.shape().dim;
    if pitch < longest {
        return Err(Error::shape("scores", format!("[.., {longest}] or wider"), output.shape()));
    }
    output.check_scores(g.output(pitch)?)?;
    let mut recording = Recording::new(&cache.gpu);
    if output.shape().elements() > 0 {
        record(cache, &mut recording, layer, g, queries, output)?;
    }
    recording.record(encoder);
    Ok(())
}

fn record(
    cache: &QjlCache,
    recording: &mut Recording<'_>,
    layer: usize,
    g: Geometry,
    queries: &KvView,
    output: &KvView,
) -> Result<()> {
    let (gpu, codec) = (&cache.gpu, cache.device_codec(layer)?);
    let sketches = project(cache, recording, layer, g, (0, queries))?;
    let pitch = output.shape().dim;
    for (sequence, track) in cache.ledger.tracks(layer).enumerate() {
        let first_row = sequence * g.query_heads * g.queries;
        for (block, tokens) in track.visible_coded() {
            let live = tokens.start - block.start..tokens.end - block.start;
            let place = ScorePlace { first_row, live, pitch, column: block.start };
            let g = Geometry { batch: 1, tokens: block.capacity, ..g };
            let DeviceCodes { keys, positions, .. } = block.codes.as_ref();
            let first = track.runs.position(block.start);
            let positions = PositionBuffer::of_store(&codec.angles, positions.as_ref(), first, g.tokens);
            let ops = PlaneOps::new(gpu);
            ops.scores(recording, g, &sketches, &codec.buffer, (keys, &positions), &place, output)?;
        }
        for piece in track.visible_raw() {
            let [keys, _] = piece.rows.views(piece.at, piece.tokens);
            let place = ScorePlace { first_row, live: 0..piece.tokens, pitch, column: piece.start };
            let g = Geometry { batch: 1, tokens: piece.tokens, ..g };
            Exact::new(gpu).exact_scores(recording, g, [queries, &keys], &place, output)?;
        }
    }
    Ok(())
}
