//! What a cache of the original QJL keeps.

use serde::{Deserialize, Serialize};

use super::super::config::{KeyScale, ProjectionKind};
use super::super::planes::Centring;
use super::super::projection::MAX_SKETCH_DIM;
use crate::error::{Error, Result};

/// The original QJL: signs of a random projection, one norm, values in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SketchOptions {
    /// How the projection's rows are drawn.
    pub projection: ProjectionKind,
    /// Bits of a key over its channels: `m = rate * key_dim`, rounded up but for what a division's own rounding left.
    pub rate: f64,
    /// The scalar beside the signs.
    pub scale: KeyScale,
    /// What is subtracted from keys before they are sketched, and added to scores again: nothing, or a head's mean key before
    /// RoPE.
    pub centring: Centring,
    /// First tokens that stay raw.
    pub sinks: u32,
    /// Last tokens that stay raw.
    pub recent: u32,
    /// Seed of the projection.
    pub seed: u64,
}

impl Default for SketchOptions {
    fn default() -> Self {
        Self {
            projection: ProjectionKind::Gaussian,
            rate: 1.0,
            scale: KeyScale::Norm,
            centring: Centring::None,
            sinks: 0,
            recent: 0,
            seed: 42,
        }
    }
}

impl SketchOptions {
    /// Sets how the projection's rows are drawn.
    #[must_use]
    pub const fn projection(mut self, kind: ProjectionKind) -> Self {
        self.projection = kind;
        self
    }

    /// Sets the bits of a key over its channels.
    #[must_use]
    pub const fn rate(mut self, rate: f64) -> Self {
        self.rate = rate;
        self
    }

    /// Sets the scalar beside the signs.
    #[must_use]
    pub const fn scale(mut self, scale: KeyScale) -> Self {
        self.scale = scale;
        self
    }

    /// Sets what is subtracted from keys.
    #[must_use]
    pub const fn centring(mut self, centring: Centring) -> Self {
        self.centring = centring;
        self
    }

    /// Sets how many first tokens stay raw.
    #[must_use]
    pub const fn sinks(mut self, tokens: u32) -> Self {
        self.sinks = tokens;
        self
    }

    /// Sets how many last tokens stay raw.
    #[must_use]
    pub const fn recent(mut self, tokens: u32) -> Self {
        self.recent = tokens;
        self
    }

    /// Sets the seed of the projection.
    #[must_use]
    pub const fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Bits of a key of `key_dim` channels.
    ///
    /// # Errors
    /// [`Error::Range`] when the rate is not above 0 or gives more bits than a projection has.
    pub fn sketch_dim(&self, key_dim: usize) -> Result<usize> {
        let exact = self.rate * key_dim as f64;
        // A rate of m / key_dim is m bits, whatever the division was rounded to.
        let near = exact.round();
        let bits = if (exact - near).abs() <= 4.0 * f64::EPSILON * near { near } else { exact.ceil() };
        if bits >= 1.0 && bits <= MAX_SKETCH_DIM as f64 {
            return Ok(bits as usize);
        }
        let want = format!("a number that gives 1 to {MAX_SKETCH_DIM} bits for {key_dim} channels");
        Err(Error::range("sketch rate", want, format_args!("{:?}", self.rate)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_whole_bits_give_those() {
        for dim in 1..=512usize {
            for bits in [1, 3, 7, 63, 100, dim, 2 * dim, 4 * dim] {
                let options = SketchOptions::default().rate(bits as f64 / dim as f64);
                assert_eq!(options.sketch_dim(dim).unwrap(), bits, "{dim}");
            }
        }
        assert_eq!(SketchOptions::default().rate(0.26).sketch_dim(100).unwrap(), 26);
        assert_eq!(SketchOptions::default().rate(0.26).sketch_dim(102).unwrap(), 27);
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY, 17.0] {
            assert!(SketchOptions::default().rate(rate).sketch_dim(512).is_err(), "{rate}");
        }
    }
}
