//! QJL as a member of the family: sketched codecs against QJL itself and the f64 reference.

use std::sync::Arc;

use super::{Calibration, Centring, Codec, PlaneCodes, Sketch, Stored, Tables, cpu, reference};
use crate::attention::AttendOptions;
use crate::capture::RopeLayout;
use crate::qjl::{self, KeyScale, Projection, ProjectionKind};
use crate::rope::{Positions, Rope};
use crate::tensor::{DType, Shape, Tensor};

const DIM: usize = 32;

fn rope() -> Rope {
    Rope::from_theta(DIM, 24, 10_000.0, RopeLayout::HalfSplit).unwrap()
}

fn codec(kind: ProjectionKind, scale: KeyScale, centring: Centring) -> Codec {
    let projection = Arc::new(Projection::new(kind, DIM, 3 * DIM, 5).unwrap());
    Codec::sketched(Sketch { projection, scale }, centring, 20, Some(rope())).unwrap()
}

/// Rows of `[1, heads, tokens, dim]` about a mean that RoPE has turned.
fn rows(seed: u32, heads: usize, tokens: usize, dim: usize, mean: f32) -> Tensor {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let shape = Shape::new(1, heads, tokens, dim).unwrap();
    let mut numbers = Vec::new();
    for (_, _, token) in shape.iter_rows() {
        let mut row: Vec<f32> = (0..dim).map(|c| next() + mean * ((c % 5) as f32 - 2.0)).collect();
        if dim == DIM && mean != 0.0 {
            rope().rotate(&mut row, &rope().angles(token as u32));
        }
        numbers.extend(row);
    }
    Tensor::from_f32(&numbers, DType::F16, shape).unwrap()
}

fn tables(keys: &Tensor, codec: &Codec) -> Tables {
    let (view, rope) = (keys.view(), rope());
    let from = Calibration::new(&view, Positions::Start(&[0])).tokens(0..keys.shape().tokens).rope(&rope);
    Tables::learn(&from, &[], codec.options()).unwrap()
}

fn encode(codec: &Codec, keys: &Tensor, tables: &Tables) -> PlaneCodes {
    cpu::encode_keys(codec, &keys.view(), Positions::Start(&[0]), tables).unwrap()
}

#[test]
fn without_a_mean_the_codes_are_those_of_qjl() {
    let (keys, values) = (rows(1, 2, 40, DIM, 0.5), rows(2, 2, 40, 20, 0.0));
    for kind in [ProjectionKind::Gaussian, ProjectionKind::Orthogonal, ProjectionKind::Hadamard] {
        for scale in KeyScale::ALL {
            let codec = codec(kind, scale, Centring::None);
            let Some(sketch) = codec.sketch() else { panic!("a sketched codec") };
            let coded = encode(&codec, &keys, &Tables::identity(2, DIM));
            let want = qjl::cpu::quantize(&keys.view(), &sketch.projection, scale).unwrap();
            assert_eq!((&coded.segments[0].words, &coded.segments[0].nu), (&want.words, &want.scale));
            assert_eq!(coded.status, want.status);
        }
    }
    let codec = codec(ProjectionKind::Gaussian, KeyScale::Norm, Centring::None);
    let coded = cpu::encode_values(&codec, &values.view()).unwrap();
    let want = qjl::cpu::quantize_values(&values.view()).unwrap();
    assert_eq!((&coded.segments[0].words, &coded.segments[0].nu), (&want.words, &want.scale));
    assert_eq!(cpu::decode_values(&codec, &coded).unwrap(), qjl::cpu::dequantize_values(&want).unwrap());
    let bits = codec.key_bits() * DIM as f64 + codec.value_bits() * 20.0;
    assert_eq!(bits, f64::from(3 * 32 + 16 + 5 * 32 + 16));
}

#[test]
fn scores_and_attention_equal_the_reference() {
    let (mut keys, values) = (rows(3, 2, 70, DIM, 0.5), rows(4, 2, 70, 20, 0.0));
    let mut numbers = keys.view().to_f32();
    numbers[9 * DIM + 3] = f32::NAN;
    keys = Tensor::from_f32(&numbers, DType::F16, keys.shape()).unwrap();
    let queries = rows(5, 6, 3, DIM, 0.0);
    for (kind, scale) in [
        (ProjectionKind::Orthogonal, KeyScale::Norm),
        (ProjectionKind::Hadamard, KeyScale::Unbiased),
        (ProjectionKind::Gaussian, KeyScale::Mse),
    ] {
        let codec = codec(kind, scale, Centring::PreRope);
        let tables = tables(&keys, &codec);
        let key_codes = encode(&codec, &keys, &tables);
        assert_eq!(key_codes.status.non_finite, 1);
        let value_codes = cpu::encode_values(&codec, &values.view()).unwrap();
        let have = cpu::scores(&codec, &queries.view(), &key_codes, &tables).unwrap();
        let want = reference::scores(&codec, &queries.view(), &key_codes, &tables).unwrap();
        // Sums of 96 signs times numbers of some tens, each rounded in f32.
        let far = have.iter().zip(&want).map(|(h, w)| (f64::from(*h) - w).abs()).fold(0.0, f64::max);
        assert!(far < 2e-5, "{kind}: scores {far}");
        let (keys, values) = (&keys.view(), &values.view());
        let store =
            Stored { keys, key_codes: &key_codes, values, value_codes: &value_codes, tables: &tables };
        let options = AttendOptions::default().causal(true);
        let have = cpu::attend(&codec, &queries.view(), &store, None, &options).unwrap();
        let want = reference::attend(&codec, &queries.view(), &store, None, &options).unwrap();
        let far = have.iter().zip(&want).map(|(h, w)| (f64::from(*h) - w).abs()).fold(0.0, f64::max);
        assert!(far < 2e-5, "{kind}: attention {far}");
    }
}

/// A mean several times what lies about it leaves signs nothing to say of the rest.
#[test]
fn a_mean_costs_bits_where_it_is_left_in() {
    let (keys, queries) = (rows(6, 1, 256, DIM, 2.0), rows(7, 1, 16, DIM, 0.0));
    let [k, q] = [&keys, &queries].map(|rows| rows.view().to_f32());
    let dot = |q: &[f32], k: &[f32]| q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let exact: Vec<f64> = q.chunks(DIM).flat_map(|q| k.chunks(DIM).map(move |k| dot(q, k))).collect();
    let error = |centring| -> f64 {
        let codec = codec(ProjectionKind::Orthogonal, KeyScale::Norm, centring);
        let tables = tables(&keys, &codec);
        let scores = cpu::scores(&codec, &queries.view(), &encode(&codec, &keys, &tables), &tables).unwrap();
        scores.iter().zip(&exact).map(|(s, e)| (f64::from(*s) - e).powi(2)).sum()
    };
    // A sketch's error grows with the length of what is sketched: here about 16 to 3.3.
    assert!(error(Centring::PreRope) * 8.0 < error(Centring::None));
}
