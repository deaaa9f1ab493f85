//! The f32 twin of sign planes against the f64 reference over random shapes and options.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics fails"
)]

mod odd;
#[path = "../random/mod.rs"]
mod random;

use kvfold::attention::AttendOptions;
use kvfold::capture::RopeLayout;
use kvfold::qjl::NON_FINITE_SCALE;
use kvfold::qjl::planes::{
    Balance, Calibration, Centring, Codec, PlaneCodes, PlanesOptions, Stored, Tables, cpu, reference,
};
use kvfold::rope::{Positions, Rope};
use kvfold::{DType, Shape, Tensor};
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

#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    dtype: DType,
    batch: usize,
    kv_heads: usize,
    group: usize,
    queries: usize,
    tokens: usize,
    key_dim: usize,
    value_dim: usize,
    /// RoPE's channels in eighths of `key_dim`, and its layout.
    rotary: usize,
    interleaved: bool,
    planes: PlanesOptions,
    start: u32,
    lengths: Vec<u32>,
    options: AttendOptions<'static>,
}

const DIMS: [usize; 10] = [1, 8, 16, 48, 64, 80, 96, 128, 256, 511];

fn planes() -> impl Strategy<Value = PlanesOptions> {
    let centring = prop::sample::select(vec![
        Centring::None,
        Centring::BlockMean(64),
        Centring::BlockMean(7),
        Centring::PreRope,
        Centring::PreRope,
    ]);
    let balance = prop::sample::select(vec![Balance::None, Balance::Half, Balance::Full]);
    let bits = (1u8..=5, prop::option::of(0u8..=5), 1u8..=5);
    (bits, centring, balance, 0u32..6, 0u32..40, 1u8..=3, any::<u64>()).prop_map(
        |((hi, lo, values), centring, balance, sinks, recent, rounds, seed)| {
            let options = PlanesOptions::default().centring(centring).balance(balance).sinks(sinks);
            let options = options.recent(recent).rounds(rounds).seed(seed).value_planes(values);
            lo.map_or(options.key_planes(hi), |lo| options.split(hi, lo))
        },
    )
}

fn options() -> impl Strategy<Value = AttendOptions<'static>> {
    let (window, cap, scale) = (1u32..90, 0.5f32..30.0, 0.05f32..0.3);
    let each = (any::<bool>(), prop::option::of(window), prop::option::of(cap), prop::option::of(scale));
    each.prop_map(|(causal, window, cap, scale)| {
        let mut options = AttendOptions::default().causal(causal);
        (options.window, options.soft_cap, options.scale) = (window, cap, scale);
        options
    })
}

fn cases() -> impl Strategy<Value = Case> {
    let dims = || prop::sample::select(DIMS.to_vec());
    // Lengths are shares of `tokens` in 90ths, both ends included.
    let store = (1usize..3, 1usize..3, 7usize..70, prop::collection::vec(0u32..=90, 2));
    let heads = (prop::sample::select(vec![1usize, 3, 7]), 0usize..3);
    let rope = (
        prop::sample::select(vec![0usize, 4, 8, 8]),
        any::<bool>(),
        prop::sample::select(vec![0u32, 5, 9000]),
    );
    let dtypes = prop::sample::select(DType::ALL.to_vec());
    (any::<u64>(), dtypes, store, heads, dims(), dims(), rope, planes(), options()).prop_map(
        |(seed, dtype, store, (group, queries), key_dim, value_dim, rope, planes, options)| {
            let (batch, kv_heads, tokens, shares) = store;
            let lengths = shares.iter().take(batch).map(|share| share * tokens as u32 / 90).collect();
            let (rotary, interleaved, start) = rope;
            Case {
                seed,
                dtype,
                batch,
                kv_heads,
                group,
                queries,
                tokens,
                key_dim,
                value_dim,
                rotary,
                interleaved,
                planes,
                start,
                lengths,
                options,
            }
        },
    )
}

struct Built {
    codec: Codec,
    tables: Tables,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_codes: PlaneCodes,
    value_codes: PlaneCodes,
}

