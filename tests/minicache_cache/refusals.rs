//! What a cache refuses, before anything is changed.

use kvfold::attention::{AttendOptions, exact};
use kvfold::cache::{LayerShape, Step};
use kvfold::minicache::{
    CacheOptions, CpuMiniCache, LayerRole, MergeOptions, Mode, Retention, Role, pair_layers_depth,
};
use kvfold::{DType, Error, Result, Shape, Tensor};

use crate::caches::{Random, similar_layers};

const SHAPE: LayerShape = LayerShape::new(2, 8, DType::F16);

fn rows(tokens: usize) -> Tensor {
    let shape = Shape::new(1, 2, tokens, 8).unwrap();
    Tensor::from_f32(&vec![1.0; shape.elements()], DType::F16, shape).unwrap()
}

fn append(cache: &mut CpuMiniCache, layer: usize, tokens: usize) -> Result<()> {
    let rows = rows(tokens);
    cache.append(layer, &Step::new(&rows.view(), &rows.view()))
}

fn pair(options: CacheOptions) -> CpuMiniCache {
    let plan = pair_layers_depth(3, 0.4, 2).unwrap();
    let mut cache = CpuMiniCache::new(vec![SHAPE; 3], plan, options).unwrap();
    cache.add_sequence();
    cache
}

#[test]
fn layers_out_of_order_change_nothing() {
    let mut cache = pair(CacheOptions::default());
    let message = |result: Result<()>| result.unwrap_err().to_string();
    assert_eq!(
        message(append(&mut cache, 2, 3)),
        "layer 2, sequence 0: wanted the tokens of layer 1 first, had 3 tokens"
    );
    append(&mut cache, 1, 3).unwrap();
    assert_eq!(
        message(append(&mut cache, 1, 1)),
        "layer 1, sequence 0: wanted the 3 tokens of layer 2 first, had 1 more"
    );
    assert_eq!(
        message(append(&mut cache, 2, 2)),
        "layer 2, sequence 0: wanted 3 tokens, as layer 1 took, had 2"
    );
    assert_eq!(message(append(&mut cache, 3, 2)), "layer: wanted less than 3, had 3");
    append(&mut cache, 2, 3).unwrap();
    append(&mut cache, 0, 9).unwrap();
    assert_eq!(cache.len(0).unwrap(), 3);
    assert_eq!(message(cache.trim(0, 4)), "tokens to trim to: wanted at most 3, had 4");
    assert_eq!(message(cache.trim(1, 0)), "sequence: wanted less than 1, had 1");
    assert_eq!(message(cache.gather(&[0, 5])), "sequence: wanted less than 1, had 5");
    assert_eq!(cache.sequences(), 1);
}

#[test]
fn a_fixed_cache_takes_what_was_reserved() {
    let mut cache = pair(CacheOptions::default().fixed(true));
    let error = append(&mut cache, 0, 1).unwrap_err();
    assert!(matches!(error, Error::Capacity { need: 1, have: 0, .. }), "{error}");
    cache.reserve(0, 100).unwrap();
    let reserved = cache.bytes();
    for layer in 0..3 {
        append(&mut cache, layer, 100).unwrap();
    }
    assert_eq!(cache.bytes(), reserved, "an append allocates nothing");
    cache.trim(0, 10).unwrap();
    assert_eq!(cache.bytes(), reserved, "reserved room stays");
    append(&mut cache, 0, 90).unwrap();
    assert!(matches!(append(&mut cache, 0, 200), Err(Error::Capacity { need: 200, .. })));
    cache.clear(0).unwrap();
    assert_eq!(cache.bytes(), 0);
}

#[test]
fn plans_and_shapes_that_cannot_be_folded_are_named() {
    let new = |layers: Vec<LayerShape>, plan, options| CpuMiniCache::new(layers, plan, options).unwrap_err();
    let plan = || pair_layers_depth(2, 0.0, 2).unwrap();
    let plain = CacheOptions::default;
    let error = new(vec![SHAPE; 3], plan(), plain());
    assert_eq!(error.to_string(), "pairing plan: wanted 3 layers, had 2");
    let error = new(vec![SHAPE, SHAPE.value_dim(4)], plan(), plain());
    assert!(error.to_string().starts_with("layer 1: wanted"), "{error}");
    let error = new(vec![LayerShape::new(0, 8, DType::F16); 2], plan(), plain());
    assert_eq!(error.to_string(), "KV heads: wanted at least 1, had 0");
    let error = new(vec![LayerShape::new(1, 513, DType::F16); 2], plan(), plain());
    assert_eq!(error.to_string(), "key dimension: wanted 1 to 512, had 513");
    let apart = [Role::Primary, Role::Primary, Role::Merge].into_iter().zip([0, 1, 0]);
    let apart = apart.map(|(role, group)| LayerRole { role, group }).collect();
    assert!(matches!(new(vec![SHAPE; 3], apart, plain()), Error::Shape { .. }));
    let nine = pair_layers_depth(9, 0.0, 9).unwrap();
    let error = new(vec![SHAPE; 9], nine.clone(), plain());
    assert_eq!(error.to_string(), "layers folded together: wanted 2 to 8, had 9");
    let compat = plain().merge(MergeOptions::default().mode(Mode::Compat));
    assert!(
        CpuMiniCache::new(vec![SHAPE; 9], nine, compat).is_ok(),
        "the original pairs each with the lowest"
    );
    let three = pair_layers_depth(3, 0.0, 3).unwrap();
    let error = new(vec![SHAPE; 3], three, plain().merge(MergeOptions::default().slerp_t(0.3)));
    assert_eq!(error.to_string(), "slerp_t of a group of more than two: wanted 0.5, had 0.3");
    let error =
        new(vec![SHAPE; 2], plan(), plain().merge(MergeOptions::default().retention(Retention::Cosine(2.0))));
    assert!(matches!(error, Error::Range { .. }), "{error}");
}

