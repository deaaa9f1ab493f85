//! The random projection `S` of a sketch, `[sketch_dim, head_dim]`: drawn from a seed or given as data.
//!
//! Draws come from ChaCha20 keyed with the seed's eight little-endian bytes followed by `kvfold qjl projection`, so
//! that sign bits are the same everywhere. Gaussian numbers pass through the platform's `ln` and `cos`, which may
//! differ in the last bit: a cache that travels carries its matrix or compares [`Projection::digest`].

use std::f64::consts::{FRAC_PI_2, PI};

use super::ProjectionKind;
use super::draws::{Draws, orthogonal};
use crate::attention::dot;
use crate::digest::Fnv;
use crate::error::{Error, Result};
use crate::tensor::{MAX_HEAD_DIM, checked_bytes};

/// Largest number of sign bits per key.
pub const MAX_SKETCH_DIM: usize = 8192;

/// Rounds of random signs and Walsh-Hadamard; one leaves a bias on rows with outlier channels.
pub(crate) const HADAMARD_ROUNDS: usize = 2;

/// A projection `S` of `sketch_dim` rows (`m`) of `head_dim` numbers (`D`).
#[derive(Clone, Debug, PartialEq)]
pub struct Projection {
    kind: ProjectionKind,
    head_dim: usize,
    sketch_dim: usize,
    seed: Option<u64>,
    store: Store,
}

#[derive(Clone, Debug, PartialEq)]
enum Store {
    /// Row-major `[sketch_dim, head_dim]`.
    Matrix(Vec<f32>),
    /// `[block][round][head_dim]` sign bits, each round of a block on fresh words.
    Signs(Vec<u32>),
}

impl Projection {
    /// Draws a projection from a seed. The same arguments give the same projection.
    ///
    /// # Errors
    /// [`Error::Range`] when `head_dim` is not 1 to 512 (a power of two for Hadamard), `sketch_dim` is not 1 to 8192,
    /// or `kind` is [`ProjectionKind::Loaded`], which needs [`Projection::from_matrix`].
    pub fn new(kind: ProjectionKind, head_dim: usize, sketch_dim: usize, seed: u64) -> Result<Self> {
        check_dims(head_dim, sketch_dim)?;
        let mut draws = Draws::new(seed, b"kvfold qjl projection");
        let store = match kind {
            ProjectionKind::Gaussian => {
                Store::Matrix((0..sketch_dim * head_dim).map(|_| draws.gaussian() as f32).collect())
            }
            ProjectionKind::Orthogonal => {
                let length = (head_dim as f64).sqrt();
                Store::Matrix(orthogonal(&mut draws, head_dim, sketch_dim, length))
            }
            ProjectionKind::Hadamard if head_dim.is_power_of_two() => {
                Store::Signs(draws.signs(sketch_dim.div_ceil(head_dim) * HADAMARD_ROUNDS, head_dim))
            }
            ProjectionKind::Hadamard => {
                return Err(Error::range("head_dim of a Hadamard projection", "a power of two", head_dim));
            }
            ProjectionKind::Loaded => {
                return Err(Error::range("projection", "gaussian, orthogonal or hadamard", kind));
            }
        };
        Ok(Self { kind, head_dim, sketch_dim, seed: Some(seed), store })
    }

    /// Takes a matrix as data, row-major `[sketch_dim, head_dim]`, with N(0, 1) entries as the estimator's constant
    /// `sqrt(pi / 2)` supposes.
    ///
    /// # Errors
    /// [`Error::Range`] on dimensions out of range, [`Error::Shape`] when the count is not their product,
    /// [`Error::NonFinite`] naming the first entry that is not finite.
    pub fn from_matrix(matrix: &[f32], head_dim: usize, sketch_dim: usize) -> Result<Self> {
        check_dims(head_dim, sketch_dim)?;
        if matrix.len() != head_dim * sketch_dim {
            let want = format!("[{sketch_dim}, {head_dim}]");
            return Err(Error::shape("projection", want, format_args!("{} numbers", matrix.len())));
        }
        if let Some((index, &value)) = matrix.iter().enumerate().find(|(_, x)| !x.is_finite()) {
            return Err(Error::NonFinite { what: "projection".to_owned(), index, value });
        }
        let store = Store::Matrix(matrix.to_vec());
        Ok(Self { kind: ProjectionKind::Loaded, head_dim, sketch_dim, seed: None, store })
    }

    /// A matrix that was drawn like this once.
    ///
    /// # Errors
    /// As [`Projection::from_matrix`].
    pub(crate) fn drawn(
        kind: ProjectionKind,
        seed: Option<u64>,
        matrix: &[f32],
        head_dim: usize,
        sketch_dim: usize,
    ) -> Result<Self> {
        Ok(Self { kind, seed, ..Self::from_matrix(matrix, head_dim, sketch_dim)? })
    }

