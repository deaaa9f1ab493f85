//! Sign planes: rotated rows in codes of a few bits a channel, the family of which QJL's signs are the one-bit case.
//!
//! A key at position `t` is centred and weighed, `x = (k - RoPE_t(mu)) / sigma`, rotated, `y = R x`, and each channel
//! kept as a code `c` of `b` bits that stands for the odd level `L = 2 c - (2^b - 1)`, beside one scalar
//! `nu = |y| / |L|`, so that lengths are kept. A query meets it as `q' = R (q sigma)`; its score is
//! `nu (2 <q', c> - (2^b - 1) sum q') + q . RoPE_t(mu)`, and the last term needs no bytes per token. Values are rotated
//! and coded alike, and the rotation is undone once, on the output. Where keys are *split*, the half of channels that
//! matters most and the other have bits, rotations and scalars of their own.
//!
//! Codes of one bit with a random rotation are QJL (arXiv 2406.03482); the scalar is the norm-preserving member between
//! RaBitQ's (arXiv 2405.12497) and least squares; more bits follow TurboQuant (arXiv 2504.19874).
//!
//! [`cpu`] computes this in f32 with the order of operations of the kernels; [`mod@reference`] is its judge in f64.

mod config;
pub mod cpu;
#[cfg(feature = "gpu")]
pub mod gpu;
pub mod reference;
mod rotation;
mod rows;
mod tables;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use half::f16;

use crate::attention::Geometry;
use crate::error::{Error, Result};
use crate::qjl::{Counts, KeyScale, Projection};
use crate::rope::Rope;
use crate::tensor::{Shape, TensorView};

pub use config::{Balance, Centring, CodeLayout, MAX_PLANES, PlanesOptions, Preset, Segment};
pub use rotation::{Rotation, Rotations};
pub(in crate::qjl) use rows::{Centres, Fields, PlaneKeys, PlaneQueries, PlaneValues, finish};
pub(in crate::qjl) use tables::QueryEnergy;
pub use tables::{CALIBRATION_TOKENS, Calibration, HeadTables, Tables};

/// Distance of neighbouring levels, over the root mean square, of the best uniform quantiser of a Gaussian with 1 to 5
/// bits (Max 1960); one bit takes signs and needs none.
pub const STEPS: [f32; MAX_PLANES as usize] = [1.5958, 0.9957, 0.5860, 0.3352, 0.1881];

/// Factors of the step that are tried for each row, in this order; the first of the best is taken.
pub const STEP_FACTORS: [f32; 5] = [0.75, 0.875, 1.0, 1.125, 1.25];

/// Bits of a value that QJL codes: a signed byte, which stands for itself.
pub(in crate::qjl) const BYTE: u8 = 8;

/// Smallest root mean square by which a row is divided.
pub const MIN_RMS: f32 = 1e-20;

/// Everything that the layers and heads of one cache share: options, layouts, RoPE and rotations.
#[derive(Clone, Debug, PartialEq)]
pub struct Codec {
    options: PlanesOptions,
    rope: Option<Rope>,
    key_dim: usize,
    keys: CodeLayout,
    values: CodeLayout,
    rotations: Rotations,
    sketch: Option<Sketch>,
}

/// How QJL codes: keys by the signs of a projection in place of a rotation, values in 8 bits as they are.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::qjl) struct Sketch {
    pub(in crate::qjl) projection: Arc<Projection>,
    pub(in crate::qjl) scale: KeyScale,
}

impl Sketch {
    /// What a sign counts beside `nu`: `g / m`.
    pub(in crate::qjl) fn factor(&self) -> f32 {
        let gain = match self.scale {
            KeyScale::Norm => self.projection.factor(),
            KeyScale::Mse | KeyScale::Unbiased => 1.0,
        };
        gain / self.projection.sketch_dim() as f32
    }

