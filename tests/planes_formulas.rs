//! Sign planes against closed forms: the mean by angles, codes at their steps, rotations, norms, tables, bits.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics fails"
)]

mod random;

use half::f16;
use kvfold::capture::RopeLayout;
use kvfold::qjl::planes::{
    Balance, Calibration, Centring, Codec, PlanesOptions, Preset, Rotation, STEPS, Tables, cpu, reference,
};
use kvfold::rope::{Positions, Rope};
use kvfold::{DType, Error, Shape, Tensor};
use random::Random;

fn rope(dim: usize) -> Rope {
    Rope::from_theta(dim, dim, 1e4, RopeLayout::HalfSplit).unwrap()
}

fn tensor(shape: [usize; 4], numbers: &[f64]) -> Tensor {
    let numbers: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
    let [batch, heads, tokens, dim] = shape;
    Tensor::from_f32(&numbers, DType::F32, Shape::new(batch, heads, tokens, dim).unwrap()).unwrap()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn bits_and_ratios_are_the_presets() {
    let table = [
        (Preset::NearLossless, [8.5, 8.25], ["3.76", "3.88"]),
        (Preset::Balanced, [6.5, 6.25], ["4.92", "5.12"]),
        (Preset::Compact, [5.75, 5.375], ["5.57", "5.95"]),
        (Preset::Extreme, [3.5, 3.25], ["9.14", "9.85"]),
    ];
    for (preset, bits, ratios) in table {
        for (i, dim) in [64, 128].into_iter().enumerate() {
            let codec = Codec::new(preset.options(), dim, dim, Some(rope(dim))).unwrap();
            let have = codec.key_bits() + codec.value_bits();
            assert_eq!(have, bits[i], "{preset} at {dim}");
            assert_eq!(format!("{:.2}", 32.0 / have), ratios[i], "{preset} at {dim}");
        }
    }
    let block = PlanesOptions::default().centring(Centring::BlockMean(64));
    assert_eq!(
        Codec::new(block, 64, 64, None).unwrap().key_bits(),
        3.5,
        "a quarter of a bit for block means"
    );
}

#[test]
fn bytes_are_the_bits() {
    let (dim, tokens) = (64, 128);
    let rows = tensor([1, 2, tokens, dim], &Random(1).normals(2 * tokens * dim));
    for preset in Preset::ALL {
        for centring in [Centring::PreRope, Centring::BlockMean(64)] {
            let codec = Codec::new(preset.options().centring(centring), dim, dim, Some(rope(dim))).unwrap();
            let tables = Tables::identity(2, dim);
            let keys = cpu::encode_keys(&codec, &rows.view(), Positions::Start(&[0]), &tables).unwrap();
            let values = cpu::encode_values(&codec, &rows.view()).unwrap();
            let channels = (2 * tokens * dim) as f64;
            assert_eq!(keys.bytes() as f64 * 8.0, codec.key_bits() * channels, "{preset}");
            assert_eq!(values.bytes() as f64 * 8.0, codec.value_bits() * channels, "{preset}");
        }
    }
    // One round of 64 signs; one matrix of 80 channels; mean, balance and order.
    let bytes = |dim| Codec::new(PlanesOptions::default(), dim, dim, None).unwrap().rotations().bytes();
    assert_eq!((bytes(64), bytes(80), Tables::identity(3, 64).bytes()), (8, 25_600, 3 * 64 * 8));
}

#[test]
fn the_mean_by_angles_is_the_query_times_the_turned_mean() {
    let mut random = Random(3);
    for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
        for rotary in [64, 40] {
            let rope = Rope::from_theta(64, rotary, 1e5, layout.clone()).unwrap();
            for position in [0, 1, 77, 2047, 100_000] {
                let (q, mu) = (random.normals(64), random.normals(64));
                let mut turned = mu.clone();
                for ((a, b), frequency) in rope.pairs().zip(rope.inv_freq()) {
                    let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                    (turned[a], turned[b]) = (mu[a] * cos - mu[b] * sin, mu[b] * cos + mu[a] * sin);
                }
                let had = reference::mean_term(Some(&rope), &q, &mu, position);
                assert!((had - dot(&q, &turned)).abs() < 1e-12, "{had} at {position}");
            }
        }
    }
}

