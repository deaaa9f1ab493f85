//! What the cache promises beside equalling the simplest one: bytes, chunks, eviction as the original's, files.

use kvfold::cache::{LayerShape, Step};
use kvfold::capture::RopeLayout;
use kvfold::qjl::Projection;
use kvfold::qjl::cache::{CacheOptions, CpuQjlCache};
use kvfold::qjl::planes::Preset;
use kvfold::rope::{Positions, Rope};
use kvfold::{DType, Error, Shape, Tensor};

use crate::Host;
use crate::cache_model::original;
use crate::golden::Golden;
use crate::numbers::Random;

fn rope() -> Rope {
    Rope::from_theta(64, 64, 10_000.0, RopeLayout::HalfSplit).unwrap()
}

fn rows(random: &mut Random, heads: usize, tokens: usize, dim: usize) -> Tensor {
    let shape = Shape::new(1, heads, tokens, dim).unwrap();
    let numbers: Vec<f32> = (0..shape.elements()).map(|_| random.normal() as f32).collect();
    Tensor::from_f32(&numbers, DType::F16, shape).unwrap()
}

/// The first `count` tokens from `first` on of one sequence.
fn cut(tensor: &Tensor, first: usize, count: usize) -> Tensor {
    let shape = tensor.shape();
    let mut bytes = Vec::new();
    for h in 0..shape.heads {
        (first..first + count).for_each(|t| bytes.extend_from_slice(tensor.view().row_bytes(0, h, t)));
    }
    Tensor::new(bytes, DType::F16, Shape { tokens: count, ..shape }).unwrap()
}

fn append(cache: &mut CpuQjlCache, layer: usize, [keys, values, queries]: [&Tensor; 3]) {
    let (keys, values, queries) = (keys.view(), values.view(), queries.view());
    cache.append(layer, &Step::new(&keys, &values).queries(&queries)).unwrap();
}

#[test]
fn balanced_holds_what_it_claims() {
    // SmolLM2's heads over 2,048 tokens; rotations and angles are for all layers, of which it has 30.
    let layers = vec![LayerShape::new(3, 64, DType::F16); 3];
    let mut cache = CpuQjlCache::new(&layers, 1, CacheOptions::default().rope(rope())).unwrap();
    let mut random = Random(1);
    for layer in 0..layers.len() {
        let [keys, values] = [(); 2].map(|()| rows(&mut random, 3, 2048, 64));
        let queries = rows(&mut random, 9, 2048, 64);
        append(&mut cache, layer, [&keys, &values, &queries]);
    }
    let raw = 2048 * 3 * 64 * 2 * 2 * layers.len() as u64;
    assert_eq!(cache.raw_bytes(), raw);
    cache.commit().unwrap();
    assert!(cache.bytes() * 3 < raw, "after commit: {} of {raw}", cache.bytes());
    cache.settle().unwrap();
    assert!(cache.payload_bytes() * 43 <= raw * 10, "{} of {raw}", cache.payload_bytes());
    assert!(cache.bytes() * 4 <= raw, "{} of {raw}", cache.bytes());
    let text = cache.to_string();
    assert!(text.starts_with("CpuQjlCache of 3 layers, 1 sequences of 2048 tokens: keys 3 bits"), "{text}");
    cache.clear(0).unwrap();
    assert!(cache.bytes() <= 1024, "only rotations are left: {}", cache.bytes());
}

#[test]
fn a_long_prompt_trimmed_to_its_start_is_loaded() {
    let layer = LayerShape::new(1, 64, DType::F16);
    let mut random = Random(3);
    let some = rows(&mut random, 1, 4096, 64);
    let all = |tensor: &Tensor| {
        let bytes = tensor.view().row_bytes(0, 0, 0).len() * 4096;
        let bytes: Vec<u8> = tensor.bytes()[..bytes].iter().copied().cycle().take(32 * bytes).collect();
        Tensor::new(bytes, DType::F16, Shape { tokens: 32 * 4096, ..tensor.shape() }).unwrap()
    };
    let prompt = all(&some);
    let mut cache = CpuQjlCache::new(&[layer], 1, CacheOptions::default().rope(rope())).unwrap();
    append(&mut cache, 0, [&prompt; 3]);
    cache.commit().unwrap();
    cache.trim(0, 40).unwrap();
    let saved = cache.save().unwrap();
    assert!(cache.bytes() > 256 * saved.len() as u64, "{} and {}", cache.bytes(), saved.len());
    assert_eq!(CpuQjlCache::load(&saved).unwrap().save().unwrap(), saved);
}

