//! Sign planes on the GPU. `coding.rs` and `record.rs` record the kernels of `shaders/planes/`.

mod angles;
mod buffers;
mod coding;
mod params;
mod record;
mod rotations;
mod tiles;
mod variants;

pub(in crate::qjl) use angles::Angles;
pub use buffers::{PlaneBuffer, PositionBuffer, TableBuffer};
pub(in crate::qjl) use coding::Coding;
pub use rotations::CodecBuffer;
pub(in crate::qjl) use rotations::projection_words;
pub(crate) use variants::variants;
pub(in crate::qjl) use variants::{Make, sketch_bytes};

use super::{CodeLayout, Codec, Tables, check_rows};
use crate::attention::gpu::{
    AllParts, Ops as Exact, Pass, RowKind, ScorePlace, Tiling, combine, join, whole,
};
use crate::attention::{AttendOptions, Geometry, Precision};
use crate::error::{Error, Result};
use crate::gpu::{Arithmetic, Gpu, KvView, Recording};
use crate::rope::Positions;
use crate::tensor::Shape;

/// Which of a layer's two tensors is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::qjl) enum Side {
    Keys,
    Values,
}

impl Side {
    fn layout(self, codec: &Codec) -> &CodeLayout {
        match self {
            Self::Keys => codec.keys(),
            Self::Values => codec.values(),
        }
    }
}

/// The operations of sign planes, recorded into the caller's encoder.
#[derive(Clone, Debug)]
pub struct Ops {
    gpu: Gpu,
}

/// What one attention call reads: coded keys and values, and the rows themselves for sinks and recent tokens.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// Keys after RoPE, `[batch, kv_heads, tokens, key_dim]`; only sinks and recent tokens are read.
    pub keys: &'a KvView,
    /// Codes of the keys.
    pub key_codes: &'a PlaneBuffer,
    /// Values, `[batch, kv_heads, tokens, value_dim]`; only sinks and recent tokens are read.
    pub values: &'a KvView,
    /// Codes of the values.
    pub value_codes: &'a PlaneBuffer,
    /// Tables of the keys.
    pub tables: &'a TableBuffer,
    /// Positions of the keys.
    pub positions: &'a PositionBuffer,
}

