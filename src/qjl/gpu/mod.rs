//! QJL on the GPU: each private function records the kernel of the same name in `shaders/qjl/`.

mod buffers;
mod variants;

pub use buffers::{CodesReadBack, ProjectionBuffer, QuantizedValueBuffers, SketchedKeyBuffers};
pub(crate) use variants::variants;

use bytemuck::{Pod, Zeroable};
use variants::{VALUE_ROW_LANES, WORKGROUP, quantize_values_variant};

use super::planes::gpu::{
    CodecBuffer, Coding, Ops as PlaneOps, PlaneBuffer, PositionBuffer, Side, TableBuffer,
};
use super::{KeyScale, Projection};
use crate::attention::gpu::{Pass, RowKind, ScorePlace, combine, whole};
use crate::attention::{AttendOptions, Geometry};
use crate::error::{Error, Result};
use crate::gpu::{Dispatch, Gpu, InputParams, KvView, Recording, Window, index32};
use crate::tensor::Shape;

/// The uniform of `quantize_values`, field by field as its `Params` declares it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct QuantizeValuesParams {
    view: InputParams,
    scales_at: u32,
    padding: [u32; 3],
}

/// QJL's operations, recorded into the caller's encoder.
#[derive(Clone, Debug)]
pub struct Ops {
    gpu: Gpu,
}

