//! Coded blocks on the device, and what codes rows into them.

use super::super::super::KeyScale;
use super::super::super::gpu::{
    Ops as SketchOps, ProjectionBuffer, QuantizedValueBuffers, SketchedKeyBuffers,
};
use super::super::super::planes::Tables;
use super::super::super::planes::gpu::{
    Angles, CodecBuffer, Ops as PlaneOps, PlaneBuffer, PositionBuffer, Side, TableBuffer,
};
use super::super::coders::Coder;
use crate::cache::LayerShape;
use crate::error::{Error, Result};
use crate::gpu::{Gpu, KvView, Recording};
use crate::tensor::Shape;

/// Positions beyond those asked for that angles are made for, so that they are seldom made anew.
const AHEAD: u32 = 2048;

/// A coder on the device.
#[derive(Debug)]
pub(super) enum DeviceCoder {
    Planes { codec: CodecBuffer, angles: Angles },
    Sketch { projection: ProjectionBuffer, scale: KeyScale },
}

impl DeviceCoder {
    pub(super) fn upload(gpu: &Gpu, coder: &Coder) -> Result<Self> {
        Ok(match coder {
            Coder::Planes(codec) => Self::Planes {
                codec: PlaneOps::new(gpu).upload_codec(codec)?,
                angles: Angles::upload(gpu, codec, 0)?,
            },
            Coder::Sketch { projection, scale } => {
                Self::Sketch { projection: SketchOps::new(gpu).upload_projection(projection)?, scale: *scale }
            }
        })
    }

    /// Angles for positions up to `last`, where there are none yet.
    pub(super) fn grown(&self, gpu: &Gpu, last: u32) -> Result<Option<Angles>> {
        match self {
            Self::Planes { codec, angles } if u64::from(last) >= angles.end => {
                Angles::upload(gpu, codec.codec(), last.saturating_add(AHEAD)).map(Some)
            }
            _ => Ok(None),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Planes { codec, angles } => codec.bytes() + angles.buffer.size(),
            Self::Sketch { projection, .. } => projection.bytes(),
        }
    }
}

/// Coded keys and values of one sequence and layer, `[1, kv_heads, capacity, dim]`.
#[derive(Debug)]
pub(crate) enum DeviceCodes {
    Planes {
        keys: PlaneBuffer,
        values: PlaneBuffer,
        /// One for each token, where they do not follow each other.
        positions: Option<wgpu::Buffer>,
    },
    Sketch {
        keys: SketchedKeyBuffers,
        values: QuantizedValueBuffers,
    },
}

impl DeviceCodes {
    /// A block of zeros, whose odd keys and values are counted in `status`.
    pub(super) fn new(
        gpu: &Gpu,
        coder: &DeviceCoder,
        layer: &LayerShape,
        capacity: usize,
        [key_status, value_status]: [&wgpu::Buffer; 2],
    ) -> Result<Self> {
        let shape = |dim| Shape { batch: 1, heads: layer.kv_heads, tokens: capacity, dim };
        let [keys, values] = layer.dims().map(shape);
        Ok(match coder {
            DeviceCoder::Planes { codec, .. } => {
                let codec = codec.codec();
                let means = codec.block().map_or(0, |block| layer.kv_heads * capacity.div_ceil(block));
                Self::Planes {
                    keys: PlaneBuffer::counted(gpu, keys, (codec, Side::Keys), means, key_status.clone())?,
                    values: PlaneBuffer::counted(
                        gpu,
                        values,
                        (codec, Side::Values),
                        0,
                        value_status.clone(),
                    )?,
                    positions: None,
                }
            }
            DeviceCoder::Sketch { projection, scale } => Self::Sketch {
                keys: SketchedKeyBuffers::counted(gpu, keys, projection, *scale, key_status.clone())?,
                values: QuantizedValueBuffers::counted(gpu, values, value_status.clone())?,
            },
        })
    }

    /// The buffers that hold rows, in one order for all blocks of a layer.
    pub(super) fn stores(&self) -> Vec<&wgpu::Buffer> {
        match self {
            Self::Planes { keys, values, .. } => vec![&keys.store, &values.store],
            Self::Sketch { keys, values } => [keys.codes.stores(), values.codes.stores()].concat(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        let positions = match self {
            Self::Planes { positions: Some(positions), .. } => positions.size(),
            _ => 0,
        };
        positions + self.stores().iter().map(|store| store.size()).sum::<u64>()
    }

    /// This block with these positions of its tokens.
    pub(super) fn at_positions(&self, positions: Option<wgpu::Buffer>) -> Self {
        match self {
            Self::Planes { keys, values, .. } => {
                Self::Planes { keys: keys.clone(), values: values.clone(), positions }
            }
            Self::Sketch { keys, values } => Self::Sketch { keys: keys.clone(), values: values.clone() },
        }
    }

    /// Codes rows, the first of which becomes token `at`.
    pub(super) fn encode(
        &self,
        recording: &mut Recording<'_>,
        gpu: &Gpu,
        coder: &DeviceCoder,
        [keys, values]: [&KvView; 2],
        centre: Option<(&TableBuffer, &PositionBuffer)>,
        at: usize,
    ) -> Result<()> {
        match (self, coder) {
            (Self::Planes { keys: to, values: to_values, .. }, DeviceCoder::Planes { codec, .. }) => {
                let missing = || Error::range("tables", "those of the layer", "none");
                let (tables, positions) = centre.ok_or_else(missing)?;
                let ops = PlaneOps::new(gpu);
                ops.encode(recording, keys, codec, to, (tables, positions), at)?;
                let (plain, nowhere) = ops.plain(codec, values.shape().heads)?;
                ops.encode(recording, values, codec, to_values, (&plain, &nowhere), at)
            }
            (Self::Sketch { keys: to, values: to_values }, DeviceCoder::Sketch { projection, .. }) => {
                let ops = SketchOps::new(gpu);
                ops.quantize(recording, keys, projection, to, at)?;
                ops.quantize_values(recording, values, to_values, at)
            }
            _ => Err(Error::range("coder", "the one that the block was made with", "another")),
        }
    }
}

/// Tables of one layer on the device; those that change nothing where there are none.
pub(super) fn upload_tables(
    gpu: &Gpu,
    coder: &DeviceCoder,
    layer: &LayerShape,
    tables: Option<&Tables>,
) -> Result<Option<TableBuffer>> {
    let DeviceCoder::Planes { codec, .. } = coder else { return Ok(None) };
    let identity = Tables::identity(layer.kv_heads, layer.key_dim);
    TableBuffer::upload(gpu, codec.codec(), tables.unwrap_or(&identity)).map(Some)
}