#[test]
fn rotations_are_orthogonal_and_the_same_everywhere() {
    for channels in [1, 2, 16, 32, 40, 48, 64, 80, 96, 128, 255, 256] {
        for rounds in 1..=3 {
            let rotation = Rotation::new(channels, rounds, 7);
            let x = Random(channels as u64).normals(channels);
            let want = reference::rotate(&rotation, &x);
            // The matrix is rounded to f32: half an ulp of entries of size n^-1/2, n of them, times |x|.
            let norm = dot(&x, &x).sqrt();
            assert!((dot(&want, &want).sqrt() - norm).abs() < 1e-6 * norm, "{channels}: norm");
            let back = reference::rotate_back(&rotation, &want);
            assert!(back.iter().zip(&x).all(|(b, x)| (b - x).abs() < 1e-6 * norm), "{channels}: R^T R");
            let mut row: Vec<f32> = x.iter().map(|&x| x as f32).collect();
            rotation.apply(&mut row);
            assert!(
                row.iter().zip(&want).all(|(r, w)| (f64::from(*r) - w).abs() < 1e-6 * norm),
                "{channels}: R"
            );
            rotation.apply_transposed(&mut row);
            assert!(
                row.iter().zip(&x).all(|(r, x)| (f64::from(*r) - x).abs() < 2e-6 * norm),
                "{channels}: R^T"
            );
        }
    }
    assert_ne!(Rotation::new(64, 2, 1), Rotation::new(64, 2, 2));
    // Sign bits have no platform in them: these words stand for every saved cache.
    assert_eq!(
        Rotation::new(64, 2, 7).signs().unwrap(),
        [3_876_397_456, 2_403_564_985, 541_246_334, 1_163_273_900]
    );
}

#[test]
fn codes_are_floors_of_the_best_step() {
    let mut random = Random(9);
    for planes in 1..=5u8 {
        for n in [1, 7, 64] {
            let y = random.normals(n);
            let (codes, nu) = reference::codes(planes, &y);
            let top = f64::from((1u32 << planes) - 1);
            let levels: Vec<f64> = codes.iter().map(|&c| 2.0 * f64::from(c) - top).collect();
            let norm = dot(&y, &y).sqrt();
            assert!((nu * dot(&levels, &levels).sqrt() - norm).abs() < 1e-12 * norm, "norms are kept");
            if planes == 1 {
                assert!(y.iter().zip(&levels).all(|(y, l)| y.signum() == *l));
                continue;
            }
            // No step of the five fits better, by exhaustion.
            let fit = |levels: &[f64]| dot(&y, levels).powi(2) / dot(levels, levels);
            let rms = norm / (n as f64).sqrt();
            for factor in [0.75, 0.875, 1.0, 1.125, 1.25] {
                let step = factor * f64::from(STEPS[usize::from(planes) - 1]) * rms;
                let level = |y: &f64| (2.0 * (y / step).floor() + 1.0).clamp(-top, top);
                assert!(fit(&levels) >= fit(&y.iter().map(level).collect::<Vec<_>>()) * (1.0 - 1e-12));
            }
        }
    }
    // Gaussian rows: Max (1960) has 0.3634, 0.1188, 0.0374, 0.0115, 0.0035 of the energy left by the best uniform
    // quantiser of 1 to 5 bits at least squares, a share e; with lengths kept that is 2 (1 - sqrt(1 - e)). The tail has
    // a few hundred of the 65,536 draws and a tenth of the error: 2 % at one sigma.
    let (y, n) = (random.normals(1 << 16), 1 << 16);
    for (planes, left) in (1..=5).zip([0.3634f64, 0.1188, 0.03744, 0.01154, 0.00349]) {
        let (codes, nu) = reference::codes(planes, &y);
        let top = f64::from((1u32 << planes) - 1);
        let error: f64 =
            y.iter().zip(&codes).map(|(y, &c)| (y - nu * (2.0 * f64::from(c) - top)).powi(2)).sum();
        let (relative, want) = (error / n as f64, 2.0 * (1.0 - (1.0 - left).sqrt()));
        assert!((relative - want).abs() < 0.06 * want, "{planes} planes: {relative}, wanted {want}");
    }
}

