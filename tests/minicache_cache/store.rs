//! What a cache saves, keeps and gives back.

use std::collections::BTreeMap;

use kvfold::cache::{LayerShape, Step};
use kvfold::minicache::{CacheOptions, CpuMiniCache, MergeOptions, Mode, Retention, cpu, pair_layers_depth};
use kvfold::{DType, Error, Shape, Tensor};

use crate::caches::{Random, similar_layers};

/// Two layers that are folded, of one sequence.
fn pair(shape: LayerShape, options: CacheOptions) -> CpuMiniCache {
    let plan = pair_layers_depth(2, 0.0, 2).unwrap();
    let mut cache = CpuMiniCache::new(vec![shape; 2], plan, options).unwrap();
    cache.add_sequence();
    cache
}

/// Appends tokens `from..to` of keys that serve as values too.
fn append(cache: &mut CpuMiniCache, layers: &[Tensor], from: usize, to: usize) {
    for (layer, rows) in layers.iter().enumerate() {
        let part = cut(rows, from, to);
        cache.append(layer, &Step::new(&part.view(), &part.view())).unwrap();
    }
    cache.commit().unwrap();
}

fn cut(whole: &Tensor, from: usize, to: usize) -> Tensor {
    let shape = Shape { tokens: to - from, ..whole.shape() };
    let rows: Vec<u8> =
        shape.iter_rows().flat_map(|(b, h, t)| whole.view().row_bytes(b, h, from + t).to_vec()).collect();
    Tensor::new(rows, whole.dtype(), shape).unwrap()
}

#[test]
fn similar_layers_take_half_the_bytes_and_err_as_the_arc_says() {
    let layers = similar_layers(7, 2, Shape::new(1, 2, 4096, 128).unwrap(), 0.97);
    let mut cache = pair(LayerShape::new(2, 128, DType::F16), CacheOptions::default());
    append(&mut cache, &layers, 0, 4096);
    cache.settle().unwrap();
    let report = cache.report();
    let ratio = report.raw_bytes as f64 / report.bytes as f64;
    println!("ratio of a pair in bytes: {ratio}");
    assert!(ratio > 1.9, "{ratio}");
    assert_eq!(report.bytes, report.payload_bytes, "no block is left");

    // A merged row is off by 2 sin(W / 4) of its norm, where W is the angle of the two rows.
    let (mut expected, mut error, mut size) = (0.0, 0.0, 0.0);
    let options = MergeOptions::default();
    let rows = cpu::similarity(&layers[0].view(), &layers[1].view(), &options).unwrap();
    let mean_square = |f: &dyn Fn(f64) -> f64| {
        let angles = rows.iter().map(|row| f64::from(row.cosine).acos());
        angles.map(f).sum::<f64>() / rows.len() as f64
    };
    expected += mean_square(&|w| 2.0 * (w / 4.0).sin());
    let [keys, _] = cache.restore(1).unwrap();
    for (x, y) in keys.view().to_f32().iter().zip(layers[1].view().to_f32()) {
        error += f64::from(x - y).powi(2);
        size += f64::from(y).powi(2);
    }
    let error = (error / size).sqrt();
    assert!((error / expected - 1.0).abs() < 0.05, "{error} where the arc says {expected}");

    cache.clear(0).unwrap();
    assert_eq!((cache.bytes(), cache.payload_bytes()), (0, 0));
}

/// A real model: nothing merges, so the cache keeps every row bit for bit, and costs its page tables alone.
#[test]
fn a_real_model_is_kept_raw_at_next_to_no_cost() {
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/web/samples/smollm2_prose_s128.safetensors");
    let capture = kvfold::Capture::open(sample).unwrap();
    let layers: Vec<LayerShape> = capture
        .layers
        .iter()
        .map(|layer| LayerShape::new(layer.kv_heads(), layer.key_dim(), layer.values.dtype()))
        .collect();
    let plan = pair_layers_depth(layers.len(), 0.5, 2).unwrap();
    let mut cache = CpuMiniCache::new(layers, plan, CacheOptions::default()).unwrap();
    cache.add_sequence();
    for from in (0..128).step_by(16) {
        for (index, layer) in capture.layers.iter().enumerate() {
            let [keys, values] =
                [capture.keys(index).unwrap(), &layer.values].map(|t| cut(t, from, from + 16));
            cache.append(index, &Step::new(&keys.view(), &values.view())).unwrap();
        }
        cache.commit().unwrap();
    }
    cache.settle().unwrap();
    let report = cache.report();
    let folded = &report.layers[28];
    assert_eq!((folded.folded, folded.keys.merged, folded.values.merged), (128, 0, 0));
    assert_eq!((folded.keys.sink, folded.keys.rule), (4 * 3, 124 * 3));
    let ratio = report.raw_bytes as f64 / report.bytes as f64;
    assert!((0.998..1.0).contains(&ratio), "{ratio}");
    for (index, layer) in capture.layers.iter().enumerate() {
        let [keys, values] = cache.restore(index).unwrap();
        assert_eq!((&keys, &values), (capture.keys(index).unwrap(), &layer.values), "layer {index}");
    }
}

/// The tensors of a saved cache by name.
fn tensors(file: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let file = safetensors::SafeTensors::deserialize(file).unwrap();
    file.tensors().into_iter().map(|(name, tensor)| (name, tensor.data().to_vec())).collect()
}

