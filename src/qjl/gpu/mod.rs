//! QJL on the GPU: each private function records the kernel of the same name in `shaders/qjl/`.

mod buffers;
mod params;
mod variants;

pub use buffers::{CodesReadBack, ProjectionBuffer, QuantizedValueBuffers, SketchedKeyBuffers};
pub(crate) use variants::variants;

use buffers::Codes;
use params::{AttendParams, CombineParams, ScoresParams};
use variants::{
    VALUE_ROW_LANES, WORKGROUP, attend_variant, combine_variant, partial_stride, projecting_variant,
    quantize_values_variant, scores_variant, value_words,
};

use super::{KeyScale, Projection};
use crate::attention::{AttendOptions, Geometry};
use crate::error::{Error, Result};
use crate::gpu::{Dispatch, Gpu, Kernel, KvView, Recording, ViewUse, Window, index32};
use crate::tensor::{DType, Shape};

/// Workgroups that an attention pass aims for: enough to fill a large GPU once. More splits cost more combining.
const TARGET_WORKGROUPS: usize = 1024;

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
        let sketch_dim = projection.sketch_dim;
        let codes = Codes::new(&self.gpu, keys.shape().rows(), sketch_dim.div_ceil(32))?;
        let mut recording = Recording::new(&self.gpu);
        self.quantize(&mut recording, keys, projection, scale, &codes)?;
        recording.record(encoder);
        Ok(SketchedKeyBuffers { shape: keys.shape(), sketch_dim, key_scale: scale, codes })
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
        let shape = values.shape();
        shape.check_dim("values")?;
        let codes = Codes::new(&self.gpu, shape.rows(), value_words(shape.dim) as usize)?;
        let mut recording = Recording::new(&self.gpu);
        self.quantize_values(&mut recording, values, &codes)?;
        recording.record(encoder);
        Ok(QuantizedValueBuffers { shape, codes })
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
        output.shape().check_equal("scores", geometry.output(geometry.tokens)?)?;
        if output.dtype() != DType::F32 {
            let (want, have) = (DType::F32.to_string(), output.dtype().to_string());
            return Err(Error::DType { what: "scores".to_owned(), want, have });
        }
        if !output.is_contiguous() {
            let (want, have) = ("no gaps".to_owned(), "other strides".to_owned());
            return Err(Error::Alignment { what: "scores".to_owned(), want, have });
        }
        let mut recording = Recording::new(&self.gpu);
        if output.shape().elements() > 0 {
            let sketches = self.project(&mut recording, queries, projection)?;
            self.scores(&mut recording, geometry, &sketches, keys, projection, output)?;
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
        options: &AttendOptions,
        output: &KvView,
    ) -> Result<()> {
        options.validate()?;
        let geometry = geometry(queries, keys, projection)?;
        geometry.check_values(values.shape)?;
        let lengths: Vec<u32> = geometry.lengths(lengths)?.into_iter().map(|length| length as u32).collect();
        output.shape().check_equal("attention output", geometry.output(values.shape.dim)?)?;
        let mut recording = Recording::new(&self.gpu);
        if output.shape().elements() > 0 {
            let sketches = self.project(&mut recording, queries, projection)?;
            let splits = Splits::choose(geometry);
            let stores = Stores { sketches: &sketches, keys, values, factor: factor(keys, projection) };
            let partials = self.attend(&mut recording, geometry, &stores, &lengths, options, splits)?;
            self.combine(&mut recording, &partials, splits.count, output)?;
        }
        recording.record(encoder);
        Ok(())
    }

    fn quantize(
        &self,
        recording: &mut Recording<'_>,
        keys: &KvView,
        projection: &ProjectionBuffer,
        scale: KeyScale,
        codes: &Codes,
    ) -> Result<()> {
        if keys.shape().rows() == 0 {
            return Ok(());
        }
        let (input, params) = keys.bind_input("keys", &self.gpu)?;
        let [words, scales, status] = [&codes.words, &codes.scales, &codes.status].map(Window::whole);
        recording.add(Dispatch {
            variant: self.projecting(Kernel::Quantize, keys.dtype(), projection, scale),
            params,
            buffers: &[input, Window::whole(&projection.buffer), words, scales, status],
            workgroups: (keys.shape().rows() as u64).div_ceil(2),
        })
    }

    fn quantize_values(&self, recording: &mut Recording<'_>, values: &KvView, codes: &Codes) -> Result<()> {
        let shape = values.shape();
        if shape.rows() == 0 {
            return Ok(());
        }
        let (input, params) = values.bind_input("values", &self.gpu)?;
        let caps = self.gpu.caps();
        let [words, scales, status] = [&codes.words, &codes.scales, &codes.status].map(Window::whole);
        recording.add(Dispatch {
            variant: quantize_values_variant(shape.dim, values.dtype(), caps.f16)
                .with_subgroups(caps.shuffle_width()),
            params,
            buffers: &[input, words, scales, status],
            workgroups: (shape.rows() as u64).div_ceil(u64::from(WORKGROUP / VALUE_ROW_LANES)),
        })
    }

    /// `[rows, sketch_dim + 1]` f32: `S q` of every query, then whether it is finite.
    fn project(
        &self,
        recording: &mut Recording<'_>,
        queries: &KvView,
        projection: &ProjectionBuffer,
    ) -> Result<wgpu::Buffer> {
        let rows = queries.shape().rows();
        let bytes = crate::tensor::checked_bytes("query sketches", &[rows, projection.sketch_dim + 1], 4)?;
        let sketches = self.gpu.storage("query sketches", bytes as u64)?;
        let (input, params) = queries.bind_input("queries", &self.gpu)?;
        recording.add(Dispatch {
            variant: self.projecting(Kernel::Project, queries.dtype(), projection, KeyScale::Norm),
            params,
            buffers: &[input, Window::whole(&projection.buffer), Window::whole(&sketches)],
            workgroups: (rows as u64).div_ceil(2),
        })?;
        Ok(sketches)
    }

    fn scores(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        sketches: &wgpu::Buffer,
        keys: &SketchedKeyBuffers,
        projection: &ProjectionBuffer,
        output: &KvView,
    ) -> Result<()> {
        let bound = output.bind("scores", ViewUse::Write, &self.gpu)?;
        let tiles = g.tokens.div_ceil(WORKGROUP as usize);
        let rows = g.batch * g.query_heads * g.queries;
        let [offset, ..] = bound.layout;
        recording.add(Dispatch {
            variant: scores_variant(projection.sketch_dim),
            params: ScoresParams {
                tokens: index32(g.tokens)?,
                queries: index32(g.queries)?,
                query_heads: index32(g.query_heads)?,
                group: index32(g.group)?,
                tiles: index32(tiles)?,
                rows: index32(rows)?,
                offset,
                factor: factor(keys, projection),
            },
            buffers: &[
                Window::whole(sketches),
                Window::whole(&keys.codes.words),
                Window::whole(&keys.codes.scales),
                bound.window,
            ],
            workgroups: (rows * tiles) as u64,
        })
    }

    /// Partial softmaxes of every query and split.
    fn attend(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        stores: &Stores<'_>,
        lengths: &[u32],
        options: &AttendOptions,
        splits: Splits,
    ) -> Result<wgpu::Buffer> {
        let rows = g.batch * g.query_heads * g.queries;
        let value_dim = stores.values.shape.dim;
        let sizes = [rows, splits.count, partial_stride(value_dim) as usize];
        let partials = self
            .gpu
            .storage("partials", crate::tensor::checked_bytes("partial results", &sizes, 4)? as u64)?;
        let lengths = self.gpu.upload("lengths", bytemuck::cast_slice(lengths))?;
        let variant = attend_variant(stores.keys.sketch_dim, value_dim);
        // A cache without tokens has no buffers to bind: its partial sums are the zeros that a new buffer holds.
        let workgroups = if g.tokens == 0 { 0 } else { (rows * splits.count) as u64 };
        let codes = |codes: &Codes| [&codes.words, &codes.scales].map(Window::whole);
        let [key_words, key_scales] = codes(&stores.keys.codes);
        let [value_words, value_scales] = codes(&stores.values.codes);
        recording.add(Dispatch {
            variant: variant.with_subgroups(self.gpu.caps().shuffle_width()),
            params: AttendParams {
                tokens: index32(g.tokens)?,
                queries: index32(g.queries)?,
                query_heads: index32(g.query_heads)?,
                group: index32(g.group)?,
                rows: index32(rows)?,
                splits: index32(splits.count)?,
                split: index32(splits.tokens)?,
                causal: u32::from(options.causal),
                window: options.window.unwrap_or(u32::MAX),
                soft_cap: options.soft_cap.unwrap_or(0.0),
                factor: stores.factor,
                scale: options.scale_for(g.key_dim),
            },
            buffers: &[
                Window::whole(stores.sketches),
                key_words,
                key_scales,
                value_words,
                value_scales,
                Window::whole(&lengths),
                Window::whole(&partials),
            ],
            workgroups,
        })?;
        Ok(partials)
    }

    fn combine(
        &self,
        recording: &mut Recording<'_>,
        partials: &wgpu::Buffer,
        splits: usize,
        output: &KvView,
    ) -> Result<()> {
        let (window, view) = output.bind_output("attention output", &self.gpu)?;
        recording.add(Dispatch {
            variant: combine_variant(output.shape().dim, output.dtype()),
            params: CombineParams { view, splits: index32(splits)?, padding: [0; 3] },
            buffers: &[Window::whole(partials), window],
            workgroups: u64::from(view.words).div_ceil(u64::from(WORKGROUP)),
        })
    }

    fn projecting(
        &self,
        kernel: Kernel,
        dtype: DType,
        projection: &ProjectionBuffer,
        scale: KeyScale,
    ) -> crate::gpu::Variant {
        let caps = self.gpu.caps();
        let dims = [projection.head_dim, projection.sketch_dim];
        projecting_variant(kernel, projection.kind, dims, dtype, caps.f16, scale)
            .with_subgroups(caps.shuffle_width())
    }
}

