//! Pairs of layers with every kind of row that a fold must survive.

use half::{bf16, f16};
use kvfold::{DType, Shape, Tensor};

use crate::random::Random;

/// What one row of a pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Random,
    /// Any angle.
    Angle,
    /// An angle below 0.6, mostly above the default threshold.
    Similar,
    Identical,
    Opposite,
    /// Up to 0.01 from opposite.
    NearlyOpposite,
    ZeroLower,
    ZeroUpper,
    ZeroBoth,
    /// One channel each, powers of two: cosines of exactly -1, 0 and 1, and so ties.
    OneHot,
    /// Norms about f16's smallest normal number.
    Small,
    /// Numbers up to f16's largest.
    Large,
    /// The upper row's largest number is the type's largest, and so would be its restored one.
    Edge,
    /// Beyond what f32 measures, for types that reach there.
    Immeasurable,
    NonFinite,
}

impl Kind {
    pub const ALL: [Self; 15] = [
        Self::Random,
        Self::Angle,
        Self::Similar,
        Self::Identical,
        Self::Opposite,
        Self::NearlyOpposite,
        Self::ZeroLower,
        Self::ZeroUpper,
        Self::ZeroBoth,
        Self::OneHot,
        Self::Small,
        Self::Large,
        Self::Edge,
        Self::Immeasurable,
        Self::NonFinite,
    ];
}

pub fn norm(row: &[f64]) -> f64 {
    row.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn peak(row: &[f64]) -> f64 {
    row.iter().fold(0.0, |p, x| p.max(x.abs()))
}

fn scaled(row: &[f64], factor: f64) -> Vec<f64> {
    row.iter().map(|x| x * factor).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// A row at `angle` from `row`, as long.
pub fn at_angle(random: &mut Random, row: &[f64], angle: f64) -> Vec<f64> {
    let other = random.normals(row.len());
    let along = dot(&other, row) / dot(row, row);
    let across: Vec<f64> = other.iter().zip(row).map(|(o, x)| o - along * x).collect();
    let length = norm(&across);
    // In one dimension nothing is across.
    let (cosine, sine) = if row.len() == 1 {
        (angle.cos().signum(), 0.0)
    } else {
        (angle.cos(), angle.sin() * norm(row) / length)
    };
    row.iter().zip(across).map(|(x, y)| cosine * x + sine * y).collect()
}

fn one_hot(random: &mut Random, dim: usize) -> Vec<f64> {
    let mut row = vec![0.0; dim];
    let channel = (random.uniform() * dim.min(3) as f64) as usize;
    row[channel] = [1.0, -1.0, 0.5, 4.0][(random.uniform() * 4.0) as usize];
    row
}

fn pair_of_rows(random: &mut Random, kind: Kind, dim: usize, dtype: DType) -> [Vec<f64>; 2] {
    let size = 10f64.powf(random.uniform() * 3.0 - 1.5);
    let a = scaled(&random.normals(dim), size);
    let gain = 2f64.powf(random.uniform() * 6.0 - 3.0);
    let similar = |random: &mut Random, a: &[f64]| {
        let angle = 0.6 * random.uniform();
        scaled(&at_angle(random, a, angle), gain)
    };
    let zero = vec![0.0; dim];
    match kind {
        Kind::Random => [a, random.normals(dim)],
        Kind::Angle => {
            let angle = std::f64::consts::PI * random.uniform();
            let b = scaled(&at_angle(random, &a, angle), gain);
            [a, b]
        }
        Kind::Similar | Kind::NonFinite => {
            let b = similar(random, &a);
            [a, b]
        }
        Kind::Identical => [a.clone(), a],
        Kind::Opposite => [a.clone(), scaled(&a, -2.0)],
        Kind::NearlyOpposite => {
            let angle = std::f64::consts::PI - 0.01 * random.uniform();
            let b = at_angle(random, &a, angle);
            [a, b]
        }
        Kind::ZeroLower => [zero, a],
        Kind::ZeroUpper => [a, zero],
        Kind::ZeroBoth => [zero, vec![-0.0; dim]],
        Kind::OneHot => [one_hot(random, dim), one_hot(random, dim)],
        Kind::Small => {
            let small = scaled(&a, 3e-5 / size * random.uniform());
            let b = similar(random, &small);
            [small, b]
        }
        Kind::Large => {
            let large = scaled(&a, 65504.0 * random.uniform() / peak(&a));
            let b = at_angle(random, &large, 0.5);
            let fit = (65504.0 / peak(&b)).min(1.0);
            [large, scaled(&b, fit)]
        }
        Kind::Edge => {
            let largest = f64::from(dtype.largest());
            let lower = scaled(&a, largest / 1000.0 * (1.0 + random.uniform()) / peak(&a));
            let upper: Vec<f64> = lower.iter().rev().copied().collect();
            let fit = largest / peak(&upper);
            [lower, scaled(&upper, fit)]
        }
        Kind::Immeasurable => {
            let factor = [1e-44, 1e-38, 1e-33, 1e31, 1e36][(random.uniform() * 5.0) as usize] / size;
            let b = similar(random, &a);
            if dtype == DType::F16 { [a, b] } else { [scaled(&a, factor), b] }
        }
    }
}

/// Bits of numbers that are not finite, one a signalling NaN with a payload; little-endian, in `dtype`.
fn broken_number(random: &mut Random, dtype: DType) -> Vec<u8> {
    let which = (random.uniform() * 3.0) as usize;
    match dtype {
        DType::F16 => [0x7c01u16, 0xfc00, 0x7e55][which].to_le_bytes().to_vec(),
        DType::Bf16 => [0x7f81u16, 0xff80, 0x7fd5][which].to_le_bytes().to_vec(),
        DType::F32 => [0x7f80_0001u32, 0xff80_0000, 0xffc0_5555][which].to_le_bytes().to_vec(),
    }
}

fn encode(number: f64, dtype: DType) -> Vec<u8> {
    let limit = dtype.largest();
    let number = (number as f32).clamp(-limit, limit);
    match dtype {
        DType::F16 => f16::from_f32(number).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(number).to_le_bytes().to_vec(),
        DType::F32 => number.to_le_bytes().to_vec(),
    }
}

/// A pair whose rows are of `kinds`, drawn at random.
pub fn pair_of(seed: u64, shape: Shape, dtype: DType, kinds: &[Kind]) -> [Tensor; 2] {
    let mut random = Random(seed);
    let mut bytes = [Vec::new(), Vec::new()];
    for _ in 0..shape.rows() {
        let kind = kinds[(random.uniform() * kinds.len() as f64) as usize];
        let rows = pair_of_rows(&mut random, kind, shape.dim, dtype);
        let broken = (random.uniform() * 2.0) as usize;
        for (which, row) in rows.iter().enumerate() {
            let mut row: Vec<Vec<u8>> = row.iter().map(|&x| encode(x, dtype)).collect();
            if kind == Kind::NonFinite && which == broken {
                let channel = (random.uniform() * shape.dim as f64) as usize;
                row[channel] = broken_number(&mut random, dtype);
            }
            bytes[which].extend(row.concat());
        }
    }
    bytes.map(|bytes| Tensor::new(bytes, dtype, shape).unwrap())
}
