//! The recorders of what codes rows: each records the kernel of its name in `shaders/planes/`, or of `shaders/qjl/` for sketches.

use super::super::CodeLayout;
use super::params::{BlockMeansParams, EncodeParams, TileParams};
use super::tiles::TILE;
use super::{CodecBuffer, Ops, PlaneBuffer, PositionBuffer, Side, TableBuffer};
use crate::error::Result;
use crate::gpu::{Dispatch, InputParams, KvView, Recording, ViewUse, Window, index32};
use crate::qjl::gpu::Ops as SketchOps;
use crate::tensor::checked_bytes;

/// Bytes of the counts of odd rows.
const STATUS_BYTES: u64 = 12;
/// Invocations of a workgroup that moves words.
const WORKGROUP: u64 = 128;

/// Rows on their way from their coding to their tiles: where scalars and means stand behind their codes, in words.
struct Rows {
    buffer: wgpu::Buffer,
    scales_at: usize,
    means_at: usize,
    /// Block means of a head.
    blocks: usize,
}

/// How rows are coded, and where to.
pub(in crate::qjl) struct Coding<'a> {
    pub(in crate::qjl) codec: &'a CodecBuffer,
    tables: &'a TableBuffer,
    positions: &'a PositionBuffer,
    /// What takes the codes and, from these words on, scalars and block means.
    pub(in crate::qjl) to: &'a wgpu::Buffer,
    pub(in crate::qjl) scales_at: usize,
    means_at: usize,
    /// Counts of odd rows.
    pub(in crate::qjl) status: &'a wgpu::Buffer,
    /// Where rows go to tiles at once: the token of the store that the first becomes, and tiles of a head of the store.
    tiles: [usize; 2],
}

impl Coding<'_> {
    pub(in crate::qjl) fn params(&self, view: InputParams) -> Result<EncodeParams> {
        let (position, consecutive) = self.positions.consecutive();
        let [first, store_tiles] = self.tiles;
        Ok(EncodeParams {
            view,
            set_heads: self.tables.set_heads(),
            fine_at: self.positions.angles.fine_at,
            scales_at: index32(self.scales_at)?,
            means_at: index32(self.means_at)?,
            block: self.codec.codec.block().unwrap_or(1) as u32,
            position,
            consecutive,
            first: index32(first)?,
            store_tiles: index32(store_tiles)?,
            padding: [0; 3],
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
            Window::whole(self.to),
            Window::whole(self.status),
        ]
    }
}

impl Ops {
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
        let at_once = codec.codec.sketch().is_none()
            && self.make(codec).encodes_tiles(&codes.layout, codes.side == Side::Keys)
            && rows.bind("rows to code", ViewUse::Read, &self.gpu)?.vectors;
        let status = &codes.status;
        if at_once {
            let tiles = [first, codes.tiles().tiles];
            let (to, scales_at) = (&codes.store, codes.scales_at);
            let coding = Coding { codec, tables, positions, to, scales_at, means_at: 0, status, tiles };
            return self.encode_tiles(recording, rows, codes, &coding);
        }
        let coded = self.rows(rows, codec, codes)?;
        let Rows { buffer: to, scales_at, means_at, .. } = &coded;
        let (scales_at, means_at) = (*scales_at, *means_at);
        let coding = Coding { codec, tables, positions, to, scales_at, means_at, status, tiles: [0; 2] };
        if codes.side == Side::Keys {
            self.block_means(recording, rows, codec, &coded)?;
        }
        match (codec.codec.sketch(), codes.side) {
            (None, _) => {
                self.code(recording, rows, (&codes.layout, codes.side == Side::Keys), &coding)?;
            }
            (Some(_), Side::Keys) => SketchOps::new(&self.gpu).quantize(recording, rows, &coding)?,
            (Some(_), Side::Values) => SketchOps::new(&self.gpu).quantize_values(recording, rows, &coding)?,
        }
        self.tile(recording, rows, codec, &coded, codes, first)
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
        let coding = Coding {
            codec,
            tables: &tables,
            positions: &positions,
            to: &buffer,
            scales_at,
            means_at: 0,
            status: &status,
            tiles: [0; 2],
        };
        self.code(recording, rows, (layout, false), &coding)?;
        Ok((buffer, scales_at))
    }

    /// Codes rows into their tiles at once.
    fn encode_tiles(
        &self,
        recording: &mut Recording<'_>,
        rows: &KvView,
        codes: &PlaneBuffer,
        coding: &Coding<'_>,
    ) -> Result<()> {
        let (input, view) = rows.bind_input("rows to code", &self.gpu)?;
        let (shape, [first, _], is_keys) = (rows.shape(), coding.tiles, codes.side == Side::Keys);
        let touched = (first + shape.tokens).div_ceil(TILE) - first / TILE;
        let workgroups = if shape.rows() == 0 { 0 } else { shape.batch * shape.heads * touched };
        recording.add(Dispatch {
            variant: self.make(coding.codec).encode_tiles(&codes.layout, is_keys, rows.dtype()),
            params: coding.params(view)?,
            buffers: &coding.bindings(input),
            workgroups: workgroups as u64,
        })
    }

    /// Codes rotated rows of a layout, as keys are or as values.
    fn code(
        &self,
        recording: &mut Recording<'_>,
        rows: &KvView,
        (layout, is_keys): (&CodeLayout, bool),
        coding: &Coding<'_>,
    ) -> Result<()> {
        let (input, view) = rows.bind_input("rows to code", &self.gpu)?;
        recording.add(Dispatch {
            variant: self.make(coding.codec).encode(layout, is_keys, rows.dtype()),
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
}
