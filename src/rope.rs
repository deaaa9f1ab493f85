//! Rotary position embedding (Su et al. 2021, arXiv 2104.09864), as far as a cache must know it: which channels turn
//! together, and how fast.
//!
//! At position `t` the pair `(a, b)` of a row becomes `(a cos - b sin, a sin + b cos)` of the angle `t * inv_freq`.
//! Kernels do no trigonometry: they read `(cos, sin)` rows that [`Rope::angles`] made, for a tile's first position and
//! for the offsets within a tile, and [`add_angles`] joins the two.

use crate::capture::{Capture, CaptureInfo, RopeLayout};
use crate::error::{Error, Result};

/// Positions that share one coarse row of angles: position `p` is `p - p % ANGLE_TILE` plus the offset `p % ANGLE_TILE`.
pub const ANGLE_TILE: u32 = 64;

/// A rotary embedding of the first `rotary_dim` channels of a head; the channels behind them stay as they are.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    rotary_dim: usize,
    inv_freq: Vec<f64>,
    layout: RopeLayout,
}

impl Rope {
    /// An embedding given by its frequencies in radians per position, one for each of the `rotary_dim / 2` pairs.
    /// Scaled embeddings (linear, NTK, YaRN, Llama 3) are given by their scaled frequencies.
    ///
    /// # Errors
    /// [`Error::Range`] when `rotary_dim` is 0, odd or above `head_dim`, or the layout is [`RopeLayout::Other`];
    /// [`Error::Shape`] on another count of frequencies; [`Error::NonFinite`] naming the first that is not finite.
    pub fn new(head_dim: usize, rotary_dim: usize, inv_freq: Vec<f64>, layout: RopeLayout) -> Result<Self> {
        if rotary_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            return Err(Error::range(
                "rotary_dim",
                format!("an even number from 2 to {head_dim}"),
                rotary_dim,
            ));
        }
        if inv_freq.len() != rotary_dim / 2 {
            return Err(Error::shape("inv_freq", format_args!("[{}]", rotary_dim / 2), inv_freq.len()));
        }
        if let Some((index, &value)) = inv_freq.iter().enumerate().find(|(_, f)| !f.is_finite()) {
            return Err(Error::NonFinite { what: "inv_freq".to_owned(), index, value: value as f32 });
        }
        if let RopeLayout::Other(name) = &layout {
            return Err(Error::range("rope layout", "half-split or interleaved", name));
        }
        Ok(Self { rotary_dim, inv_freq, layout })
    }

    /// Frequencies `theta^(-2 i / rotary_dim)` (section 3.2.2).
    ///
    /// # Errors
    /// As [`Rope::new`]; [`Error::Range`] when `theta` is not a finite number above 0.
    pub fn from_theta(head_dim: usize, rotary_dim: usize, theta: f64, layout: RopeLayout) -> Result<Self> {
        if !(theta.is_finite() && theta > 0.0) {
            return Err(Error::range("rope theta", "a finite number above 0", theta));
        }
        let frequency = |i: usize| theta.powf(-2.0 * i as f64 / rotary_dim as f64);
        Self::new(head_dim, rotary_dim, (0..rotary_dim / 2).map(frequency).collect(), layout)
    }

    /// What a capture says of a layer; `None` where it does not give both frequencies and a layout known here.
    ///
    /// # Errors
    /// As [`Rope::new`], on captures that were changed after their check.
    pub fn from_capture(capture: &Capture, layer: usize) -> Result<Option<Self>> {
        match capture.layers.get(layer) {
            Some(held) => Self::from_info(&capture.info, layer, held.key_dim()),
            None => Ok(None),
        }
    }

    /// [`Rope::from_capture`] of a layer whose keys have `head_dim` channels.
    pub(crate) fn from_info(info: &CaptureInfo, layer: usize, head_dim: usize) -> Result<Option<Self>> {
        let known = |layout: &&RopeLayout| !matches!(layout, RopeLayout::Other(_));
        let layout = info.rope_layout.as_ref().filter(known).cloned();
        let Some((layout, inv_freq)) = layout.zip(info.layer_inv_freq(layer, head_dim)) else {
            return Ok(None);
        };
        let inv_freq: Vec<f64> = inv_freq.into_iter().map(f64::from).collect();
        Self::new(head_dim, 2 * inv_freq.len(), inv_freq, layout).map(Some)
    }

    /// Channels that turn, the first of a row.
    #[must_use]
    pub const fn rotary_dim(&self) -> usize {
        self.rotary_dim
    }

    /// Radians per position of each pair.
    #[must_use]
    pub fn inv_freq(&self) -> &[f64] {
        &self.inv_freq
    }

    /// How channels are paired.
    #[must_use]
    pub const fn layout(&self) -> &RopeLayout {
        &self.layout
    }

    /// Channels of every pair, in the order of `inv_freq`.
    pub fn pairs(&self) -> impl ExactSizeIterator<Item = (usize, usize)> {
        let (half, interleaved) = (self.rotary_dim / 2, self.layout == RopeLayout::Interleaved);
        (0..half).map(move |i| if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) })
    }

    /// `(cos, sin)` of every pair's angle at a position, computed in f64 and rounded to f32.
    #[must_use]
    pub fn angles(&self, position: u32) -> Vec<[f32; 2]> {
        let angle = |frequency: &f64| {
            let (sin, cos) = (f64::from(position) * frequency).sin_cos();
            [cos as f32, sin as f32]
        };
        self.inv_freq.iter().map(angle).collect()
    }

    /// Turns a row from position 0 to the position of `angles`; channels that the row does not have are left out.
    pub fn rotate(&self, row: &mut [f32], angles: &[[f32; 2]]) {
        for ((a, b), &[cos, sin]) in self.pairs().zip(angles) {
            turn(row, a, b, cos, sin);
        }
    }

    /// Turns a row from the position of `angles` back to position 0.
    pub fn unrotate(&self, row: &mut [f32], angles: &[[f32; 2]]) {
        for ((a, b), &[cos, sin]) in self.pairs().zip(angles) {
            turn(row, a, b, cos, -sin);
        }
    }

    /// Checks that a row of `head_dim` channels holds every channel that turns.
    ///
    /// # Errors
    /// [`Error::Range`] naming `rotary_dim`.
    pub fn check_dim(&self, head_dim: usize) -> Result<()> {
        if self.rotary_dim <= head_dim {
            return Ok(());
        }
        Err(Error::range("rotary_dim", format!("at most the {head_dim} channels of a head"), self.rotary_dim))
    }
}

