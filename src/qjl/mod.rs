//! QJL: each key as the signs of a random projection and one scalar (arXiv 2406.03482), values as 8-bit codes.
//!
//! With `S` a [`Projection`] of `m` rows: a key `k` is kept as `m` bits, bit `j` set iff `(S k)_j >= 0`, and a scalar
//! `nu` ([`KeyScale`]). A query stays as it is: its score is `g/m * nu * <S q, s>`, `s = +-1` from the bits, `g` the
//! projection's factor for [`KeyScale::Norm`] and 1 otherwise. A value row is kept as `dim` signed 8-bit codes and a scale.
//!
//! [`cpu`] computes this in f32 with the order of operations of the kernels; [`mod@reference`] is its judge in f64.

pub mod cache;
mod config;
pub mod cpu;
mod draws;
#[cfg(feature = "gpu")]
pub mod gpu;
pub mod planes;
mod projection;
pub mod reference;

use half::f16;

use crate::error::{Error, Result};
use crate::tensor::Shape;

pub use config::{KeyScale, ProjectionKind};
pub use projection::{MAX_SKETCH_DIM, Projection};

/// The stored scale of a row that holds a non-finite number: such a row is masked.
pub const NON_FINITE_SCALE: f16 = f16::from_bits(0x7e00);

/// Largest stored scale; larger ones are clamped to it and counted.
pub(crate) const MAX_SCALE: f32 = 65504.0;

/// What was odd among the rows of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rows that hold a non-finite number: marked and masked.
    pub non_finite: u32,
    /// Rows of zeros.
    pub zero: u32,
    /// Rows whose scale was clamped to 65504.
    pub overflow: u32,
}

/// Keys as sign bits and one scalar each.
#[derive(Clone, Debug, PartialEq)]
pub struct SketchedKeys {
    /// Shape of the keys, `[batch, heads, tokens, head_dim]`.
    pub shape: Shape,
    /// Bits of a key, `m`.
    pub sketch_dim: usize,
    /// `[batch, heads, tokens, ceil(m / 32)]`: bit `j % 32` of word `j / 32` is set iff `(S k)_j >= 0`; unused bits are 0.
    pub words: Vec<u32>,
    /// `nu`, `[batch, heads, tokens]`; [`NON_FINITE_SCALE`] marks a masked row.
    pub scale: Vec<f16>,
    /// What was odd.
    pub status: Counts,
}

impl SketchedKeys {
    /// Words of one key.
    #[must_use]
    pub const fn words_per_row(&self) -> usize {
        self.sketch_dim.div_ceil(32)
    }

    /// Bytes stored: words and scalars.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.words.as_slice()) + size_of_val(self.scale.as_slice())
    }

    /// Checks that words and scalars are as many as the shape has rows.
    ///
    /// # Errors
    /// [`Error::Shape`] naming what does not fit.
    pub fn check(&self) -> Result<()> {
        check_codes("sketched keys", self.shape, self.words_per_row(), &self.words, &self.scale)
    }
}

/// Values as signed 8-bit codes and one scale each.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedValues {
    /// Shape of the values, `[batch, heads, tokens, value_dim]`.
    pub shape: Shape,
    /// `[batch, heads, tokens, ceil(value_dim / 4)]`: byte `c % 4` of word `c / 4`, least significant first, is the
    /// code of channel `c`; unused bytes are 0.
    pub words: Vec<u32>,
    /// Step of the codes, `[batch, heads, tokens]`; [`NON_FINITE_SCALE`] marks a masked row.
    pub scale: Vec<f16>,
    /// What was odd.
    pub status: Counts,
}

impl QuantizedValues {
    /// Words of one value row.
    #[must_use]
    pub const fn words_per_row(&self) -> usize {
        self.shape.dim.div_ceil(4)
    }

    /// Bytes stored: words and scales.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.words.as_slice()) + size_of_val(self.scale.as_slice())
    }

    /// Checks that words and scales are as many as the shape has rows.
    ///
    /// # Errors
    /// [`Error::Shape`] naming what does not fit.
    pub fn check(&self) -> Result<()> {
        check_codes("quantized values", self.shape, self.words_per_row(), &self.words, &self.scale)
    }
}

fn check_codes(what: &str, shape: Shape, per_row: usize, words: &[u32], scale: &[f16]) -> Result<()> {
    let rows = shape.rows();
    if rows.checked_mul(per_row) == Some(words.len()) && scale.len() == rows {
        return Ok(());
    }
    let want = format!("{rows} rows of {per_row} words and one scale for {shape}");
    Err(Error::shape(what, want, format_args!("{} words and {} scales", words.len(), scale.len())))
}

/// Checks that a projection is for keys of this shape and codes of this many bits.
pub(crate) fn check_projection(keys: Shape, sketch_dim: usize, projection: &Projection) -> Result<()> {
    let (want, have) = ((projection.sketch_dim(), projection.head_dim()), (sketch_dim, keys.dim));
    if want == have {
        return Ok(());
    }
    let text = |(m, d): (usize, usize)| format!("sketch_dim {m}, head_dim {d}");
    Err(Error::shape("keys", format!("{} as the projection has", text(want)), text(have)))
}
