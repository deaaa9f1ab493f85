//! The recorders: each records the kernel of its name in `shaders/planes/`.

use super::super::{Centring, CodeLayout, Codec, Tables};
use super::params::{
    AttendParams, BlockMeansParams, EncodeParams, ProjectParams, ScoresParams, UnrotateParams,
};
use super::variants::{Make, sketch};
use super::{CodecBuffer, Ops, PlaneBuffer, PositionBuffer, Stored, TableBuffer};
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

    pub(super) fn encode(
        &self,
        recording: &mut Recording<'_>,
        rows: &KvView,
        codec: &CodecBuffer,
        layout: &CodeLayout,
        codes: &PlaneBuffer,
        centre: Option<(&TableBuffer, &PositionBuffer)>,
    ) -> Result<()> {
        let (input, view) = rows.bind_input("rows to code", &self.gpu)?;
        // Values have no tables: one that changes nothing stands in for every head.
        let (identity, nowhere);
        let (tables, positions) = match centre {
            Some((tables, positions)) => (tables, positions),
            None => {
                let plain =
                    Codec::new(codec.codec.options().centring(Centring::None), layout.channels(), 1, None)?;
                let tables = Tables::identity(rows.shape().heads, layout.channels());
                identity = TableBuffer::upload(&self.gpu, &plain, &tables)?;
                nowhere = PositionBuffer::upload(&self.gpu, &plain, Positions::Explicit(&[]), [0, 0])?;
                (&identity, &nowhere)
            }
        };
        recording.add(Dispatch {
            variant: self.make(codec).encode(layout, centre.is_some(), rows.dtype()),
            params: EncodeParams {
                view,
                set_heads: tables.set_heads(),
                fine_at: positions.fine_at,
                scales_at: index32(codes.scales_at)?,
                means_at: index32(codes.means_at)?,
                block: codec.codec.block().unwrap_or(1) as u32,
                padding: [0; 3],
            },
            buffers: &[
                input,
                Window::whole(&tables.buffer),
                Window::whole(&codec.rotations),
                Window::whole(&positions.angles),
                Window::whole(&positions.positions),
                Window::whole(&codes.store),
                Window::whole(&codes.status),
            ],
            workgroups: (rows.shape().rows() as u64).div_ceil(2),
        })
    }

    pub(super) fn block_means(
        &self,
        recording: &mut Recording<'_>,
        keys: &KvView,
        codec: &CodecBuffer,
        codes: &PlaneBuffer,
        means: usize,
    ) -> Result<()> {
        let Some(block) = codec.codec.block() else { return Ok(()) };
        let (input, view) = keys.bind_input("keys", &self.gpu)?;
        recording.add(Dispatch {
            variant: self.make(codec).block_means(keys.dtype()),
            params: BlockMeansParams {
                view,
                sinks: codec.codec.options().sinks,
                means_at: index32(codes.means_at)?,
                block: index32(block)?,
                padding: 0,
            },
            buffers: &[input, Window::whole(&codes.store)],
            workgroups: means as u64,
        })
    }

    pub(super) fn project(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        queries: &KvView,
        codec: &CodecBuffer,
        tables: &TableBuffer,
    ) -> Result<wgpu::Buffer> {
        let rows = queries.shape().rows();
        let bytes = checked_bytes("query sketches", &[rows, sketch(&codec.codec)], 4)?;
        let sketches = self.gpu.storage("query sketches", bytes as u64)?;
        let (input, view) = queries.bind_input("queries", &self.gpu)?;
        recording.add(Dispatch {
            variant: self.make(codec).project(queries.dtype()),
            params: ProjectParams {
                view,
                group: index32(g.group)?,
                set_heads: tables.set_heads(),
                padding: [0; 2],
            },
            buffers: &[
                input,
                Window::whole(&tables.buffer),
                Window::whole(&codec.rotations),
                Window::whole(&sketches),
            ],
            workgroups: rows as u64,
        })?;
        Ok(sketches)
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
                fine_at: positions.fine_at,
                key_scales_at: index32(keys.scales_at)?,
                means_at: index32(keys.means_at)?,
                block: codec.codec.block().unwrap_or(1) as u32,
                tiles: index32(tiles)?,
                offset,
                padding: [0; 2],
            },
            buffers: &[
                Window::whole(sketches),
                Window::whole(&positions.angles),
                Window::whole(&positions.positions),
                Window::whole(store),
                bound.window,
            ],
            workgroups: (g.batch * g.query_heads * g.queries * tiles) as u64,
        })
    }

    pub(super) fn attend(
        &self,
        recording: &mut Recording<'_>,
        pass: &Pass,
        sketches: &wgpu::Buffer,
        codec: &CodecBuffer,
        stored: &Stored<'_>,
    ) -> Result<()> {
        let (keys, values, positions) = (stored.key_codes, stored.value_codes, stored.positions);
        recording.add(Dispatch {
            variant: self.make(codec).attend(),
            params: AttendParams {
                attention: pass.params,
                fine_at: positions.fine_at,
                key_scales_at: index32(keys.scales_at)?,
                means_at: index32(keys.means_at)?,
                value_scales_at: index32(values.scales_at)?,
                block: codec.codec.block().unwrap_or(1) as u32,
                padding: [0; 3],
            },
            buffers: &[
                Window::whole(sketches),
                Window::whole(&positions.angles),
                Window::whole(&positions.positions),
                Window::whole(&keys.store),
                Window::whole(&values.store),
                Window::whole(&pass.spans),
                Window::whole(&pass.partials),
            ],
            workgroups: pass.workgroups,
        })
    }

    /// One partial result a query, turned back.
    pub(super) fn unrotate(
        &self,
        recording: &mut Recording<'_>,
        coded: &Pass,
        codec: &CodecBuffer,
    ) -> Result<wgpu::Buffer> {
        let (rows, splits, all_splits) = coded.splits();
        let stride = partial_stride(codec.codec.values().channels()) as usize;
        let bytes = checked_bytes("partial results", &[rows as usize, stride], 4)?;
        let joined = self.gpu.storage("joined", bytes as u64)?;
        recording.add(Dispatch {
            variant: self.make(codec).unrotate(),
            params: UnrotateParams { rows, splits: all_splits, coded: splits, padding: 0 },
            buffers: &[
                Window::whole(&coded.partials),
                Window::whole(&joined),
                Window::whole(&codec.rotations),
            ],
            workgroups: u64::from(rows),
        })?;
        Ok(joined)
    }
}
