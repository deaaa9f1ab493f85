//! The f32 twin against the f64 reference over random shapes and options, and rows that are odd.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics fails"
)]

mod random;

use half::f16;
use kvfold::attention::{self, AttendOptions};
use kvfold::qjl::{KeyScale, NON_FINITE_SCALE, Projection, ProjectionKind, QuantizedValues, SketchedKeys};
use kvfold::qjl::{cpu, reference};
use kvfold::{DType, Error, Shape, Tensor};
use proptest::prelude::*;
use random::Random;

/// Half an ulp of f32 at 1.
const HALF_ULP: f64 = 1.0 / (1u64 << 24) as f64;

fn tensor(shape: [usize; 4], dtype: DType, mut number: impl FnMut() -> f64) -> Tensor {
    let [batch, heads, tokens, dim] = shape;
    let shape = Shape::new(batch, heads, tokens, dim).unwrap();
    let numbers: Vec<f32> = (0..shape.elements()).map(|_| number() as f32).collect();
    Tensor::from_f32(&numbers, dtype, shape).unwrap()
}

/// Keys of one head and one sequence.
fn key_rows(rows: &[&[f32]]) -> Tensor {
    let shape = Shape::new(1, 1, rows.len(), rows[0].len()).unwrap();
    Tensor::from_f32(&rows.concat(), DType::F32, shape).unwrap()
}

fn f64s(row: &[f32]) -> Vec<f64> {
    row.iter().map(|&x| f64::from(x)).collect()
}

#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    kind: ProjectionKind,
    scale: KeyScale,
    dtype: DType,
    batch: usize,
    kv_heads: usize,
    group: usize,
    queries: usize,
    tokens: usize,
    key_dim: usize,
    value_dim: usize,
    sketch_dim: usize,
    lengths: Vec<u32>,
    options: AttendOptions<'static>,
}

fn options() -> impl Strategy<Value = AttendOptions<'static>> {
    let (window, cap, scale) = (1u32..90, 0.5f32..30.0, 0.05f32..1.0);
    let each = (any::<bool>(), prop::option::of(window), prop::option::of(cap), prop::option::of(scale));
    each.prop_map(|(causal, window, cap, scale)| {
        let mut options = AttendOptions::default().causal(causal);
        (options.window, options.soft_cap, options.scale) = (window, cap, scale);
        options
    })
}

fn cases() -> impl Strategy<Value = Case> {
    let kinds = prop::sample::select(ProjectionKind::ALL[..3].to_vec());
    let scales = prop::sample::select(KeyScale::ALL.to_vec());
    let dtypes = prop::sample::select(DType::ALL.to_vec());
    let groups = prop::sample::select(vec![1usize, 3, 7]);
    // Lengths are shares of `tokens` in 150ths, both ends included.
    let store = (1usize..3, 1usize..3, 0usize..150, prop::collection::vec(0u32..=150, 2));
    let dims = (0u32..8, 1usize..100, 1usize..70, 1usize..150);
    let rest = (any::<u64>(), groups, 0usize..5, options());
    (kinds, scales, dtypes, store, dims, rest).prop_map(|(kind, scale, dtype, store, dims, rest)| {
        let (batch, kv_heads, tokens, shares) = store;
        let (power, odd_dim, value_dim, sketch_dim) = dims;
        let (seed, group, queries, options) = rest;
        let key_dim = if kind == ProjectionKind::Hadamard { 1 << power } else { odd_dim };
        let lengths = shares.iter().take(batch).map(|share| share * tokens as u32 / 150).collect();
        Case {
            seed,
            kind,
            scale,
            dtype,
            batch,
            kv_heads,
            group,
            queries,
            tokens,
            key_dim,
            value_dim,
            sketch_dim,
            lengths,
            options,
        }
    })
}

struct Built {
    s: Projection,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sketch: SketchedKeys,
    codes: QuantizedValues,
}