    /// The key that signs times `nu` stand for: `g/m S^T` of them.
    fn restore(&self, signs: &[f32], key: &mut [f32]) {
        self.projection.project_transposed(signs, key);
        let factor = self.factor();
        key.iter_mut().for_each(|x| *x *= factor);
    }
}

impl Codec {
    /// A codec for heads of these dimensions. `rope` is the RoPE that the keys have been through; `None` for a model
    /// without one. Where it is not known, options with [`Centring::BlockMean`] need none.
    ///
    /// # Errors
    /// [`Error::Range`] on options out of range or a `rotary_dim` above `key_dim`, [`Error::Shape`] on a dimension
    /// that is not 1 to 512.
    pub fn new(options: PlanesOptions, key_dim: usize, value_dim: usize, rope: Option<Rope>) -> Result<Self> {
        Self::with_matrices(options, key_dim, value_dim, rope, &BTreeMap::new())
    }

    /// As [`Codec::new`], with these `[n, n]` rotations, by `n`, in place of drawn ones.
    pub(crate) fn with_matrices(
        options: PlanesOptions,
        key_dim: usize,
        value_dim: usize,
        rope: Option<Rope>,
        matrices: &BTreeMap<usize, Vec<f32>>,
    ) -> Result<Self> {
        options.validate()?;
        for (what, dim) in [("keys", key_dim), ("values", value_dim)] {
            Shape { batch: 1, heads: 1, tokens: 1, dim }.check_dim(what)?;
        }
        if let Some(rope) = &rope {
            rope.check_dim(key_dim)?;
        }
        let keys = CodeLayout::keys(&options, key_dim, rope.as_ref());
        let values = CodeLayout::values(&options, value_dim);
        let rotations = Rotations::with_matrices(&options, &keys, &values, matrices);
        Ok(Self { options, rope, key_dim, keys, values, rotations, sketch: None })
    }

    /// QJL as the member of the family whose keys have one bit for each row of a projection and no rotation, and whose values
    /// have 8 bits.
    pub(in crate::qjl) fn sketched(
        sketch: Sketch,
        centring: Centring,
        value_dim: usize,
        rope: Option<Rope>,
    ) -> Result<Self> {
        let (key_dim, bits) = (sketch.projection.head_dim(), sketch.projection.sketch_dim());
        Shape { batch: 1, heads: 1, tokens: 1, dim: value_dim }.check_dim("values")?;
        if let Some(rope) = &rope {
            rope.check_dim(key_dim)?;
        }
        let options = PlanesOptions::default().key_planes(1).value_planes(BYTE).sinks(0).recent(0);
        let options = options.centring(centring).balance(Balance::None).seed(0);
        Ok(Self {
            options,
            rope,
            key_dim,
            keys: CodeLayout::uniform(bits, 1),
            values: CodeLayout::uniform(value_dim, BYTE),
            rotations: Rotations::default(),
            sketch: Some(sketch),
        })
    }

    /// The same with so many first and last tokens of a sequence raw.
    pub(crate) fn keeping(mut self, sinks: u32, recent: u32) -> Self {
        self.options = self.options.sinks(sinks).recent(recent);
        self
    }

    /// How keys are sketched; `None` where they are rotated.
    pub(in crate::qjl) const fn sketch(&self) -> Option<&Sketch> {
        self.sketch.as_ref()
    }

    /// The projection that keys are sketched with; `None` where they are rotated.
    pub(crate) fn projection(&self) -> Option<&Arc<Projection>> {
        self.sketch.as_ref().map(|sketch| &sketch.projection)
    }

    pub(in crate::qjl) const fn sketch_mut(&mut self) -> Option<&mut Sketch> {
        self.sketch.as_mut()
    }

    /// [`Tables::calibrate`] with the codec's options.
    pub(crate) fn calibrate(&self, from: &Calibration<'_>) -> Result<Tables> {
        Tables::measure(from, &self.options)
    }

    /// Whether what it codes needs tables to be read again: not the signs of keys that were not centred.
    pub(crate) fn keeps_tables(&self) -> bool {
        self.sketch.is_none() || self.options.centring == Centring::PreRope
    }

