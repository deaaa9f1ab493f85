//! What a cache of a whole model promises, checked on whatever it runs on: every layer attends as a cache of its own would,
//! windows let go, and sequences and files are those of the parts.

use kvfold::attention::{AttendOptions, exact};
use kvfold::cache::{LayerShape, Step};
use kvfold::capture::RopeLayout;
use kvfold::fold::{Fold, Model, Policy};
use kvfold::minicache::{self, CpuMiniCache, LayerRole, Role};
use kvfold::qjl::cache::{CacheOptions, CpuQjlCache};
use kvfold::rope::Rope;
use kvfold::{DType, Shape, Tensor};

use crate::numbers::Random;

const KV_HEADS: usize = 2;
const HEADS: usize = 4;
const DIM: usize = 16;
const LAYERS: usize = 6;
/// Of layer 0, which is raw, and of layer 5, which is coded; the latter keeps what tables are made from.
const WINDOWS: [u32; 2] = [40, 150];

/// A step of one layer.
pub struct Rows {
    pub keys: Tensor,
    pub values: Tensor,
    pub queries: Tensor,
}

/// The cache that is tested.
pub trait Subject: Sized {
    fn append(&mut self, layer: usize, rows: &Rows) -> kvfold::Result<()>;
    fn attend(
        &mut self,
        layer: usize,
        queries: &Tensor,
        options: &AttendOptions<'_>,
    ) -> kvfold::Result<Vec<f32>>;
    /// Ends a step, with all folded that can be.
    fn commit(&mut self) -> kvfold::Result<()>;
    fn len(&self, sequence: usize) -> kvfold::Result<usize>;
    fn trim(&mut self, sequence: usize, tokens: usize) -> kvfold::Result<()>;
    fn fork(&mut self, sequence: usize) -> kvfold::Result<usize>;
    fn gather(&mut self, sources: &[u32]) -> kvfold::Result<()>;
    /// Bytes needed, and those of the rows as they came.
    fn bytes(&self) -> [u64; 2];
    /// Tokens held and folded of a layer.
    fn tokens(&self, layer: usize) -> [usize; 2];
    fn save(&self) -> kvfold::Result<Vec<u8>>;
    fn load(&self, file: &[u8]) -> kvfold::Result<Self>;
}

fn rope() -> Rope {
    Rope::from_theta(DIM, DIM, 1e4, RopeLayout::HalfSplit).unwrap()
}

/// Six layers of which the first and the last have windows.
pub fn model() -> Model {
    let mut windows = vec![None; LAYERS];
    (windows[0], windows[5]) = (Some(WINDOWS[0]), Some(WINDOWS[1]));
    Model::new(vec![LayerShape::new(KV_HEADS, DIM, DType::F16); LAYERS]).rope(rope()).windows(windows)
}

fn coded(name: &str) -> Fold {
    Fold::Coded(CacheOptions::named(name).unwrap().coding)
}

/// Every way of keeping a layer.
pub fn policy() -> Policy {
    let policy =
        Policy::named("raw", LAYERS).unwrap().layer(1, coded("balanced")).layer(4, coded("qjl-orth"));
    policy.layer(2, Fold::Minicache(7)).layer(3, Fold::Minicache(7)).layer(5, coded("balanced"))
}

/// Layers 2 and 3 are alike, but for a tenth of their length.
pub fn step(random: &mut Random, sequences: usize, tokens: usize) -> Vec<Rows> {
    let tensor = |numbers: &[f64], heads| {
        let numbers: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
        Tensor::from_f32(&numbers, DType::F16, Shape::new(sequences, heads, tokens, DIM).unwrap()).unwrap()
    };
    let count = sequences * KV_HEADS * tokens * DIM;
    let mut below = [random.normals(count), random.normals(count)];
    let mut rows = Vec::new();
    for layer in 0..LAYERS {
        for part in &mut below {
            let new = random.normals(count);
            let keep = if layer == 3 { 1.0 } else { 0.0 };
            let add = if layer == 3 { 0.1 } else { 1.0 };
            part.iter_mut().zip(new).for_each(|(x, new)| *x = keep * *x + add * new);
        }
        let queries = random.normals(sequences * HEADS * tokens * DIM);
        let [keys, values] = &below;
        rows.push(Rows {
            keys: tensor(keys, KV_HEADS),
            values: tensor(values, KV_HEADS),
            queries: tensor(&queries, HEADS),
        });
    }
    rows
}