/// Three sequences of 0, 1 and 777 tokens, seven query heads on one KV head of 80 channels.
#[test]
fn ragged_sequences_attend_as_their_rows() {
    let shape = LayerShape::new(1, 80, DType::F16);
    let plan = pair_layers_depth(2, 0.0, 2).unwrap();
    let mut cache = CpuMiniCache::new(vec![shape; 2], plan, CacheOptions::default()).unwrap();
    while cache.add_sequence() < 2 {}
    let layers = similar_layers(2, 2, Shape::new(3, 1, 777, 80).unwrap(), 0.97);
    for (layer, rows) in layers.iter().enumerate() {
        let rows = rows.view();
        cache.append(layer, &Step::new(&rows, &rows).counts(&[0, 1, 777])).unwrap();
    }
    cache.settle().unwrap();
    assert_eq!((0..3).map(|s| cache.len(s).unwrap()).collect::<Vec<_>>(), [0, 1, 777]);
    let numbers: Vec<f32> = Random(3).normals(3 * 7 * 80).iter().map(|&x| x as f32).collect();
    let queries = Tensor::from_f32(&numbers, DType::F16, Shape::new(3, 7, 1, 80).unwrap()).unwrap();
    let out = cache.attend(1, &queries.view(), &AttendOptions::default()).unwrap();
    assert!(out[..560].iter().all(|&x| x == 0.0), "an empty sequence attends to nothing");
    let mut only = [0.0; 80];
    layers[1].view().read_row(1, 0, 0, &mut only);
    assert_eq!(&out[560..640], &only, "a single row has all the weight");
    let [keys, values] = cache.restore(1).unwrap();
    let (lengths, options) = ([0, 1, 777], AttendOptions::default());
    let want = exact(&queries.view(), &keys.view(), &values.view(), Some(&lengths), &options).unwrap();
    for (x, y) in out.iter().zip(&want) {
        // Merged rows are read unrounded, by up to an ulp of f16 of numbers about 1.
        assert!((x - y).abs() < 2f32.powi(-10), "{x} {y}");
    }
    assert!(matches!(cache.attend(1, &rows(1).view(), &AttendOptions::default()), Err(Error::Shape { .. })));
}

/// A context of 70,000 tokens: runs of 2,048 tokens, each in a store of its own.
#[test]
fn long_contexts_attend_as_their_rows() {
    let tokens = 70_000;
    let shape = LayerShape::new(1, 4, DType::F16);
    let plan = pair_layers_depth(2, 0.0, 2).unwrap();
    let mut cache = CpuMiniCache::new(vec![shape; 2], plan, CacheOptions::default()).unwrap();
    cache.add_sequence();
    let layers = similar_layers(4, 2, Shape::new(1, 1, tokens, 4).unwrap(), 0.97);
    for (layer, rows) in layers.iter().enumerate() {
        cache.append(layer, &Step::new(&rows.view(), &rows.view())).unwrap();
    }
    cache.settle().unwrap();
    assert_eq!(cache.report().layers[1].folded, tokens / 32 * 32);
    let numbers: Vec<f32> = Random(3).normals(4).iter().map(|&x| x as f32).collect();
    let queries = Tensor::from_f32(&numbers, DType::F16, Shape::new(1, 1, 1, 4).unwrap()).unwrap();
    let options = AttendOptions::default();
    let out = cache.attend(1, &queries.view(), &options).unwrap();
    let [keys, values] = cache.restore(1).unwrap();
    let want = exact(&queries.view(), &keys.view(), &values.view(), None, &options).unwrap();
    for (x, y) in out.iter().zip(&want) {
        // Merged rows are read unrounded, by up to an ulp of f16 of numbers about 1.
        assert!((x - y).abs() < 2f32.powi(-10), "{x} {y}");
    }
}
