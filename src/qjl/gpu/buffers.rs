//! What QJL keeps on the device.

use half::f16;

use super::super::{
    Counts, KeyScale, Projection, ProjectionKind, QuantizedValues, SketchedKeys, check_projection,
};
use crate::error::Result;
use crate::gpu::{Gpu, ReadBack, words};
use crate::tensor::{Shape, checked_bytes};

/// A projection on the device: the matrix, transposed, or the signs of Hadamard.
#[derive(Clone, Debug)]
pub struct ProjectionBuffer {
    pub(super) kind: ProjectionKind,
    pub(super) head_dim: usize,
    pub(super) sketch_dim: usize,
    pub(super) factor: f32,
    /// [`Projection::digest`]: what sketches made with it carry, so that none meets another.
    pub(super) digest: u64,
    pub(super) buffer: wgpu::Buffer,
}

impl ProjectionBuffer {
    pub(super) fn upload(gpu: &Gpu, projection: &Projection) -> Result<Self> {
        let (rows, columns) = (projection.sketch_dim(), projection.head_dim());
        let words: Vec<u32> = match (projection.matrix(), projection.signs()) {
            (Some(matrix), _) => {
                let column = |c: usize| matrix.iter().skip(c).step_by(columns).map(|x| x.to_bits());
                (0..columns).flat_map(column).collect()
            }
            (None, signs) => signs.unwrap_or_default().to_vec(),
        };
        let buffer = gpu.upload("projection", bytemuck::cast_slice(&words))?;
        let (kind, factor, digest) = (projection.kind(), projection.factor(), projection.digest());
        Ok(Self { kind, head_dim: columns, sketch_dim: rows, factor, digest, buffer })
    }

    /// Bytes of the buffer.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffer.size()
    }
}

/// Codes of a tensor on the device: words and f16 scales, two to a word.
#[derive(Clone, Debug)]
pub(in crate::qjl) struct Codes {
    pub(super) words: wgpu::Buffer,
    pub(super) scales: wgpu::Buffer,
    pub(super) status: wgpu::Buffer,
}

impl Codes {
    pub(super) fn new(gpu: &Gpu, rows: usize, words_per_row: usize) -> Result<Self> {
        Self::counted(gpu, rows, words_per_row, gpu.storage("status", 12)?)
    }

    /// Room for rows that are counted in `status`, 12 bytes.
    fn counted(gpu: &Gpu, rows: usize, words_per_row: usize, status: wgpu::Buffer) -> Result<Self> {
        Ok(Self {
            words: gpu.storage("codes", checked_bytes("codes", &[rows, words_per_row], 4)? as u64)?,
            scales: gpu.storage("scales", (rows.div_ceil(2) * 4) as u64)?,
            status,
        })
    }

    /// The buffers of codes and scales.
    pub(in crate::qjl) fn stores(&self) -> [&wgpu::Buffer; 2] {
        [&self.words, &self.scales]
    }

    fn upload(gpu: &Gpu, words: &[u32], scales: &[f16], status: Counts) -> Result<Self> {
        let status = [status.non_finite, status.zero, status.overflow];
        Self::uploaded(gpu, words, scales, gpu.upload("status", bytemuck::cast_slice(&status))?)
    }

    /// Codes whose status is counted elsewhere.
    fn uploaded(gpu: &Gpu, words: &[u32], scales: &[f16], status: wgpu::Buffer) -> Result<Self> {
        Ok(Self {
            words: gpu.upload("codes", bytemuck::cast_slice(words))?,
            scales: gpu.upload("scales", bytemuck::cast_slice(scales))?,
            status,
        })
    }

    fn bytes(&self) -> u64 {
        self.words.size() + self.scales.size()
    }

    fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<CodesReadBack> {
        let [words, scales, status] =
            [&self.words, &self.scales, &self.status].map(|buffer| ReadBack::prepare(gpu, &[buffer]));
        let (words, scales, status) = (words?, scales?, status?);
        Ok(CodesReadBack {
            words: words.record(encoder),
            scales: scales.record(encoder),
            status: status.record(encoder),
        })
    }
}

/// Codes on their way to the host.
#[derive(Debug)]
pub struct CodesReadBack {
    words: ReadBack,
    scales: ReadBack,
    status: ReadBack,
}

impl CodesReadBack {
    async fn parse(self, rows: usize) -> Result<(Vec<u32>, Vec<f16>, Counts)> {
        let (codes, scales) = (words(&self.words.await?), self.scales.await?);
        let scales =
            scales.as_chunks::<2>().0.iter().take(rows).map(|&half| f16::from_le_bytes(half)).collect();
        let status = words(&self.status.await?);
        let at = |index: usize| status.get(index).copied().unwrap_or_default();
        Ok((codes, scales, Counts { non_finite: at(0), zero: at(1), overflow: at(2) }))
    }
}

