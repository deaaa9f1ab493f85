//! The recorders: each records the kernel of its name in `shaders/planes/`.

use super::super::{Centring, Codec, Tables};
use super::params::{
    AttendParams, BlockMeansParams, CalibrateParams, EncodeParams, ProjectParams, QueryEnergyParams,
    ScoresParams, UnrotateParams,
};
use super::variants::{Make, query_energy_variant, sketch};
use super::{CodecBuffer, Ops, PlaneBuffer, PositionBuffer, Side, TableBuffer};
use crate::attention::gpu::{Pass, partial_stride};
use crate::attention::{AttendOptions, Geometry};
use crate::error::Result;
use crate::gpu::{Dispatch, KvView, Recording, ViewUse, Window, index32};
use crate::rope::Positions;
use crate::tensor::checked_bytes;

/// Tokens of a tile of scores.
const WORKGROUP: usize = 128;

impl Ops {
    fn make<'a>(&self, codec: &'a CodecBuffer) -> Make<'a> {
        Make { codec: &codec.codec, subgroups: self.gpu.caps().shuffle_width() }
    }

    /// Tables that change nothing, and no positions: what values are coded with.
    pub(in crate::qjl) fn plain(
        &self,
        codec: &CodecBuffer,
        heads: usize,
    ) -> Result<(TableBuffer, PositionBuffer)> {
        let dim = codec.codec.values().channels();
        let plain = Codec::new(codec.codec.options().centring(Centring::None), dim, 1, None)?;
        let tables = TableBuffer::upload(&self.gpu, &plain, &Tables::identity(heads, dim))?;
        let nowhere = PositionBuffer::upload(&self.gpu, &plain, Positions::Explicit(&[]), [0, 0])?;
        Ok((tables, nowhere))
    }

    /// Codes rows, the first of which becomes token `first` of the store; whole pages, or all that there are.
    #[allow(clippy::too_many_arguments, reason = "coding has this many inputs, each of another kind")]
    pub(in crate::qjl) fn encode(
        &self,
        recording: &mut Recording<'_>,
        rows: &KvView,
        codec: &CodecBuffer,
        side: Side,
        codes: &PlaneBuffer,
        (tables, positions): (&TableBuffer, &PositionBuffer),
        first: usize,
    ) -> Result<()> {
        let (input, view) = rows.bind_input("rows to code", &self.gpu)?;
        let (position, consecutive) = positions.consecutive();
        recording.add(Dispatch {
            variant: self.make(codec).encode(side.layout(&codec.codec), side == Side::Keys, rows.dtype()),
            params: EncodeParams {
                view,
                set_heads: tables.set_heads(),
                fine_at: positions.angles.fine_at,
                scales_at: index32(codes.scales_at)?,
                means_at: index32(codes.means_at)?,
                block: codec.codec.block().unwrap_or(1) as u32,
                capacity: index32(codes.shape.tokens)?,
                first: index32(first)?,
                position,
                consecutive,
                padding: [0; 3],
            },
            buffers: &[
                input,
                Window::whole(&tables.buffer),
                Window::whole(&codec.rotations),
                Window::whole(&positions.angles.buffer),
                Window::whole(&positions.positions),
                Window::whole(&codes.store),
                Window::whole(&codes.status),
            ],
            workgroups: (rows.shape().rows() as u64).div_ceil(2),
        })
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

    /// Takes the means of keys, the first of which becomes token `first` of the store; whole blocks, or all that there are.
    pub(in crate::qjl) fn block_means(
        &self,
        recording: &mut Recording<'_>,
        keys: &KvView,
        codec: &CodecBuffer,
        codes: &PlaneBuffer,
        first: usize,
    ) -> Result<()> {
        let Some(block) = codec.codec.block() else { return Ok(()) };
        let shape = keys.shape();
        let (input, view) = keys.bind_input("keys", &self.gpu)?;
        recording.add(Dispatch {
            variant: self.make(codec).block_means(keys.dtype()),
            params: BlockMeansParams {
                view,
                sinks: codec.codec.options().sinks,
                means_at: index32(codes.means_at)?,
                block: index32(block)?,
                capacity: index32(codes.shape.tokens.div_ceil(block))?,
                first: index32(first / block)?,
                padding: [0; 3],
            },
            buffers: &[input, Window::whole(&codes.store)],
            workgroups: (shape.batch * shape.heads * shape.tokens.div_ceil(block)) as u64,
        })
    }

    /// Room for so many queries made ready.
    pub(in crate::qjl) fn sketches(&self, codec: &Codec, rows: usize) -> Result<wgpu::Buffer> {
        let bytes = checked_bytes("query sketches", &[rows, sketch(codec)], 4)?;
        self.gpu.storage("query sketches", bytes as u64)
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
        recording.add(Dispatch {
            variant: self.make(codec).project(queries.dtype()),
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
            workgroups: queries.shape().rows() as u64,
        })
    }

    pub(super) fn scores(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        [sketches, store]: [&wgpu::Buffer; 2],
        codec: &CodecBuffer,
        (keys, positions): (&PlaneBuffer, &PositionBuffer),
        output: &KvView,
    ) -> Result<()> {
        let bound = output.bind("scores", ViewUse::Write, &self.gpu)?;
        let pass = Pass::new(&self.gpu, g, 1, None, &AttendOptions::default())?;
        let tiles = g.tokens.div_ceil(WORKGROUP);
        let [offset, ..] = bound.layout;
        recording.add(Dispatch {
            variant: self.make(codec).scores(),
            params: ScoresParams {
                attention: pass.params,
                fine_at: positions.angles.fine_at,
                key_scales_at: index32(keys.scales_at)?,
                means_at: index32(keys.means_at)?,
                block: codec.codec.block().unwrap_or(1) as u32,
                tiles: index32(tiles)?,
                offset,
                padding: [0; 2],
            },
            buffers: &[
                Window::whole(sketches),
                Window::whole(&positions.angles.buffer),
                Window::whole(&positions.positions),
                Window::whole(store),
                bound.window,
            ],
            workgroups: (g.batch * g.query_heads * g.queries * tiles) as u64,
        })
    }

    /// One pass over coded keys and values; the pass says where their positions are consecutive.
    pub(in crate::qjl) fn attend(
        &self,
        recording: &mut Recording<'_>,
        pass: &Pass,
        sketches: &wgpu::Buffer,
        codec: &CodecBuffer,
        [keys, values]: [&PlaneBuffer; 2],
        positions: &PositionBuffer,
    ) -> Result<()> {
        recording.add(Dispatch {
            variant: self.make(codec).attend(),
            params: AttendParams {
                attention: pass.params,
                fine_at: positions.angles.fine_at,
                key_scales_at: index32(keys.scales_at)?,
                means_at: index32(keys.means_at)?,
                value_scales_at: index32(values.scales_at)?,
                block: codec.codec.block().unwrap_or(1) as u32,
                padding: [0; 3],
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

    /// One partial result a query, turned back: of so many query rows, with so many splits of coded rows and in all.
    pub(in crate::qjl) fn unrotate(
        &self,
        recording: &mut Recording<'_>,
        partials: &wgpu::Buffer,
        [rows, coded, splits]: [u32; 3],
        codec: &CodecBuffer,
    ) -> Result<wgpu::Buffer> {
        let stride = partial_stride(codec.codec.values().channels()) as usize;
        let bytes = checked_bytes("partial results", &[rows as usize, stride], 4)?;
        let joined = self.gpu.storage("joined", bytes as u64)?;
        recording.add(Dispatch {
            variant: self.make(codec).unrotate(),
            params: UnrotateParams { rows, splits, coded, padding: 0 },
            buffers: &[Window::whole(partials), Window::whole(&joined), Window::whole(&codec.rotations)],
            workgroups: u64::from(rows),
        })?;
        Ok(joined)
    }
}