#[test]
fn decoded_rows_keep_their_norm() {
    let mut random = Random(5);
    for (dim, value_planes) in [(64, 3), (80, 2), (1, 1), (511, 5)] {
        let options = PlanesOptions::default().value_planes(value_planes);
        let codec = Codec::new(options, dim, dim, None).unwrap();
        let rows = tensor([1, 1, 5, dim], &random.normals(5 * dim));
        let codes = cpu::encode_values(&codec, &rows.view()).unwrap();
        let decoded = cpu::decode_values(&codec, &codes).unwrap();
        for (x, y) in rows.view().to_f32().chunks(dim).zip(decoded.chunks(dim)) {
            let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            // nu is rounded to f16: half an ulp is 2^-11 of it.
            assert!((norm(x) - norm(y)).abs() <= norm(x) * (1.0 / 2048.0 + 1e-5), "{dim}");
        }
    }
}

/// Keys `mu + noise` turned to their positions, and queries of given size per pair.
fn calibrated(options: PlanesOptions, with_queries: bool) -> (Tables, Vec<f64>, Vec<f64>, Vec<f64>) {
    let (dim, tokens, rope) = (8, 20_000, rope(8));
    let (mut random, mu) = (Random(11), Random(12).normals(8));
    // Standard deviations of the pairs (0, 4), (1, 5), (2, 6), (3, 7); the last pair is always 0.
    let spread = [1.0, 3.0, 0.5, 0.0, 1.0, 3.0, 0.5, 0.0];
    let size = [2.0, 1.0, 9.0, 1.0, 2.0, 1.0, 9.0, 1.0];
    let mut keys = Vec::new();
    for t in 0..tokens {
        let before: Vec<f64> = (0..dim).map(|c| mu[c] + spread[c] * random.normal()).collect();
        keys.extend(reference::turned(&rope, &before, t as u32 + 5));
    }
    keys[..dim].fill(1e3);
    keys[dim] = f64::NAN;
    let queries: Vec<f64> = (0..2 * tokens * dim).map(|i| size[i % dim] * random.normal()).collect();
    let (keys, queries) = (tensor([1, 1, tokens, dim], &keys), tensor([1, 2, tokens, dim], &queries));
    let (keys, queries) = (keys.view(), queries.view());
    let mut from = Calibration::new(&keys, Positions::Start(&[5])).rope(&rope).tokens(1..tokens);
    from.queries = with_queries.then_some(&queries);
    let square = |x: [f64; 8]| x.map(|x| x * x).to_vec();
    (Tables::calibrate(&from, &options).unwrap(), mu, square(spread), square(size))
}

#[test]
fn tables_are_the_moments_of_keys_and_queries() {
    let floor =
        |e: &[f64]| -> Vec<f64> { e.iter().map(|x| x + 1e-4 * e.iter().sum::<f64>() / 8.0).collect() };
    for (balance, exponent) in [(Balance::Half, 0.125), (Balance::Full, 0.25), (Balance::None, 0.0)] {
        let (tables, mu, ek, eq) = calibrated(PlanesOptions::default().balance(balance), true);
        // 20,000 draws: a mean is off by 3 / sqrt(20,000) = 0.02 at three sigma, three times that in two channels.
        assert!(
            tables.mu.iter().zip(&mu).all(|(m, w)| (m.to_f64() - w).abs() < 0.07),
            "{:?} {mu:?}",
            tables.mu
        );
        let (ek, eq) = (floor(&ek), floor(&eq));
        let raw: Vec<f64> = ek.iter().zip(&eq).map(|(k, q)| (k / q).powf(exponent)).collect();
        let centre = (raw.iter().map(|x| x.ln()).sum::<f64>() / 8.0).exp();
        for (had, raw) in tables.sigma.iter().zip(&raw) {
            let want = (raw / centre).clamp(1.0 / 16.0, 16.0);
            // Variances are within 2 % (two channels, and mu's rounding in the silent pair), to the exponent.
            assert!((f64::from(*had) - want).abs() < 0.02 * want, "{balance:?}: {had}, wanted {want}");
        }
        // ek eq: 4, 9, 20, little.
        assert_eq!(tables.order, [2, 6, 1, 5, 0, 4, 3, 7]);
    }
    let (tables, ..) = calibrated(PlanesOptions::default(), false);
    assert_eq!(
        (&tables.sigma[..], &tables.order[..]),
        (&[1.0; 8][..], &[1, 5, 0, 4, 2, 6, 3, 7][..]),
        "keys alone"
    );
    let (tables, ..) = calibrated(PlanesOptions::default().centring(Centring::None), true);
    assert_eq!(tables.mu, [f16::ZERO; 8]);
}

