//! The CPU twin against the original QJL cache (tests/golden/README.md): the original's projection is loaded as data.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that panics fails"
)]

mod golden;

use golden::{Golden, codes_of, long_keys, original_f16_codes, packed_bytes, values_of};
use half::f16;
use kvfold::attention::AttendOptions;
use kvfold::qjl::{Counts, KeyScale, Projection, QuantizedValues, SketchedKeys, cpu, reference};
use kvfold::{DType, Shape, Tensor};

impl Golden {
    /// Every `m../dtype` of the file, with `m` and the dtype of its inputs.
    fn cases(&self) -> Vec<(String, usize, DType)> {
        let file = self.file();
        let mut prefixes: Vec<String> = file
            .names()
            .into_iter()
            .filter_map(|name| name.strip_suffix("/keys").map(str::to_owned))
            .collect();
        prefixes.sort();
        prefixes
            .into_iter()
            .map(|prefix| {
                let (m, dtype) = prefix[1..].split_once('/').unwrap();
                let dtype = DType::ALL.into_iter().find(|d| d.to_string() == dtype).unwrap();
                (prefix.clone(), m.parse().unwrap(), dtype)
            })
            .collect()
    }
}

/// One head of one sequence.
fn rows(numbers: &[f32], dim: usize, dtype: DType) -> Tensor {
    Tensor::from_f32(numbers, dtype, Shape::new(1, 1, numbers.len() / dim, dim).unwrap()).unwrap()
}

fn ulps(a: f16, b: f16) -> i32 {
    (i32::from(a.to_bits()) - i32::from(b.to_bits())).abs()
}