/// Sketched keys on the device.
#[derive(Clone, Debug)]
pub struct SketchedKeyBuffers {
    pub(super) shape: Shape,
    pub(super) sketch_dim: usize,
    pub(super) key_scale: KeyScale,
    /// Digest of the projection that they were sketched with.
    pub(super) digest: u64,
    pub(in crate::qjl) codes: Codes,
}

impl SketchedKeyBuffers {
    /// Copies sketched keys to the device; new ones are counted in `status`, 12 bytes.
    pub(in crate::qjl) fn uploaded(
        gpu: &Gpu,
        keys: &SketchedKeys,
        projection: &ProjectionBuffer,
        key_scale: KeyScale,
        status: wgpu::Buffer,
    ) -> Result<Self> {
        let codes = Codes::uploaded(gpu, &keys.words, &keys.scale, status)?;
        let (sketch_dim, digest) = (keys.sketch_dim, projection.digest);
        Ok(Self { shape: keys.shape, sketch_dim, key_scale, digest, codes })
    }

    /// Room for keys that are counted in `status`, 12 bytes.
    pub(in crate::qjl) fn counted(
        gpu: &Gpu,
        shape: Shape,
        projection: &ProjectionBuffer,
        key_scale: KeyScale,
        status: wgpu::Buffer,
    ) -> Result<Self> {
        let (sketch_dim, digest) = (projection.sketch_dim, projection.digest);
        let codes = Codes::counted(gpu, shape.rows(), sketch_dim.div_ceil(32), status)?;
        Ok(Self { shape, sketch_dim, key_scale, digest, codes })
    }

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
        let codes = Codes::upload(gpu, &keys.words, &keys.scale, keys.status)?;
        let digest = projection.digest();
        Ok(Self { shape: keys.shape, sketch_dim: keys.sketch_dim, key_scale, digest, codes })
    }

    /// Shape of the keys, `[batch, heads, tokens, head_dim]`.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Bytes of the buffers: sign words and scalars.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.codes.bytes()
    }

    /// Schedules the read-back of everything stored; [`parse`](Self::parse) makes [`SketchedKeys`] of it.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<CodesReadBack> {
        self.codes.read_back(gpu, encoder)
    }

    /// The sketched keys on the host.
    ///
    /// # Errors
    /// What the read-backs say.
    pub async fn parse(&self, read_back: CodesReadBack) -> Result<SketchedKeys> {
        let (words, scale, status) = read_back.parse(self.shape.rows()).await?;
        Ok(SketchedKeys { shape: self.shape, sketch_dim: self.sketch_dim, words, scale, status })
    }
}

/// Coded values on the device.
#[derive(Clone, Debug)]
pub struct QuantizedValueBuffers {
    pub(super) shape: Shape,
    pub(in crate::qjl) codes: Codes,
}

impl QuantizedValueBuffers {
    /// Copies coded values to the device; new ones are counted in `status`, 12 bytes.
    pub(in crate::qjl) fn uploaded(
        gpu: &Gpu,
        values: &QuantizedValues,
        status: wgpu::Buffer,
    ) -> Result<Self> {
        Ok(Self { shape: values.shape, codes: Codes::uploaded(gpu, &values.words, &values.scale, status)? })
    }

    /// Room for values that are counted in `status`, 12 bytes.
    pub(in crate::qjl) fn counted(gpu: &Gpu, shape: Shape, status: wgpu::Buffer) -> Result<Self> {
        Ok(Self { shape, codes: Codes::counted(gpu, shape.rows(), shape.dim.div_ceil(4), status)? })
    }

    /// Copies coded values to the device.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) when words and scales do not fit the shape, as [`Gpu::upload`].
    pub fn upload(gpu: &Gpu, values: &QuantizedValues) -> Result<Self> {
        values.check()?;
        Ok(Self {
            shape: values.shape,
            codes: Codes::upload(gpu, &values.words, &values.scale, values.status)?,
        })
    }

    /// Shape of the values, `[batch, heads, tokens, value_dim]`.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Bytes of the buffers: code words and scales.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.codes.bytes()
    }

    /// Schedules the read-back of everything stored; [`parse`](Self::parse) makes [`QuantizedValues`] of it.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<CodesReadBack> {
        self.codes.read_back(gpu, encoder)
    }

    /// The coded values on the host.
    ///
    /// # Errors
    /// What the read-backs say.
    pub async fn parse(&self, read_back: CodesReadBack) -> Result<QuantizedValues> {
        let (words, scale, status) = read_back.parse(self.shape.rows()).await?;
        Ok(QuantizedValues { shape: self.shape, words, scale, status })
    }
}
