//! Rows that are odd or stay raw, and positions that are not a count.

use half::f16;
use kvfold::attention::AttendOptions;
use kvfold::capture::RopeLayout;
use kvfold::qjl::planes::{Codec, PlaneCodes, PlanesOptions, Stored, Tables, cpu, reference};
use kvfold::rope::{Positions, Rope};
use kvfold::{DType, Shape, Tensor};

use super::random::Random;
use super::tensor;

/// Rows of one head and one sequence.
fn rows(rows: &[&[f32]]) -> Tensor {
    let shape = Shape::new(1, 1, rows.len(), rows[0].len()).unwrap();
    Tensor::from_f32(&rows.concat(), DType::F32, shape).unwrap()
}

/// A plain case: keys, values and queries of one head, everything coded.
struct Plain {
    codec: Codec,
    tables: Tables,
    queries: Tensor,
}

impl Plain {
    fn new(dim: usize, options: PlanesOptions) -> Self {
        let mut random = Random(8);
        let rope = Rope::from_theta(dim, dim, 1e4, RopeLayout::HalfSplit).unwrap();
        let codec = Codec::new(options.sinks(0).recent(0), dim, dim, Some(rope)).unwrap();
        let queries = tensor([1, 1, 2, dim], DType::F32, || random.normal());
        Self { codec, tables: Tables::identity(1, dim), queries }
    }

    fn encode(&self, keys: &Tensor) -> PlaneCodes {
        cpu::encode_keys(&self.codec, &keys.view(), Positions::Start(&[0]), &self.tables).unwrap()
    }

    fn attend(&self, keys: &Tensor, values: &Tensor) -> Vec<f32> {
        let (key_codes, value_codes) =
            (self.encode(keys), cpu::encode_values(&self.codec, &values.view()).unwrap());
        let store = Stored {
            keys: &keys.view(),
            key_codes: &key_codes,
            values: &values.view(),
            value_codes: &value_codes,
            tables: &self.tables,
        };
        cpu::attend(&self.codec, &self.queries.view(), &store, None, &AttendOptions::default()).unwrap()
    }
}

#[test]
fn one_bad_row_changes_no_other_output() {
    let (d, n) = (32, 70);
    let mut random = Random(3);
    let clean = [random.normals(d * n), random.normals(d * n)];
    let build = |numbers: &[f64]| {
        let mut numbers = numbers.iter();
        tensor([1, 1, n, d], DType::F32, || *numbers.next().unwrap())
    };
    for options in [PlanesOptions::default(), PlanesOptions::default().split(3, 1)] {
        let plain = Plain::new(d, options);
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for which in 0..2 {
                let mut spoilt = clean.clone();
                spoilt[which][d * 66 + 3] = bad;
                let have = plain.attend(&build(&spoilt[0]), &build(&spoilt[1]));
                // The same as if the token were masked by its whole key.
                let mut masked = clean.clone();
                masked[0][d * 66..d * 67].fill(f64::NAN);
                let want = plain.attend(&build(&masked[0]), &build(&masked[1]));
                assert_eq!(have, want, "{bad}");
                assert!(have.iter().all(|x| x.is_finite()));
            }
        }
    }
}

#[test]
fn huge_tiny_and_zero_rows() {
    for options in
        [1, 2, 3, 4, 5].map(|planes| PlanesOptions::default().key_planes(planes).value_planes(planes))
    {
        let plain = Plain::new(4, options);
        let keys = rows(&[
            &[65504.0; 4],
            &[1e30, -1e30, 1.0, 0.0],
            &[3e38; 4],
            &[1e-30; 4],
            &[1e-45, 0.0, 0.0, 0.0],
            &[0.0; 4],
            &[-0.0; 4],
            &[6e4, -6e4, 6e4, 6e4],
        ]);
        let codes = plain.encode(&keys);
        let nu = &codes.segments[0].nu;
        assert!(nu.iter().all(|nu| nu.is_finite()), "{nu:?}");
        assert_eq!(nu[1..3], [f16::MAX; 2], "clamped");
        assert_eq!(nu[3..7], [f16::ZERO; 4], "below f16, or zeros");
        assert_eq!((codes.status.zero, codes.status.non_finite), (2, 0));
        // nu is at most the root mean square, which both f16 rows keep within f16.
        assert_eq!(codes.status.overflow, 2);
        let scores = cpu::scores(&plain.codec, &plain.queries.view(), &codes, &plain.tables).unwrap();
        assert!(scores.iter().all(|x| x.is_finite()), "{scores:?}");
        assert!(plain.attend(&keys, &keys).iter().all(|x| x.is_finite()));
    }
}