    /// Bytes of rotations, or of the projection.
    pub(crate) fn bytes(&self) -> usize {
        self.rotations.bytes() + self.sketch.as_ref().map_or(0, |sketch| sketch.projection.bytes())
    }

    /// Channels of a key.
    #[must_use]
    pub const fn key_dim(&self) -> usize {
        self.key_dim
    }

    /// Channels of a value.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        self.values.channels()
    }

    /// The options.
    #[must_use]
    pub const fn options(&self) -> &PlanesOptions {
        &self.options
    }

    /// The RoPE that the keys have been through.
    #[must_use]
    pub const fn rope(&self) -> Option<&Rope> {
        self.rope.as_ref()
    }

    /// Layout of a key's code.
    #[must_use]
    pub const fn keys(&self) -> &CodeLayout {
        &self.keys
    }

    /// Layout of a value's code.
    #[must_use]
    pub const fn values(&self) -> &CodeLayout {
        &self.values
    }

    /// The rotations of all segments.
    #[must_use]
    pub const fn rotations(&self) -> &Rotations {
        &self.rotations
    }

    /// Bits per channel of a coded key: codes, scalars, and block means where there are any. Tables and rotations are
    /// one for all tokens and not in it.
    #[must_use]
    pub fn key_bits(&self) -> f64 {
        let mean = self.block().map_or(0.0, |block| 16.0 / block as f64);
        self.keys.bits() as f64 / self.key_dim as f64 + mean
    }

    /// Bits per channel of a coded value: codes and scalar.
    #[must_use]
    pub fn value_bits(&self) -> f64 {
        self.values.bits() as f64 / self.values.channels() as f64
    }

    /// Tokens that share a block mean.
    pub(in crate::qjl) fn block(&self) -> Option<usize> {
        match self.options.centring {
            Centring::BlockMean(tokens) => Some(tokens as usize),
            Centring::None | Centring::PreRope => None,
        }
    }

    /// The RoPE by which the mean turns; `None` when there is no mean, or it does not turn.
    fn mean_rope(&self) -> Option<&Rope> {
        self.rope.as_ref().filter(|_| self.options.centring == Centring::PreRope)
    }

    /// Whether a row stays raw in a sequence of `length` tokens: a sink, or recent.
    fn is_raw(&self, token: usize, length: usize) -> bool {
        token < self.options.sinks as usize || token + self.options.recent as usize >= length
    }

    /// Checks codes of this layout, of rows of so many channels.
    fn check_codes(&self, what: &str, (layout, dim): (&CodeLayout, usize), codes: &PlaneCodes) -> Result<()> {
        check_rows(what, dim, codes.shape)?;
        if codes.layout != *layout {
            let want = format!("segments {:?} as the codec has", layout.segments());
            return Err(Error::shape(what, want, format_args!("{:?}", codes.layout.segments())));
        }
        codes.check(what)
    }

    /// Checks key codes and tables against each other and the queries.
    fn check_scores(&self, queries: Shape, keys: &PlaneCodes, tables: &Tables) -> Result<Geometry> {
        let geometry = Geometry::of(queries, keys.shape)?;
        self.check_codes("key codes", (&self.keys, self.key_dim), keys)?;
        tables.check(keys.shape)?;
        let (want, have) = (self.key_rows(keys.shape), (keys.positions.len(), keys.means.len()));
        if want != have {
            let text =
                |(positions, means)| format!("{positions} positions and {means} numbers of block means");
            return Err(Error::shape("key codes", text(want), text(have)));
        }
        Ok(geometry)
    }

    /// Positions and numbers of block means that key codes of this shape have.
    fn key_rows(&self, shape: Shape) -> (usize, usize) {
        let means = self.block().map_or(0, |block| shape.tokens.div_ceil(block));
        (shape.batch * shape.tokens, shape.batch * shape.heads * means * shape.dim)
    }

    /// Checks everything that one attention call reads.
    fn check_attend(&self, queries: Shape, store: &Stored<'_>) -> Result<Geometry> {
        let geometry = self.check_scores(queries, store.key_codes, store.tables)?;
        store.keys.shape().check_equal("keys", store.key_codes.shape)?;
        geometry.check_values(store.value_codes.shape)?;
        self.check_codes("value codes", (&self.values, self.value_dim()), store.value_codes)?;
        store.values.shape().check_equal("values", store.value_codes.shape)?;
        Ok(geometry)
    }
}