#[test]
fn heads_without_energy_are_even() {
    let zeros = tensor([1, 2, 6, 4], &[0.0; 48]);
    let zeros = zeros.view();
    let from = Calibration::new(&zeros, Positions::Start(&[0])).queries(&zeros);
    let tables = Tables::calibrate(&from, &PlanesOptions::default()).unwrap();
    assert_eq!(tables, Tables::identity(2, 4));
}

#[test]
fn tables_and_codecs_that_do_not_fit_are_typed_errors() {
    let options = PlanesOptions::default();
    let keys = tensor([2, 2, 6, 4], &[1.0; 96]);
    let keys = keys.view();
    let calibrate = |from: &Calibration<'_>| Tables::calibrate(from, &options);
    let base = || Calibration::new(&keys, Positions::Start(&[0, 0]));
    assert_eq!(calibrate(&base()).unwrap().sets, 2, "a set for each sequence");
    for range in [0..0, 5..7] {
        assert!(matches!(calibrate(&base().tokens(range)), Err(Error::Range { .. })));
    }
    let few = tensor([2, 2, 4, 4], &[1.0; 64]);
    let few = few.view();
    assert!(calibrate(&Calibration::new(&few, Positions::Start(&[0, 0]))).is_err(), "sinks alone");
    assert!(matches!(calibrate(&Calibration::new(&keys, Positions::Start(&[0]))), Err(Error::Shape { .. })));
    assert!(matches!(calibrate(&base().rope(&rope(8))), Err(Error::Range { .. })), "rotary_dim");
    for (shape, heads) in [([2, 3, 1, 4], true), ([1, 2, 1, 4], false), ([2, 2, 1, 5], false)] {
        let queries = tensor(shape, &vec![1.0; shape.iter().product()]);
        let error = calibrate(&base().queries(&queries.view())).unwrap_err();
        assert_eq!(matches!(error, Error::HeadRatio { .. }), heads, "{error}");
    }
    assert!(matches!(Codec::new(options, 513, 1, None), Err(Error::Shape { .. })));
    assert!(matches!(Codec::new(options, 1, 0, None), Err(Error::Shape { .. })));
    assert!(matches!(Codec::new(options, 4, 4, Some(rope(8))), Err(Error::Range { .. })));
    assert!(matches!(Codec::new(options.rounds(9), 4, 4, None), Err(Error::Range { .. })));

    let codec = Codec::new(options, 4, 4, None).unwrap();
    let encode = |tables: &Tables| cpu::encode_keys(&codec, &keys, Positions::Start(&[0, 9]), tables);
    let good = Tables::identity(2, 4);
    let codes = encode(&good).unwrap();
    assert_eq!(codes.positions, [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14]);
    assert!(matches!(encode(&Tables::identity(3, 4)), Err(Error::Shape { .. })));
    let spoilt = |spoil: fn(&mut Tables)| {
        let mut tables = good.clone();
        spoil(&mut tables);
        encode(&tables).unwrap_err().code()
    };
    assert_eq!(spoilt(|t| t.sigma[1] = f32::NAN), "non_finite");
    assert_eq!(spoilt(|t| t.sigma[1] = 0.0), "range");
    assert_eq!(spoilt(|t| t.order[1] = 0), "range");
    assert_eq!(spoilt(|t| t.sets = 2), "shape");
    assert_eq!(spoilt(|t| t.mu.truncate(7)), "shape");
    let mut short = codes.clone();
    short.segments[0].nu.pop();
    assert!(matches!(cpu::scores(&codec, &keys, &short, &good), Err(Error::Shape { .. })));
    let mut short = codes;
    short.positions.pop();
    assert!(matches!(cpu::scores(&codec, &keys, &short, &good), Err(Error::Shape { .. })));
}
