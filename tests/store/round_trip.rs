//! What comes back is what the twins restore, exactly.

use kvfold::capture::Capture;
use kvfold::minicache::{self, DirectionPlanes, MergeOptions, Mode, Retention};
use kvfold::qjl::cache::{Coding, NamedCoding, SketchOptions};
use kvfold::qjl::planes::{
    Balance, CALIBRATION_TOKENS, Calibration, Centring, Codec, PlanesOptions, Preset, Tables, cpu,
};
use kvfold::qjl::{self, KeyScale, Projection, ProjectionKind};
use kvfold::rope::{Positions, Rope};
use kvfold::store::{FoldOptions, Store};
use kvfold::{DType, Shape, Tensor, TensorView};
use proptest::prelude::*;

use crate::made::{Parts, Sizes};

/// Folds, goes through a file, and unfolds; checks what must hold of every store.
fn through(capture: &Capture, options: &FoldOptions) -> Capture {
    let store = Store::fold(capture, options).unwrap();
    let file = store.to_bytes().unwrap();
    assert_eq!(file, Store::fold(capture, options).unwrap().to_bytes().unwrap(), "deterministic");
    let again = Store::from_bytes(&file).unwrap();
    assert_eq!(again, store);
    assert_eq!(again.to_bytes().unwrap(), file);
    let tensors: usize = Parts::of(&file).tensors.values().map(|part| part.bytes.len()).sum();
    assert_eq!(store.payload_bytes() + store.kept_bytes(), tensors);
    let report = store.report(Some(capture)).unwrap();
    let layers: u64 = report.layers.iter().map(|layer| layer.bytes_after).sum();
    assert_eq!(layers + report.shared_bytes, report.bytes_after);
    assert_eq!(report.layers.iter().map(|layer| layer.bytes_before).sum::<u64>(), report.bytes_before);
    let restored = again.unfold().unwrap();
    assert_eq!(restored.info, capture.info);
    for (layer, old) in restored.layers.iter().zip(&capture.layers) {
        assert_eq!((&layer.queries, &layer.keys_pre_rope), (&old.queries, &old.keys_pre_rope));
    }
    restored
}

/// One sequence of a tensor, padding left out.
fn sequence(tensor: &Tensor, b: usize, tokens: usize) -> Tensor {
    let shape = Shape { batch: 1, tokens, ..tensor.shape() };
    let bytes = shape.iter_rows().flat_map(|(_, h, t)| tensor.view().row_bytes(b, h, t).to_vec()).collect();
    Tensor::new(bytes, tensor.dtype(), shape).unwrap()
}

/// Rows at and beyond a sequence's length must be zeros.
fn assert_padding(tensor: &Tensor, b: usize, length: usize) {
    let rows = tensor.shape().iter_rows().filter(|&(batch, _, t)| batch == b && t >= length);
    for (b, h, t) in rows {
        assert!(tensor.view().row_bytes(b, h, t).iter().all(|&byte| byte == 0));
    }
}

fn parts(capture: &Capture, layer: usize) -> [&Tensor; 2] {
    [capture.keys(layer).unwrap(), &capture.layers[layer].values]
}

fn check_minicache(capture: &Capture, merge: &MergeOptions, start_frac: f64) {
    let restored = through(capture, &FoldOptions::MiniCache { merge: merge.clone(), start_frac });
    let start = (capture.layers.len() as f64 * start_frac) as usize;
    for b in 0..capture.batch() {
        let length = capture.length(b);
        let options = merge.clone().first_position(capture.info.position_start.as_ref().unwrap()[b]);
        for part in 0..2 {
            let was = |layer| sequence(parts(capture, layer)[part], b, length);
            let is = |layer| sequence(parts(&restored, layer)[part], b, length);
            for layer in 0..capture.layers.len() {
                assert_padding(parts(&restored, layer)[part], b, length);
                let depth = layer.wrapping_sub(start);
                if layer < start || (depth % 2 == 0 && layer + 1 == capture.layers.len()) {
                    assert_eq!(is(layer), was(layer), "alone");
                } else if depth % 2 == 0 {
                    let folded =
                        minicache::cpu::merge(&was(layer).view(), &was(layer + 1).view(), &options).unwrap();
                    for (at, which) in
                        [(layer, minicache::Layer::Lower), (layer + 1, minicache::Layer::Upper)]
                    {
                        assert_eq!(is(at), minicache::cpu::restore(&folded, which).unwrap(), "layer {at}");
                    }
                }
            }
        }
    }
}