    /// How the rows were drawn.
    #[must_use]
    pub const fn kind(&self) -> ProjectionKind {
        self.kind
    }

    /// Channels of a key, `D`.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Sign bits of a key, `m`.
    #[must_use]
    pub const fn sketch_dim(&self) -> usize {
        self.sketch_dim
    }

    /// The seed; `None` when loaded.
    #[must_use]
    pub const fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Row-major `[sketch_dim, head_dim]`; `None` for Hadamard, which has no matrix.
    #[must_use]
    pub fn matrix(&self) -> Option<&[f32]> {
        match &self.store {
            Store::Matrix(matrix) => Some(matrix),
            Store::Signs(_) => None,
        }
    }

    /// The random signs of Hadamard: `[ceil(m / D)][2][D]` bits, 1 for a minus, least significant bit first. Each
    /// round of each block starts on a fresh word; unused bits are 0.
    #[must_use]
    pub fn signs(&self) -> Option<&[u32]> {
        match &self.store {
            Store::Matrix(_) => None,
            Store::Signs(signs) => Some(signs),
        }
    }

    /// The constant `c` that makes `c/m * |k| * <S q, sign(S k)>` unbiased: `sqrt(pi / 2)` for Gaussian and loaded
    /// rows, `sqrt(pi) G((D + 1) / 2) / (G(D / 2) sqrt(D))` for rows of norm `sqrt(D)`, `G` the gamma function.
    #[must_use]
    pub fn factor(&self) -> f32 {
        let factor = match self.kind {
            ProjectionKind::Gaussian | ProjectionKind::Loaded => FRAC_PI_2.sqrt(),
            ProjectionKind::Orthogonal | ProjectionKind::Hadamard => sphere_factor(self.head_dim),
        };
        factor as f32
    }

    /// Bytes stored: the matrix, or the signs of Hadamard.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Matrix(matrix) => size_of_val(matrix.as_slice()),
            Store::Signs(signs) => size_of_val(signs.as_slice()),
        }
    }

    /// 64-bit FNV-1a over `head_dim`, `sketch_dim`, the bits of [`Projection::factor`] and the stored words, each as
    /// four little-endian bytes: equal for projections that sketch alike, whatever drew them.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let head = [self.head_dim as u32, self.sketch_dim as u32, self.factor().to_bits()];
        let body: Box<dyn Iterator<Item = u32> + '_> = match &self.store {
            Store::Matrix(matrix) => Box::new(matrix.iter().map(|x| x.to_bits())),
            Store::Signs(signs) => Box::new(signs.iter().copied()),
        };
        let mut hash = Fnv::new();
        head.into_iter().chain(body).for_each(|word| hash.add(&word.to_le_bytes()));
        hash.value()
    }

    /// `out = S row` in f32: `row` has `head_dim` numbers, `out` `sketch_dim`; of slices that do not, as much as fits.
    ///
    /// Hadamard is `H (s2 * (H (s1 * row)) / sqrt(D))` per block, `H` the butterflies `(a + b, a - b)` at distance
    /// 1, 2, 4, ...
    pub fn project(&self, row: &[f32], out: &mut [f32]) {
        match &self.store {
            Store::Matrix(matrix) => {
                for (y, s) in out.iter_mut().zip(matrix.chunks_exact(self.head_dim)) {
                    *y = dot(s, row);
                }
            }
            Store::Signs(signs) => self.project_hadamard(signs, row, out),
        }
    }

    /// `out = S^T y` in f32: `y` has `sketch_dim` numbers, `out` `head_dim`; of slices that do not, as much as fits. Rows are
    /// added in order, blocks of Hadamard likewise.
    pub fn project_transposed(&self, y: &[f32], out: &mut [f32]) {
        out.fill(0.0);
        match &self.store {
            Store::Matrix(matrix) => {
                for (y, s) in y.iter().zip(matrix.chunks_exact(self.head_dim)) {
                    out.iter_mut().zip(s).for_each(|(x, s)| *x += y * s);
                }
            }
            Store::Signs(signs) => self.transposed_hadamard(signs, y, out),
        }
    }

    fn transposed_hadamard(&self, signs: &[u32], y: &[f32], out: &mut [f32]) {
        let words = self.head_dim.div_ceil(32);
        let shrink = (1.0 / (self.head_dim as f64).sqrt()) as f32;
        let mut x = vec![0.0; self.head_dim];
        let blocks = signs.chunks_exact(words * HADAMARD_ROUNDS);
        for (y, block) in y.chunks(self.head_dim).zip(blocks) {
            x.fill(0.0);
            x.iter_mut().zip(y).for_each(|(x, y)| *x = *y);
            // The rounds from the last to the first: H is its own transpose, and so are the signs.
            for (round, signs) in block.chunks_exact(words).rev().enumerate() {
                if round > 0 {
                    x.iter_mut().for_each(|x| *x *= shrink);
                }
                walsh_hadamard(&mut x);
                flip(&mut x, signs);
            }
            out.iter_mut().zip(&x).for_each(|(out, x)| *out += x);
        }
    }

    fn project_hadamard(&self, signs: &[u32], row: &[f32], out: &mut [f32]) {
        let words = self.head_dim.div_ceil(32);
        let shrink = (1.0 / (self.head_dim as f64).sqrt()) as f32;
        let mut x = vec![0.0; self.head_dim];
        let blocks = signs.chunks_exact(words * HADAMARD_ROUNDS);
        for (out, block) in out.chunks_mut(self.head_dim).zip(blocks) {
            x.fill(0.0);
            x.iter_mut().zip(row).for_each(|(x, r)| *x = *r);
            for (round, signs) in block.chunks_exact(words).enumerate() {
                if round > 0 {
                    x.iter_mut().for_each(|x| *x *= shrink);
                }
                flip(&mut x, signs);
                walsh_hadamard(&mut x);
            }
            out.iter_mut().zip(&x).for_each(|(y, x)| *y = *x);
        }
    }
}

