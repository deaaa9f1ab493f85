//! Twin and reference must agree.

use kvfold::minicache::{Cause, Layer, Layout, MergeOptions, Mode, Retention, cpu, reference};
use kvfold::{DType, Tensor};
use proptest::prelude::*;

use crate::options::{Case, cases};
use crate::rows::norm;
use crate::store::{is_raw, kept};

/// Two f32 sums of up to 512 products of unit rows, in lanes.
const COSINE: f64 = 2e-6;
/// Rows whose cosine is this near to a cut may fall on either side of it.
const CUT: f64 = 1e-5;
/// Half an ulp of f16, relative to its number.
const F16: f64 = 1.0 / 2048.0;
/// Half of f16's smallest step.
const F16_STEP: f64 = 1.0 / (1u64 << 25) as f64;

/// The cosine that divides each sequence, as the rule puts it, by the reference's measurements.
fn cuts(rows: &[reference::Row], case: &Case) -> Vec<f64> {
    let (shape, options) = (case.shape, &case.options);
    let cut = |sequence: &[reference::Row]| {
        let candidate = |i: usize, row: &reference::Row| {
            row.fault != Some(Cause::NonFinite)
                && i % shape.tokens >= options.sink_tokens() as usize
                && (options.mode == Mode::Compat || row.magnitudes != [0.0, 0.0])
        };
        let candidates = sequence.iter().enumerate().filter(|(i, row)| candidate(*i, row));
        let mut cosines: Vec<f64> = candidates.map(|(_, row)| row.cosine).collect();
        cosines.sort_by(f64::total_cmp);
        match (options.retention, cosines.first(), cosines.last()) {
            (Retention::Cosine(threshold), ..) => f64::from(threshold),
            (Retention::Range(gamma), Some(low), Some(high)) => low + f64::from(gamma) * (high - low),
            (Retention::Fraction(rho), ..) => {
                let keep = (rho * cosines.len() as f32).ceil() as usize;
                keep.checked_sub(1).map_or(f64::NAN, |last| cosines[last])
            }
            _ => f64::NAN,
        }
    };
    rows.chunks((shape.heads * shape.tokens).max(1)).map(cut).collect()
}

/// Length of the sum of the two unit rows: 2 where they are parallel, 0 where opposite.
fn chord(lower: &[f64], upper: &[f64]) -> f64 {
    let (_, a) = reference::magnitude_direction(lower);
    let (_, b) = reference::magnitude_direction(upper);
    norm(&a.iter().zip(b).map(|(x, y)| x + y).collect::<Vec<_>>())
}

/// Whether rounding decides the fault: a chord or a stored magnitude within rounding of its bound.
fn at_a_bound(row: &reference::Row, chord: f64, case: &Case) -> bool {
    let near = |x: f64, bound: f64| (x - bound).abs() <= 1e-6 * bound;
    let [lower, upper] = row.magnitudes;
    let limits = [2f64.powi(-14), 65504.0];
    let magnitudes = [lower, upper, upper / lower];
    let peak = row.direction.iter().fold(0.0f64, |p, e| p.max(e.abs()));
    let restored = upper * peak;
    (chord - 1.0 / 1024.0).abs() <= 1e-6
        || limits.iter().any(|&bound| magnitudes.iter().any(|&m| near(m, bound)))
        || case.options.mode == Mode::Compat && near(restored, 65504.0)
}

/// Largest difference of a merged number from the reference's, which is not rounded. The terms: the stored direction's (or
/// ratio's) f16 rounding, the magnitude's, the output's; steps below f16's normal range; and the f32 direction, whose two
/// unit terms cancel to `chord`.
fn tolerance(number: f64, magnitude: f64, chord: f64, case: &Case) -> f64 {
    let (output, step) = match case.dtype {
        DType::F16 => (F16, F16_STEP),
        DType::Bf16 => (1.0 / 256.0, 0.0),
        DType::F32 => (2f64.powi(-24), 0.0),
    };
    let direction = 1e-6 * 2.0 / chord;
    let (relative, absolute) = match case.options.mode {
        Mode::Shared => (2.0 * F16 + output, magnitude * (F16_STEP + direction) + step),
        Mode::Anchor => (F16 + output + 1e-6, step),
        Mode::Compat => (F16 + output, magnitude * direction + F16_STEP + step),
    };
    // Roundings of rounded numbers: a part in 2^-8 more.
    (number.abs() * relative + absolute) * (1.0 + 1.0 / 128.0) + f64::from(f32::MIN_POSITIVE)
}