impl Case {
    /// Random tensors with a mean; about one row in ten of keys and values is not finite, one in ten is zeros.
    fn build(&self) -> Built {
        let mut random = Random(self.seed);
        let mut odd = Random(self.seed ^ 1);
        let rotary = self.key_dim * self.rotary / 16 * 2;
        let layout = if self.interleaved { RopeLayout::Interleaved } else { RopeLayout::HalfSplit };
        let rope = (rotary > 0).then(|| Rope::from_theta(self.key_dim, rotary, 1e4, layout).unwrap());
        let heads = self.kv_heads * self.group;
        let queries = tensor([self.batch, heads, self.queries, self.key_dim], self.dtype, || random.normal());
        let mut kv = |dim: usize| {
            let (mut channel, mut factor) = (0, 1.0);
            tensor([self.batch, self.kv_heads, self.tokens, dim], self.dtype, || {
                if channel % dim == 0 {
                    let pick = odd.normal();
                    factor = match pick {
                        1.3.. => f64::NAN,
                        ..-1.3 => 0.0,
                        _ => 1.0,
                    };
                }
                channel += 1;
                (random.normal() + (channel % dim) as f64 % 3.0) * factor
            })
        };
        let (keys, values) = (kv(self.key_dim), kv(self.value_dim));
        let (key_view, query_view) = (keys.view(), queries.view());
        let starts = vec![self.start; self.batch];
        let positions = Positions::Start(&starts);
        let mut calibration = Calibration::new(&key_view, positions).queries(&query_view);
        calibration.rope = rope.as_ref();
        let tables = Tables::calibrate(&calibration, &self.planes).unwrap();
        let codec = Codec::new(self.planes, self.key_dim, self.value_dim, rope).unwrap();
        let key_codes = cpu::encode_keys(&codec, &key_view, positions, &tables).unwrap();
        let value_codes = cpu::encode_values(&codec, &values.view()).unwrap();
        Built { codec, tables, queries, keys, values, key_codes, value_codes }
    }
}

/// `|have - want| <= bound` everywhere, both of one length.
fn assert_near(what: &str, have: &[f32], want: &[f64], bound: f64) {
    assert_eq!(have.len(), want.len());
    for (i, (h, w)) in have.iter().zip(want).enumerate() {
        let error = (f64::from(*h) - w).abs();
        assert!(error <= bound, "{what}, element {i}: {h}, wanted {w}, allowed {bound:e}");
    }
}

fn f64s(row: &[f32]) -> Option<Vec<f64>> {
    row.iter().all(|x| x.is_finite()).then(|| row.iter().map(|&x| f64::from(x)).collect())
}

/// Codes of one row, segment by segment, against the f64 formulas for `x`, the row before rotation.
fn check_row(codec: &Codec, codes: &PlaneCodes, index: usize, x: Option<&[f64]>, noise: f64) {
    let mut start = 0;
    for (segment, stored) in codes.layout.segments().iter().zip(&codes.segments) {
        let (b, words) = (usize::from(segment.planes), segment.words());
        if b == 0 {
            assert!(stored.words.is_empty() && stored.nu.is_empty(), "no planes, no scalar");
            continue;
        }
        let row = &stored.words[index * words..(index + 1) * words];
        let bit = |k: usize| row[k / 32] >> (k % 32) & 1;
        assert!((segment.channels * b..32 * words).all(|k| bit(k) == 0), "unused bits are 0");
        let Some(x) = x else {
            assert!(stored.nu[index].to_bits() == NON_FINITE_SCALE.to_bits() && row.iter().all(|&w| w == 0));
            continue;
        };
        let code = |i: usize| (0..b).map(|j| (bit(b * i + j) << j) as u8).sum::<u8>();
        let have: Vec<u8> = (0..segment.channels).map(code).collect();
        let rotation = codec.rotations().get(segment.channels).unwrap();
        let y = reference::rotate(rotation, &x[start..start + segment.channels]);
        start += segment.channels;
        let (want, _) = reference::codes(segment.planes, &y);
        // Cell borders and near ties of two steps: the codes must be as good as the reference's, not the same.
        let top = f64::from((1u32 << b) - 1);
        let fit = |codes: &[u8]| {
            let levels: Vec<f64> = codes.iter().map(|&c| 2.0 * f64::from(c) - top).collect();
            let along: f64 = y.iter().zip(&levels).map(|(y, l)| y * l).sum();
            (along / levels.iter().map(|l| l * l).sum::<f64>().sqrt(), levels)
        };
        let ((have_fit, levels), (want_fit, _)) = (fit(&have), fit(&want));
        let norm = y.iter().map(|y| y * y).sum::<f64>().sqrt();
        // `noise` is the rounding of a row's norm; borders shift by as much in each of n channels.
        let slack = noise * (segment.channels as f64).sqrt() * 4.0;
        assert!(have_fit >= want_fit - slack, "row {index}: {have:?}, wanted {want:?} of {y:?}");
        let own = norm / levels.iter().map(|l| l * l).sum::<f64>().sqrt();
        let error = (stored.nu[index].to_f64() - own).abs();
        assert!(error <= own * (1.0 / 2048.0 + 1e-5) + 3e-8 + noise, "nu {}, wanted {own}", stored.nu[index]);
    }
}

