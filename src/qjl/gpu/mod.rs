//! QJL on the GPU: each private function records the kernel of the same name in `shaders/qjl/`.

mod buffers;
mod params;
mod variants;

pub use buffers::{CodesReadBack, ProjectionBuffer, QuantizedValueBuffers, SketchedKeyBuffers};
pub(crate) use variants::variants;

use buffers::Codes;
use params::{AttendParams, ProjectParams, QuantizeParams, ScoresParams};
use variants::{
    VALUE_ROW_LANES, WORKGROUP, attend_variant, projecting_variant, quantize_values_variant, scores_variant,
};

use super::{KeyScale, Projection};
use crate::attention::gpu::{Pass, ScorePlace, value_fours};
use crate::attention::{AttendOptions, Geometry};
use crate::error::{Error, Result};
use crate::gpu::{Dispatch, Gpu, InputParams, Kernel, KvView, Recording, ViewUse, Window, index32};
use crate::tensor::{DType, Shape};

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
        let (shape, digest) = (keys.shape(), projection.digest);
        let sketched = SketchedKeyBuffers { shape, sketch_dim, key_scale: scale, digest, codes };
        let mut recording = Recording::new(&self.gpu);
        self.quantize(&mut recording, keys, projection, &sketched, 0)?;
        recording.record(encoder);
        Ok(sketched)
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
        let codes = Codes::new(&self.gpu, shape.rows(), value_fours(shape.dim) as usize)?;
        let coded = QuantizedValueBuffers { shape, codes };
        let mut recording = Recording::new(&self.gpu);
        self.quantize_values(&mut recording, values, &coded, 0)?;
        recording.record(encoder);
        Ok(coded)
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
            let sketches = self.sketches(projection, queries.shape().rows())?;
            self.project(&mut recording, queries, projection, (&sketches, 0))?;
            let place = ScorePlace::whole(geometry);
            self.scores(&mut recording, geometry, &sketches, keys, projection, &place, output)?;
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
        geometry.check_values(values.shape)?;
        output.shape().check_equal("attention output", geometry.output(values.shape.dim)?)?;
        let pass = Pass::new(&self.gpu, geometry, values.shape.dim, lengths, options)?;
        let mut recording = Recording::new(&self.gpu);
        if output.shape().elements() > 0 {
            let sketches = self.sketches(projection, queries.shape().rows())?;
            self.project(&mut recording, queries, projection, (&sketches, 0))?;
            self.attend(&mut recording, &pass, &sketches, keys, values, projection)?;
            pass.combine(&mut recording, &self.gpu, options, output)?;
        }
        recording.record(encoder);
        Ok(())
    }

    /// Sketches keys, the first of which becomes token `first` of the store; whole pages, or all that there are.
    pub(in crate::qjl) fn quantize(
        &self,
        recording: &mut Recording<'_>,
        keys: &KvView,
        projection: &ProjectionBuffer,
        sketched: &SketchedKeyBuffers,
        first: usize,
    ) -> Result<()> {
        if keys.shape().rows() == 0 {
            return Ok(());
        }
        let (input, view) = keys.bind_input("keys", &self.gpu)?;
        let codes = &sketched.codes;
        let [words, scales, status] = [&codes.words, &codes.scales, &codes.status].map(Window::whole);
        recording.add(Dispatch {
            variant: self.projecting(Kernel::Quantize, keys.dtype(), projection, sketched.key_scale),
            params: quantize_params(view, sketched.shape, first)?,
            buffers: &[input, Window::whole(&projection.buffer), words, scales, status],
            workgroups: (keys.shape().rows() as u64).div_ceil(2),
        })
    }

    /// Codes values, the first of which becomes token `first` of the store; whole pages, or all that there are.
    pub(in crate::qjl) fn quantize_values(
        &self,
        recording: &mut Recording<'_>,
        values: &KvView,
        coded: &QuantizedValueBuffers,
        first: usize,
    ) -> Result<()> {
        let shape = values.shape();
        if shape.rows() == 0 {
            return Ok(());
        }
        let (input, view) = values.bind_input("values", &self.gpu)?;
        let (caps, codes) = (self.gpu.caps(), &coded.codes);
        let [words, scales, status] = [&codes.words, &codes.scales, &codes.status].map(Window::whole);
        recording.add(Dispatch {
            variant: quantize_values_variant(shape.dim, values.dtype()).with_subgroups(caps.shuffle_width()),
            params: quantize_params(view, coded.shape, first)?,
            buffers: &[input, words, scales, status],
            workgroups: (shape.rows() as u64).div_ceil(u64::from(WORKGROUP / VALUE_ROW_LANES)),
        })
    }

    /// Room for `[rows, sketch_dim + 1]` f32.
    pub(in crate::qjl) fn sketches(
        &self,
        projection: &ProjectionBuffer,
        rows: usize,
    ) -> Result<wgpu::Buffer> {
        let bytes = crate::tensor::checked_bytes("query sketches", &[rows, projection.sketch_dim + 1], 4)?;
        self.gpu.storage("query sketches", bytes as u64)
    }

    /// `S q` of every query, then whether it is finite; the first query becomes row `first` of the sketches.
    pub(in crate::qjl) fn project(
        &self,
        recording: &mut Recording<'_>,
        queries: &KvView,
        projection: &ProjectionBuffer,
        (sketches, first): (&wgpu::Buffer, usize),
    ) -> Result<()> {
        let rows = queries.shape().rows();
        let (input, view) = queries.bind_input("queries", &self.gpu)?;
        recording.add(Dispatch {
            variant: self.projecting(Kernel::Project, queries.dtype(), projection, KeyScale::Norm),
            params: ProjectParams { view, first_row: index32(first)?, padding: [0; 3] },
            buffers: &[input, Window::whole(&projection.buffer), Window::whole(sketches)],
            workgroups: (rows as u64).div_ceil(2),
        })
    }

    /// Records the scores of one store's sketched keys.
    #[allow(clippy::too_many_arguments, reason = "scoring has this many inputs, each of another kind")]
    pub(in crate::qjl) fn scores(
        &self,
        recording: &mut Recording<'_>,
        g: Geometry,
        sketches: &wgpu::Buffer,
        keys: &SketchedKeyBuffers,
        projection: &ProjectionBuffer,
        place: &ScorePlace,
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
                first_row: index32(place.first_row)?,
                live_first: index32(place.live.start)?,
                live_end: index32(place.live.end)?,
                offset,
                pitch: index32(place.pitch)?,
                column: index32(place.column)?,
                factor: factor(keys, projection),
                padding: [0; 3],
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

    /// One pass over sketched keys and coded values.
    pub(in crate::qjl) fn attend(
        &self,
        recording: &mut Recording<'_>,
        pass: &Pass,
        sketches: &wgpu::Buffer,
        keys: &SketchedKeyBuffers,
        values: &QuantizedValueBuffers,
        projection: &ProjectionBuffer,
    ) -> Result<()> {
        let (key, value, factor) = (&keys.codes, &values.codes, factor(keys, projection));
        recording.add(Dispatch {
            variant: attend_variant(keys.sketch_dim, values.shape.dim)
                .with_subgroups(self.gpu.caps().shuffle_width()),
            params: AttendParams { attention: pass.params, factor, padding: [0; 3] },
            buffers: &[
                Window::whole(sketches),
                Window::whole(&key.words),
                Window::whole(&key.scales),
                Window::whole(&value.words),
                Window::whole(&value.scales),
                Window::whole(&pass.spans),
                Window::whole(&pass.partials),
            ],
            workgroups: pass.workgroups,
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
        projecting_variant(kernel, projection.kind, dims, dtype, scale).with_subgroups(caps.shuffle_width())
    }
}

fn quantize_params(view: InputParams, store: Shape, first: usize) -> Result<QuantizeParams> {
    Ok(QuantizeParams { view, capacity: index32(store.tokens)?, first: index32(first)?, padding: [0; 2] })
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
    if keys.digest != projection.digest {
        let want = format!("the one that sketched the keys, {:016x}", keys.digest);
        return Err(Error::range("projection", want, format_args!("{:016x}", projection.digest)));
    }
    Ok(geometry)
}
