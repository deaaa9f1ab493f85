//! Mean and variance of the estimated score over random projections, against the closed forms in the literature.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics fails"
)]

mod random;

use std::f64::consts::{FRAC_2_PI, FRAC_PI_2};

use kvfold::qjl::{KeyScale, Projection, ProjectionKind, cpu};
use kvfold::{DType, Shape, Tensor};
use random::Random;
use safetensors::SafeTensors;

fn row(numbers: &[f64]) -> Tensor {
    let numbers: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
    Tensor::from_f32(&numbers, DType::F32, Shape::new(1, 1, 1, numbers.len()).unwrap()).unwrap()
}

/// Estimates of `q . k` over projections of seeds 0, 1, ...
fn estimates(kind: ProjectionKind, m: usize, q: &[f64], k: &[f64], seeds: u64) -> Vec<f64> {
    let (query, key) = (row(q), row(k));
    (0..seeds)
        .map(|seed| {
            let s = Projection::new(kind, k.len(), m, seed).unwrap();
            let keys = cpu::quantize(&key.view(), &s, KeyScale::Norm).unwrap();
            f64::from(cpu::scores(&query.view(), &keys, &s, KeyScale::Norm).unwrap()[0])
        })
        .collect()
}

/// Mean and central second and fourth moments of a sample.
struct Moments {
    count: f64,
    mean: f64,
    variance: f64,
    fourth: f64,
}

impl Moments {
    fn of(sample: &[f64]) -> Self {
        let count = sample.len() as f64;
        let mean = sample.iter().sum::<f64>() / count;
        let central = |power: i32| sample.iter().map(|x| (x - mean).powi(power)).sum::<f64>() / count;
        Self { count, mean, variance: central(2), fourth: central(4) }
    }

    fn mean_error(&self) -> f64 {
        (self.variance / self.count).sqrt()
    }

    /// Standard error of the sample's variance: `sqrt((mu_4 - sigma^4) / N)`.
    fn variance_error(&self) -> f64 {
        ((self.fourth - self.variance.powi(2)) / self.count).sqrt()
    }
}

/// Unit vectors `q` and `k` with this cosine. `|k| = 1` is exact in f16: the stored norm adds no bias.
fn pair(dim: usize, cos: f64, random: &mut Random) -> (Vec<f64>, Vec<f64>) {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let unit = |v: Vec<f64>| {
        let norm = dot(&v, &v).sqrt();
        v.into_iter().map(|x| x / norm).collect::<Vec<_>>()
    };
    let k = unit(random.normals(dim));
    let other = random.normals(dim);
    let along = dot(&other, &k);
    let across = unit(other.iter().zip(&k).map(|(o, k)| o - along * k).collect());
    let sin = (1.0 - cos * cos).sqrt();
    (k.iter().zip(&across).map(|(k, a)| cos * k + sin * a).collect(), k)
}

/// Five standard errors: a right estimator fails one of the checks here once in some 60,000 choices of seeds.
const SIGMAS: f64 = 5.0;

fn check(kind: ProjectionKind, dim: usize, m: usize, variance: Option<fn(f64, f64, f64) -> f64>) {
    let mut random = Random(1);
    for cos in [0.0, 0.5, -0.95] {
        let (q, k) = pair(dim, cos, &mut random);
        let moments = Moments::of(&estimates(kind, m, &q, &k, 2500));
        let z = (moments.mean - cos) / moments.mean_error();
        assert!(z.abs() < SIGMAS, "{kind} D {dim} m {m} cos {cos}: mean {} is {z:.1} off", moments.mean);
        if let Some(variance) = variance {
            let want = variance(dim as f64, m as f64, cos);
            let z = (moments.variance - want) / moments.variance_error();
            let had = moments.variance;
            assert!(z.abs() < SIGMAS, "{kind} D {dim} m {m} cos {cos}: {had}, wanted {want}, {z:.1} off");
        }
    }
}

/// QJL, arXiv 2406.03482: `|q|^2 |k|^2 (pi/2 - cos^2) / m`.
fn gaussian_variance(_: f64, m: f64, cos: f64) -> f64 {
    (FRAC_PI_2 - cos * cos) / m
}