fn f64s(tensor: &Tensor) -> Vec<f64> {
    tensor.view().to_f32().into_iter().map(f64::from).collect()
}

fn check(case: &Case) {
    let [lower, upper] = case.pair();
    let (a, b, options) = (lower.view(), upper.view(), &case.options);
    let rows = cpu::similarity(&a, &b, options).unwrap();
    let layout = Layout::new((case.shape, case.dtype), (case.shape, case.dtype), options.mode).unwrap();
    let causes = cpu::retain(&rows, &cpu::threshold(&rows, &layout, options), &layout, options);
    let folded = cpu::merge(&a, &b, options).unwrap();
    let judge = reference::merge(&a, &b, options).unwrap();
    let cuts = cuts(&judge.rows, case);
    let restored = [Layer::Lower, Layer::Upper].map(|which| f64s(&cpu::restore(&folded, which).unwrap()));
    let (a, b) = (f64s(&lower), f64s(&upper));
    let row_of = |all: &[f64], row: usize| all[row * case.shape.dim..(row + 1) * case.shape.dim].to_vec();
    for (row, exact) in judge.rows.iter().enumerate() {
        let found = rows[row];
        let (x, y) = (row_of(&a, row), row_of(&b, row));
        let context = || format!("row {row}: {found:?}, exactly {:?} {:?}", exact.cosine, exact.fault);
        assert!((f64::from(found.cosine) - exact.cosine).abs() <= COSINE, "{}", context());
        let finite = exact.fault != Some(Cause::NonFinite);
        let chord = if finite && norm(&x) > 0.0 && norm(&y) > 0.0 { chord(&x, &y) } else { 2.0 };
        let (have, want) = (causes[row], judge.causes[row]);
        let cut = cuts[row / (case.shape.heads * case.shape.tokens)];
        if have != want {
            let decided = (exact.cosine - cut).abs() >= CUT && !at_a_bound(exact, chord, case);
            assert!(!decided, "{have:?}, wanted {want:?}, cut {cut}, chord {chord}, {}", context());
            continue;
        }
        if have.is_some() || is_raw(&folded, row) {
            continue; // Raw rows are held bit for bit by `store`.
        }
        for (which, all) in [&judge.lower, &judge.upper].into_iter().enumerate() {
            if kept(options.mode, which) {
                continue;
            }
            for (have, want) in row_of(&restored[which], row).iter().zip(row_of(all, row)) {
                let tolerance = tolerance(want, exact.magnitudes[which], chord, case);
                assert!(
                    (have - want).abs() <= tolerance,
                    "layer {which}: {have}, wanted {want} ± {tolerance:e}, chord {chord}, {}",
                    context()
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_twin_equals_the_reference(case in cases()) {
        check(&case);
    }
}

#[test]
fn a_cosine_at_the_threshold_is_merged() {
    // One channel each, powers of two: the cosines are exactly 1, 0 and -1.
    let shape = kvfold::Shape::new(1, 1, 3, 2).unwrap();
    let tensor = |numbers: [f32; 6]| Tensor::from_f32(&numbers, DType::F16, shape).unwrap();
    let (lower, upper) = (tensor([2.0, 0.0, 2.0, 0.0, 2.0, 0.0]), tensor([4.0, 0.0, 0.0, 4.0, -4.0, 0.0]));
    let merged = |threshold: f32| {
        let options = MergeOptions::default().sinks(0).retention(Retention::Cosine(threshold));
        let judge = reference::merge(&lower.view(), &upper.view(), &options).unwrap();
        let twin = cpu::merge(&lower.view(), &upper.view(), &options.raw_page_share(1.0)).unwrap();
        let causes: Vec<bool> = judge.causes.iter().map(Option::is_none).collect();
        let kept: Vec<bool> = (0..3).map(|row| twin.pages[0].retained >> row & 1 == 0).collect();
        assert_eq!(causes, kept);
        causes
    };
    assert_eq!(merged(1.0), [true, false, false]);
    assert_eq!(merged(0.0), [true, true, false]);
    assert_eq!(merged(-0.0), [true, true, false]);
    // The third has no common direction, whatever the threshold.
    assert_eq!(merged(-1.0), [true, true, false]);
}