fn check_codes(case: &Case, built: &Built) {
    let Built { codec, tables, keys, values, key_codes, value_codes, .. } = built;
    let (all, dim) = (keys.view().to_f32(), case.key_dim);
    let mut odd = 0;
    for (index, (b, h, t)) in keys.shape().iter_rows().enumerate() {
        let key = f64s(&all[index * dim..][..dim]);
        odd += u32::from(key.is_none());
        let block = match case.planes.centring {
            Centring::BlockMean(block) => {
                let (block, blocks) = (block as usize, case.tokens.div_ceil(block as usize));
                let start = ((b * case.kv_heads + h) * blocks + t / block) * dim;
                Some(key_codes.means[start..start + dim].iter().map(|m| m.to_f64()).collect::<Vec<_>>())
            }
            _ => None,
        };
        let head = tables.head(b, h);
        let prepared = |key: &Vec<f64>| {
            reference::prepared_key(codec, head, key, case.start + t as u32, block.as_deref())
        };
        // Keys and means up to about 8 before the weighing, which multiplies by at most 16; D terms to a rotated one.
        let most = head.sigma.iter().fold(0.0f64, |most, s| most.max(1.0 / f64::from(*s)));
        let noise = (dim as f64 + 40.0) * HALF_ULP * 8.0 * most * (dim as f64).sqrt();
        check_row(codec, key_codes, index, key.as_ref().map(prepared).as_deref(), noise);
    }
    assert_eq!(key_codes.status.non_finite, odd);
    let (all, dim) = (values.view().to_f32(), case.value_dim);
    for index in 0..values.shape().rows() {
        let noise = (dim as f64 + 40.0) * HALF_ULP * 8.0 * (dim as f64).sqrt();
        check_row(codec, value_codes, index, f64s(&all[index * dim..][..dim]).as_deref(), noise);
    }
}

/// Decoded rows, which bound everything that is made of them.
fn decoded(built: &Built) -> (f64, f64) {
    let Built { codec, tables, key_codes, value_codes, .. } = built;
    let (have, shape) = (cpu::decode_keys(codec, key_codes, tables).unwrap(), key_codes.shape);
    let mut largest = (1.0f64, 1.0f64);
    let mut near = |have: &[f32], want: Option<Vec<f64>>, key: bool| {
        let want = want.unwrap_or_else(|| vec![0.0; have.len()]);
        let size = want.iter().map(|x| x * x).sum::<f64>().sqrt();
        let largest = if key { &mut largest.0 } else { &mut largest.1 };
        *largest = largest.max(size);
        // D terms of a rotation, a few more roundings; sigma's spread (at most 256) among the channels of a key.
        let bound = (have.len() as f64 + 40.0) * HALF_ULP * size.max(1.0) * if key { 256.0 } else { 1.0 };
        assert_near("decoded", have, &want, bound);
    };
    for (b, h, t) in shape.iter_rows() {
        let have = &have[shape.row(b, h, t) * shape.dim..][..shape.dim];
        near(have, reference::decoded_key(codec, key_codes, tables, (b, h, t)), true);
    }
    let (have, shape) = (cpu::decode_values(codec, value_codes).unwrap(), value_codes.shape);
    for (b, h, t) in shape.iter_rows() {
        let have = &have[shape.row(b, h, t) * shape.dim..][..shape.dim];
        near(have, reference::decoded_value(codec, value_codes, (b, h, t)), false);
    }
    largest
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_twin_equals_the_reference(case in cases()) {
        let built = case.build();
        check_codes(&case, &built);
        let (key, value) = decoded(&built);
        let Built { codec, tables, queries, keys, values, key_codes, value_codes } = &built;
        let (queries, keys, values) = (queries.view(), keys.view(), values.view());

        let query = queries.to_f32().chunks(case.key_dim).fold(0.0f64, |most, q| {
            most.max(q.iter().map(|&q| f64::from(q).powi(2)).sum::<f64>().sqrt())
        });
        let spread = |t: &Tables| {
            let (low, high) = t.sigma.iter().fold((f32::MAX, 0.0f32), |(l, h), &s| (l.min(s), h.max(s)));
            f64::from(high / low)
        };
        // A score is q.k of norms query and key, in other coordinates whose balance stretches both by at most the
        // spread of sigma, and as a difference of sums 2^b times as large, whose every term is rounded.
        let planes = f64::from(1u32 << case.planes.planes_hi.max(case.planes.planes_lo.unwrap_or(0)).max(3));
        let score = query * (key + 3.0 * (case.key_dim as f64).sqrt());
        let rounding = (case.key_dim as f64 + 60.0) * HALF_ULP * score * spread(tables) * planes.sqrt();
        let want = reference::scores(codec, &queries, key_codes, tables).unwrap();
        let have = cpu::scores(codec, &queries, key_codes, tables).unwrap();
        assert_near("scores", &have, &want, rounding);

        let store = Stored { keys: &keys, key_codes, values: &values, value_codes, tables };
        let lengths = Some(&case.lengths[..]);
        let want = reference::attend(codec, &queries, &store, lengths, &case.options).unwrap();
        let have = cpu::attend(codec, &queries, &store, lengths, &case.options).unwrap();
        // A logit's error counts twice in a softmax, beside the roundings of the sum over tokens and of the rotation.
        let logit = f64::from(case.options.scale_for(case.key_dim)) * rounding;
        let own = (case.tokens + case.value_dim + 60) as f64 * HALF_ULP;
        let largest = value + 5.0 * (case.value_dim as f64).sqrt();
        assert_near("attention", &have, &want, (2.0 * logit + own) * largest);
    }
}
