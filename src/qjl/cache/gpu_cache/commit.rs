//! Coding what is no longer recent.

use std::ops::Range;
use std::sync::Arc;

use super::super::super::planes::CALIBRATION_TOKENS;
use super::super::super::planes::gpu::{Angles, Ops as PlaneOps, PositionBuffer, TableBuffer};
use super::super::track::{Fill, MakeCodes};
use super::blocks::{MIN_BLOCK, Sized, rows};
use super::codes::{DeviceCodec, DeviceCodes};
use super::{DeviceTrack, QjlCache};
use crate::cache::LayerShape;
use crate::cache::tail::Write;
use crate::error::{Error, Result};
use crate::gpu::block::{Copies, append, largest};
use crate::gpu::{Gpu, Recording};
use crate::tensor::checked_bytes;

struct MakeDeviceCodes<'a> {
    cache: &'a QjlCache,
    codec: &'a DeviceCodec,
    layer: &'a LayerShape,
    copies: &'a mut Copies,
}

impl MakeCodes<DeviceCodes> for MakeDeviceCodes<'_> {
    fn make(&mut self, capacity: usize) -> Result<DeviceCodes> {
        DeviceCodes::new(&self.cache.gpu, self.codec, self.layer, capacity, self.cache.status())
    }

    fn copy(&mut self, codes: &DeviceCodes, capacity: usize) -> Result<DeviceCodes> {
        let copy = self.make(capacity)?;
        for (from, to) in codes.stores().into_iter().zip(copy.stores()) {
            self.copies.add(from, to);
        }
        Ok(copy)
    }
}

/// What a commit makes, until it is known that all of it can be made.
pub(super) struct Commit<'a> {
    cache: &'a QjlCache,
    recording: Recording<'a>,
    copies: Copies,
    /// Of every coder; those that had to grow.
    angles: Vec<Option<Angles>>,
}

/// What a commit leaves: tracks of every sequence, and angles that grew.
pub(super) struct Committed {
    pub(super) sequences: Vec<Vec<DeviceTrack>>,
    pub(super) angles: Vec<Option<Angles>>,
}

pub(super) fn commit(cache: &QjlCache, encoder: &mut wgpu::CommandEncoder, all: bool) -> Result<Committed> {
    let mut commit = Commit {
        cache,
        recording: Recording::new(&cache.gpu),
        copies: Copies::default(),
        angles: cache.devices.iter().map(|_| None).collect(),
    };
    let mut sequences = Vec::with_capacity(cache.ledger.sequences.len());
    for tracks in &cache.ledger.sequences {
        let next = tracks.iter().enumerate().map(|(layer, track)| commit.next(layer, track, all));
        sequences.push(next.collect::<Result<Vec<_>>>()?);
    }
    commit.copies.record(encoder);
    commit.recording.record(encoder);
    Ok(Committed { sequences, angles: commit.angles })
}