fn check_rows(what: &str, dim: usize, rows: Shape) -> Result<()> {
    if rows.dim == dim {
        return Ok(());
    }
    Err(Error::shape(what, format!("a head dimension of {dim} as the codec has"), rows))
}

/// Coded rows, keys or values.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PlaneCodes {
    /// Shape of the rows, `[batch, heads, tokens, head_dim]`.
    pub shape: Shape,
    /// The segments of a row.
    pub layout: CodeLayout,
    /// What each segment stores.
    pub segments: Vec<SegmentCodes>,
    /// Positions of keys, `[batch, tokens]`; empty for values.
    pub positions: Vec<u32>,
    /// Block means of keys in f16, `[batch, heads, ceil(tokens / block), head_dim]`; empty for values and without
    /// [`Centring::BlockMean`].
    pub means: Vec<f16>,
    /// What was odd.
    pub status: Counts,
}

/// One segment of coded rows; empty where its channels have no bits.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SegmentCodes {
    /// `[batch, heads, tokens, ceil(b n / 32)]`: the code of channel `i` is bits `b i` to `b i + b - 1` of a row, the
    /// least significant bit of the first word first; unused bits are 0.
    pub words: Vec<u32>,
    /// `nu`, `[batch, heads, tokens]`; [`NON_FINITE_SCALE`](crate::qjl::NON_FINITE_SCALE) marks a masked row.
    pub nu: Vec<f16>,
}

impl PlaneCodes {
    pub(in crate::qjl) fn new(shape: Shape, layout: &CodeLayout) -> Self {
        let segments = layout.segments().iter().map(|_| SegmentCodes::default()).collect();
        let layout = layout.clone();
        Self { shape, layout, segments, positions: Vec::new(), means: Vec::new(), status: Counts::default() }
    }

    /// Bytes stored of the rows: words, scalars and block means.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let segment = |s: &SegmentCodes| size_of_val(s.words.as_slice()) + size_of_val(s.nu.as_slice());
        self.segments.iter().map(segment).sum::<usize>() + size_of_val(self.means.as_slice())
    }

    /// Checks that words and scalars are as many as the shape has rows.
    fn check(&self, what: &str) -> Result<()> {
        let rows = self.shape.rows();
        let layout = self.layout.segments();
        for (segment, codes) in layout.iter().zip(&self.segments) {
            let want = (rows * segment.words(), if segment.planes == 0 { 0 } else { rows });
            let have = (codes.words.len(), codes.nu.len());
            if want != have {
                let text = |(words, nu)| format!("{words} words and {nu} scalars");
                return Err(Error::shape(what, text(want), text(have)));
            }
        }
        if layout.len() == self.segments.len() {
            return Ok(());
        }
        Err(Error::shape(what, format!("{} segments", layout.len()), self.segments.len()))
    }
}

/// What one attention call reads: codes of all tokens, and the rows themselves for those that stay raw.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// Keys after RoPE, `[batch, kv_heads, tokens, key_dim]`; only sinks and recent tokens are read.
    pub keys: &'a TensorView<'a>,
    /// Codes of the keys.
    pub key_codes: &'a PlaneCodes,
    /// Values, `[batch, kv_heads, tokens, value_dim]`; only sinks and recent tokens are read.
    pub values: &'a TensorView<'a>,
    /// Codes of the values.
    pub value_codes: &'a PlaneCodes,
    /// Tables of the keys.
    pub tables: &'a Tables,
}