/// Decoded rows, and raw ones where they stay raw.
fn mixed(options: &PlanesOptions, raw: &Tensor, decoded: &[f32]) -> Tensor {
    let rows = Tensor::from_f32(decoded, raw.dtype(), raw.shape()).unwrap();
    let length = raw.shape().tokens;
    let coded = |t: usize| t >= options.sinks as usize && t + (options.recent as usize) < length;
    let row = |(b, h, t)| {
        if coded(t) { rows.view().row_bytes(b, h, t) } else { raw.view().row_bytes(b, h, t) }.to_vec()
    };
    Tensor::new(raw.shape().iter_rows().flat_map(row).collect(), raw.dtype(), raw.shape()).unwrap()
}

fn check_planes(capture: &Capture, options: &PlanesOptions) {
    let restored = through(capture, &FoldOptions::Coded(Coding::Planes(*options)));
    for (b, layer) in
        (0..capture.batch()).flat_map(|b| (0..capture.layers.len()).map(move |layer| (b, layer)))
    {
        let length = capture.length(b);
        let [keys, values] = parts(capture, layer).map(|tensor| sequence(tensor, b, length));
        let [new_keys, new_values] = parts(&restored, layer).map(|tensor| sequence(tensor, b, length));
        parts(&restored, layer).into_iter().for_each(|tensor| assert_padding(tensor, b, length));
        if length < CALIBRATION_TOKENS {
            assert_eq!((new_keys, new_values), (keys, values), "too short for tables");
            continue;
        }
        let rope = Rope::from_capture(capture, layer).unwrap();
        let codec = Codec::new(*options, keys.shape().dim, values.shape().dim, rope.clone()).unwrap();
        let start = [capture.info.position_start.as_ref().unwrap()[b]];
        let (view, positions) = (keys.view(), Positions::Start(&start));
        let mut calibration = Calibration::new(&view, positions);
        let queries = capture.queries(layer).ok().map(|all| sequence(all, b, all.shape().tokens));
        let queries: Option<TensorView<'_>> = queries.as_ref().map(Tensor::view);
        calibration.queries = queries.as_ref();
        calibration.rope = rope.as_ref();
        let tables = Tables::calibrate(&calibration, options).unwrap();
        let codes = cpu::encode_keys(&codec, &view, positions, &tables).unwrap();
        let decoded = cpu::decode_keys(&codec, &codes, &tables).unwrap();
        assert_eq!(new_keys, mixed(options, &keys, &decoded), "keys of layer {layer}");
        let decoded =
            cpu::decode_values(&codec, &cpu::encode_values(&codec, &values.view()).unwrap()).unwrap();
        assert_eq!(new_values, mixed(options, &values, &decoded), "values of layer {layer}");
    }
}