impl Commit<'_> {
    /// What becomes of a track.
    fn next(&mut self, layer: usize, track: &DeviceTrack, all: bool) -> Result<DeviceTrack> {
        let cache = self.cache;
        let (rules, shape, learns) =
            (&cache.ledger.rules, *cache.ledger.layer(layer)?, cache.ledger.options.learns());
        let mut next = track.clone();
        if learns && next.extra.tables.is_none() && next.len(rules) >= CALIBRATION_TOKENS {
            next.extra.tables = Some(Arc::new(self.learn(layer, &shape, track)?));
            next.extra.energies = None;
        }
        next.evict(rules);
        let end = next.codable(rules, all);
        if end > next.tail.first() && (!learns || next.extra.tables.is_some()) {
            let codec = cache.device_codec(layer)?;
            let mut make = MakeDeviceCodes { cache, codec, layer: &shape, copies: &mut self.copies };
            let (mut coded, fills) = next.coded(rules, (end, all), &mut make)?;
            for fill in fills {
                self.code(layer, &shape, (&next, &mut coded), &fill)?;
            }
            next = coded;
        }
        self.compact(shape, &mut next, all)?;
        Ok(next)
    }

    fn compact(&mut self, shape: LayerShape, track: &mut DeviceTrack, all: bool) -> Result<()> {
        let gpu = &self.cache.gpu;
        let mut make = Sized::new(gpu, shape, &mut self.copies, [if all { 0 } else { MIN_BLOCK }, 32]);
        let Some((tail, moves)) = track.compacted(all, &mut make)? else { return Ok(()) };
        for part in moves {
            let [keys, values] = part.from.views(part.row, part.tokens);
            for piece in tail.pieces_of(part.start, part.start + part.tokens) {
                let (rows, from) = (Arc::clone(piece.rows), piece.start - part.start);
                let write = Write { rows, at: piece.at, from, count: piece.tokens };
                append(&mut self.recording, gpu, [&keys, &values], 0, &write)?;
            }
        }
        track.tail = tail;
        Ok(())
    }

    /// The positions of these tokens, stored where they do not follow each other, and the angles that they need.
    fn positions(
        &mut self,
        layer: usize,
        track: &DeviceTrack,
        tokens: Range<usize>,
    ) -> Result<PositionBuffer> {
        let (gpu, codec) = (&self.cache.gpu, self.cache.device_codec(layer)?);
        let held = &codec.angles;
        let all = track.runs.of(tokens.clone());
        let last = all.iter().copied().max().unwrap_or(0);
        let slot = self.cache.coders.index(layer).and_then(|index| self.angles.get_mut(index));
        let missing = || Error::range("layer", "one of the cache's", layer);
        let slot = slot.ok_or_else(missing)?;
        if slot.as_ref().unwrap_or(held).end <= u64::from(last) {
            *slot = codec.grown(gpu, last)?;
        }
        let angles = slot.as_ref().unwrap_or(held);
        let stored = if track.runs.are_consecutive(&tokens) {
            None
        } else {
            Some(gpu.upload("positions", bytemuck::cast_slice(&all))?)
        };
        let first = all.first().copied().unwrap_or(0);
        Ok(PositionBuffer::of_store(angles, stored.as_ref(), first, tokens.len()))
    }

    fn learn(&mut self, layer: usize, shape: &LayerShape, track: &DeviceTrack) -> Result<TableBuffer> {
        let tokens = self.cache.ledger.rules.sinks..CALIBRATION_TOKENS;
        let positions = self.positions(layer, track, tokens.clone())?;
        let codec = &self.cache.device_codec(layer)?.buffer;
        let tables = TableBuffer::new(&self.cache.gpu, shape.kv_heads, shape.key_dim)?;
        let energies = match &track.extra.energies {
            Some(energies) => energies.as_ref().clone(),
            None => energies_for(&self.cache.gpu, shape)?,
        };
        let [keys, _] = rows(&mut self.recording, &self.cache.gpu, *shape, &track.tail, tokens)?;
        let ops = PlaneOps::new(&self.cache.gpu);
        ops.calibrate(&mut self.recording, &keys, codec, &positions, &energies, &tables)?;
        Ok(tables)
    }

    /// Codes the rows of `from` into a block of `track`.
    fn code(
        &mut self,
        layer: usize,
        shape: &LayerShape,
        (from, track): (&DeviceTrack, &mut DeviceTrack),
        fill: &Fill,
    ) -> Result<()> {
        let (cache, rules) = (self.cache, &self.cache.ledger.rules);
        let Some(block) = track.coded.get_mut(fill.block) else { return Ok(()) };
        // Positions of the whole block stand beside it where they do not follow each other; a trim may have cut off what broke off.
        let held = block.start..block.end();
        let stored = if from.runs.are_consecutive(&held) {
            None
        } else {
            let mut all = from.runs.of(held);
            all.resize(block.capacity, 0);
            Some(cache.gpu.upload("positions", bytemuck::cast_slice(&all))?)
        };
        if stored.is_some() || block.codes.positions.is_some() {
            block.codes = Arc::new(block.codes.at_positions(stored));
        }
        let (codec, tables) = (cache.device_codec(layer)?, cache.tables(layer, &track.extra));
        let Some(block) = track.coded.get(fill.block) else { return Ok(()) };
        // Rows that raw blocks part are gathered, as many as one binding can show.
        let most = largest(&cache.gpu, *shape) / rules.least * rules.least;
        for part in fill.parts(most.max(rules.least)) {
            let positions = self.positions(layer, from, part.tokens.clone())?;
            let [keys, values] = rows(&mut self.recording, &cache.gpu, *shape, &from.tail, part.tokens)?;
            let centre = tables.map(|tables| (tables, &positions));
            let recording = &mut self.recording;
            block.codes.encode(recording, &cache.gpu, codec, [&keys, &values], centre, part.at)?;
        }
        Ok(())
    }
}

/// Room for the energies of a layer's queries: of each KV head the sums of every channel, and how many.
pub(super) fn energies_for(gpu: &Gpu, shape: &LayerShape) -> Result<wgpu::Buffer> {
    let bytes = checked_bytes("query energies", &[shape.kv_heads, shape.key_dim + 1], 4)?;
    gpu.storage("query energies", bytes as u64)
}