impl Ops {
    /// Operations on this device. Kernels are compiled when first recorded.
    #[must_use]
    pub fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone() }
    }

    /// Copies a projection to the device.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn upload_projection(&self, projection: &Projection) -> Result<ProjectionBuffer> {
        ProjectionBuffer::upload(&self.gpu, projection)
    }

    /// Records the sketching of keys, `[batch, heads, tokens, head_dim]`: sign bits of `S k` and the scalar `scale`.
    ///
    /// # Errors
    /// [`Error::Shape`] when the keys' dimension is not the projection's, the errors of a view that cannot be bound,
    /// [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn encode_quantize(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        keys: &KvView,
        projection: &ProjectionBuffer,
        scale: KeyScale,
    ) -> Result<SketchedKeyBuffers> {
        check_projection(keys.shape(), "keys", projection)?;
        let codec = projection.codec(scale, 1)?;
        let codes = self.encode(encoder, keys, &codec, Side::Keys)?;
        let (digest, sketch_dim) = (projection.projection.digest(), projection.projection.sketch_dim());
        Ok(SketchedKeyBuffers { key_scale: scale, digest, sketch_dim, codes })
    }

    /// Records the coding of values, `[batch, heads, tokens, value_dim]`, in 8 bits.
    ///
    /// # Errors
    /// [`Error::Shape`] when `value_dim` is not 1 to 512, the errors of a view that cannot be bound, [`Error::Limit`],
    /// [`Error::OutOfMemory`].
    pub fn encode_quantize_values(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        values: &KvView,
    ) -> Result<QuantizedValueBuffers> {
        values.shape().check_dim("values")?;
        let codec = CodecBuffer::upload(&self.gpu, &buffers::values_codec(values.shape().dim)?)?;
        Ok(QuantizedValueBuffers { codes: self.encode(encoder, values, &codec, Side::Values)? })
    }

    /// Codes rows that are not centred.
    fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        rows: &KvView,
        codec: &CodecBuffer,
        side: Side,
    ) -> Result<PlaneBuffer> {
        let (ops, shape) = (PlaneOps::new(&self.gpu), rows.shape());
        let codes = PlaneBuffer::new(&self.gpu, shape, (codec.codec(), side), Vec::new(), 0)?;
        let mut recording = Recording::new(&self.gpu);
        if shape.rows() > 0 {
            let (tables, positions) = ops.plain(shape.heads, shape.dim)?;
            ops.encode(&mut recording, rows, codec, &codes, (&tables, &positions), 0)?;
        }
        recording.record(encoder);
        Ok(codes)
    }

    /// Records the estimated scores of every query and key, neither scaled nor masked, into `output`: contiguous f32,
    /// `[batch, query_heads, queries, tokens]`; 0 for masked keys and non-finite queries.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::HeadRatio`], [`Error::DType`] or [`Error::Alignment`] when the views do not fit, the errors
    /// of a view that cannot be bound, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn encode_scores(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        queries: &KvView,
        keys: &SketchedKeyBuffers,
        projection: &ProjectionBuffer,
        output: &KvView,
    ) -> Result<()> {
        let geometry = geometry(queries, keys, projection)?;
        output.check_scores(geometry.output(geometry.tokens)?)?;
        let mut recording = Recording::new(&self.gpu);
        if output.shape().elements() > 0 {
            let codec = projection.codec(keys.key_scale, 1)?;
            let sketched = self.project(&mut recording, geometry, queries, &codec)?;
            let (place, codes) = (ScorePlace::whole(geometry), (&keys.codes, &sketched.nowhere));
            let (ops, queries) = (PlaneOps::new(&self.gpu), &sketched.sketches);
            ops.scores(&mut recording, geometry, queries, &codec, codes, &place, output)?;
        }
        recording.record(encoder);
        Ok(())
    }

    /// Records attention over sketched keys and coded values into `output`, `[batch, query_heads, queries, value_dim]` of any
    /// element type. `lengths` has one length per sequence; without it every sequence holds all tokens.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::HeadRatio`] or [`Error::Range`] when shapes, lengths or options do not fit, the errors of a
    /// view that cannot be bound or written, [`Error::Limit`], [`Error::OutOfMemory`].
    #[allow(clippy::too_many_arguments, reason = "attention has this many inputs, each of another kind")]
    pub fn encode_attend(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        queries: &KvView,
        keys: &SketchedKeyBuffers,
        values: &QuantizedValueBuffers,
        projection: &ProjectionBuffer,
        lengths: Option<&[u32]>,
        options: &AttendOptions<'_>,
        output: &KvView,
    ) -> Result<()> {
        let geometry = geometry(queries, keys, projection)?;
        geometry.check_values(values.shape())?;
        let value_dim = values.shape().dim;
        output.shape().check_equal("attention output", geometry.output(value_dim)?)?;
        let (codec, ops) = (projection.codec(keys.key_scale, value_dim)?, PlaneOps::new(&self.gpu));
        let spans = whole(&geometry.lengths(lengths)?);
        let all = (RowKind::Coded, spans.as_slice(), ops.tiling(&codec, geometry));
        let pass = Pass::of(&self.gpu, all, geometry, value_dim, options)?;
        let mut recording = Recording::new(&self.gpu);
        if output.shape().elements() > 0 {
            let sketched = self.project(&mut recording, geometry, queries, &codec)?;
            let codes = [&keys.codes, &values.codes];
            let (queries, nowhere) = (&sketched.sketches, &sketched.nowhere);
            let arithmetic = ops.arithmetic(options.precision);
            ops.attend(&mut recording, &pass, queries, &codec, codes, nowhere, arithmetic)?;
            combine(&mut recording, &self.gpu, &pass.parts(), options, output)?;
        }
        recording.record(encoder);
        Ok(())
    }

    /// `S q` of every query, for keys that are not centred.
    fn project(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        queries: &KvView,
        codec: &CodecBuffer,
    ) -> Result<Sketched> {
        let ops = PlaneOps::new(&self.gpu);
        let (tables, nowhere): (TableBuffer, PositionBuffer) =
            ops.plain(g.kv_heads, codec.codec().key_dim())?;
        let sketches = ops.sketches(codec.codec(), g)?;
        ops.project(recording, g, queries, codec, &tables, (&sketches, 0))?;
        Ok(Sketched { sketches, nowhere })
    }

    /// Sketches keys.
    pub(in crate::qjl) fn quantize(
        &self,
        recording: &mut Recording<'_>,
        keys: &KvView,
        coding: &Coding<'_>,
    ) -> Result<()> {
        let codec = coding.codec.codec();
        let Some(sketch) = codec.sketch() else { return Ok(()) };
        let (input, view) = keys.bind_input("keys", &self.gpu)?;
        recording.add(Dispatch {
            variant: PlaneOps::new(&self.gpu).make(coding.codec).quantize(sketch, keys.dtype()),
            params: coding.params(view)?,
            buffers: &coding.bindings(input),
            workgroups: (keys.shape().rows() as u64).div_ceil(2),
        })
    }

    /// Codes values in 8 bits.
    pub(in crate::qjl) fn quantize_values(
        &self,
        recording: &mut Recording<'_>,
        values: &KvView,
        coding: &Coding<'_>,
    ) -> Result<()> {
        let shape = values.shape();
        let (input, view) = values.bind_input("values", &self.gpu)?;
        let variant = quantize_values_variant(shape.dim, values.dtype());
        recording.add(Dispatch {
            variant: variant.with_subgroups(self.gpu.caps().shuffle_width()),
            params: QuantizeValuesParams { view, scales_at: index32(coding.scales_at)?, padding: [0; 3] },
            buffers: &[input, Window::whole(coding.to), Window::whole(coding.status)],
            workgroups: (shape.rows() as u64).div_ceil(u64::from(WORKGROUP / VALUE_ROW_LANES)),
        })
    }
}

/// Queries made ready, and the positions that keys without a mean do not have.
struct Sketched {
    sketches: wgpu::Buffer,
    nowhere: PositionBuffer,
}

fn check_projection(rows: Shape, what: &str, projection: &ProjectionBuffer) -> Result<()> {
    let dim = projection.projection.head_dim();
    if rows.dim == dim {
        return Ok(());
    }
    Err(Error::shape(what, format_args!("a dimension of {dim} as the projection has"), rows))
}

/// Sizes of scoring queries against sketched keys.
fn geometry(queries: &KvView, keys: &SketchedKeyBuffers, projection: &ProjectionBuffer) -> Result<Geometry> {
    let geometry = Geometry::of(queries.shape(), keys.shape())?;
    check_projection(keys.shape(), "keys", projection)?;
    let projection = &projection.projection;
    if keys.sketch_dim != projection.sketch_dim() {
        let want = format!("{} bits as the projection has", projection.sketch_dim());
        return Err(Error::shape("sketched keys", want, keys.sketch_dim));
    }
    if keys.digest != projection.digest() {
        let want = format!("the one that sketched the keys, {:016x}", keys.digest);
        return Err(Error::range("projection", want, format_args!("{:016x}", projection.digest())));
    }
    Ok(geometry)
}