/// Whole orthogonal blocks, `m = B D`: `1/B { (c^2/D)(1 - 2/pi) sin^2 + [(c^2/D)(1 + (D - 1) 2/pi) - 1] cos^2 }` with
/// `c` the projection's factor.
fn orthogonal_variance(dim: f64, m: f64, cos: f64) -> f64 {
    let s = Projection::new(ProjectionKind::Orthogonal, dim as usize, 1, 0).unwrap();
    let per_row = f64::from(s.factor()).powi(2) / dim;
    let (cos2, blocks) = (cos * cos, m / dim);
    (per_row * (1.0 - FRAC_2_PI) * (1.0 - cos2) + (per_row * (1.0 + (dim - 1.0) * FRAC_2_PI) - 1.0) * cos2)
        / blocks
}

#[test]
fn gaussian_scores_are_unbiased_with_the_papers_variance() {
    check(ProjectionKind::Gaussian, 16, 16, Some(gaussian_variance));
    check(ProjectionKind::Gaussian, 20, 40, Some(gaussian_variance));
}

#[test]
fn orthogonal_scores_are_unbiased_with_less_variance() {
    check(ProjectionKind::Orthogonal, 16, 16, Some(orthogonal_variance));
    check(ProjectionKind::Orthogonal, 20, 60, Some(orthogonal_variance));
    // Two channels: the constant differs most from sqrt(pi / 2) here.
    check(ProjectionKind::Orthogonal, 2, 4, Some(orthogonal_variance));
    for cos in [0.0, 0.5, -0.95] {
        assert!(orthogonal_variance(64.0, 64.0, cos) < 0.5 * gaussian_variance(64.0, 64.0, cos));
    }
}

#[test]
fn a_partial_last_block_is_unbiased() {
    check(ProjectionKind::Orthogonal, 16, 23, None);
}

/// Hadamard signs are not Haar: for a fixed key its bias is not zero. On keys and queries of a real model (SmolLM2,
/// D = 64, m = 64) the bias and the mean square error stay near those of Haar rows.
#[test]
fn hadamard_is_bounded_on_a_real_capture() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/web/samples/smollm2_prose_s128.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |name: String, index: usize| -> Vec<f64> {
        let tensor = file.tensor(&name).unwrap();
        let row = tensor.data()[index * 128..][..128].as_chunks::<2>().0;
        row.iter().map(|b| half::f16::from_le_bytes(*b).to_f64()).collect()
    };
    let (mut worst_bias, mut squared_bias) = (0.0f64, 0.0);
    let (mut squares, mut haar, mut pairs) = (0.0, 0.0, 0.0);
    for layer in [0, 7, 15, 29] {
        for (token, query) in [(0, 31), (1, 5), (40, 12), (90, 0), (127, 31)] {
            for kv_head in 0..3 {
                let k = read(format!("layer.{layer}.key"), kv_head * 128 + token);
                let q = read(format!("layer.{layer}.query"), (3 * kv_head + 1) * 32 + query);
                let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
                let size = norm(&q) * norm(&k);
                let cos = q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>() / size;
                let moments = Moments::of(&estimates(ProjectionKind::Hadamard, 64, &q, &k, 300));
                let bias = moments.mean / size - cos;
                let variance = moments.variance / size.powi(2);
                worst_bias = worst_bias.max(bias.abs());
                squared_bias += bias * bias - variance / 300.0;
                squares += bias * bias + variance;
                haar += orthogonal_variance(64.0, 64.0, cos);
                pairs += 1.0;
            }
        }
    }
    // One estimate's standard deviation is about 0.09 of |q||k|. Four standard errors of a mean over 300 seeds, and
    // a root mean square bias (sampling noise subtracted) of a twentieth of it.
    assert!(worst_bias < 0.022, "worst bias {worst_bias}");
    let rms = (squared_bias / pairs).max(0.0).sqrt();
    assert!(rms < 0.005, "root mean square bias {rms}");
    let ratio = squares / haar;
    assert!((0.9..1.1).contains(&ratio), "mean square error is {ratio} of Haar rows'");
}
