//! A seed's random numbers, and the orthogonal matrices made of them.

use std::f64::consts::TAU;

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Rows of Haar-random orthogonal matrices, `dim` to a block, of norm `length`; a partial last block has the first
/// rows of its matrix. Gram-Schmidt on Gaussian rows, with the norms taken positive, gives exactly Haar's measure;
/// it runs twice over each row, which keeps rows orthogonal to rounding.
pub(super) fn orthogonal(draws: &mut Draws, dim: usize, rows: usize, length: f64) -> Vec<f32> {
    let norm = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut matrix = Vec::with_capacity(rows * dim);
    let mut block: Vec<Vec<f64>> = Vec::with_capacity(dim);
    while matrix.len() < rows * dim {
        if block.len() == dim {
            block.clear();
        }
        let mut row: Vec<f64> = (0..dim).map(|_| draws.gaussian()).collect();
        let drawn = norm(&row);
        for done in block.iter().chain(&block) {
            let along: f64 = row.iter().zip(done).map(|(x, q)| x * q).sum();
            row.iter_mut().zip(done).for_each(|(x, q)| *x -= along * q);
        }
        let left = norm(&row);
        // Nearly inside the span of the rows before it: its direction would be rounding. Draw again.
        if left <= 1e-9 * drawn {
            continue;
        }
        row.iter_mut().for_each(|x| *x /= left);
        matrix.extend(row.iter().map(|x| (x * length) as f32));
        block.push(row);
    }
    matrix
}

/// A seed's stream of random numbers.
pub(super) struct Draws {
    stream: ChaCha20Rng,
    /// The second number of a Box-Muller pair.
    spare: Option<f64>,
}

impl Draws {
    /// ChaCha20 keyed with the seed's eight little-endian bytes followed by `label`, 24 bytes at most.
    pub(super) fn new(seed: u64, label: &[u8]) -> Self {
        let mut key = [0; 32];
        let text = seed.to_le_bytes().into_iter().chain(label.iter().copied());
        key.iter_mut().zip(text).for_each(|(k, b)| *k = b);
        Self { stream: ChaCha20Rng::from_seed(key), spare: None }
    }

    /// N(0, 1) by Box-Muller.
    pub(super) fn gaussian(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        // 53 bits; in (0, 1] so that the logarithm is finite, and in [0, 1) for the angle.
        let unit = (1u64 << 53) as f64;
        let radius = (-2.0 * (((self.stream.next_u64() >> 11) + 1) as f64 / unit).ln()).sqrt();
        let (sin, cos) = (TAU * (self.stream.next_u64() >> 11) as f64 / unit).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos
    }

    /// `rows` of `bits` random bits, each on fresh words with unused bits 0.
    pub(super) fn signs(&mut self, rows: usize, bits: usize) -> Vec<u32> {
        let words = bits.div_ceil(32);
        let last = u32::MAX >> (words * 32 - bits);
        let mask = |word| if word % words == words - 1 { last } else { u32::MAX };
        (0..rows * words).map(|word| self.stream.next_u32() & mask(word)).collect()
    }
}
