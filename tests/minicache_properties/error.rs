//! The error of a merged row in closed form: at an angle `W` between the two, the shared direction stands `t W` from the
//! lower row and `(1 - t) W` from the upper, and a unit vector at an angle `w` is `2 sin(w / 2)` away.

use kvfold::minicache::{Layer, MergeOptions, Mode, Retention, cpu};
use kvfold::{DType, Shape, Tensor};
use proptest::prelude::*;

use crate::options::MODES;
use crate::rows::{Kind, norm, pair_of};

/// Rounding of a merged row, relative to its norm: direction, magnitude and output to f16, half an ulp (2^-11) each; the
/// direction's channels below f16's normal range, 2^-25 each; and f32 arithmetic, amplified where the rows near opposite.
fn rounding(dim: usize, angle: f64) -> f64 {
    3.0 / 2048.0 + (dim as f64).sqrt() * 2f64.powi(-25) + 2e-6 / (angle / 2.0).cos()
}

fn rows(tensor: &Tensor) -> Vec<Vec<f64>> {
    let numbers: Vec<f64> = tensor.view().to_f32().into_iter().map(f64::from).collect();
    numbers.chunks(tensor.shape().dim).map(<[f64]>::to_vec).collect()
}

/// By the chord, which is good at small angles.
fn angle(a: &[f64], b: &[f64]) -> f64 {
    let apart: Vec<f64> = a.iter().zip(b).map(|(x, y)| x / norm(a) - y / norm(b)).collect();
    2.0 * (norm(&apart) / 2.0).min(1.0).asin()
}

fn check(seed: u64, dim: usize, mode: Mode, t: f32) {
    let shape = Shape::new(1, 2, 40, dim).unwrap();
    let [lower, upper] = pair_of(seed, shape, DType::F16, &[Kind::Similar, Kind::Angle]);
    let options = MergeOptions::default().mode(mode).retention(Retention::Never).slerp_t(t).sinks(0);
    let folded = cpu::merge(&lower.view(), &upper.view(), &options).unwrap();
    let (a, b) = (rows(&lower), rows(&upper));
    // Anchor is the case t = 0; Compat leaves the lower layer.
    let t = if mode == Mode::Anchor { 0.0 } else { f64::from(t) };
    let layers =
        [(Layer::Lower, &a, if mode == Mode::Compat { 0.0 } else { t }), (Layer::Upper, &b, 1.0 - t)];
    for (layer, raw, share) in layers {
        for (row, have) in rows(&cpu::restore(&folded, layer).unwrap()).iter().enumerate() {
            let (page, bit) = (row / 40 * 2 + row % 40 / 32, row % 40 % 32);
            if folded.pages[page].retained >> bit & 1 == 1 {
                continue; // Opposite to rounding; `rules` says which.
            }
            let w = angle(&a[row], &b[row]);
            let apart: Vec<f64> = have.iter().zip(&raw[row]).map(|(x, y)| x - y).collect();
            let (error, want) = (norm(&apart) / norm(&raw[row]), 2.0 * (share * w / 2.0).sin());
            // Small rows' channels may lie below f16's normal range in the output as well.
            let tolerance = rounding(dim, w) + (dim as f64).sqrt() * 2f64.powi(-25) / norm(&raw[row]);
            assert!(
                (error - want).abs() <= tolerance,
                "{layer:?} row {row}: {error}, 2 sin is {want}, W {w}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_merged_row_is_as_far_off_as_the_angle_says(seed: u64, dim in 2usize..=130, t in 0f32..=1.0) {
        for mode in MODES {
            check(seed, dim, mode, 0.5);
            check(seed, dim, mode, t);
        }
    }
}