#[test]
fn raw_rows_are_read_raw() {
    // All tokens are sinks or recent: attention is exact, whatever the codes.
    let (d, n) = (64, 40);
    let mut random = Random(4);
    let rope = Rope::from_theta(d, d, 1e4, RopeLayout::HalfSplit).unwrap();
    let codec = Codec::new(PlanesOptions::default().sinks(8).recent(32), d, d, Some(rope)).unwrap();
    let mut draw = |heads, tokens| tensor([1, heads, tokens, d], DType::F16, || random.normal());
    let (queries, keys, values) = (draw(3, 5), draw(1, n), draw(1, n));
    let tables = Tables::identity(1, d);
    let mut key_codes = cpu::encode_keys(&codec, &keys.view(), Positions::Start(&[0]), &tables).unwrap();
    key_codes.segments[0].nu.fill(f16::ONE);
    let value_codes = cpu::encode_values(&codec, &values.view()).unwrap();
    let (keys, values) = (keys.view(), values.view());
    let store = Stored {
        keys: &keys,
        key_codes: &key_codes,
        values: &values,
        value_codes: &value_codes,
        tables: &tables,
    };
    let options = AttendOptions::default().causal(true);
    let exact = kvfold::attention::exact(&queries.view(), &keys, &values, None, &options).unwrap();
    assert_eq!(cpu::attend(&codec, &queries.view(), &store, None, &options).unwrap(), exact);
    // With another length other rows are recent: the recent window counts from the sequence's end.
    let shorter = cpu::attend(&codec, &queries.view(), &store, Some(&[n as u32 - 1]), &options).unwrap();
    let want =
        kvfold::attention::exact(&queries.view(), &keys, &values, Some(&[n as u32 - 1]), &options).unwrap();
    assert_eq!(shorter, want);
}

#[test]
fn positions_turn_the_mean_with_them() {
    // Keys that are exactly their turned mean code to nothing and score by the mean alone.
    let d = 16;
    let mut plain = Plain::new(d, PlanesOptions::default());
    let mu: Vec<f16> = Random(6).normals(d).into_iter().map(f16::from_f64).collect();
    plain.tables.mu = mu.clone();
    let positions = [3u32, 900, 2_000_000];
    let rope = plain.codec.rope().unwrap().clone();
    let turned: Vec<Vec<f32>> = positions
        .iter()
        .map(|&t| {
            let mu: Vec<f64> = mu.iter().map(|m| m.to_f64()).collect();
            reference::turned(&rope, &mu, t).into_iter().map(|x| x as f32).collect()
        })
        .collect();
    let keys = rows(&turned.iter().map(|row| &row[..]).collect::<Vec<_>>());
    let codes =
        cpu::encode_keys(&plain.codec, &keys.view(), Positions::Explicit(&positions), &plain.tables).unwrap();
    // What is left is the rounding of f32 angles and products.
    assert!(codes.segments[0].nu.iter().all(|nu| nu.to_f32() < 2e-6), "{:?}", codes.segments[0].nu);
    let scores = cpu::scores(&plain.codec, &plain.queries.view(), &codes, &plain.tables).unwrap();
    let exact = kvfold::attention::exact_scores(&plain.queries.view(), &keys.view()).unwrap();
    assert!(scores.iter().zip(&exact).all(|(s, e)| (s - e).abs() < 5e-5), "{scores:?} {exact:?}");
}

#[test]
fn attention_over_many_tokens_is_exact_on_its_codes() {
    let (d, n) = (64, 4096);
    let mut random = Random(21);
    let rope = Rope::from_theta(d, d, 1e5, RopeLayout::HalfSplit).unwrap();
    let mut draw = |tokens, size: f64| tensor([1, 1, tokens, d], DType::F16, || size * random.normal());
    // Scores spread by 4 nats.
    let (queries, keys, values) = (draw(1, 3.0), draw(n, 1.0), draw(n, 1.0));
    let (keys, values, mut tables) = (keys.view(), values.view(), Tables::identity(1, d));
    tables.mu = Random(22).normals(d).into_iter().map(f16::from_f64).collect();
    for options in [PlanesOptions::default(), PlanesOptions::default().split(3, 1)] {
        let codec = Codec::new(options, d, d, Some(rope.clone())).unwrap();
        let key_codes = cpu::encode_keys(&codec, &keys, Positions::Start(&[0]), &tables).unwrap();
        let value_codes = cpu::encode_values(&codec, &values).unwrap();
        let store = Stored {
            keys: &keys,
            key_codes: &key_codes,
            values: &values,
            value_codes: &value_codes,
            tables: &tables,
        };
        let options = AttendOptions::default();
        let want = reference::attend(&codec, &queries.view(), &store, None, &options).unwrap();
        let have = cpu::attend(&codec, &queries.view(), &store, None, &options).unwrap();
        let error: f64 = have.iter().zip(&want).map(|(h, w)| (f64::from(*h) - w).powi(2)).sum();
        let relative = (error / want.iter().map(|w| w * w).sum::<f64>()).sqrt();
        // Logits of up to 13 in f32 are off by 5e-7 as a root mean square; measured 1.4e-6 and 2.1e-6.
        assert!(relative < 5e-6, "{relative:e}");
    }
}