/// Runs a step and gives what every layer attended to.
fn run(cache: &mut impl Subject, rows: &[Rows]) -> Vec<Vec<f32>> {
    let options = AttendOptions::default().causal(true);
    let mut outputs = Vec::new();
    for (layer, rows) in rows.iter().enumerate() {
        cache.append(layer, rows).unwrap();
        outputs.push(cache.attend(layer, &rows.queries, &options).unwrap());
    }
    cache.commit().unwrap();
    outputs
}

/// What layers would do by themselves.
struct Alone {
    raw: [Vec<Vec<f32>>; 2],
    balanced: CpuQjlCache,
    pair: CpuMiniCache,
    sketch: CpuQjlCache,
    windowed: CpuQjlCache,
}

impl Alone {
    fn new() -> Self {
        let shape = LayerShape::new(KV_HEADS, DIM, DType::F16);
        let planes = |name: &str| CacheOptions::named(name).unwrap().rope(rope());
        let one = |options| CpuQjlCache::new(&[shape], 1, options).unwrap();
        let plan = [Role::Primary, Role::Merge].map(|role| LayerRole { role, group: 0 });
        let options = minicache::CacheOptions::default();
        let mut pair = CpuMiniCache::new(vec![shape; 2], plan.to_vec(), options).unwrap();
        pair.add_sequence();
        let windowed = planes("balanced").capacity(WINDOWS[1] as usize);
        Self {
            raw: [vec![Vec::new(); KV_HEADS], vec![Vec::new(); KV_HEADS]],
            balanced: one(planes("balanced")),
            pair,
            sketch: one(planes("qjl-orth")),
            windowed: one(windowed),
        }
    }

    fn run(&mut self, rows: &[Rows]) -> Vec<Vec<f32>> {
        let causal = AttendOptions::default().causal(true);
        let views: Vec<_> = rows.iter().map(|r| (r.keys.view(), r.values.view(), r.queries.view())).collect();
        let planes = |cache: &mut CpuQjlCache, layer: usize, options: &AttendOptions<'_>| {
            let (keys, values, queries) = &views[layer];
            cache.append(0, &Step::new(keys, values).queries(queries)).unwrap();
            let out = cache.attend(0, queries, options).unwrap();
            cache.commit().unwrap();
            out
        };
        let first = self.exact(&rows[0], &causal.window(WINDOWS[0]));
        let balanced = planes(&mut self.balanced, 1, &causal);
        let mut outputs = vec![first, balanced];
        for (own, (keys, values, queries)) in views[2..4].iter().enumerate() {
            self.pair.append(own, &Step::new(keys, values)).unwrap();
            outputs.push(self.pair.attend(own, queries, &causal).unwrap());
        }
        self.pair.commit().unwrap();
        outputs.push(planes(&mut self.sketch, 4, &causal));
        outputs.push(planes(&mut self.windowed, 5, &causal.window(WINDOWS[1])));
        outputs
    }

    /// Exact attention over all rows so far.
    fn exact(&mut self, rows: &Rows, options: &AttendOptions<'_>) -> Vec<f32> {
        let mut all = Vec::new();
        for (held, new) in self.raw.iter_mut().zip([&rows.keys, &rows.values]) {
            let tokens = new.shape().tokens;
            let numbers = new.view().to_f32();
            let heads = held.iter_mut().zip(numbers.chunks(tokens * DIM));
            heads.for_each(|(held, new)| held.extend_from_slice(new));
            let shape = Shape::new(1, KV_HEADS, held[0].len() / DIM, DIM).unwrap();
            all.push(Tensor::from_f32(&held.concat(), DType::F16, shape).unwrap());
        }
        exact(&rows.queries.view(), &all[0].view(), &all[1].view(), None, options).unwrap()
    }
}