impl Case {
    /// Random tensors; about one row in ten of keys and values is not finite, one in ten is zeros.
    fn build(&self) -> Built {
        let mut random = Random(self.seed);
        let mut odd = Random(self.seed ^ 1);
        let s = Projection::new(self.kind, self.key_dim, self.sketch_dim, self.seed).unwrap();
        let heads = self.kv_heads * self.group;
        let queries = tensor([self.batch, heads, self.queries, self.key_dim], self.dtype, || random.normal());
        let mut kv = |dim: usize| {
            let (mut channel, mut factor) = (0, 1.0);
            tensor([self.batch, self.kv_heads, self.tokens, dim], self.dtype, || {
                if channel % dim == 0 {
                    let pick = odd.normal();
                    factor = if pick > 1.3 {
                        f64::NAN
                    } else if pick < -1.3 {
                        0.0
                    } else {
                        1.0
                    };
                }
                channel += 1;
                random.normal() * factor
            })
        };
        let (keys, values) = (kv(self.key_dim), kv(self.value_dim));
        let sketch = cpu::quantize(&keys.view(), &s, self.scale).unwrap();
        let codes = cpu::quantize_values(&values.view()).unwrap();
        Built { s, queries, keys, values, sketch, codes }
    }
}

/// `|have - want| <= bound` everywhere, both of one length.
fn assert_near(have: &[f32], want: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(have.len(), want.len());
    for (i, (h, w)) in have.iter().zip(want).enumerate() {
        let error = (f64::from(*h) - w).abs();
        assert!(error <= bound(i), "element {i}: {h}, wanted {w}, allowed {:e}", bound(i));
    }
}

/// Bits, scalar and odd-row marks of every key, against the f64 formulas.
fn check_keys(case: &Case, built: &Built) {
    let (words, all) = (built.sketch.words_per_row(), built.keys.view().to_f32());
    let mut counts = (0, 0);
    for (t, key) in all.chunks(case.key_dim).enumerate() {
        let bits = &built.sketch.words[t * words..][..words];
        let bit = |j: usize| bits[j / 32] >> (j % 32) & 1 == 1;
        assert!((case.sketch_dim..words * 32).all(|j| !bit(j)), "unused bits are 0");
        let nu = built.sketch.scale[t];
        if !key.iter().all(|k| k.is_finite()) {
            counts.0 += 1;
            assert_eq!((nu.to_bits(), bits.iter().any(|&w| w != 0)), (NON_FINITE_SCALE.to_bits(), false));
            continue;
        }
        if key.iter().all(|&k| k == 0.0) {
            counts.1 += 1;
            assert!(nu == f16::ZERO && (0..case.sketch_dim).all(bit), "0 is at or above 0");
            continue;
        }
        let key = f64s(key);
        let y = reference::project(&built.s, &key);
        // A dot product of D terms (or butterflies and signs, fewer roundings) is off by at most D + 20 half ulps of
        // sum |s||k|, which is at most |s||k| as norms.
        let norm = key.iter().map(|k| k * k).sum::<f64>().sqrt();
        let row_norm = built.s.matrix().map_or((case.key_dim as f64).sqrt(), |m| {
            m.chunks(case.key_dim)
                .map(|r| r.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt())
                .fold(0.0, f64::max)
        });
        let rounding = (case.key_dim as f64 + 20.0) * HALF_ULP * row_norm * norm;
        for (j, y) in y.iter().enumerate().filter(|(_, y)| y.abs() > rounding) {
            assert_eq!(bit(j), *y >= 0.0, "bit {j} of key {t}: {y}");
        }
        let want = reference::key_scale(case.scale, &key, &y);
        // Half an ulp of f16 (2^-11; 2^-25 among subnormals) and f32's sums.
        let allowed = want * (1.0 / 2048.0 + 1e-5) + 3e-8 + rounding;
        assert!((nu.to_f64() - want).abs() <= allowed, "nu of key {t}: {nu}, wanted {want}");
    }
    assert_eq!((built.sketch.status.non_finite, built.sketch.status.zero), counts);
}

fn check_values(case: &Case, built: &Built) {
    let (words, all) = (built.codes.words_per_row(), built.values.view().to_f32());
    for (t, value) in all.chunks(case.value_dim).enumerate() {
        let bytes: Vec<u8> =
            built.codes.words[t * words..][..words].iter().flat_map(|w| w.to_le_bytes()).collect();
        if !value.iter().all(|v| v.is_finite()) {
            assert_eq!((built.codes.scale[t].to_bits(), bytes.iter().any(|&b| b != 0)), (0x7e00, false));
            continue;
        }
        let (scale, codes) = reference::value_codes(&f64s(value));
        let have: Vec<i8> = bytes[..case.value_dim].iter().map(|b| b.cast_signed()).collect();
        assert!(scale.to_bits().abs_diff(built.codes.scale[t].to_bits()) <= 1, "scale of value {t}");
        if scale == built.codes.scale[t] {
            // Equal, but for a quotient (at most 127.1) that f32's rounding, 2^-17 there, may carry over a half.
            for ((a, b), v) in have.iter().zip(&codes).zip(value) {
                let quotient = f64::from(*v) / scale.to_f64();
                let to_half = (quotient.fract().abs() - 0.5).abs();
                assert!(a == b || to_half < 1e-5 && a.abs_diff(*b) == 1, "value {t}: {a}, wanted {b}");
            }
        }
        assert!(bytes[case.value_dim..].iter().all(|&b| b == 0), "unused bytes are 0");
    }
}