impl Ops {
    /// Operations on this device. Kernels are compiled when first recorded.
    #[must_use]
    pub fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone() }
    }

    /// Copies a codec's rotations to the device.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn upload_codec(&self, codec: &Codec) -> Result<CodecBuffer> {
        CodecBuffer::upload(&self.gpu, codec)
    }

    /// Copies a layer's tables to the device.
    ///
    /// # Errors
    /// [`Error::Shape`] when the tables are not for the codec's keys, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn upload_tables(&self, codec: &CodecBuffer, tables: &Tables) -> Result<TableBuffer> {
        let dim = codec.codec.key_dim();
        tables.check(Shape { batch: tables.sets, heads: tables.heads, tokens: 0, dim })?;
        TableBuffer::upload(&self.gpu, &codec.codec, tables)
    }

    /// Copies positions, and the angles that they need, to the device.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Range`] when the positions do not fit, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn upload_positions(
        &self,
        codec: &CodecBuffer,
        positions: Positions<'_>,
        batch: usize,
        tokens: usize,
    ) -> Result<PositionBuffer> {
        PositionBuffer::upload(&self.gpu, &codec.codec, positions, [batch, tokens])
    }

    /// Records the coding of keys, as [`cpu::encode_keys`](mod@super::cpu).
    ///
    /// # Errors
    /// [`Error::Shape`] when keys, tables and positions do not fit, the errors of a view that cannot be bound,
    /// [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn encode_key_codes(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        keys: &KvView,
        codec: &CodecBuffer,
        tables: &TableBuffer,
        positions: &PositionBuffer,
    ) -> Result<PlaneBuffer> {
        let shape = keys.shape();
        check_rows("keys", codec.codec.key_dim(), shape)?;
        check_tables(shape, tables)?;
        check_positions(shape, positions)?;
        let (_, means) = codec.codec.key_rows(shape);
        let means = means / shape.dim.max(1);
        let side = (&codec.codec, Side::Keys);
        let codes = PlaneBuffer::new(&self.gpu, shape, side, positions.host.clone(), means)?;
        let mut recording = Recording::new(&self.gpu);
        if shape.rows() > 0 {
            self.encode(&mut recording, keys, codec, &codes, (tables, positions), 0)?;
        }
        recording.record(encoder);
        Ok(codes)
    }

    /// Records the coding of values, as [`cpu::encode_values`](mod@super::cpu).
    ///
    /// # Errors
    /// [`Error::Shape`] when the values' dimension is not the codec's, the errors of a view that cannot be bound,
    /// [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn encode_value_codes(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        values: &KvView,
        codec: &CodecBuffer,
    ) -> Result<PlaneBuffer> {
        let shape = values.shape();
        check_rows("values", codec.codec.value_dim(), shape)?;
        let codes = PlaneBuffer::new(&self.gpu, shape, (&codec.codec, Side::Values), Vec::new(), 0)?;
        let mut recording = Recording::new(&self.gpu);
        if shape.rows() > 0 {
            let (tables, positions) = self.plain(shape.heads, shape.dim)?;
            self.encode(&mut recording, values, codec, &codes, (&tables, &positions), 0)?;
        }
        recording.record(encoder);
        Ok(codes)
    }

    /// Records the scores of every query and coded key, the mean's part included, neither scaled nor masked, into `output`:
    /// contiguous f32, `[batch, query_heads, queries, tokens]`; 0 for masked keys and non-finite queries.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::HeadRatio`], [`Error::DType`] or [`Error::Alignment`] when the views do not fit, the errors
    /// of a view that cannot be bound, [`Error::Limit`], [`Error::OutOfMemory`].
    #[allow(clippy::too_many_arguments, reason = "scoring has this many inputs, each of another kind")]
    pub fn encode_scores(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        queries: &KvView,
        keys: &PlaneBuffer,
        codec: &CodecBuffer,
        tables: &TableBuffer,
        positions: &PositionBuffer,
        output: &KvView,
    ) -> Result<()> {
        let g = self.geometry(queries, keys, codec, tables, positions)?;
        output.check_scores(g.output(g.tokens)?)?;
        let mut recording = Recording::new(&self.gpu);
        if output.shape().elements() > 0 {
            let sketches = self.sketches(&codec.codec, g)?;
            self.project(&mut recording, g, queries, codec, tables, (&sketches, 0))?;
            let place = ScorePlace::whole(g);
            self.scores(&mut recording, g, &sketches, codec, (keys, positions), &place, output)?;
        }
        recording.record(encoder);
        Ok(())
    }

    /// Records attention, as [`cpu::attend`](mod@super::cpu), into `output`, `[batch, query_heads, queries, value_dim]` of any
    /// element type.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::HeadRatio`], [`Error::DType`] or [`Error::Range`] when shapes, types, lengths or options do
    /// not fit, the errors of a view that cannot be bound or written, [`Error::Limit`], [`Error::OutOfMemory`].
    #[allow(clippy::too_many_arguments, reason = "attention has this many inputs, each of another kind")]
    pub fn encode_attend(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        queries: &KvView,
        stored: &Stored<'_>,
        codec: &CodecBuffer,
        lengths: Option<&[u32]>,
        options: &AttendOptions<'_>,
        output: &KvView,
    ) -> Result<()> {
        let Stored { keys, key_codes, values, value_codes, tables, positions } = *stored;
        let g = self.geometry(queries, key_codes, codec, tables, positions)?;
        keys.shape().check_equal("keys", key_codes.shape)?;
        g.check_values(value_codes.shape)?;
        check_layout("value codes", codec.codec.values(), value_codes)?;
        values.shape().check_equal("values", value_codes.shape)?;
        if keys.dtype() != values.dtype() {
            let (want, have) = (keys.dtype().to_string(), values.dtype().to_string());
            return Err(Error::DType { what: "values".to_owned(), want, have });
        }
        let value_dim = value_codes.shape.dim;
        output.shape().check_equal("attention output", g.output(value_dim)?)?;
        let [coded, sinks, recent] = self.spans(&g.lengths(lengths)?, codec);
        let rows = Tiling::rows(g, value_dim);
        let pass = |kind, spans: &[[u32; 4]], tiling| {
            Pass::of(&self.gpu, (kind, spans, tiling), g, value_dim, options)
        };
        let mut coded = pass(RowKind::Coded, &coded, self.tiling(codec, g))?;
        let raw = [pass(RowKind::Raw, &sinks, rows)?, pass(RowKind::More, &recent, rows)?];
        let mut recording = Recording::new(&self.gpu);
        if output.shape().elements() > 0 {
            let sketches = self.sketches(&codec.codec, g)?;
            self.project(&mut recording, g, queries, codec, tables, (&sketches, 0))?;
            if let Some(first) = positions.first {
                coded.consecutive(first);
            }
            for pass in &raw {
                Exact::new(&self.gpu).exact(&mut recording, pass, [queries, keys, values])?;
            }
            let codes = [key_codes, value_codes];
            let arithmetic = self.arithmetic(options.precision);
            self.attend(&mut recording, &coded, &sketches, codec, codes, positions, arithmetic)?;
            let parts = [&coded.parts(), &raw[0].parts(), &raw[1].parts()];
            self.join(&mut recording, parts, codec, options, output)?;
        }
        recording.record(encoder);
        Ok(())
    }

    /// Joins what passes over coded rows and over raw ones have left. What came of rotated values is turned back first.
    pub(crate) fn join(
        &self,
        recording: &mut Recording<'_>,
        parts: AllParts<'_>,
        codec: &CodecBuffer,
        options: &AttendOptions<'_>,
        output: &KvView,
    ) -> Result<()> {
        let (gpu, [coded, raw, more]) = (&self.gpu, parts);
        let joined = if coded.splits > 0 && codec.codec.sketch().is_none() {
            self.unrotate(recording, parts, output.shape().rows(), codec)?
        } else if [coded, raw, more].iter().filter(|parts| parts.splits > 0).count() > 1 {
            join(recording, gpu, parts, output.shape())?
        } else {
            let only = parts.into_iter().find(|parts| parts.splits > 0);
            only.unwrap_or(raw).clone()
        };
        combine(recording, gpu, &joined, options, output)
    }

    /// How codes meet queries and weights on this device.
    pub(in crate::qjl) fn arithmetic(&self, precision: Precision) -> Arithmetic {
        match precision {
            Precision::Exact => Arithmetic::Exact,
            Precision::Auto if !self.gpu.caps().byte_products => Arithmetic::Exact,
            Precision::Auto | Precision::Fast => Arithmetic::Fast,
        }
    }

    /// How an attention pass over codes is divided.
    pub(in crate::qjl) fn tiling(&self, codec: &CodecBuffer, g: Geometry) -> Tiling {
        let tiling = Tiling::fours(g, variants::attend_tokens(&codec.codec));
        // A mean that turns takes registers, so that fewer workgroups run at once.
        if codec.codec.mean_rope().is_some() { tiling.aiming_at(1536) } else { tiling }
    }

    /// What is coded, the sinks, and what is recent, of every sequence.
    fn spans(&self, lengths: &[usize], codec: &CodecBuffer) -> [Vec<[u32; 4]>; 3] {
        let (sinks, recent) = (codec.codec.options().sinks, codec.codec.options().recent);
        let cut = |pick: fn(u32, u32, u32) -> [u32; 2]| {
            let mut spans = whole(lengths);
            for span in &mut spans {
                let length = span[0];
                let sinks = sinks.min(length);
                let [from, to] = pick(length, sinks, length.saturating_sub(recent).max(sinks));
                (span[1], span[2]) = (from, to);
            }
            spans
        };
        [
            cut(|_, sinks, recent| [sinks, recent]),
            cut(|_, sinks, _| [0, sinks]),
            cut(|length, _, recent| [recent, length]),
        ]
    }

    fn geometry(
        &self,
        queries: &KvView,
        keys: &PlaneBuffer,
        codec: &CodecBuffer,
        tables: &TableBuffer,
        positions: &PositionBuffer,
    ) -> Result<Geometry> {
        let geometry = Geometry::of(queries.shape(), keys.shape)?;
        check_layout("key codes", codec.codec.keys(), keys)?;
        check_tables(keys.shape, tables)?;
        check_positions(keys.shape, positions)?;
        Ok(geometry)
    }
}

fn check_layout(what: &str, layout: &CodeLayout, codes: &PlaneBuffer) -> Result<()> {
    if codes.layout == *layout {
        return Ok(());
    }
    let want = format!("segments {:?} as the codec has", layout.segments());
    Err(Error::shape(what, want, format_args!("{:?}", codes.layout.segments())))
}

fn check_tables(keys: Shape, tables: &TableBuffer) -> Result<()> {
    if (tables.heads, tables.dim) == (keys.heads, keys.dim) && [1, keys.batch].contains(&tables.sets) {
        return Ok(());
    }
    let want = format!("[1 or {}, {}, {}]", keys.batch, keys.heads, keys.dim);
    Err(Error::shape("tables", want, format_args!("[{}, {}, {}]", tables.sets, tables.heads, tables.dim)))
}

fn check_positions(keys: Shape, positions: &PositionBuffer) -> Result<()> {
    let (want, have) = ([keys.batch, keys.tokens], [positions.batch, positions.tokens]);
    if want == have {
        Ok(())
    } else {
        Err(Error::shape("positions", format!("{want:?}"), format_args!("{have:?}")))
    }
}