/// Keys and values of sketches of keys as they are: `g/m nu S^T s`, in f64 from the signs, and values from their bytes.
fn check_sketches(capture: &Capture, options: &SketchOptions) {
    let coding = Coding::Sketch(*options);
    let restored = through(capture, &FoldOptions::Coded(coding));
    for (b, layer) in
        (0..capture.batch()).flat_map(|b| (0..capture.layers.len()).map(move |layer| (b, layer)))
    {
        let length = capture.length(b);
        let [keys, values] = parts(capture, layer).map(|tensor| sequence(tensor, b, length));
        let [new_keys, new_values] = parts(&restored, layer).map(|tensor| sequence(tensor, b, length));
        let raw = |t: usize| t < options.sinks as usize || t + options.recent as usize >= length;
        let dim = keys.shape().dim;
        let m = options.sketch_dim(dim).unwrap();
        let projection = Projection::new(options.projection, dim, m, options.seed).unwrap();
        let sketch = qjl::cpu::quantize(&keys.view(), &projection, options.scale).unwrap();
        let gain = if options.scale == KeyScale::Norm { f64::from(projection.factor()) } else { 1.0 };
        let columns: Vec<Vec<f32>> = (0..dim)
            .map(|c| {
                let (mut unit, mut column) = (vec![0.0; dim], vec![0.0; m]);
                unit[c] = 1.0;
                projection.project(&unit, &mut column);
                column
            })
            .collect();
        let (mut was, mut is) = (vec![0.0; dim], vec![0.0; dim]);
        for (row, (_, h, t)) in keys.shape().iter_rows().enumerate() {
            keys.view().read_row(0, h, t, &mut was);
            new_keys.view().read_row(0, h, t, &mut is);
            if raw(t) {
                assert_eq!(is, was, "a raw row");
                continue;
            }
            let nu = f64::from(sketch.scale[row].to_f32());
            for (x, column) in is.iter().zip(&columns) {
                let sign = |j: usize| {
                    let word = sketch.words[row * m.div_ceil(32) + j / 32];
                    if word >> (j % 32) & 1 == 1 { 1.0 } else { -1.0 }
                };
                let sum: f64 = column.iter().enumerate().map(|(j, s)| sign(j) * f64::from(*s)).sum();
                let size: f64 = column.iter().map(|s| f64::from(s.abs())).sum();
                let (want, size) = (gain / m as f64 * nu * sum, gain / m as f64 * nu * size);
                // m sums in f32 and the transform's own roundings; then half a step of the element type.
                let steps = match keys.dtype() {
                    DType::F16 => 11,
                    DType::Bf16 => 8,
                    _ => 24,
                };
                let bound = size * (m + 16) as f64 * f64::from(f32::EPSILON)
                    + want.abs() * 2f64.powi(-steps)
                    + 2f64.powi(-24);
                assert!((f64::from(*x) - want).abs() <= bound, "{t}: {x} {want} {bound}");
            }
        }
        let codes = qjl::cpu::quantize_values(&values.view()).unwrap();
        let bytes = qjl::cpu::dequantize_values(&codes).unwrap();
        let options = PlanesOptions::default().sinks(options.sinks).recent(options.recent);
        assert_eq!(new_values, mixed(&options, &values, &bytes), "values of layer {layer}");
    }
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop::sample::select(DType::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn minicache_restores_what_the_twin_restores(
        dtype in dtypes(),
        mode in prop::sample::select(vec![Mode::Shared, Mode::Anchor, Mode::Compat]),
        retention in prop::sample::select(vec![
            Retention::Cosine(0.9), Retention::Range(0.3), Retention::Fraction(0.4), Retention::Never,
            Retention::Cosine(1.0),
        ]),
        (layers, start_frac) in (1usize..6, prop::sample::select(vec![0.0, 0.5, 1.0])),
        key_dim in prop::sample::select(vec![2usize, 5, 16, 33]),
        lengths in prop::collection::vec(prop::sample::select(vec![0usize, 1, 31, 33, 70]), 1..4),
        padding in 0usize..2,
        raw_page_share in prop::sample::select(vec![0.5f32, 0.9, 1.0]),
        seed in any::<u64>(),
    ) {
        let tokens = lengths.iter().max().unwrap() + padding;
        let value_dim = key_dim + 1;
        let sizes = Sizes { dtype, layers, tokens, lengths, key_dim, value_dim, rope: false, seed, heads: 2 };
        let merge = MergeOptions::default().mode(mode).retention(retention).raw_page_share(raw_page_share);
        let coded = DirectionPlanes::default().bits(1 + (seed % 5) as u8);
        let merge = if mode == Mode::Shared && seed % 2 == 1 { merge.planes(coded) } else { merge };
        check_minicache(&sizes.capture(), &merge, start_frac);
    }

    #[test]
    fn planes_restore_what_the_twin_decodes(
        dtype in dtypes(),
        preset in prop::sample::select(Preset::ALL.to_vec()),
        key_dim in prop::sample::select(vec![6usize, 16, 24, 34]),
        value_dim in prop::sample::select(vec![7usize, 16]),
        lengths in prop::collection::vec(prop::sample::select(vec![5usize, 127, 128, 150]), 1..3),
        (sinks, recent) in (0u32..6, prop::sample::select(vec![0u32, 16, 64, 400])),
        block in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let tokens = *lengths.iter().max().unwrap();
        let sizes = Sizes { dtype, layers: 2, tokens, lengths, key_dim, value_dim, rope: true, seed, heads: 2 };
        let mut options = preset.options().sinks(sinks).recent(recent).seed(seed);
        if block {
            options = options.centring(Centring::BlockMean(48)).balance(Balance::None);
        }
        check_planes(&sizes.capture(), &options);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sketches_restore_what_their_formula_says(
        dtype in dtypes(),
        projection in prop::sample::select(vec![
            ProjectionKind::Gaussian, ProjectionKind::Orthogonal, ProjectionKind::Hadamard,
        ]),
        scale in prop::sample::select(KeyScale::ALL.to_vec()),
        rate in prop::sample::select(vec![0.3, 1.0, 2.5, 4.0]),
        (key_dim, value_dim) in prop::sample::select(vec![(16usize, 7usize), (32, 16), (20, 5)]),
        lengths in prop::collection::vec(prop::sample::select(vec![0usize, 3, 40, 70]), 1..3),
        (sinks, recent) in (0u32..6, prop::sample::select(vec![0u32, 16, 400])),
        seed in any::<u64>(),
    ) {
        prop_assume!(projection != ProjectionKind::Hadamard || key_dim.is_power_of_two());
        let tokens = *lengths.iter().max().unwrap();
        let sizes = Sizes { dtype, layers: 2, tokens, lengths, key_dim, value_dim, rope: true, seed, heads: 2 };
        let options = SketchOptions::default().projection(projection).scale(scale).rate(rate).seed(seed);
        check_sketches(&sizes.capture(), &options.sinks(sinks).recent(recent));
    }
}

/// Thousands of bits a channel and one coded token: codes are read where they were stored alone.
#[test]
fn wide_sketches_of_few_rows_are_small() {
    let sizes = Sizes {
        layers: 1,
        heads: 1,
        tokens: 6_000,
        lengths: vec![6_000],
        key_dim: 1,
        value_dim: 1,
        rope: false,
        ..Sizes::default()
    };
    let capture = sizes.capture();
    let options = SketchOptions::default().rate(8192.0).sinks(5_999);
    let store = Store::fold(&capture, &FoldOptions::Coded(Coding::Sketch(options))).unwrap();
    assert!(store.payload_bytes() < 60_000, "{}", store.payload_bytes());
    let restored = Store::from_bytes(&store.to_bytes().unwrap()).unwrap().unfold().unwrap();
    assert_eq!(restored.tokens(), 6_000);
    let rows = |of: &Capture| sequence(parts(of, 0)[0], 0, 5_999);
    assert_eq!(rows(&restored), rows(&capture));
}

#[test]
fn centred_sketches_keep_what_tables_need() {
    let sizes = Sizes { tokens: 150, lengths: vec![150, 127], ..Sizes::default() };
    let capture = sizes.capture();
    let restored = through(&capture, &NamedCoding::QjlOrth.into());
    for layer in 0..capture.layers.len() {
        let [[keys, values], [new_keys, new_values]] =
            [&capture, &restored].map(|of| parts(of, layer).map(|tensor| sequence(tensor, 1, 127)));
        assert_eq!((new_keys, new_values), (keys, values), "too short for tables");
    }
    let store = Store::fold(&capture, &NamedCoding::QjlOrth.into()).unwrap();
    let names = Parts::of(&store.to_bytes().unwrap()).tensors;
    assert!(names.contains_key("sequence.0.layer.3.key.mu") && names.contains_key("projection.16"));
    assert!(!names.contains_key("sequence.1.layer.3.key.mu"));
    let plain = Store::fold(&capture, &NamedCoding::Qjl.into()).unwrap();
    assert!(!Parts::of(&plain.to_bytes().unwrap()).tensors.contains_key("sequence.0.layer.3.key.mu"));
    // Four bits a channel, and a mean taken off, are nearer than one bit of the key as it is.
    let error = |store: &Store| store.report(Some(&capture)).unwrap().key_relative_error.unwrap();
    assert!(error(&store) < error(&plain), "{} {}", error(&store), error(&plain));
    // Without RoPE's description there is no mean before it.
    let unknown = Sizes { rope: false, ..sizes }.capture();
    let FoldOptions::Coded(took) = Store::fold(&unknown, &NamedCoding::QjlOrth.into()).unwrap().options()
    else {
        panic!("another method")
    };
    assert_eq!(took.centring(), Centring::None);
    through(&unknown, &FoldOptions::Coded(took));
}

#[test]
fn unknown_rope_falls_back_to_block_means_and_says_so() {
    let capture = Sizes { rope: false, ..Sizes::default() }.capture();
    let store = Store::fold(&capture, &FoldOptions::default()).unwrap();
    let took = PlanesOptions::default().centring(Centring::BlockMean(64));
    assert_eq!(store.options(), FoldOptions::Coded(Coding::Planes(took)));
    check_planes(&capture, &took);
}

#[test]
fn layers_that_differ_are_no_pair() {
    let mut capture = Sizes { layers: 2, ..Sizes::default() }.capture();
    let wide = Sizes { layers: 1, value_dim: 8, ..Sizes::default() }.capture();
    capture.layers[1] = wide.layers[0].clone();
    let merge = MergeOptions::default().retention(Retention::Never);
    let store = Store::fold(&capture, &FoldOptions::MiniCache { merge, start_frac: 0.0 }).unwrap();
    assert!(store.report(None).unwrap().layers.iter().all(|layer| layer.pair.is_none()));
    assert_eq!(store.unfold().unwrap(), capture);
}

#[test]
fn rows_that_are_not_finite_do_not_spread() {
    let mut capture = Sizes { layers: 2, dtype: DType::F32, ..Sizes::default() }.capture();
    let keys = capture.layers[0].keys.take().unwrap();
    let mut numbers = keys.view().to_f32();
    numbers[20 * 16 + 3] = f32::NAN;
    capture.layers[0].keys = Some(Tensor::from_f32(&numbers, DType::F32, keys.shape()).unwrap());
    let finite = |options: &FoldOptions| {
        let restored = Store::fold(&capture, options).unwrap().unfold().unwrap();
        let bad = restored.layers.iter().flat_map(|layer| layer.keys.as_ref().unwrap().view().to_f32());
        bad.filter(|x| !x.is_finite()).count()
    };
    assert_eq!(finite(&FoldOptions::default()), 0, "coded as zeros");
    let merge = MergeOptions::default().retention(Retention::Never);
    assert_eq!(finite(&FoldOptions::MiniCache { merge, start_frac: 0.0 }), 1, "kept as it came");
}