/// What an attention pass reads.
struct Stores<'a> {
    sketches: &'a wgpu::Buffer,
    keys: &'a SketchedKeyBuffers,
    values: &'a QuantizedValueBuffers,
    factor: f32,
}

/// How the tokens of a sequence are divided among workgroups.
#[derive(Clone, Copy)]
struct Splits {
    count: usize,
    /// Tokens of a split, a multiple of the workgroup.
    tokens: usize,
}

impl Splits {
    fn choose(g: Geometry) -> Self {
        let rows = (g.batch * g.query_heads * g.queries).max(1);
        let tiles = g.tokens.div_ceil(WORKGROUP as usize).max(1);
        let tiles_per_split = tiles.div_ceil(TARGET_WORKGROUPS.div_ceil(rows));
        Self { count: tiles.div_ceil(tiles_per_split), tokens: tiles_per_split * WORKGROUP as usize }
    }
}

fn factor(keys: &SketchedKeyBuffers, projection: &ProjectionBuffer) -> f32 {
    let gain = if keys.key_scale == KeyScale::Norm { projection.factor } else { 1.0 };
    gain / keys.sketch_dim as f32
}

fn check_projection(rows: Shape, what: &str, projection: &ProjectionBuffer) -> Result<()> {
    if rows.dim == projection.head_dim {
        return Ok(());
    }
    Err(Error::shape(
        what,
        format_args!("a dimension of {} as the projection has", projection.head_dim),
        rows,
    ))
}

/// Sizes of scoring queries against sketched keys.
fn geometry(queries: &KvView, keys: &SketchedKeyBuffers, projection: &ProjectionBuffer) -> Result<Geometry> {
    let geometry = Geometry::of(queries.shape(), keys.shape)?;
    check_projection(keys.shape, "keys", projection)?;
    if keys.sketch_dim != projection.sketch_dim {
        let want = format!("{} bits as the projection has", projection.sketch_dim);
        return Err(Error::shape("sketched keys", want, keys.sketch_dim));
    }
    Ok(geometry)
}
