//! Rotations of rows before they are coded: orthogonal, drawn from a seed, norms kept.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use super::super::draws::{Draws, orthogonal};
use super::super::projection::{flip, walsh_hadamard};
use super::config::{CodeLayout, PlanesOptions};
use crate::attention::dot;
use crate::digest::Fnv;

/// Channels, rounds and seed of a drawn rotation.
type Drawn = (usize, u8, u64);

/// Rotations that [`Rotation::shared`] keeps.
const SHARED: usize = 8;

/// An orthogonal matrix `R` of `n` channels.
///
/// For `n` a power of two, rounds of random signs and Walsh-Hadamard, `R = n^(-r/2) H D_r ... H D_1`; else one
/// Haar-random matrix. Draws come from ChaCha20 keyed with the seed's eight little-endian bytes, `kvfold planes` and
/// `n` as two little-endian bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    channels: usize,
    store: Store,
}

#[derive(Clone, Debug, PartialEq)]
enum Store {
    /// `[round][n]` sign bits, each round on fresh words.
    Signs(Vec<u32>),
    /// Row-major `[n, n]`.
    Matrix(Vec<f32>),
}

impl Rotation {
    /// Draws a rotation of 1 to 512 channels.
    #[must_use]
    pub fn new(channels: usize, rounds: u8, seed: u64) -> Self {
        let mut label = b"kvfold planes".to_vec();
        label.extend_from_slice(&(channels as u16).to_le_bytes());
        let mut draws = Draws::new(seed, &label);
        let store = if channels.is_power_of_two() {
            Store::Signs(draws.signs(usize::from(rounds), channels))
        } else {
            Store::Matrix(orthogonal(&mut draws, channels, channels, 1.0))
        };
        Self { channels, store }
    }

    /// [`Rotation::new`], drawn once for all who ask while it is among the last few: a Haar-random matrix takes long.
    pub(crate) fn shared(channels: usize, rounds: u8, seed: u64) -> Arc<Self> {
        static LAST: Mutex<VecDeque<(Drawn, Arc<Rotation>)>> = Mutex::new(VecDeque::new());
        let key = (channels, rounds, seed);
        // A panic of another holder leaves whole rotations.
        let lock = || LAST.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((_, found)) = lock().iter().find(|(of, _)| *of == key) {
            return found.clone();
        }
        // Others need not wait for the draw; two may draw the same.
        let drawn = Arc::new(Self::new(channels, rounds, seed));
        let mut last = lock();
        last.truncate(SHARED - 1);
        last.push_front((key, drawn.clone()));
        drawn
    }

