//! Coded blocks on the device, and what codes rows into them.

use super::super::super::planes::gpu::{
    Angles, CodecBuffer, Ops as PlaneOps, PlaneBuffer, PositionBuffer, Side, TableBuffer,
};
use super::super::super::planes::{Codec, Tables};
use crate::cache::LayerShape;
use crate::error::{Error, Result};
use crate::gpu::{Gpu, KvView, Recording};
use crate::tensor::Shape;

/// Positions beyond those asked for that angles are made for, so that they are seldom made anew.
const AHEAD: u32 = 2048;

/// A codec on the device.
#[derive(Debug)]
pub(super) struct DeviceCodec {
    pub(super) buffer: CodecBuffer,
    pub(super) angles: Angles,
}

impl DeviceCodec {
    pub(super) fn upload(gpu: &Gpu, codec: &Codec) -> Result<Self> {
        Ok(Self { buffer: CodecBuffer::upload(gpu, codec)?, angles: Angles::upload(gpu, codec, 0)? })
    }

    /// Angles for positions up to `last`, where there are none yet.
    pub(super) fn grown(&self, gpu: &Gpu, last: u32) -> Result<Option<Angles>> {
        if u64::from(last) < self.angles.end {
            return Ok(None);
        }
        Angles::upload(gpu, self.buffer.codec(), last.saturating_add(AHEAD)).map(Some)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.buffer.bytes() + self.angles.buffer.size()
    }
}

/// Coded keys and values of one sequence and layer, `[1, kv_heads, capacity, dim]`.
#[derive(Debug)]
pub(crate) struct DeviceCodes {
    pub(super) keys: PlaneBuffer,
    pub(super) values: PlaneBuffer,
    /// One for each token, where they do not follow each other.
    pub(super) positions: Option<wgpu::Buffer>,
}

impl DeviceCodes {
    /// A block of zeros, whose odd keys and values are counted in `status`.
    pub(super) fn new(
        gpu: &Gpu,
        codec: &DeviceCodec,
        layer: &LayerShape,
        capacity: usize,
        [key_status, value_status]: [&wgpu::Buffer; 2],
    ) -> Result<Self> {
        let shape = |dim| Shape { batch: 1, heads: layer.kv_heads, tokens: capacity, dim };
        let [keys, values] = layer.dims().map(shape);
        let codec = codec.buffer.codec();
        let means = codec.block().map_or(0, |block| layer.kv_heads * capacity.div_ceil(block));
        Ok(Self {
            keys: PlaneBuffer::counted(gpu, keys, (codec, Side::Keys), means, key_status.clone())?,
            values: PlaneBuffer::counted(gpu, values, (codec, Side::Values), 0, value_status.clone())?,
            positions: None,
        })
    }

    /// The buffers that hold rows, in one order for all blocks of a layer.
    pub(super) const fn stores(&self) -> [&wgpu::Buffer; 2] {
        [&self.keys.store, &self.values.store]
    }

    pub(super) fn bytes(&self) -> u64 {
        let positions = self.positions.as_ref().map_or(0, wgpu::Buffer::size);
        positions + self.stores().iter().map(|store| store.size()).sum::<u64>()
    }

    /// This block with these positions of its tokens.
    pub(super) fn at_positions(&self, positions: Option<wgpu::Buffer>) -> Self {
        Self { keys: self.keys.clone(), values: self.values.clone(), positions }
    }

    /// Codes rows, the first of which becomes token `at`.
    pub(super) fn encode(
        &self,
        recording: &mut Recording<'_>,
        gpu: &Gpu,
        codec: &DeviceCodec,
        [keys, values]: [&KvView; 2],
        centre: Option<(&TableBuffer, &PositionBuffer)>,
        at: usize,
    ) -> Result<()> {
        let missing = || Error::range("tables", "those of the layer", "none");
        let (tables, positions) = centre.ok_or_else(missing)?;
        let ops = PlaneOps::new(gpu);
        ops.encode(recording, keys, &codec.buffer, &self.keys, (tables, positions), at)?;
        let (plain, nowhere) = ops.plain(values.shape().heads, values.shape().dim)?;
        ops.encode(recording, values, &codec.buffer, &self.values, (&plain, &nowhere), at)
    }
}

/// Tables of one layer on the device; those that change nothing where there are none.
pub(super) fn upload_tables(
    gpu: &Gpu,
    codec: &DeviceCodec,
    layer: &LayerShape,
    tables: Option<&Tables>,
) -> Result<TableBuffer> {
    let identity = Tables::identity(layer.kv_heads, layer.key_dim);
    TableBuffer::upload(gpu, codec.buffer.codec(), tables.unwrap_or(&identity))
}