fn check_dims(head_dim: usize, sketch_dim: usize) -> Result<()> {
    if !(1..=MAX_HEAD_DIM).contains(&head_dim) {
        return Err(Error::range("head_dim", format!("1 to {MAX_HEAD_DIM}"), head_dim));
    }
    if !(1..=MAX_SKETCH_DIM).contains(&sketch_dim) {
        return Err(Error::range("sketch_dim", format!("1 to {MAX_SKETCH_DIM}"), sketch_dim));
    }
    checked_bytes("projection", &[head_dim, sketch_dim], 4).map(|_| ())
}

/// Negates the numbers whose bit is set.
pub(super) fn flip(numbers: &mut [f32], bits: &[u32]) {
    for (numbers, word) in numbers.chunks_mut(32).zip(bits) {
        for (j, x) in numbers.iter_mut().enumerate() {
            *x = f32::from_bits(x.to_bits() ^ ((word >> j & 1) << 31));
        }
    }
}

/// The unnormalised Walsh-Hadamard transform in place; a power of two of numbers.
pub(super) fn walsh_hadamard(numbers: &mut [f32]) {
    let mut distance = 1;
    while distance < numbers.len() {
        for pair in numbers.chunks_exact_mut(2 * distance) {
            let (low, high) = pair.split_at_mut(distance);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        distance *= 2;
    }
}

/// `sqrt(pi) G((D + 1) / 2) / (G(D / 2) sqrt(D))`: one over the mean of |first coordinate| on the sphere of radius
/// `sqrt(D)`. The gamma ratio `r(D)` follows `r(D + 2) = r(D) (D + 1) / D` from `r(1)` or `r(2)`.
fn sphere_factor(dim: usize) -> f64 {
    let first = if dim % 2 == 1 { 1.0 } else { PI / 2.0 };
    let start = if dim % 2 == 1 { 1 } else { 2 };
    let ratio = (start..dim).step_by(2).fold(first, |r, d| r * (d as f64 + 1.0) / d as f64);
    ratio / (dim as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_the_closed_form() {
        // Gamma ratios by Stirling to 8 digits: research tables give 1.24843 at 64, 1.24940 at 80, 1.25087 at 128.
        for (dim, want) in
            [(1, 1.0), (64, 1.24843), (80, 1.24940), (96, 1.25005), (128, 1.25087), (256, 1.25209)]
        {
            let had = Projection::new(ProjectionKind::Orthogonal, dim, 1, 0).unwrap().factor();
            assert!((had - want).abs() < 5.1e-6, "D = {dim}: wanted {want}, had {had}");
        }
        let gaussian = Projection::new(ProjectionKind::Gaussian, 3, 1, 0).unwrap();
        assert_eq!(gaussian.factor(), 1.253_314_1);
    }

    #[test]
    fn rows_of_a_block_are_orthogonal_with_norm_root_d() {
        for (kind, dim) in [(ProjectionKind::Orthogonal, 80), (ProjectionKind::Hadamard, 64)] {
            let sketch = 2 * dim + 3;
            let projection = Projection::new(kind, dim, sketch, 7).unwrap();
            // Columns of S, by projecting unit vectors; then rows.
            let mut rows = vec![vec![0.0f32; dim]; sketch];
            for c in 0..dim {
                let mut unit = vec![0.0; dim];
                unit[c] = 1.0;
                let mut column = vec![0.0; sketch];
                projection.project(&unit, &mut column);
                rows.iter_mut().zip(column).for_each(|(row, y)| row[c] = y);
            }
            for i in 0..sketch {
                for j in (i / dim * dim)..=i {
                    let want = if i == j { dim as f32 } else { 0.0 };
                    let had = dot(&rows[i], &rows[j]);
                    // D products of numbers near 1, rounded to 24 bits.
                    assert!((had - want).abs() < 2e-7 * dim as f32 * 4.0, "{kind} {i} {j}: {had}");
                }
            }
        }
    }

    #[test]
    fn the_transpose_is_the_transpose() {
        let kinds = [ProjectionKind::Gaussian, ProjectionKind::Orthogonal, ProjectionKind::Hadamard];
        for (kind, sketch) in kinds.into_iter().flat_map(|kind| [(kind, 5), (kind, 16), (kind, 40)]) {
            let projection = Projection::new(kind, 16, sketch, 11).unwrap();
            for (c, j) in (0..16).flat_map(|c| (0..sketch).map(move |j| (c, j))) {
                let (mut unit, mut column) = (vec![0.0; 16], vec![0.0; sketch]);
                unit[c] = 1.0;
                projection.project(&unit, &mut column);
                let (mut bit, mut row) = (vec![0.0; sketch], vec![f32::NAN; 16]);
                bit[j] = 1.0;
                projection.project_transposed(&bit, &mut row);
                // Two rounds of four butterflies, each rounded once.
                assert!(
                    (row[c] - column[j]).abs() <= 8.0 * f32::EPSILON * column[j].abs().max(1.0),
                    "{kind} {c} {j}"
                );
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_projection_and_digest() {
        for kind in [ProjectionKind::Gaussian, ProjectionKind::Orthogonal, ProjectionKind::Hadamard] {
            let draw = |seed| Projection::new(kind, 32, 40, seed).unwrap();
            assert_eq!(draw(1), draw(1));
            assert_ne!(draw(1).digest(), draw(2).digest());
            assert_eq!((draw(1).kind(), draw(1).seed()), (kind, Some(1)));
        }
        let gaussian = Projection::new(ProjectionKind::Gaussian, 32, 40, 1).unwrap();
        let loaded = Projection::from_matrix(gaussian.matrix().unwrap(), 32, 40).unwrap();
        assert_eq!((loaded.kind(), loaded.seed()), (ProjectionKind::Loaded, None));
        assert_eq!(loaded.digest(), gaussian.digest());
        // Sign bits have no platform in them: this digest stands in every saved cache.
        assert_eq!(
            Projection::new(ProjectionKind::Hadamard, 64, 256, 42).unwrap().digest(),
            6_421_782_836_295_045_251
        );
    }

    #[test]
    fn what_is_stored_is_what_is_counted() {
        let hadamard = Projection::new(ProjectionKind::Hadamard, 16, 40, 3).unwrap();
        // Three blocks of two rounds, one word each.
        assert_eq!((hadamard.bytes(), hadamard.signs().unwrap().len()), (24, 6));
        assert!(hadamard.signs().unwrap().iter().all(|word| word >> 16 == 0));
        assert!(hadamard.matrix().is_none());
        assert_eq!(Projection::new(ProjectionKind::Orthogonal, 80, 100, 3).unwrap().bytes(), 32_000);
    }

    #[test]
    fn one_channel_works_for_all_kinds() {
        for kind in [ProjectionKind::Gaussian, ProjectionKind::Orthogonal, ProjectionKind::Hadamard] {
            let projection = Projection::new(kind, 1, 5, 9).unwrap();
            let mut y = [0.0; 5];
            projection.project(&[2.0], &mut y);
            let unit = kind != ProjectionKind::Gaussian;
            assert!(y.iter().all(|y| if unit { y.abs() == 2.0 } else { *y != 0.0 }), "{kind}: {y:?}");
        }
    }

    #[test]
    fn bad_dimensions_and_matrices_are_named() {
        let refused = [
            Projection::new(ProjectionKind::Gaussian, 0, 1, 0),
            Projection::new(ProjectionKind::Gaussian, 513, 1, 0),
            Projection::new(ProjectionKind::Gaussian, 1, 0, 0),
            Projection::new(ProjectionKind::Gaussian, 1, 8193, 0),
            Projection::new(ProjectionKind::Hadamard, 80, 80, 0),
            Projection::new(ProjectionKind::Loaded, 8, 8, 0),
        ];
        for projection in refused {
            assert!(matches!(projection, Err(Error::Range { .. })), "{projection:?}");
        }
        assert!(matches!(Projection::from_matrix(&[1.0; 5], 2, 3), Err(Error::Shape { .. })));
        let error = Projection::from_matrix(&[1.0, f32::NAN], 2, 1).unwrap_err();
        assert!(matches!(error, Error::NonFinite { index: 1, .. }), "{error}");
    }
}
