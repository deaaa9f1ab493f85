//! The recorders: each records the kernel of its name in `shaders/planes/`.

use super::super::Codec;
use super::params::{
    AttendParams, BlockMeansParams, CalibrateParams, EncodeParams, ProjectParams, QueryEnergyParams,
    ScoresParams, TileParams,
};
use super::tiles::TILE;
use super::variants::{Make, attend_tokens, query_energy_variant, sketch_bytes};
use super::{CodecBuffer, Ops, PlaneBuffer, PositionBuffer, Side, TableBuffer};
use crate::attention::Geometry;
use crate::attention::gpu::{
    AllParts, AttentionParams, GatherParams, Parts, Pass, ScorePlace, Tiling, joined,
};
use crate::error::Result;
use crate::gpu::{Arithmetic, Dispatch, InputParams, KvView, Recording, ViewUse, Window, index32};
use crate::qjl::gpu::Ops as SketchOps;
use crate::tensor::checked_bytes;

/// Bytes of the counts of odd rows.
const STATUS_BYTES: u64 = 12;
/// Invocations of a workgroup that moves words.
const WORKGROUP: u64 = 128;

/// Rows on their way from their coding to their tiles: where scalars and means stand behind their codes, in words.
pub(in crate::qjl) struct Rows {
    pub(in crate::qjl) buffer: wgpu::Buffer,
    pub(in crate::qjl) scales_at: usize,
    means_at: usize,
    /// Block means of a head.
    blocks: usize,
}

/// How rows are coded, and where to.
pub(in crate::qjl) struct Coding<'a> {
    pub(in crate::qjl) codec: &'a CodecBuffer,
    pub(in crate::qjl) codes: &'a PlaneBuffer,
    tables: &'a TableBuffer,
    positions: &'a PositionBuffer,
    pub(in crate::qjl) rows: Rows,
}

impl Coding<'_> {
    pub(in crate::qjl) fn params(&self, view: InputParams) -> Result<EncodeParams> {
        let (position, consecutive) = self.positions.consecutive();
        Ok(EncodeParams {
            view,
            set_heads: self.tables.set_heads(),
            fine_at: self.positions.angles.fine_at,
            scales_at: index32(self.rows.scales_at)?,
            means_at: index32(self.rows.means_at)?,
            block: self.codec.codec.block().unwrap_or(1) as u32,
            position,
            consecutive,
            padding: 0,
        })
    }

    /// The buffers of a kernel that codes, in the order of its bindings.
    pub(in crate::qjl) fn bindings(&self, input: Window) -> [Window; 7] {
        [
            input,
            Window::whole(&self.tables.buffer),
            Window::whole(&self.codec.rotations),
            Window::whole(&self.positions.angles.buffer),
            Window::whole(&self.positions.positions),
            Window::whole(&self.rows.buffer),
            Window::whole(&self.codes.status),
        ]
    }
}