/// How far f32 attention may be from f64: a logit's error, twice over in a softmax, times the largest value.
fn attend_bound(case: &Case, width: usize, logit: f64, value: f64) -> f64 {
    let logit_error = (width as f64 + 40.0) * HALF_ULP * logit;
    (2.0 * logit_error + (case.tokens as f64 + 40.0) * HALF_ULP) * value.max(1.0) * 2.0
}

fn largest(numbers: impl IntoIterator<Item = f64>) -> f64 {
    numbers.into_iter().filter(|x| x.is_finite()).fold(0.0, |max, x| max.max(x.abs()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_twin_equals_the_reference(case in cases()) {
        let built = case.build();
        let Built { s, queries, keys, values, sketch, codes } = &built;
        check_keys(&case, &built);
        check_values(&case, &built);

        let (queries, lengths) = (queries.view(), Some(&case.lengths[..]));
        let want = reference::scores(&queries, sketch, s, case.scale).unwrap();
        // g/m nu sum |S q|_j is at most g nu times the largest |S q|_j, and g < 1.3.
        let size = largest(queries.to_f32().chunks(case.key_dim).flat_map(|q| reference::project(s, &f64s(q))));
        let nu = largest(sketch.scale.iter().map(|nu| nu.to_f64()));
        let score = 1.3 * nu * size;
        let rounding = (case.sketch_dim + case.key_dim + 20) as f64 * HALF_ULP * score * 4.0;
        assert_near(&cpu::scores(&queries, sketch, s, case.scale).unwrap(), &want, |_| rounding);

        let factor = f64::from(case.options.scale_for(case.key_dim));
        let value = largest(values.view().to_f32().iter().map(|&v| f64::from(v)));
        let bound = attend_bound(&case, 4 * (case.sketch_dim + case.key_dim), factor * score, value);
        let want = reference::attend(&queries, sketch, codes, s, case.scale, lengths, &case.options).unwrap();
        let have = cpu::attend(&queries, sketch, codes, s, case.scale, lengths, &case.options).unwrap();
        assert_near(&have, &want, |_| bound);

        let key = largest(keys.view().to_f32().iter().map(|&k| f64::from(k)));
        let query = largest(queries.to_f32().iter().map(|&q| f64::from(q)));
        let bound = attend_bound(&case, case.key_dim, factor * key * query * case.key_dim as f64, value);
        let (keys, values) = (keys.view(), values.view());
        let want = reference::exact(&queries, &keys, &values, lengths, &case.options).unwrap();
        let have = attention::exact(&queries, &keys, &values, lengths, &case.options).unwrap();
        assert_near(&have, &want, |_| bound);
    }

    /// With whole orthogonal blocks the unbiased scale keeps `k . k` exactly, and least squares is the closest fit.
    #[test]
    fn scales_do_what_they_say(seed: u64, dim in 1usize..60, blocks in 1usize..3) {
        let s = Projection::new(ProjectionKind::Orthogonal, dim, dim * blocks, seed).unwrap();
        let key = tensor([1, 1, 1, dim], DType::F32, { let mut r = Random(seed); move || r.normal() });
        let own = |scale| {
            let sketch = cpu::quantize(&key.view(), &s, scale).unwrap();
            f64::from(cpu::scores(&key.view(), &sketch, &s, scale).unwrap()[0])
        };
        let square: f64 = key.view().to_f32().iter().map(|&x| f64::from(x).powi(2)).sum();
        // nu is rounded to f16.
        prop_assert!((own(KeyScale::Unbiased) - square).abs() <= square * (1.0 / 2048.0 + 1e-5) + 1e-7);
        prop_assert!(own(KeyScale::Mse) <= square * (1.0 + 1.0 / 2048.0 + 1e-5) + 1e-7, "a projection is shorter");
    }
}

fn gaussian(dim: usize, m: usize) -> Projection {
    Projection::new(ProjectionKind::Gaussian, dim, m, 5).unwrap()
}

#[test]
fn one_bad_row_changes_no_other_output() {
    let (d, n) = (24, 70);
    let s = gaussian(d, 40);
    let mut random = Random(3);
    let clean = [random.normals(d * n), random.normals(d * n)];
    let queries = tensor([1, 1, 2, d], DType::F32, || random.normal());
    let build = |numbers: &[f64]| {
        let mut numbers = numbers.iter();
        tensor([1, 1, n, d], DType::F32, || *numbers.next().unwrap())
    };
    let attend = |keys: &Tensor, values: &Tensor| {
        let sketch = cpu::quantize(&keys.view(), &s, KeyScale::Norm).unwrap();
        let codes = cpu::quantize_values(&values.view()).unwrap();
        let options = AttendOptions::default();
        let out = cpu::attend(&queries.view(), &sketch, &codes, &s, KeyScale::Norm, None, &options).unwrap();
        (out, sketch, codes)
    };
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for which in 0..2 {
            let mut spoilt = clean.clone();
            spoilt[which][d * 66 + 3] = bad;
            let (have, sketch, codes) = attend(&build(&spoilt[0]), &build(&spoilt[1]));
            assert_eq!(sketch.status.non_finite + codes.status.non_finite, 1);
            // The same as if token 66 were not there: remove it, and put a masked row last.
            let mut without = clean.clone();
            for numbers in &mut without {
                numbers.drain(d * 66..d * 67);
                numbers.extend(vec![f64::NAN; d]);
            }
            let (want, ..) = attend(&build(&without[0]), &build(&without[1]));
            assert!(have.iter().zip(&want).all(|(h, w)| (h - w).abs() < 1e-5), "{bad}: {have:?} {want:?}");
        }
    }
    // A query that is not finite gets zeros and leaves its neighbour alone.
    let (want, sketch, codes) = attend(&build(&clean[0]), &build(&clean[1]));
    let mut two = queries.view().to_f32();
    two[0] = f32::NAN;
    let spoilt = Tensor::from_f32(&two, DType::F32, queries.shape()).unwrap();
    let options = AttendOptions::default();
    let have = cpu::attend(&spoilt.view(), &sketch, &codes, &s, KeyScale::Norm, None, &options).unwrap();
    assert!(have[..d].iter().all(|&x| x == 0.0));
    assert_eq!(have[d..], want[d..]);
}

#[test]
fn huge_and_tiny_keys_stay_finite() {
    let s = Projection::new(ProjectionKind::Orthogonal, 4, 8, 1).unwrap();
    let rows: [&[f32]; 6] =
        [&[6e4; 4], &[1e30, -1e30, 1.0, 0.0], &[3e38; 4], &[1e-30; 4], &[1e-45, 0.0, 0.0, 0.0], &[0.0; 4]];
    let keys = key_rows(&rows);
    for scale in KeyScale::ALL {
        let sketch = cpu::quantize(&keys.view(), &s, scale).unwrap();
        assert!(sketch.scale.iter().all(|nu| nu.is_finite()), "{scale}: {:?}", sketch.scale);
        assert_eq!(sketch.status.zero, 1, "{scale}");
        assert_eq!(sketch.scale[1..3], [f16::MAX; 2], "{scale}: clamped");
        assert!(sketch.status.overflow >= 2, "{scale}");
        assert_eq!(sketch.scale[3..], [f16::ZERO; 3], "{scale}: below f16");
        let query = key_rows(&[&[1.0, 2.0, 3.0, 4.0]]);
        assert!(cpu::scores(&query.view(), &sketch, &s, scale).unwrap().iter().all(|x| x.is_finite()));
    }
    // |(6e4, 6e4, 6e4, 6e4)| = 120,000 is above f16; its least-squares scale is smaller.
    assert_eq!(cpu::quantize(&keys.view(), &s, KeyScale::Norm).unwrap().status.overflow, 3);
}

#[test]
fn huge_and_tiny_values_keep_their_codes() {
    let rows: [&[f32]; 5] = [&[65504.0, -65504.0], &[1e30, 1.0], &[1e-3, -5e-4], &[1e-30, 0.0], &[0.0, 0.0]];
    let codes = cpu::quantize_values(&key_rows(&rows).view()).unwrap();
    assert_eq!((codes.status.overflow, codes.status.zero, codes.status.non_finite), (1, 1, 0));
    // 2^-14 is the least scale: 1e-3 is code 16, 1e-30 is code 0.
    let least = f16::from_f32(2f32.powi(-14));
    assert_eq!(codes.scale[1..], [f16::MAX, least, least, f16::ZERO]);
    let code = |t: usize, c: usize| codes.words[t].to_le_bytes()[c].cast_signed();
    assert_eq!([code(0, 0), code(0, 1), code(1, 0), code(2, 0), code(2, 1)], [127, -127, 127, 16, -8]);
    let restored = cpu::dequantize_values(&codes).unwrap();
    // 127 * f16(65504 / 127): finite in f32 though above f16's largest number.
    assert!((restored[0] - 65504.0).abs() <= 65504.0 / 2048.0 && restored[1] == -restored[0]);
    assert!(restored[6..].iter().all(|&x| x == 0.0));
}

#[test]
fn a_zero_key_scores_zero_and_takes_its_share() {
    let s = gaussian(8, 33);
    let keys = key_rows(&[&[0.0; 8], &[-0.0; 8]]);
    let sketch = cpu::quantize(&keys.view(), &s, KeyScale::Norm).unwrap();
    assert_eq!(
        sketch.words,
        [u32::MAX, 1, u32::MAX, 1],
        "0 and -0 are at or above 0; bit 32 opens a second word"
    );
    assert_eq!(sketch.scale, [f16::ZERO; 2]);
    let query = key_rows(&[&[1.0; 8]]);
    assert_eq!(cpu::scores(&query.view(), &sketch, &s, KeyScale::Norm).unwrap(), [0.0, 0.0]);
    let codes = cpu::quantize_values(&key_rows(&[&[1.0], &[3.0]]).view()).unwrap();
    let options = AttendOptions::default();
    let out = cpu::attend(&query.view(), &sketch, &codes, &s, KeyScale::Norm, None, &options).unwrap();
    let values = cpu::dequantize_values(&codes).unwrap();
    assert!((out[0] - (values[0] + values[1]) / 2.0).abs() < 1e-6, "equal weights: {out:?}");
}

#[test]
fn bytes_are_what_is_stored() {
    let s = gaussian(64, 64);
    let keys = tensor([2, 3, 5, 64], DType::F16, || 1.0);
    let sketch = cpu::quantize(&keys.view(), &s, KeyScale::Norm).unwrap();
    assert_eq!(sketch.bytes(), 30 * (8 + 2));
    let codes = cpu::quantize_values(&keys.view()).unwrap();
    assert_eq!(codes.bytes(), 30 * (64 + 2));
}

#[test]
fn what_does_not_fit_is_a_typed_error() {
    let s = gaussian(8, 16);
    let keys = tensor([1, 2, 3, 8], DType::F32, || 1.0);
    let sketch = cpu::quantize(&keys.view(), &s, KeyScale::Norm).unwrap();
    let codes = cpu::quantize_values(&keys.view()).unwrap();
    let queries = |shape| tensor(shape, DType::F32, || 1.0);
    let scores = |shape, s: &Projection| cpu::scores(&queries(shape).view(), &sketch, s, KeyScale::Norm);
    assert!(matches!(scores([1, 3, 1, 8], &s), Err(Error::HeadRatio { query_heads: 3, kv_heads: 2 })));
    assert!(matches!(scores([2, 2, 1, 8], &s), Err(Error::Shape { .. })), "batch");
    assert!(matches!(scores([1, 2, 1, 9], &s), Err(Error::Shape { .. })), "dimension");
    assert!(matches!(scores([1, 2, 1, 8], &gaussian(8, 17)), Err(Error::Shape { .. })), "sketch_dim");
    assert!(matches!(
        cpu::quantize(&keys.view(), &gaussian(9, 16), KeyScale::Norm),
        Err(Error::Shape { .. })
    ));
    let attend = |keys: &SketchedKeys, codes: &QuantizedValues, lengths: &[u32]| {
        let queries = queries([1, 4, 1, 8]);
        let options = AttendOptions::default();
        cpu::attend(&queries.view(), keys, codes, &s, KeyScale::Norm, Some(lengths), &options)
    };
    assert!(attend(&sketch, &codes, &[3]).is_ok());
    assert!(matches!(attend(&sketch, &codes, &[4]), Err(Error::Range { .. })), "length");
    assert!(matches!(attend(&sketch, &codes, &[]), Err(Error::Shape { .. })), "lengths");
    let mut short = sketch.clone();
    short.words.pop();
    assert!(matches!(attend(&short, &codes, &[3]), Err(Error::Shape { .. })), "words");
    let mut short = codes.clone();
    short.scale.pop();
    assert!(matches!(attend(&sketch, &short, &[3]), Err(Error::Shape { .. })), "scales");
}