    /// Channels, `n`.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.channels
    }

    /// 64-bit FNV-1a over the channels and the stored words, each as four little-endian bytes: equal for rotations that
    /// turn alike, whatever drew them.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hash = Fnv::new();
        hash.add(&(self.channels as u32).to_le_bytes());
        match &self.store {
            Store::Signs(signs) => signs.iter().for_each(|word| hash.add(&word.to_le_bytes())),
            Store::Matrix(matrix) => matrix.iter().for_each(|x| hash.add(&x.to_bits().to_le_bytes())),
        }
        hash.value()
    }

    /// The random signs, `[rounds][n]` bits, 1 for a minus, least significant bit first, each round on fresh words;
    /// `None` where there is a matrix.
    #[must_use]
    pub fn signs(&self) -> Option<&[u32]> {
        match &self.store {
            Store::Signs(signs) => Some(signs),
            Store::Matrix(_) => None,
        }
    }

    /// Row-major `[n, n]`; `None` where `n` is a power of two.
    #[must_use]
    pub fn matrix(&self) -> Option<&[f32]> {
        match &self.store {
            Store::Signs(_) => None,
            Store::Matrix(matrix) => Some(matrix),
        }
    }

    /// Bytes stored: the signs or the matrix.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Signs(signs) => size_of_val(signs.as_slice()),
            Store::Matrix(matrix) => size_of_val(matrix.as_slice()),
        }
    }

    /// `n^(-r/2)`, the one factor after all rounds; 1 for a matrix.
    #[must_use]
    pub fn factor(&self) -> f32 {
        let rounds = self.signs().map_or(0, |signs| signs.len() / self.words());
        (self.channels as f64).powf(-0.5 * rounds as f64) as f32
    }

    /// `row = R row` in f32; `row` has `n` numbers. Each round flips signs, then runs the butterflies `(a + b, a - b)`
    /// at distance 1, 2, 4, ...; the factor comes last.
    pub fn apply(&self, row: &mut [f32]) {
        match &self.store {
            Store::Signs(signs) => {
                for signs in signs.chunks_exact(self.words()) {
                    flip(row, signs);
                    walsh_hadamard(row);
                }
                let factor = self.factor();
                row.iter_mut().for_each(|x| *x *= factor);
            }
            Store::Matrix(matrix) => {
                let from = row.to_vec();
                for (y, r) in row.iter_mut().zip(matrix.chunks_exact(self.channels)) {
                    *y = dot(r, &from);
                }
            }
        }
    }

    /// `row = R^T row` in f32, the inverse of [`Rotation::apply`]: its rounds backwards, butterflies before signs.
    pub fn apply_transposed(&self, row: &mut [f32]) {
        match &self.store {
            Store::Signs(signs) => {
                for signs in signs.chunks_exact(self.words()).rev() {
                    walsh_hadamard(row);
                    flip(row, signs);
                }
                let factor = self.factor();
                row.iter_mut().for_each(|x| *x *= factor);
            }
            Store::Matrix(matrix) => {
                let from = row.to_vec();
                row.fill(0.0);
                for (y, r) in from.iter().zip(matrix.chunks_exact(self.channels)) {
                    row.iter_mut().zip(r).for_each(|(x, r)| *x += y * r);
                }
            }
        }
    }

    fn words(&self) -> usize {
        self.channels.div_ceil(32)
    }
}

/// The rotations of a cache, one for each width that its keys' and values' segments have, shared by layers and heads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rotations {
    all: Vec<Rotation>,
}

impl Rotations {
    /// Draws what these layouts need; segments without bits need none.
    #[must_use]
    pub fn new(options: &PlanesOptions, keys: &CodeLayout, values: &CodeLayout) -> Self {
        Self::with_matrices(options, keys, values, &BTreeMap::new())
    }

    /// As [`Rotations::new`], but with these `[n, n]` matrices, by `n`, in place of drawn ones.
    pub(super) fn with_matrices(
        options: &PlanesOptions,
        keys: &CodeLayout,
        values: &CodeLayout,
        matrices: &BTreeMap<usize, Vec<f32>>,
    ) -> Self {
        let rotation = |channels: usize| match matrices.get(&channels) {
            Some(matrix) if matrix.len() == channels * channels => {
                Rotation { channels, store: Store::Matrix(matrix.clone()) }
            }
            _ => Rotation::new(channels, options.rounds, options.seed),
        };
        let mut all: Vec<Rotation> = Vec::new();
        for segment in keys.segments().iter().chain(values.segments()).filter(|s| s.planes > 0) {
            if !all.iter().any(|rotation| rotation.channels == segment.channels) {
                all.push(rotation(segment.channels));
            }
        }
        Self { all }
    }

    /// All rotations, in the order in which the segments need them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Rotation> {
        self.all.iter()
    }

    /// The rotation of `channels` channels.
    #[must_use]
    pub fn get(&self, channels: usize) -> Option<&Rotation> {
        self.all.iter().find(|rotation| rotation.channels == channels)
    }

    /// All of them, in the order in which keys, then values, need them.
    #[must_use]
    pub fn all(&self) -> &[Rotation] {
        &self.all
    }

    /// Bytes stored.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.all.iter().map(Rotation::bytes).sum()
    }
}