impl Ops {
    pub(in crate::qjl) fn make<'a>(&self, codec: &'a CodecBuffer) -> Make<'a> {
        Make { codec: &codec.codec, subgroups: self.gpu.caps().shuffle_width() }
    }

    /// Tables that change nothing, and no positions: what rows are coded with that are not centred.
    pub(in crate::qjl) fn plain(&self, heads: usize, dim: usize) -> Result<(TableBuffer, PositionBuffer)> {
        Ok((TableBuffer::plain(&self.gpu, heads, dim)?, PositionBuffer::nowhere(&self.gpu)?))
    }

    /// Codes rows, the first of which becomes token `first` of the store; whole blocks where there are block means, or all
    /// that there are.
    #[allow(clippy::too_many_arguments, reason = "coding has this many inputs, each of another kind")]
    pub(in crate::qjl) fn encode(
        &self,
        recording: &mut Recording<'_>,
        rows: &KvView,
        codec: &CodecBuffer,
        codes: &PlaneBuffer,
        (tables, positions): (&TableBuffer, &PositionBuffer),
        first: usize,
    ) -> Result<()> {
        let rows_of = self.rows(rows, codec, codes)?;
        let coding = Coding { codec, codes, tables, positions, rows: rows_of };
        if codes.side == Side::Keys {
            self.block_means(recording, rows, codec, &coding.rows)?;
        }
        match (codec.codec.sketch(), codes.side) {
            (None, _) => self.code(recording, rows, &coding)?,
            (Some(_), Side::Keys) => SketchOps::new(&self.gpu).quantize(recording, rows, &coding)?,
            (Some(_), Side::Values) => SketchOps::new(&self.gpu).quantize_values(recording, rows, &coding)?,
        }
        self.tile(recording, rows, codec, &coding.rows, codes, first)
    }

    /// Codes rows as values are, and leaves them as they come: codes row after row in words, then, from the word given on,
    /// scalars in f16.
    pub(crate) fn encode_rows(
        &self,
        recording: &mut Recording<'_>,
        rows: &KvView,
        codec: &CodecBuffer,
    ) -> Result<(wgpu::Buffer, usize)> {
        let (shape, layout) = (rows.shape(), codec.codec.values());
        let words: usize = layout.segments().iter().map(super::super::Segment::words).sum();
        let scales_at = shape.rows() * words;
        let bytes = checked_bytes("coded rows", &[scales_at + shape.rows().div_ceil(2)], 4)?;
        let buffer = self.gpu.storage("coded rows", bytes as u64)?;
        let status = self.gpu.storage("status", STATUS_BYTES)?;
        let (tables, positions) = self.plain(1, shape.dim)?;
        let (input, view) = rows.bind_input("rows to code", &self.gpu)?;
        recording.add(Dispatch {
            variant: self.make(codec).encode(layout, false, rows.dtype()),
            params: EncodeParams {
                view,
                set_heads: tables.set_heads(),
                fine_at: positions.angles.fine_at,
                scales_at: index32(scales_at)?,
                means_at: 0,
                block: 1,
                position: 0,
                consecutive: 1,
                padding: 0,
            },
            buffers: &[
                input,
                Window::whole(&tables.buffer),
                Window::whole(&codec.rotations),
                Window::whole(&positions.angles.buffer),
                Window::whole(&positions.positions),
                Window::whole(&buffer),
                Window::whole(&status),
            ],
            workgroups: (shape.rows() as u64).div_ceil(2),
        })?;
        Ok((buffer, scales_at))
    }

    /// Codes rotated rows.
    fn code(&self, recording: &mut Recording<'_>, rows: &KvView, coding: &Coding<'_>) -> Result<()> {
        let (input, view) = rows.bind_input("rows to code", &self.gpu)?;
        let Coding { codec, codes, .. } = coding;
        recording.add(Dispatch {
            variant: self.make(codec).encode(&codes.layout, codes.side == Side::Keys, rows.dtype()),
            params: coding.params(view)?,
            buffers: &coding.bindings(input),
            workgroups: (rows.shape().rows() as u64).div_ceil(2),
        })
    }

    /// Room for coded rows, one after the other.
    fn rows(&self, rows: &KvView, codec: &CodecBuffer, codes: &PlaneBuffer) -> Result<Rows> {
        let (shape, segments) = (rows.shape(), codes.layout.segments());
        let row_words: usize = segments.iter().map(super::super::Segment::words).sum();
        let scalars = segments.iter().filter(|segment| segment.planes > 0).count();
        let blocks = match codec.codec.block().filter(|_| codes.side == Side::Keys) {
            Some(block) => shape.tokens.div_ceil(block),
            None => 0,
        };
        let scales_at = shape.rows() * row_words;
        let means_at = scales_at + (shape.rows() * scalars).div_ceil(2);
        let means = [shape.batch * shape.heads, blocks, shape.dim.div_ceil(2)];
        let bytes = checked_bytes("block means", &means, 4)? + checked_bytes("coded rows", &[means_at], 4)?;
        let buffer = self.gpu.storage("coded rows", bytes as u64)?;
        Ok(Rows { buffer, scales_at, means_at, blocks })
    }

    /// Moves coded rows to their tiles.
    fn tile(
        &self,
        recording: &mut Recording<'_>,
        rows: &KvView,
        codec: &CodecBuffer,
        coded: &Rows,
        codes: &PlaneBuffer,
        first: usize,
    ) -> Result<()> {
        let (shape, tiles) = (rows.shape(), codes.tiles());
        let heads = shape.batch * shape.heads;
        let touched = (first + shape.tokens).div_ceil(TILE) - first / TILE;
        let block = codec.codec.block().unwrap_or(1);
        let words = [
            touched * tiles.tile_words(),
            touched * tiles.scalar_words(),
            coded.blocks * shape.dim.div_ceil(2),
        ];
        let words = heads * words.into_iter().max().unwrap_or(0);
        recording.add(Dispatch {
            variant: self.make(codec).tile(&codes.layout, codes.side == Side::Keys),
            params: TileParams {
                heads: index32(heads)?,
                tokens: index32(shape.tokens)?,
                from_scales_at: index32(coded.scales_at)?,
                from_means_at: index32(coded.means_at)?,
                first: index32(first)?,
                store_tiles: index32(tiles.tiles)?,
                scales_at: index32(codes.scales_at)?,
                means_at: index32(codes.means_at)?,
                blocks: index32(coded.blocks)?,
                first_block: index32(first / block)?,
                store_blocks: index32(codes.shape.tokens.div_ceil(block))?,
                padding: 0,
            },
            buffers: &[Window::whole(&coded.buffer), Window::whole(&codes.store)],
            workgroups: if shape.rows() == 0 { 0 } else { (index32(words)? as u64).div_ceil(WORKGROUP) },
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

    /// Takes the means of blocks of keys.
    fn block_means(
        &self,
        recording: &mut Recording<'_>,
        keys: &KvView,
        codec: &CodecBuffer,
        coded: &Rows,
    ) -> Result<()> {
        let Some(block) = codec.codec.block() else { return Ok(()) };
        let shape = keys.shape();
        let (input, view) = keys.bind_input("keys", &self.gpu)?;
        recording.add(Dispatch {
            variant: self.make(codec).block_means(keys.dtype()),
            params: BlockMeansParams {
                view,
                sinks: codec.codec.options().sinks,
                means_at: index32(coded.means_at)?,
                block: index32(block)?,
                padding: 0,
            },
            buffers: &[input, Window::whole(&coded.buffer)],
            workgroups: (shape.batch * shape.heads * coded.blocks) as u64,
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