#[test]
fn chunks_leave_what_the_whole_leaves() {
    let layer = LayerShape::new(2, 64, DType::F16);
    let mut random = Random(2);
    let [keys, values] = [(); 2].map(|()| rows(&mut random, 2, 400, 64));
    let queries = rows(&mut random, 4, 400, 64);
    for options in [CacheOptions::default().rope(rope()), Preset::Compact.into(), CacheOptions::qjl_orth()] {
        let mut saved = Vec::new();
        for chunks in [vec![400], vec![1, 3, 128, 200, 68], vec![4; 100]] {
            let mut cache = CpuQjlCache::new(&[layer], 1, options.clone()).unwrap();
            let mut first = 0;
            for count in chunks {
                let [k, v, q] = [&keys, &values, &queries].map(|tensor| cut(tensor, first, count));
                append(&mut cache, 0, [&k, &v, &q]);
                cache.commit().unwrap();
                first += count;
            }
            cache.settle().unwrap();
            saved.push(cache.save().unwrap());
        }
        assert!(saved.windows(2).all(|pair| pair[0] == pair[1]), "{options:?}");
    }
}

/// A cache of one sequence.
fn one(layer: LayerShape, options: CacheOptions) -> kvfold::Result<Host> {
    CpuQjlCache::new(&[layer], 1, options).map(Host)
}

#[test]
fn the_oldest_leave_as_they_do_from_the_original() {
    original::evicts(&one).unwrap();
}

#[test]
fn scores_above_f16_stay_finite() {
    original::overflows(&one).unwrap();
}

/// The original's figures over the tokens of its golden cases.
#[test]
fn the_originals_bytes_are_as_it_counted_them() {
    for (name, dim, cases) in [("qjl_d64", 64, 9), ("qjl_d80", 80, 3), ("qjl_d128", 128, 3)] {
        let golden = Golden::open(name);
        let facts = golden.facts();
        let all = facts["cases"].as_array().unwrap();
        assert_eq!(all.len(), cases, "{name}");
        for case in all {
            let number = |what: &str| case[what].as_u64().unwrap() as usize;
            let matrix = golden.f32(&format!("m{}/S", number("m")));
            let projection = Projection::from_matrix(&matrix, dim, number("m")).unwrap();
            let layer = LayerShape::new(1, dim, DType::F16);
            let mut cache = one(layer, CacheOptions::qjl().projection(projection)).unwrap().0;
            let rows = rows(&mut Random(1), 1, number("n"), dim);
            append(&mut cache, 0, [&rows, &rows, &rows]);
            let had = cache.original_accounting().unwrap();
            assert_eq!((had.len(), had[0].memory_bytes()), (1, number("memory_bytes")), "{name}");
        }
    }
    // Of every head and sequence, and of what has not left.
    let options = CacheOptions::qjl().capacity(5);
    let mut cache = CpuQjlCache::new(&[LayerShape::new(3, 64, DType::F16)], 1, options).unwrap();
    let rows = rows(&mut Random(1), 3, 8, 64);
    append(&mut cache, 0, [&rows, &rows, &rows]);
    cache.commit().unwrap();
    assert_eq!(cache.fork(0).unwrap(), 1);
    let [had] = cache.original_accounting().unwrap()[..] else { panic!("one layer") };
    assert_eq!((had.tokens, had.key_bytes, had.value_bytes), (10, 30 * 66, 30 * 66));
    let planes = CpuQjlCache::new(&[LayerShape::new(3, 64, DType::F16)], 1, CacheOptions::default());
    assert_eq!(planes.unwrap().original_accounting(), None);
}