fn turn(row: &mut [f32], a: usize, b: usize, cos: f32, sin: f32) {
    if let Ok([x, y]) = row.get_disjoint_mut([a, b]) {
        (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
    }
}

/// `(cos, sin)` of the sum of two angles.
#[must_use]
pub fn add_angles([cos_a, sin_a]: [f32; 2], [cos_b, sin_b]: [f32; 2]) -> [f32; 2] {
    [cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b]
}

/// The positions, in RoPE's sense, of the tokens of `[batch, heads, tokens, dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions<'a> {
    /// Consecutive from this position on, one for each sequence.
    Start(&'a [u32]),
    /// `[batch, tokens]`.
    Explicit(&'a [u32]),
}

impl Positions<'_> {
    /// `[batch, tokens]`.
    ///
    /// # Errors
    /// [`Error::Shape`] on another count of numbers, [`Error::Range`] when a position is above `u32::MAX`.
    pub fn resolve(&self, batch: usize, tokens: usize) -> Result<Vec<u32>> {
        match *self {
            Self::Explicit(all) if all.len() == batch * tokens => Ok(all.to_vec()),
            Self::Explicit(all) => {
                Err(Error::shape("positions", format_args!("[{batch}, {tokens}]"), all.len()))
            }
            Self::Start(starts) if starts.len() != batch => {
                Err(Error::shape("position starts", format_args!("[{batch}]"), starts.len()))
            }
            Self::Start(starts) => {
                let last = u64::from(starts.iter().copied().max().unwrap_or(0)) + tokens as u64;
                if last > u64::from(u32::MAX) {
                    return Err(Error::range("position", format!("at most {}", u32::MAX), last));
                }
                let from = |&start: &u32| (0..tokens).map(move |t| start + t as u32);
                Ok(starts.iter().flat_map(from).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_by_hand_in_both_layouts() {
        // A quarter turn for the first pair, none for the second.
        let quarter = vec![std::f64::consts::FRAC_PI_2, 0.0];
        for (layout, want) in [
            (RopeLayout::HalfSplit, [-3.0, 2.0, 1.0, 4.0, 5.0]),
            (RopeLayout::Interleaved, [-2.0, 1.0, 3.0, 4.0, 5.0]),
        ] {
            let rope = Rope::new(5, 4, quarter.clone(), layout).unwrap();
            let (mut row, angles) = ([1.0, 2.0, 3.0, 4.0, 5.0], rope.angles(1));
            rope.rotate(&mut row, &angles);
            assert!(row.iter().zip(want).all(|(r, w)| (r - w).abs() < 1e-6), "{row:?}");
            rope.unrotate(&mut row, &angles);
            assert!(row.iter().zip([1.0, 2.0, 3.0, 4.0, 5.0]).all(|(r, w)| (r - w).abs() < 1e-6), "{row:?}");
        }
    }

    #[test]
    fn coarse_and_fine_angles_add_up() {
        let rope = Rope::from_theta(64, 64, 1e5, RopeLayout::HalfSplit).unwrap();
        for position in [0, 63, 64, 100_000, u32::MAX] {
            let fine = rope.angles(position % ANGLE_TILE);
            let coarse = rope.angles(position - position % ANGLE_TILE);
            for ((c, f), want) in coarse.into_iter().zip(fine).zip(rope.angles(position)) {
                let had = add_angles(c, f);
                // Three roundings of 2^-24 of numbers up to 1, and those of the tables.
                assert!((0..2).all(|i| (had[i] - want[i]).abs() < 4e-7), "{position}: {had:?} {want:?}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let new = |head, rotary, count: usize, layout| Rope::new(head, rotary, vec![0.5; count], layout);
        for (head, rotary) in [(64, 63), (64, 66), (64, 0)] {
            assert!(matches!(new(head, rotary, rotary / 2, RopeLayout::HalfSplit), Err(Error::Range { .. })));
        }
        assert!(matches!(new(64, 64, 31, RopeLayout::HalfSplit), Err(Error::Shape { .. })));
        let other = RopeLayout::Other("mrope".to_owned());
        assert!(matches!(new(64, 64, 32, other), Err(Error::Range { .. })));
        let error = Rope::new(4, 4, vec![1.0, f64::NAN], RopeLayout::Interleaved).unwrap_err();
        assert!(matches!(error, Error::NonFinite { index: 1, .. }), "{error}");
        assert!(Rope::from_theta(4, 4, 0.0, RopeLayout::HalfSplit).is_err());
        assert!(new(64, 32, 16, RopeLayout::HalfSplit).unwrap().check_dim(31).is_err());
    }

    #[test]
    fn positions_are_per_sequence_or_per_token() {
        assert_eq!(Positions::Start(&[5, 0]).resolve(2, 3).unwrap(), [5, 6, 7, 0, 1, 2]);
        assert_eq!(Positions::Explicit(&[9, 7]).resolve(1, 2).unwrap(), [9, 7]);
        assert!(Positions::Start(&[5]).resolve(2, 3).is_err());
        assert!(Positions::Explicit(&[5]).resolve(2, 3).is_err());
        assert!(matches!(Positions::Start(&[u32::MAX]).resolve(1, 2), Err(Error::Range { .. })));
    }
}
