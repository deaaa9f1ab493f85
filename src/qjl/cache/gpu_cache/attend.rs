//! Attention over what every sequence holds: coded blocks first, then raw rows, all partial results on one scale.

use std::ops::Range;

use super::super::super::planes::gpu::{Ops as PlaneOps, PositionBuffer, sketch_bytes};
use super::super::track::Coded;
use super::QjlCache;
use super::codes::DeviceCodes;
use crate::attention::gpu::{Ops as Exact, Pass, RowKind, Stage, Tiling};
use crate::attention::{AttendOptions, Geometry};
use crate::cache::Segment;
use crate::error::Result;
use crate::gpu::{KvView, Recording};
use crate::tensor::Shape;

/// Bytes of queries made ready, and of what is found for them among rows of one kind, above which a call is cut into smaller ones:
/// half of what every device can bind at once.
const MOST_BYTES: u64 = 64 << 20;

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
    options.validate()?;
    g.check_sinks(options)?;
    let mut recording = Recording::new(&cache.gpu);
    if output.shape().elements() > 0 {
        let call = Call { cache, layer, g, value_dim: shape.value_dim, queries, options, output };
        call.record(&mut recording, &Cut { sequences: 0..g.batch, queries: 0..g.queries })?;
    }
    recording.record(encoder);
    Ok(())
}

/// Some queries of some sequences.
struct Cut {
    sequences: Range<usize>,
    queries: Range<usize>,
}

impl Cut {
    /// Its sequences one by one, or the halves of its queries; nothing where it is one query.
    fn parts(&self) -> Vec<Self> {
        if self.sequences.len() > 1 {
            let one = |sequence| Self { sequences: sequence..sequence + 1, queries: self.queries.clone() };
            return self.sequences.clone().map(one).collect();
        }
        let Range { start, end } = self.queries;
        let middle = start + (end - start) / 2;
        if middle == start {
            return Vec::new();
        }
        let half = |queries| Self { sequences: self.sequences.clone(), queries };
        vec![half(start..middle), half(middle..end)]
    }
}

/// A coded block that a pass reads, and the first position of its tokens.
struct CodedPart<'a> {
    block: &'a Coded<DeviceCodes>,
    live: Range<usize>,
    position: u32,
}

/// What some sequences hold of a layer.
#[derive(Default)]
struct Held<'a> {
    lengths: Vec<usize>,
    coded: Vec<Segment>,
    blocks: Vec<CodedPart<'a>>,
    /// Raw rows in turns: the sinks, and what is recent.
    raw: [(Vec<Segment>, Vec<[KvView; 2]>); 2],
}

impl<'a> Held<'a> {
    fn of(cache: &'a QjlCache, layer: usize, sequences: &Range<usize>) -> Self {
        let mut held = Self::default();
        let tracks = cache.ledger.tracks(layer).skip(sequences.start).take(sequences.len());
        for (sequence, track) in tracks.enumerate() {
            held.lengths.push(track.len(&cache.ledger.rules));
            for (block, tokens) in track.visible_coded() {
                held.coded.push(Segment { sequence, start: block.start, tokens: block.capacity });
                let live = tokens.start - block.start..tokens.end - block.start;
                held.blocks.push(CodedPart { block, live, position: track.runs.position(block.start) });
            }
            for (turn, piece) in [0, 1].into_iter().cycle().zip(track.visible_raw()) {
                let [sinks, recent] = &mut held.raw;
                let (segments, rows) = if turn == 0 { sinks } else { recent };
                segments.push(Segment { sequence, start: piece.start, tokens: piece.tokens });
                rows.push(piece.rows.views(piece.at, piece.tokens));
            }
        }
        held
    }
}

/// Attention of one layer.
struct Call<'a> {
    cache: &'a QjlCache,
    layer: usize,
    g: Geometry,
    value_dim: usize,
    queries: &'a KvView,
    options: &'a AttendOptions<'a>,
    output: &'a KvView,
}