fn relative_l2(have: &[f32], want: &[f64]) -> f64 {
    assert_eq!(have.len(), want.len());
    let error: f64 = have.iter().zip(want).map(|(h, w)| (f64::from(*h) - w).powi(2)).sum();
    (error / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
}

/// Each query on its own over the first `n` tokens, as the original attends: several at once would stand at the last
/// positions of the sequence, and those before its start see nothing.
fn attend(
    queries: &Tensor,
    keys: &SketchedKeys,
    values: &QuantizedValues,
    s: &Projection,
    n: usize,
) -> Vec<f32> {
    let dim = queries.shape().dim;
    let one = |query: &[f32]| {
        let query = rows(query, dim, queries.dtype());
        let options = AttendOptions::default();
        cpu::attend(&query.view(), keys, values, s, KeyScale::Norm, Some(&[n as u32]), &options).unwrap()
    };
    queries.view().to_f32().chunks(dim).flat_map(one).collect()
}

fn check_case(golden: &Golden, dim: usize, case: &(String, usize, DType)) {
    let (prefix, m, dtype) = case;
    let at = |name: &str| format!("{prefix}/{name}");
    let s = Projection::from_matrix(&golden.f32(&format!("m{m}/S")), dim, *m).unwrap();
    let [keys, values, queries] =
        ["keys", "values", "queries"].map(|n| rows(&golden.f32(&at(n)), dim, *dtype));

    let sketch = cpu::quantize(&keys.view(), &s, KeyScale::Norm).unwrap();
    assert_eq!(packed_bytes(&sketch), golden.u8(&at("derived_packed_lsb")), "{prefix} signs");
    assert_eq!(sketch.status, Counts::default(), "{prefix}: no golden key is zeros (README.md)");
    for (have, want) in sketch.scale.iter().zip(golden.f32(&at("norm"))) {
        // Both round an f32 norm that may differ in its last bits.
        assert!(ulps(*have, f16::from_f32(want)) <= 1, "{prefix}: norm {have}, wanted {want}");
    }

    let scores = cpu::scores(&queries.view(), &sketch, &s, KeyScale::Norm).unwrap();
    let (original, judged) = (golden.f32(&at("est_ip")), golden.f64(&at("est_ip_f64")));
    for ((have, original), judged) in scores.iter().zip(original).zip(judged) {
        let size = judged.abs().max(1.0);
        let error = (f64::from(*have) - judged).abs();
        // f32 against f64 on the same signs and norm: m roundings of sums that may cancel.
        assert!(error <= 2e-5 * size, "{prefix}: {have}, wanted {judged}");
        // The original rounds the estimate to f16: half an ulp is 2^-11 of it.
        assert!(f64::from((have - original).abs()) <= 5.1e-4 * size, "{prefix}: {have}, original {original}");
    }

    let ours = cpu::quantize_values(&values.view()).unwrap();
    let (codes, scales) = (golden.i8(&at("v_int8")), golden.f32(&at("v_scale")));
    let scale_of = |t: usize| ours.scale[t].to_f32();
    let mut same = 0;
    for (t, (ours, theirs)) in codes_of(&ours).chunks(dim).zip(codes.chunks(dim)).enumerate() {
        // The original rounds the scale after it chose the codes, and to bf16 for bf16 values.
        if scale_of(t) == scales[t] {
            same += 1;
            assert!(ours.iter().zip(theirs).all(|(a, b)| a.abs_diff(*b) <= 1), "{prefix} value {t}");
        }
    }
    // Of 17 rows one is zeros and one is below the smallest scale; bf16 scales rarely equal f16 ones.
    assert!(same >= if *dtype == DType::Bf16 { 1 } else { 15 }, "{prefix}: only {same} scales agree");

    let theirs = values_of(&codes, &scales, dim);
    for n in [1, 2, 17] {
        let want = golden.f64(&at(&format!("attend_n{n}_f64")));
        let have = attend(&queries, &sketch, &theirs, &s, n);
        let error = relative_l2(&have, &want);
        // On the same codes only f32 arithmetic is left: the contract's bound for exact precision.
        assert!(error <= 1e-5, "{prefix} attend over {n}: {error:e}");
        let original = golden.f32(&at(&format!("attend_n{n}")));
        let error = relative_l2(&original, &have.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
        assert!(error <= 3e-3, "{prefix} attend over {n}, the original: {error:e}");
    }
}

fn check_file(name: &str, dim: usize, cases: usize) {
    let golden = Golden::open(name);
    let found = golden.cases();
    assert_eq!(found.len(), cases, "{name}");
    found.iter().for_each(|case| check_case(&golden, dim, case));
}

#[test]
fn head_dim_64_agrees_with_the_original() {
    check_file("qjl_d64", 64, 9);
}

#[test]
fn head_dim_80_agrees_with_the_original() {
    check_file("qjl_d80", 80, 3);
}

#[test]
fn head_dim_128_agrees_with_the_original() {
    check_file("qjl_d128", 128, 3);
}

#[test]
fn the_live_tokens_after_eviction_agree() {
    let golden = Golden::open("qjl_special");
    let s = Projection::from_matrix(&golden.f32("evict/S"), 64, 64).unwrap();
    let live = |name: &str| rows(&golden.f32(name)[3 * 64..], 64, DType::F16);
    let keys = cpu::quantize(&live("evict/keys").view(), &s, KeyScale::Norm).unwrap();
    let signs: Vec<bool> = golden.i8("evict/live_signs").iter().map(|&sign| sign >= 0).collect();
    let bit = |i: usize| keys.words[i / 32] >> (i % 32) & 1 == 1;
    assert_eq!((0..5 * 64).map(bit).collect::<Vec<_>>(), signs);
    let norms = golden.f32("evict/live_norm");
    assert!(keys.scale.iter().zip(norms).all(|(a, b)| ulps(*a, f16::from_f32(b)) <= 1));
    let values = values_of(&golden.i8("evict/live_v_int8"), &golden.f32("evict/live_v_scale"), 64);
    let queries = rows(&golden.f32("evict/queries"), 64, DType::F16);
    let error = relative_l2(&attend(&queries, &keys, &values, &s, 5), &golden.f64("evict/attend_f64"));
    assert!(error <= 3e-3, "{error:e}");
}

#[test]
fn a_long_context_keeps_its_normalisation() {
    let golden = Golden::open("qjl_special");
    let s = Projection::from_matrix(&golden.f32("long/S"), 128, 128).unwrap();
    let keys = long_keys(&golden);
    let values = values_of(&golden.i8("long/v_int8"), &golden.f32("long/v_scale"), 128);
    let queries = rows(&golden.f32("long/queries"), 128, DType::F16);
    let want = golden.f64("long/attend_f64");
    let error = relative_l2(&attend(&queries, &keys, &values, &s, 2048), &want);
    assert!(error <= 1e-5, "f32 softmax over 2,048 tokens: {error:e}");
    let original = relative_l2(&golden.f32("long/attend"), &want);
    assert!(original > 0.04, "the original's f16 softmax is known to lose 4.6 %, had {original:e}");
}

/// Queries so large that the original's f16 scores overflow and everything becomes NaN. In f32 the scores are some
/// 1e5 apart, so that one token takes all the weight: the output is that token's value, exactly as its codes say.
#[test]
fn scores_above_f16_stay_finite() {
    let golden = Golden::open("qjl_special");
    let s = Projection::from_matrix(&golden.f32("long/S"), 128, 128).unwrap();
    let raw_values = golden.f32("overflow/values");
    let [keys, values, queries] =
        ["keys", "values", "queries"].map(|n| rows(&golden.f32(&format!("overflow/{n}")), 128, DType::F16));
    assert!(golden.f32("overflow/attend").iter().all(|x| x.is_nan()), "the original is NaN here");
    let keys = cpu::quantize(&keys.view(), &s, KeyScale::Norm).unwrap();
    let values = cpu::quantize_values(&values.view()).unwrap();
    let scores = cpu::scores(&queries.view(), &keys, &s, KeyScale::Norm).unwrap();
    let best = (0..4).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap();
    let have = attend(&queries, &keys, &values, &s, 4);
    assert_eq!(have, cpu::dequantize_values(&values).unwrap()[best * 128..][..128]);

    // The f64 figure stands on the original's codes, which its f16 division puts one step off in a few channels.
    let (codes, scales) = original_f16_codes(&raw_values, 128);
    let theirs = values_of(&codes, &scales, 128);
    let error = relative_l2(&attend(&queries, &keys, &theirs, &s, 4), &golden.f64("overflow/attend_f64"));
    assert!(error <= 1e-6, "{error:e}");
    assert!(codes_of(&values).iter().zip(&codes).all(|(a, b)| a.abs_diff(*b) <= 1));
}

/// The f64 reference and the twin judge the same stored codes alike, over the longest golden context.
#[test]
fn the_reference_agrees_on_golden_codes() {
    let golden = Golden::open("qjl_d128");
    let s = Projection::from_matrix(&golden.f32("m128/S"), 128, 128).unwrap();
    let [keys, values, queries] =
        ["keys", "values", "queries"].map(|n| rows(&golden.f32(&format!("m128/f16/{n}")), 128, DType::F16));
    let keys = cpu::quantize(&keys.view(), &s, KeyScale::Norm).unwrap();
    let values = cpu::quantize_values(&values.view()).unwrap();
    let options = AttendOptions::default();
    let want =
        reference::attend(&queries.view(), &keys, &values, &s, KeyScale::Norm, None, &options).unwrap();
    assert!(relative_l2(&attend(&queries, &keys, &values, &s, 17), &want) <= 1e-5);
}
