//! The recorders of what meets coded rows: each records the kernel of its name in `shaders/planes/`.

use super::super::Codec;
use super::params::{AttendParams, CalibrateParams, ProjectParams, QueryEnergyParams, ScoresParams};
use super::variants::{Make, attend_tokens, query_energy_variant, sketch_bytes};
use super::{CodecBuffer, Ops, PlaneBuffer, PositionBuffer, TableBuffer};
use crate::attention::Geometry;
use crate::attention::gpu::{
    AllParts, AttentionParams, GatherParams, Parts, Pass, ScorePlace, Tiling, joined,
};
use crate::error::Result;
use crate::gpu::{Arithmetic, Dispatch, KvView, Recording, ViewUse, Window, index32};

impl Ops {
    pub(in crate::qjl) fn make<'a>(&self, codec: &'a CodecBuffer) -> Make<'a> {
        Make { codec: &codec.codec, subgroups: self.gpu.caps().shuffle_width() }
    }

    /// Makes one sequence's tables of its first keys and their queries' energy.
    pub(in crate::qjl) fn calibrate(
        &self,
        recording: &mut Recording<'_>,
        keys: &KvView,
        codec: &CodecBuffer,
        positions: &PositionBuffer,
        energies: &wgpu::Buffer,
        tables: &TableBuffer,
    ) -> Result<()> {
        let (input, view) = keys.bind_input("keys", &self.gpu)?;
        let (position, consecutive) = positions.consecutive();
        recording.add(Dispatch {
            variant: self.make(codec).calibrate(keys.dtype()),
            params: CalibrateParams {
                view,
                fine_at: positions.angles.fine_at,
                position,
                consecutive,
                padding: 0,
            },
            buffers: &[
                input,
                Window::whole(&positions.angles.buffer),
                Window::whole(&positions.positions),
                Window::whole(energies),
                Window::whole(&tables.buffer),
            ],
            workgroups: keys.shape().heads as u64,
        })
    }

    /// Adds the energy of one sequence's queries, `[1, query_heads, tokens, key_dim]`.
    pub(in crate::qjl) fn query_energy(
        &self,
        recording: &mut Recording<'_>,
        queries: &KvView,
        kv_heads: usize,
        energies: &wgpu::Buffer,
    ) -> Result<()> {
        let (input, view) = queries.bind_input("queries", &self.gpu)?;
        let shape = queries.shape();
        recording.add(Dispatch {
            variant: query_energy_variant(shape.dim, queries.dtype())
                .with_subgroups(self.gpu.caps().shuffle_width()),
            params: QueryEnergyParams {
                view,
                group: index32(shape.heads / kv_heads.max(1))?,
                padding: [0; 3],
            },
            buffers: &[input, Window::whole(energies)],
            workgroups: if shape.tokens == 0 { 0 } else { kv_heads as u64 },
        })
    }

    /// Room for the queries of so many sequences, made ready: zeros, which stand for queries that see nothing.
    pub(in crate::qjl) fn sketches(&self, codec: &Codec, g: Geometry) -> Result<wgpu::Buffer> {
        self.gpu.storage("query sketches", sketch_bytes(codec, g)?)
    }

    /// Makes queries ready; the first becomes row `first` of the sketches.
    pub(in crate::qjl) fn project(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        queries: &KvView,
        codec: &CodecBuffer,
        tables: &TableBuffer,
        (sketches, first): (&wgpu::Buffer, usize),
    ) -> Result<()> {
        let (input, view) = queries.bind_input("queries", &self.gpu)?;
        let (variant, rows_a_workgroup) = match codec.codec.sketch() {
            Some(sketch) => (self.make(codec).sketch_queries(sketch, queries.dtype()), 2),
            None => (self.make(codec).project(queries.dtype()), 1),
        };
        recording.add(Dispatch {
            variant,
            params: ProjectParams {
                view,
                group: index32(g.group)?,
                set_heads: tables.set_heads(),
                first_row: index32(first)?,
                padding: 0,
            },
            buffers: &[
                input,
                Window::whole(&tables.buffer),
                Window::whole(&codec.rotations),
                Window::whole(sketches),
            ],
            workgroups: (queries.shape().rows() as u64).div_ceil(rows_a_workgroup),
        })
    }

    /// Records the scores of one store's coded keys.
    #[allow(clippy::too_many_arguments, reason = "scoring has this many inputs, each of another kind")]
    pub(in crate::qjl) fn scores(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        sketches: &wgpu::Buffer,
        codec: &CodecBuffer,
        (keys, positions): (&PlaneBuffer, &PositionBuffer),
        place: &ScorePlace,
        output: &KvView,
    ) -> Result<()> {
        let bound = output.bind("scores", ViewUse::Write, &self.gpu)?;
        let (tokens, units) = (attend_tokens(&codec.codec), Tiling::fours(g, 1).units() * g.batch);
        let tiles = g.tokens.div_ceil(tokens);
        let [offset, ..] = bound.layout;
        recording.add(Dispatch {
            variant: self.make(codec).scores(),
            params: ScoresParams {
                attention: AttentionParams::of_store(g, place, positions.consecutive())?,
                fine_at: positions.angles.fine_at,
                tile_angles_at: positions.angles.tile_at,
                key_scales_at: index32(keys.scales_at)?,
                means_at: index32(keys.means_at)?,
                block: codec.codec.block().unwrap_or(1) as u32,
                tiles: index32(tiles)?,
                units: index32(units)?,
                offset,
                pitch: index32(place.pitch)?,
                column: index32(place.column)?,
                fast_pairs: positions.angles.fast_pairs,
                padding: 0,
            },
            buffers: &[
                Window::whole(sketches),
                Window::whole(&positions.angles.buffer),
                Window::whole(&positions.positions),
                Window::whole(&keys.store),
                bound.window,
            ],
            workgroups: (units * tiles) as u64,
        })
    }

    /// One pass over coded keys and values; the pass says where their positions are consecutive.
    #[allow(clippy::too_many_arguments, reason = "attention has this many inputs, each of another kind")]
    pub(in crate::qjl) fn attend(
        &self,
        recording: &mut Recording<'_>,
        pass: &Pass,
        sketches: &wgpu::Buffer,
        codec: &CodecBuffer,
        [keys, values]: [&PlaneBuffer; 2],
        positions: &PositionBuffer,
        arithmetic: Arithmetic,
    ) -> Result<()> {
        recording.add(Dispatch {
            variant: self.make(codec).attend(arithmetic),
            params: AttendParams {
                attention: pass.params,
                fine_at: positions.angles.fine_at,
                tile_angles_at: positions.angles.tile_at,
                key_scales_at: index32(keys.scales_at)?,
                means_at: index32(keys.means_at)?,
                value_scales_at: index32(values.scales_at)?,
                block: codec.codec.block().unwrap_or(1) as u32,
                units: index32(pass.units)?,
                fast_pairs: positions.angles.fast_pairs,
            },
            buffers: &[
                Window::whole(sketches),
                Window::whole(&positions.angles.buffer),
                Window::whole(&positions.positions),
                Window::whole(&keys.store),
                Window::whole(&values.store),
                Window::whole(&pass.spans),
                Window::whole(&pass.partials),
            ],
            workgroups: pass.workgroups,
        })
    }

    /// One partial result for each of so many query rows, that of coded values turned back.
    pub(in crate::qjl) fn unrotate(
        &self,
        recording: &mut Recording<'_>,
        parts: AllParts<'_>,
        rows: usize,
        codec: &CodecBuffer,
    ) -> Result<Parts> {
        let (joined, [coded, raw, more]) = (joined(&self.gpu, rows, codec.codec.value_dim())?, parts);
        recording.add(Dispatch {
            variant: self.make(codec).unrotate(),
            params: GatherParams::new(rows, parts)?,
            buffers: &[&coded.partials, &raw.partials, &codec.rotations, &more.partials, &joined.partials]
                .map(Window::whole),
            workgroups: rows as u64,
        })?;
        Ok(joined)
    }
}