#[test]
fn chunks_and_the_whole_leave_the_same_store() {
    for (mode, retention) in [
        (Mode::Shared, Retention::Cosine(0.97)),
        (Mode::Anchor, Retention::Cosine(0.97)),
        (Mode::Shared, Retention::Fraction(0.3)),
        (Mode::Shared, Retention::Range(0.5)),
    ] {
        let options = CacheOptions::default().merge(MergeOptions::default().mode(mode).retention(retention));
        let shape = LayerShape::new(3, 80, DType::F16);
        let layers = similar_layers(3, 2, Shape::new(1, 3, 2300, 80).unwrap(), 0.97);
        let (mut whole, mut chunked) = (pair(shape, options.clone()), pair(shape, options));
        append(&mut whole, &layers, 0, 2300);
        let mut from = 0;
        for chunk in [1, 31, 1, 400, 64, 700, 1, 1, 1101] {
            append(&mut chunked, &layers, from, from + chunk);
            from += chunk;
        }
        assert_eq!(from, 2300);
        for cache in [&mut whole, &mut chunked] {
            cache.end_prefill(0).unwrap();
            cache.settle().unwrap();
        }
        assert_eq!(whole.report().layers, chunked.report().layers, "{mode:?}");
        assert_eq!(tensors(&whole.save().unwrap()), tensors(&chunked.save().unwrap()), "{mode:?}");
    }
}

#[test]
fn rules_that_see_a_whole_prefill_decide_once() {
    let shape = LayerShape::new(2, 64, DType::F16);
    let layers = similar_layers(5, 2, Shape::new(1, 2, 640, 64).unwrap(), 0.9);
    let merge = MergeOptions::default().retention(Retention::Fraction(0.25));
    let mut cache = pair(shape, CacheOptions::default().merge(merge));
    append(&mut cache, &layers, 0, 320);
    assert_eq!(cache.report().layers[0].folded, 0, "nothing is folded before the prefill ends");
    cache.end_prefill(0).unwrap();
    assert!(matches!(cache.end_prefill(0), Err(Error::Range { .. })));
    cache.settle().unwrap();
    let report = cache.report().layers[0];
    // 4 sinks of each head are not candidates.
    let candidates = 2 * (320 - 4);
    assert_eq!(report.keys.rule, (0.25f32 * candidates as f32).ceil() as u32);
    assert_eq!(report.keys.sink, 8);
    // Later rows are decided by the threshold that the prefill froze, in whatever chunks they come.
    append(&mut cache, &layers, 320, 640);
    let later = cache.report().layers[0].keys.rule - report.keys.rule;
    assert!((80..240).contains(&later), "a quarter of 640 rows or so: {later}");
}

#[test]
fn damaged_files_are_refused_with_the_cause() {
    let layers = similar_layers(9, 2, Shape::new(1, 1, 70, 8).unwrap(), 0.97);
    let mut cache = pair(LayerShape::new(1, 8, DType::F16), CacheOptions::default());
    append(&mut cache, &layers, 0, 70);
    let file = cache.save().unwrap();
    assert!(CpuMiniCache::load(&file).is_ok());
    for length in (0..file.len()).step_by(7) {
        assert!(CpuMiniCache::load(&file[..length]).is_err(), "cut at {length}");
    }
    let data = file.len() - 100;
    let mut flipped = file.clone();
    flipped[data] ^= 1;
    assert!(matches!(CpuMiniCache::load(&flipped), Err(Error::Digest { .. })));
    let replaced = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = file.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let mut file = file.clone();
        file[at..at + to.len()].copy_from_slice(to.as_bytes());
        CpuMiniCache::load(&file).unwrap_err()
    };
    let newer = replaced("\"kvfold.minicache\":\"1\"", "\"kvfold.minicache\":\"2\"");
    assert!(newer.to_string().contains("version 1 to 1"), "{newer}");
    assert!(matches!(replaced("tokens", "tokenz"), Error::Digest { .. }));
}

#[test]
fn a_loaded_cache_goes_on_as_if_it_had_never_stopped() {
    let shape = LayerShape::new(2, 64, DType::F16);
    let layers = similar_layers(11, 2, Shape::new(1, 2, 900, 64).unwrap(), 0.95);
    let mut cache = pair(shape, CacheOptions::default().recent(10));
    append(&mut cache, &layers, 0, 500);
    let mut loaded = CpuMiniCache::load(&cache.save().unwrap()).unwrap();
    for cache in [&mut cache, &mut loaded] {
        append(cache, &layers, 500, 900);
        cache.trim(0, 890).unwrap();
    }
    assert_eq!(cache.report(), loaded.report());
    assert_eq!(cache.save().unwrap(), loaded.save().unwrap());
    let mut random = Random(1);
    let numbers: Vec<f32> = random.normals(4 * 64).iter().map(|&x| x as f32).collect();
    let queries = Tensor::from_f32(&numbers, DType::F16, Shape::new(1, 4, 1, 64).unwrap()).unwrap();
    let options = kvfold::attention::AttendOptions::default();
    let attend = |cache: &CpuMiniCache| cache.attend(1, &queries.view(), &options).unwrap();
    assert_eq!(attend(&cache), attend(&loaded));
}