#[test]
fn steps_that_do_not_fit_change_nothing() {
    let layers = [LayerShape::new(2, 64, DType::F16)];
    let mut cache = CpuQjlCache::new(&layers, 2, CacheOptions::default()).unwrap();
    let shape = Shape::new(2, 2, 3, 64).unwrap();
    let tensor = |dtype, shape: Shape| Tensor::from_f32(&vec![0.5; shape.elements()], dtype, shape).unwrap();
    let (good, single) = (tensor(DType::F16, shape), tensor(DType::F32, shape));
    let (narrow, queries) =
        (tensor(DType::F16, Shape { dim: 63, ..shape }), tensor(DType::F16, Shape { heads: 3, ..shape }));
    let [good, single, narrow, queries] = [&good, &single, &narrow, &queries].map(Tensor::view);
    let step = Step::new(&good, &good);
    let refused = [
        (cache.append(1, &step), "layer"),
        (cache.append(0, &Step::new(&single, &good)), "keys"),
        (cache.append(0, &Step::new(&good, &narrow)), "values"),
        (cache.append(0, &step.queries(&queries)), "query heads"),
        (cache.append(0, &step.counts(&[1])), "token counts"),
        (cache.append(0, &step.positions(Positions::Start(&[0]))), "position starts"),
        (cache.append(0, &step.positions(Positions::Explicit(&[0; 5]))), "positions"),
        (cache.append(0, &step.positions(Positions::Start(&[0, u32::MAX]))), "position"),
        (cache.trim(0, 1), "tokens to keep"),
        (cache.trim(2, 0), "sequence"),
        (cache.gather(&[0, 2]), "sequence"),
    ];
    for (result, what) in refused {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with(what), "{error}");
    }
    assert_eq!((cache.len(0).unwrap(), cache.sequences()), (0, 2));
    let mut reversed = step;
    reversed.counts = Some(&[0, 3]);
    cache.append(0, &reversed).unwrap();
    assert_eq!((cache.len(0).unwrap(), cache.len(1).unwrap()), (0, 3));
}

#[test]
fn files_that_are_damaged_newer_or_others_are_refused() {
    let layer = LayerShape::new(1, 64, DType::F16);
    let mut cache = CpuQjlCache::new(&[layer], 1, CacheOptions::default().rope(rope())).unwrap();
    let mut random = Random(3);
    let [keys, values] = [(); 2].map(|()| rows(&mut random, 1, 300, 64));
    let queries = rows(&mut random, 1, 300, 64);
    append(&mut cache, 0, [&keys, &values, &queries]);
    cache.settle().unwrap();
    let bytes = cache.save().unwrap();
    assert!(CpuQjlCache::load(&bytes).is_ok());
    let mut last = bytes.clone();
    *last.last_mut().unwrap() ^= 1;
    assert!(matches!(CpuQjlCache::load(&last), Err(Error::Digest { .. })));
    assert!(CpuQjlCache::load(&bytes[..bytes.len() - 1]).is_err());
    for length in [0, 7, 100] {
        assert!(CpuQjlCache::load(&bytes[..length]).is_err());
    }
    let newer = replace(&bytes, "\"kvfold.cache\":\"1\"", "\"kvfold.cache\":\"2\"");
    let error = CpuQjlCache::load(&newer).unwrap_err().to_string();
    assert!(error.contains("a saved cache of version 1 to 1"), "{error}");
    let other = replace(&bytes, "kvfold.cache", "kvfold.cachf");
    assert!(matches!(CpuQjlCache::load(&other), Err(Error::Metadata { .. })));
    let flipped = replace(&bytes, "\\\"evicted\\\":0", "\\\"evicted\\\":9");
    assert!(matches!(CpuQjlCache::load(&flipped), Err(Error::Digest { .. })));
}

/// The file with one text of equal length for another.
fn replace(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    let mut bytes = bytes.to_vec();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    bytes
}