impl Call<'_> {
    /// Records some of the call, in parts where one would keep too much meanwhile. They share their room, one after the other.
    fn record(&self, recording: &mut Recording<'_>, cut: &Cut) -> Result<()> {
        let held = Held::of(self.cache, self.layer, &cut.sequences);
        let g = Geometry { batch: cut.sequences.len(), queries: cut.queries.len(), ..self.g };
        let most = MOST_BYTES.min(self.cache.gpu.caps().largest_binding());
        if self.bytes(g, &held)? > most && self.output.can_be_cut() {
            let parts = cut.parts();
            if !parts.is_empty() {
                return parts.iter().try_for_each(|part| self.record(recording, part));
            }
        }
        self.attend(recording, g, cut, &held)
    }

    /// How passes over coded and over raw rows are divided.
    fn tilings(&self, g: Geometry) -> Result<[Tiling; 2]> {
        let codec = &self.cache.device_codec(self.layer)?.buffer;
        Ok([PlaneOps::new(&self.cache.gpu).tiling(codec, g), Tiling::rows(g, self.value_dim)])
    }

    /// Bytes of the largest buffer that such a part of the call keeps.
    fn bytes(&self, g: Geometry, held: &Held<'_>) -> Result<u64> {
        let [codes, rows] = self.tilings(g)?;
        let stage = |segments: &[Segment], tiling| Stage::bytes(g, self.value_dim, segments, tiling);
        let [(sinks, _), (recent, _)] = &held.raw;
        let partials = [stage(&held.coded, codes)?, stage(sinks, rows)?, stage(recent, rows)?];
        let codec = self.cache.device_codec(self.layer)?.buffer.codec();
        let sketches = if held.coded.is_empty() { 0 } else { sketch_bytes(codec, g)? };
        Ok(partials.into_iter().fold(sketches, u64::max))
    }

    fn attend(&self, recording: &mut Recording<'_>, g: Geometry, cut: &Cut, held: &Held<'_>) -> Result<()> {
        let (gpu, [codes, rows]) = (&self.cache.gpu, self.tilings(g)?);
        let behind = self.g.queries - cut.queries.end;
        let stage = |kind, segments: &[Segment], tiling| -> Result<Stage> {
            let of = (kind, segments, tiling);
            let mut stage = Pass::stage(gpu, g, self.value_dim, &held.lengths, of, self.options)?;
            stage.passes.iter_mut().try_for_each(|pass| pass.before(behind))?;
            Ok(stage)
        };
        let mut coded = stage(RowKind::Coded, &held.coded, codes)?;
        let pinned = self.cache.ledger.rules.pinned();
        let raw = |kind, segments: &[Segment]| -> Result<Stage> {
            let mut stage = stage(kind, segments, rows)?;
            let each = stage.passes.iter_mut().zip(segments);
            each.filter(|(_, segment)| segment.start < pinned).for_each(|(pass, _)| pass.pinned());
            Ok(stage)
        };
        let [(sinks, sink_rows), (recent, recent_rows)] = &held.raw;
        let (sinks, recent) = (raw(RowKind::Raw, sinks)?, raw(RowKind::More, recent)?);
        let queries = self.queries.cut(cut.sequences.clone(), cut.queries.clone());
        let raw = sinks.passes.iter().zip(sink_rows).chain(recent.passes.iter().zip(recent_rows));
        for (pass, [keys, values]) in raw {
            Exact::new(gpu).exact(recording, pass, [&queries, keys, values])?;
        }
        // Coded rows last: only their pass waits for the queries to be made ready.
        self.attend_coded(recording, g, (cut, &queries), &mut coded, &held.blocks)?;
        let codec = &self.cache.device_codec(self.layer)?.buffer;
        let output = self.output.cut(cut.sequences.clone(), cut.queries.clone());
        let parts = [&coded.parts, &sinks.parts, &recent.parts];
        PlaneOps::new(gpu).join(recording, parts, codec, self.options, &output)
    }

    fn attend_coded(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        (cut, queries): (&Cut, &KvView),
        stage: &mut Stage,
        blocks: &[CodedPart<'_>],
    ) -> Result<()> {
        if stage.passes.is_empty() {
            return Ok(());
        }
        let (cache, ops) = (self.cache, PlaneOps::new(&self.cache.gpu));
        let codec = cache.device_codec(self.layer)?;
        let sketches = project(cache, recording, self.layer, g, (cut.sequences.start, queries))?;
        for (pass, part) in stage.passes.iter_mut().zip(blocks) {
            pass.only(part.live.clone())?;
            let DeviceCodes { keys, values, positions } = part.block.codes.as_ref();
            if positions.is_none() {
                pass.consecutive(part.position);
            }
            let (first, tokens) = (part.position, keys.shape().tokens);
            let positions = PositionBuffer::of_store(&codec.angles, positions.as_ref(), first, tokens);
            let arithmetic = ops.arithmetic(self.options.precision);
            ops.attend(recording, pass, &sketches, &codec.buffer, [keys, values], &positions, arithmetic)?;
        }
        Ok(())
    }
}

/// Queries made ready, of the sequences from `first` on; those of a sequence without tables, and so without codes, stay zeros.
pub(super) fn project(
    cache: &QjlCache,
    recording: &mut Recording<'_>,
    layer: usize,
    g: Geometry,
    (first, queries): (usize, &KvView),
) -> Result<wgpu::Buffer> {
    let (ops, codec) = (PlaneOps::new(&cache.gpu), &cache.device_codec(layer)?.buffer);
    let sketches = ops.sketches(codec.codec(), g)?;
    for (sequence, track) in cache.ledger.tracks(layer).skip(first).take(g.batch).enumerate() {
        if track.coded.is_empty() {
            continue;
        }
        let Some(tables) = cache.tables(layer, &track.extra) else { continue };
        let own = queries.part(sequence, 0, queries.shape().tokens);
        let row = sequence * g.query_heads * g.queries;
        ops.project(recording, g, &own, codec, tables, (&sketches, row))?;
    }
    Ok(sketches)
}
