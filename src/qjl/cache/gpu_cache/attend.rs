//! Attention over what every sequence holds: coded blocks first, then raw rows, all partial results on one scale.

use super::super::super::planes::gpu::{Ops as PlaneOps, PositionBuffer};
use super::super::track::Coded;
use super::QjlCache;
use super::codes::DeviceCodes;
use crate::attention::gpu::{Ops as Exact, Pass, RowKind, Stage, Tiling};
use crate::attention::{AttendOptions, Geometry, Precision};
use crate::cache::Segment;
use crate::error::Result;
use crate::gpu::{KvView, Recording};
use crate::tensor::Shape;

/// A coded block that a pass reads, and the first position of its tokens.
struct CodedPart<'a> {
    block: &'a Coded<DeviceCodes>,
    live: std::ops::Range<usize>,
    position: u32,
}

pub(super) fn attend(
    cache: &QjlCache,
    encoder: &mut wgpu::CommandEncoder,
    layer: usize,
    queries: &KvView,
    options: &AttendOptions<'_>,
    output: &KvView,
) -> Result<()> {
    let shape = *cache.ledger.layer(layer)?;
    let keys = Shape { batch: cache.sequences(), heads: shape.kv_heads, tokens: 0, dim: shape.key_dim };
    let g = Geometry::of(queries.shape(), keys)?;
    output.shape().check_equal("attention output", g.output(shape.value_dim)?)?;
    let (mut coded, mut blocks, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
    // Raw rows in turns: the sinks, and what is recent.
    let mut raw: [(Vec<Segment>, Vec<[KvView; 2]>); 2] = Default::default();
    for (sequence, track) in cache.ledger.tracks(layer).enumerate() {
        lengths.push(track.len(&cache.ledger.rules));
        for (block, tokens) in track.visible_coded() {
            coded.push(Segment { sequence, start: block.start, tokens: block.capacity });
            let live = tokens.start - block.start..tokens.end - block.start;
            blocks.push(CodedPart { block, live, position: track.runs.position(block.start) });
        }
        for (turn, piece) in [0, 1].into_iter().cycle().zip(track.visible_raw()) {
            let [(first, first_rows), (more, more_rows)] = &mut raw;
            let (segments, rows) = if turn == 0 { (first, first_rows) } else { (more, more_rows) };
            segments.push(Segment { sequence, start: piece.start, tokens: piece.tokens });
            rows.push(piece.rows.views(piece.at, piece.tokens));
        }
    }
    let gpu = &cache.gpu;
    let whole = Tiling::rows(g, shape.value_dim);
    let stage = |kind, segments: &[Segment], tiling| {
        Pass::stage(gpu, g, shape.value_dim, &lengths, (kind, segments, tiling), options)
    };
    let tiling = PlaneOps::new(gpu).tiling(&cache.device_codec(layer)?.buffer, g);
    let mut coded = stage(RowKind::Coded, &coded, tiling)?;
    let [(first, first_rows), (more, more_rows)] = raw;
    let (first, more) = (stage(RowKind::Raw, &first, whole)?, stage(RowKind::More, &more, whole)?);
    let mut recording = Recording::new(gpu);
    if output.shape().elements() > 0 {
        // Coded rows last: only their pass waits for the queries to be made ready.
        let rows = first_rows.iter().chain(&more_rows);
        for (pass, [keys, values]) in first.passes.iter().chain(&more.passes).zip(rows) {
            Exact::new(gpu).exact(&mut recording, pass, [queries, keys, values])?;
        }
        attend_coded(cache, &mut recording, layer, g, queries, &mut coded, &blocks, options.precision)?;
        let codec = &cache.device_codec(layer)?.buffer;
        let parts = [&coded.parts, &first.parts, &more.parts];
        PlaneOps::new(gpu).join(&mut recording, parts, codec, options, output)?;
    }
    recording.record(encoder);
    Ok(())
}

#[allow(clippy::too_many_arguments, reason = "attention has this many inputs, each of another kind")]
fn attend_coded(
    cache: &QjlCache,
    recording: &mut Recording<'_>,
    layer: usize,
    g: Geometry,
    queries: &KvView,
    stage: &mut Stage,
    blocks: &[CodedPart<'_>],
    precision: Precision,
) -> Result<()> {
    let (ops, codec) = (PlaneOps::new(&cache.gpu), cache.device_codec(layer)?);
    if stage.passes.is_empty() {
        return Ok(());
    }
    let sketches = project(cache, recording, layer, g, queries)?;
    for (pass, part) in stage.passes.iter_mut().zip(blocks) {
        pass.only(part.live.clone())?;
        let DeviceCodes { keys, values, positions } = part.block.codes.as_ref();
        if positions.is_none() {
            pass.consecutive(part.position);
        }
        let (first, tokens) = (part.position, keys.shape().tokens);
        let positions = PositionBuffer::of_store(&codec.angles, positions.as_ref(), first, tokens);
        let arithmetic = ops.arithmetic(precision);
        ops.attend(recording, pass, &sketches, &codec.buffer, [keys, values], &positions, arithmetic)?;
    }
    Ok(())
}

/// Queries made ready, of every sequence; those of a sequence without tables, and so without codes, stay zeros.
pub(super) fn project(
    cache: &QjlCache,
    recording: &mut Recording<'_>,
    layer: usize,
    g: Geometry,
    queries: &KvView,
) -> Result<wgpu::Buffer> {
    let (ops, codec) = (PlaneOps::new(&cache.gpu), &cache.device_codec(layer)?.buffer);
    let sketches = ops.sketches(codec.codec(), g)?;
    for (sequence, track) in cache.ledger.tracks(layer).enumerate() {
        if track.coded.is_empty() {
            continue;
        }
        let Some(tables) = cache.tables(layer, &track.extra) else { continue };
        let own = queries.part(sequence, 0, queries.shape().tokens);
        let first = sequence * g.query_heads * g.queries;
        ops.project(recording, g, &own, codec, tables, (&sketches, first))?;
    }
    Ok(sketches)
}