/// `|a - b| / |b|`.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm =
        |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

/// Steps of a prompt, of single tokens, and of chunks, past where every window and table matters.
const STEPS: [usize; 8] = [100, 1, 1, 60, 33, 1, 70, 2];

pub fn every_layer_attends_as_it_would_alone(mut cache: impl Subject, tolerance: f64) {
    let (mut alone, mut random) = (Alone::new(), Random(1));
    for (index, tokens) in STEPS.into_iter().enumerate() {
        let rows = step(&mut random, 1, tokens);
        for (layer, (had, want)) in run(&mut cache, &rows).iter().zip(alone.run(&rows)).enumerate() {
            let error = distance(had, &want);
            assert!(error < tolerance, "layer {layer} of step {index}: {error}");
        }
    }
    let tokens = STEPS.iter().sum::<usize>();
    assert_eq!(cache.len(0).unwrap(), tokens);
    assert_eq!(cache.tokens(0), [WINDOWS[0] as usize, 0]);
    let coded = (tokens - 68) / 32 * 32;
    assert_eq!((cache.tokens(1), cache.tokens(4)), ([tokens, coded], [tokens, coded]));
    assert_eq!(cache.tokens(5)[0], WINDOWS[1] as usize);
    assert_eq!(cache.tokens(2), [tokens, tokens / 32 * 32], "similar layers fold whole pages");
    let [needed, raw] = cache.bytes();
    assert!(needed < raw, "{needed} bytes for {raw}");
}

pub fn sequences_are_those_of_all_layers(mut cache: impl Subject, tolerance: f64) {
    let mut random = Random(2);
    let rows = step(&mut random, 1, 120);
    run(&mut cache, &rows);
    // Layer 0 has let go of all but its window.
    let before = cache.bytes();
    for tokens in [121, 40] {
        assert!(cache.trim(0, tokens).is_err(), "{tokens} tokens");
        assert_eq!((cache.len(0).unwrap(), cache.bytes()), (120, before), "nothing is changed");
    }
    assert!(cache.trim(1, 0).is_err() && cache.fork(1).is_err() && cache.gather(&[0, 1]).is_err());
    cache.trim(0, 110).unwrap();
    assert_eq!(cache.fork(0).unwrap(), 1);
    // Both go on alike from the same rows.
    let one = step(&mut random, 1, 3);
    let twice = |tensor: &Tensor| {
        let shape = Shape { batch: 2, ..tensor.shape() };
        Tensor::new(tensor.bytes().repeat(2), tensor.dtype(), shape).unwrap()
    };
    let both = one.iter().map(|rows| Rows {
        keys: twice(&rows.keys),
        values: twice(&rows.values),
        queries: twice(&rows.queries),
    });
    let both: Vec<Rows> = both.collect();
    for (layer, output) in run(&mut cache, &both).iter().enumerate() {
        let (first, second) = output.split_at(output.len() / 2);
        assert!(distance(first, second) < tolerance, "layer {layer}");
    }
    cache.gather(&[1]).unwrap();
    assert_eq!(cache.len(0).unwrap(), 113);
    assert!(cache.len(1).is_err());
}

pub fn a_loaded_cache_goes_on(mut cache: impl Subject) {
    let mut random = Random(3);
    for tokens in [150, 1] {
        run(&mut cache, &step(&mut random, 1, tokens));
    }
    let file = cache.save().unwrap();
    let mut loaded = cache.load(&file).unwrap();
    assert_eq!(loaded.save().unwrap(), file, "a loaded cache is saved as it was");
    for tokens in [1, 40] {
        let rows = step(&mut random, 1, tokens);
        assert_eq!(run(&mut cache, &rows), run(&mut loaded, &rows));
    }
    // Damage anywhere is found, and a file of something else is refused.
    let mut damaged = file.clone();
    let last = damaged.len() - 100;
    damaged[last] ^= 1;
    assert!(matches!(cache.load(&damaged).map(drop), Err(kvfold::Error::Digest { .. })));
    assert!(cache.load(&file[..file.len() / 2]).is_err());
}
