//! What QJL keeps on the device.

use std::sync::Arc;

use super::super::planes::gpu::{CodecBuffer, PlaneBuffer, Side, projection_words};
use super::super::planes::{Centring, Codec, PlaneCodes, SegmentCodes, Sketch};
use super::super::{Counts, KeyScale, Projection, QuantizedValues, SketchedKeys, check_projection};
use crate::error::Result;
use crate::gpu::{Gpu, ReadBack};
use crate::tensor::Shape;

/// A projection on the device: the matrix, transposed, or the signs of Hadamard.
#[derive(Clone, Debug)]
pub struct ProjectionBuffer {
    pub(super) projection: Arc<Projection>,
    buffer: wgpu::Buffer,
}

impl ProjectionBuffer {
    pub(super) fn upload(gpu: &Gpu, projection: &Projection) -> Result<Self> {
        let words = projection_words(projection);
        let buffer = gpu.upload("projection", bytemuck::cast_slice(&words))?;
        Ok(Self { projection: Arc::new(projection.clone()), buffer })
    }

    /// The codec of keys that are sketched with this projection and not centred, and of values of so many channels.
    pub(super) fn codec(&self, scale: KeyScale, value_dim: usize) -> Result<CodecBuffer> {
        let codec = codec(&self.projection, scale, value_dim)?;
        Ok(CodecBuffer { codec, rotations: self.buffer.clone() })
    }

    /// Bytes of the buffer.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffer.size()
    }
}

fn codec(projection: &Arc<Projection>, scale: KeyScale, value_dim: usize) -> Result<Codec> {
    let sketch = Sketch { projection: Arc::clone(projection), scale };
    Codec::sketched(sketch, Centring::None, value_dim, None)
}

/// The codec of values alone, whatever the keys.
pub(super) fn values_codec(value_dim: usize) -> Result<Codec> {
    let smallest = Projection::from_matrix(&[1.0], 1, 1)?;
    codec(&Arc::new(smallest), KeyScale::Norm, value_dim)
}

/// Codes on their way to the host.
#[derive(Debug)]
pub struct CodesReadBack([ReadBack; 2]);

fn upload(gpu: &Gpu, codes: &PlaneCodes, side: Side) -> Result<PlaneBuffer> {
    let status = [codes.status.non_finite, codes.status.zero, codes.status.overflow];
    PlaneBuffer::upload(gpu, codes, side, gpu.upload("status", bytemuck::cast_slice(&status))?)
}

fn plane_codes(shape: Shape, codec: &Codec, side: Side, stored: SegmentCodes, status: Counts) -> PlaneCodes {
    let layout = if side == Side::Keys { codec.keys() } else { codec.values() };
    PlaneCodes { segments: vec![stored], status, ..PlaneCodes::new(shape, layout) }
}

/// Sketched keys on the device.
#[derive(Clone, Debug)]
pub struct SketchedKeyBuffers {
    pub(super) key_scale: KeyScale,
    /// Digest of the projection that they were sketched with, so that they meet no other.
    pub(super) digest: u64,
    pub(super) sketch_dim: usize,
    pub(super) codes: PlaneBuffer,
}

impl SketchedKeyBuffers {
    /// Copies sketched keys to the device. `projection` and `key_scale` are what they were sketched with.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) when words and scalars do not fit the shape, as [`Gpu::upload`].
    pub fn upload(
        gpu: &Gpu,
        keys: &SketchedKeys,
        key_scale: KeyScale,
        projection: &Projection,
    ) -> Result<Self> {
        keys.check()?;
        check_projection(keys.shape, keys.sketch_dim, projection)?;
        let codec = codec(&Arc::new(projection.clone()), key_scale, 1)?;
        let stored = SegmentCodes { words: keys.words.clone(), nu: keys.scale.clone() };
        let codes = plane_codes(keys.shape, &codec, Side::Keys, stored, keys.status);
        Ok(Self {
            key_scale,
            digest: projection.digest(),
            sketch_dim: keys.sketch_dim,
            codes: upload(gpu, &codes, Side::Keys)?,
        })
    }

    /// Shape of the keys, `[batch, heads, tokens, head_dim]`.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.codes.shape()
    }

    /// Bytes of the buffer: sign words and scalars, in whole tiles of 32 tokens.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.codes.bytes()
    }

    /// Schedules the read-back of everything stored; [`parse`](Self::parse) makes [`SketchedKeys`] of it.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<CodesReadBack> {
        self.codes.read_back(gpu, encoder).map(CodesReadBack)
    }

    /// The sketched keys on the host.
    ///
    /// # Errors
    /// What the read-backs say.
    pub async fn parse(&self, read_back: CodesReadBack) -> Result<SketchedKeys> {
        let codes = self.codes.parse(read_back.0).await?;
        let (shape, status, sketch_dim) = (codes.shape, codes.status, self.sketch_dim);
        let stored = codes.segments.into_iter().next().unwrap_or_default();
        Ok(SketchedKeys { shape, sketch_dim, words: stored.words, scale: stored.nu, status })
    }
}

/// Coded values on the device.
#[derive(Clone, Debug)]
pub struct QuantizedValueBuffers {
    pub(super) codes: PlaneBuffer,
}

impl QuantizedValueBuffers {
    /// Copies coded values to the device.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) when words and scales do not fit the shape, as [`Gpu::upload`].
    pub fn upload(gpu: &Gpu, values: &QuantizedValues) -> Result<Self> {
        values.check()?;
        let codec = values_codec(values.shape.dim)?;
        let stored = SegmentCodes { words: values.words.clone(), nu: values.scale.clone() };
        let codes = plane_codes(values.shape, &codec, Side::Values, stored, values.status);
        Ok(Self { codes: upload(gpu, &codes, Side::Values)? })
    }

    /// Shape of the values, `[batch, heads, tokens, value_dim]`.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.codes.shape()
    }

    /// Bytes of the buffer: code words and scales, in whole tiles of 32 tokens.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.codes.bytes()
    }

    /// Schedules the read-back of everything stored; [`parse`](Self::parse) makes [`QuantizedValues`] of it.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<CodesReadBack> {
        self.codes.read_back(gpu, encoder).map(CodesReadBack)
    }

    /// The coded values on the host.
    ///
    /// # Errors
    /// What the read-backs say.
    pub async fn parse(&self, read_back: CodesReadBack) -> Result<QuantizedValues> {
        let codes = self.codes.parse(read_back.0).await?;
        let (shape, status) = (codes.shape, codes.status);
        let stored = codes.segments.into_iter().next().unwrap_or_default();
        Ok(QuantizedValues { shape, words: stored.words, scale: stored.nu, status })
    }
}
