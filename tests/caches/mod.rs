//! Random lives of a MiniCache, and a simple cache that says what it must hold: rows in vectors, folded page by page.
//! The CPU's cache and a device's are driven through the same calls.

#![allow(dead_code, reason = "shared with suites that use parts of it")]

use kvfold::attention::{AttendOptions, exact};
use kvfold::cache::LayerShape;
use kvfold::minicache::{
    CacheOptions, CacheReport, DirectionPlanes, LayerRole, MergeOptions, Mode, Retention, Role, cpu,
    pair_layers_depth,
};
use kvfold::{DType, Result, Shape, Tensor};

pub use crate::numbers::Random;

const PAGE: usize = 32;

/// What both forms of a cache can be asked.
pub trait Cache {
    fn add_sequence(&mut self) -> usize;
    fn remove_sequence(&mut self, sequence: usize) -> Result<()>;
    fn clear(&mut self, sequence: usize) -> Result<()>;
    fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()>;
    fn fork(&mut self, sequence: usize) -> Result<usize>;
    fn gather(&mut self, indices: &[u32]) -> Result<()>;
    fn append(&mut self, layer: usize, rows: &[Tensor; 2], counts: &[u32]) -> Result<()>;
    fn attend(&mut self, layer: usize, queries: &Tensor, options: &AttendOptions<'_>) -> Result<Vec<f32>>;
    fn restore(&mut self, layer: usize) -> Result<[Tensor; 2]>;
    /// Folds all that can be folded by now, so that what a trim finds folded does not depend on a device's pace.
    fn commit(&mut self) -> Result<()>;
    fn settle(&mut self) -> Result<()>;
    fn report(&self) -> CacheReport;
    /// Saves and loads the cache.
    fn reload(&mut self) -> Result<()>;
}

/// One sequence of the simple cache: rows `[layers][2][heads][tokens]`, each as f32.
#[derive(Clone, Default)]
struct Rows {
    /// As given, then as restored once folded.
    layers: Vec<[Vec<Vec<f32>>; 2]>,
    /// Tokens folded.
    folded: usize,
}

/// A cache that keeps rows in vectors and folds each page by itself.
pub struct Model {
    pub shape: LayerShape,
    pub plan: Vec<LayerRole>,
    pub options: CacheOptions,
    sequences: Vec<Rows>,
}

impl Model {
    pub fn new(shape: LayerShape, plan: Vec<LayerRole>, options: CacheOptions) -> Self {
        Self { shape, plan, options, sequences: Vec::new() }
    }

    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    pub fn len(&self, sequence: usize) -> usize {
        self.sequences[sequence].layers.first().map_or(0, |layer| layer[0].len() / self.shape.kv_heads)
    }

    /// Layers that are folded together.
    fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for (layer, role) in self.plan.iter().enumerate() {
            match role.role {
                Role::Primary => groups.push(vec![layer]),
                Role::Merge => groups.last_mut().unwrap().push(layer),
            }
        }
        groups.retain(|group| group.len() > 1);
        groups
    }

    fn add(&mut self) {
        let layer = || [Vec::new(), Vec::new()];
        let layers = (0..self.plan.len()).map(|_| layer()).collect();
        self.sequences.push(Rows { layers, folded: 0 });
    }

    /// Rows of one part, token by token and within it head by head.
    fn append(&mut self, layer: usize, rows: &[Tensor; 2], counts: &[u32]) {
        for (sequence, &count) in counts.iter().enumerate() {
            for (part, tensor) in rows.iter().enumerate() {
                for (token, head) in
                    (0..count as usize).flat_map(|t| (0..self.shape.kv_heads).map(move |h| (t, h)))
                {
                    let mut row = vec![0.0; tensor.shape().dim];
                    tensor.view().read_row(sequence, head, token, &mut row);
                    self.sequences[sequence].layers[layer][part].push(row);
                }
            }
        }
    }

    fn trim(&mut self, sequence: usize, tokens: usize) {
        let heads = self.shape.kv_heads;
        let rows = &mut self.sequences[sequence];
        rows.layers.iter_mut().flatten().for_each(|part| part.truncate(tokens * heads));
        rows.folded = rows.folded.min(tokens);
    }

    /// Tokens `from..to` of one part, `[1, heads, tokens, dim]`.
    fn tensor(&self, sequence: usize, layer: usize, part: usize, from: usize, to: usize) -> Tensor {
        let (heads, rows) = (self.shape.kv_heads, &self.sequences[sequence].layers[layer][part]);
        let dim = self.shape.dims()[part];
        let place = |h: usize| (from..to).flat_map(move |t| rows[t * heads + h].clone());
        let numbers: Vec<f32> = (0..heads).flat_map(place).collect();
        let shape = Shape::new(1, heads, to - from, dim).unwrap();
        Tensor::from_f32(&numbers, self.shape.dtype, shape).unwrap()
    }

    /// Folds every whole page of every pair.
    fn fold(&mut self) {
        for sequence in 0..self.sequences() {
            let end = self.len(sequence).saturating_sub(self.options.recent);
            while self.sequences[sequence].folded + PAGE <= end {
                let from = self.sequences[sequence].folded;
                for group in self.groups() {
                    (0..2).for_each(|part| self.fold_page(sequence, &group, part, from));
                }
                self.sequences[sequence].folded += PAGE;
            }
        }
    }

    fn fold_page(&mut self, sequence: usize, group: &[usize], part: usize, from: usize) {
        let rows = |&layer: &usize| self.tensor(sequence, layer, part, from, from + PAGE);
        let members: Vec<Tensor> = group.iter().map(rows).collect();
        let members: Vec<_> = members.iter().map(Tensor::view).collect();
        let options = self.options.merge.clone().first_position(from as u32);
        let folded = match members.as_slice() {
            [lower, upper] => cpu::merge(lower, upper, &options).unwrap(),
            _ => cpu::group_merge(&members, &options).unwrap(),
        };
        for (member, &layer) in group.iter().enumerate() {
            let restored = cpu::restore_member(&folded, member).unwrap();
            for (_, head, token) in restored.shape().iter_rows() {
                let place = (from + token) * self.shape.kv_heads + head;
                let row = &mut self.sequences[sequence].layers[layer][part][place];
                restored.view().read_row(0, head, token, row);
            }
        }
    }

    /// All sequences of one part, shorter ones padded with zeros.
    pub fn whole(&self, layer: usize, part: usize) -> Tensor {
        let longest = (0..self.sequences()).map(|s| self.len(s)).max().unwrap_or(0);
        let (heads, dim) = (self.shape.kv_heads, self.shape.dims()[part]);
        let shape = Shape::new(self.sequences(), heads, longest, dim).unwrap();
        let mut numbers = Vec::new();
        for (sequence, head, token) in shape.iter_rows() {
            let rows = &self.sequences[sequence].layers[layer][part];
            numbers.extend(rows.get(token * heads + head).cloned().unwrap_or_else(|| vec![0.0; dim]));
        }
        Tensor::from_f32(&numbers, self.shape.dtype, shape).unwrap()
    }
}

/// Layers that are similar: every row is a common vector of normal numbers plus a layer's own, so small that two layers' rows
/// have a cosine of about `cosine`.
pub fn similar_layers(seed: u64, layers: usize, shape: Shape, cosine: f64) -> Vec<Tensor> {
    let mut random = Random(seed);
    let (shared, own) = (cosine.sqrt(), (1.0 - cosine).sqrt());
    let common = random.normals(shape.elements());
    let layer = |_| {
        let numbers = common.iter().map(|x| (shared * x + own * random.normal()) as f32);
        Tensor::from_f32(&numbers.collect::<Vec<_>>(), DType::F16, shape).unwrap()
    };
    (0..layers).map(layer).collect()
}

/// A whole number below `count`.
pub fn below(random: &mut Random, count: usize) -> usize {
    (random.uniform() * count as f64) as usize
}

pub fn any<T: Clone>(random: &mut Random, of: &[T]) -> T {
    of[below(random, of.len())].clone()
}

/// Keys and values of every layer for a step: upper layers are near their lower neighbour's in most rows, far in some, and some
/// rows hold a NaN. Cosines stay far from the threshold of 0.9, so that every backend decides alike.
pub fn step(random: &mut Random, model: &Model, tokens: usize) -> Vec<[Tensor; 2]> {
    let mut layers: Vec<[Tensor; 2]> = Vec::new();
    for _ in &model.plan {
        let part = |part: usize| {
            let dim = model.shape.dims()[part];
            let shape = Shape::new(model.sequences(), model.shape.kv_heads, tokens, dim).unwrap();
            let mut numbers: Vec<f32> = random.normals(shape.elements()).iter().map(|&x| x as f32).collect();
            if let Some(below) = layers.last() {
                let near = below[part].view().to_f32();
                for (row, lower) in numbers.chunks_mut(dim).zip(near.chunks(dim)) {
                    let (kind, scale) = (random.uniform(), 0.5 + random.uniform() as f32);
                    if kind < 0.75 {
                        row.iter_mut().zip(lower).for_each(|(x, y)| *x = scale * (y + 0.1 * *x));
                    } else if kind < 0.78 {
                        row[dim / 2] = f32::NAN;
                    }
                }
            }
            Tensor::from_f32(&numbers, model.shape.dtype, shape).unwrap()
        };
        let mut part = part;
        let made = [part(0), part(1)];
        layers.push(made);
    }
    layers
}

/// A cache to live through, as small as may be while everything can happen.
pub fn made_up(random: &mut Random) -> Model {
    let dtype = any(random, &DType::ALL);
    let dims = any(random, &[[8, 8], [64, 64], [80, 48], [5, 7], [128, 64]]);
    let shape = LayerShape::new(any(random, &[1, 2, 3]), dims[0], dtype).value_dim(dims[1]);
    let mode = any(random, &[Mode::Shared, Mode::Shared, Mode::Anchor]);
    let retention = any(random, &[Retention::Cosine(0.9), Retention::Never]);
    let mut merge = MergeOptions::default().mode(mode).retention(retention).sinks(any(random, &[0, 4, 40]));
    if mode == Mode::Shared && random.uniform() < 0.5 {
        merge = merge.planes(DirectionPlanes::default().bits(any(random, &[1, 3, 4, 5])));
    }
    let options = CacheOptions::default().merge(merge).recent(any(random, &[0, 0, 7, 40]));
    // Layers alone, in pairs, and in groups of three with a pair left over.
    let plan = any(random, &[(3, 0.4, 2), (6, 0.2, 3)]);
    Model::new(shape, pair_layers_depth(plan.0, plan.1, plan.2).unwrap(), options)
}

/// One thing that can happen to a cache.
fn live(random: &mut Random, cache: &mut dyn Cache, model: &mut Model) -> Result<()> {
    let sequences = model.sequences();
    match below(random, 13) {
        12 => cache.reload()?,
        0 if sequences < 4 => {
            assert_eq!(cache.add_sequence(), sequences);
            model.add();
        }
        1 if sequences > 1 => {
            let sequence = below(random, sequences);
            cache.remove_sequence(sequence)?;
            model.sequences.remove(sequence);
        }
        2 if sequences > 0 => {
            let sequence = below(random, sequences);
            let tokens = model.len(sequence).saturating_sub(below(random, 90));
            cache.trim(sequence, tokens)?;
            model.trim(sequence, tokens);
        }
        3 if sequences > 0 && sequences < 4 => {
            let sequence = below(random, sequences);
            assert_eq!(cache.fork(sequence)?, sequences);
            let fork = model.sequences[sequence].clone();
            model.sequences.push(fork);
        }
        4 if sequences > 0 => {
            let count = 1 + below(random, 3);
            let indices: Vec<u32> = (0..count).map(|_| below(random, sequences) as u32).collect();
            cache.gather(&indices)?;
            model.sequences = indices.iter().map(|&i| model.sequences[i as usize].clone()).collect();
        }
        5 if sequences > 0 && random.uniform() < 0.3 => {
            let sequence = below(random, sequences);
            cache.clear(sequence)?;
            model.trim(sequence, 0);
        }
        _ => {
            let tokens = any(random, &[0, 1, 1, 2, 31, 33, 64, 150]);
            let counts: Vec<u32> = (0..sequences).map(|_| below(random, tokens + 1) as u32).collect();
            for (layer, rows) in step(random, model, tokens).iter().enumerate() {
                cache.append(layer, rows, &counts)?;
                model.append(layer, rows, &counts);
            }
            cache.commit()?;
            model.fold();
        }
    }
    Ok(())
}

/// How far a backend may be from the model.
pub struct Tolerance {
    /// Of a restored number, in parts of its row's norm.
    pub row: f32,
    /// Of an attention output, in parts of the largest value.
    pub attention: f32,
}

/// Compares all that a settled cache holds and says with the model.
pub fn check(
    random: &mut Random,
    cache: &mut dyn Cache,
    model: &mut Model,
    tolerance: &Tolerance,
    context: &str,
) -> Result<()> {
    cache.settle()?;
    model.fold();
    let report = cache.report();
    let folded: usize = model.sequences.iter().map(|rows| rows.folded).sum();
    let tokens: usize = (0..model.sequences()).map(|s| model.len(s)).sum();
    for layer in 0..model.plan.len() {
        let context = format!("{context}, layer {layer}");
        let alone = !model.groups().iter().any(|group| group.contains(&layer));
        assert_eq!(report.layers[layer].tokens, tokens, "{context}");
        let part = &report.layers[layer];
        if !alone {
            // What was folded and then cut is still folded; the model forgets no page either.
            assert_eq!(part.folded, folded, "{context}");
        }
        let rows = (part.keys.merged + part.keys.retained()) as usize;
        assert_eq!(rows, part.folded * model.shape.kv_heads, "{context}");
        let parts = cache.restore(layer)?;
        for (part, restored) in parts.iter().enumerate() {
            compare(restored, &model.whole(layer, part), tolerance.row, &format!("{context}, part {part}"));
        }
        compare_attention(random, cache, model, layer, tolerance.attention, &context)?;
    }
    Ok(())
}

/// Compares numbers to within a part of their row's norm; those that are not finite must be the same.
pub fn compare(have: &Tensor, want: &Tensor, tolerance: f32, context: &str) {
    assert_eq!(have.shape(), want.shape(), "{context}");
    let dim = want.shape().dim;
    let (have, want) = (have.view().to_f32(), want.view().to_f32());
    for (row, (a, b)) in have.chunks(dim).zip(want.chunks(dim)).enumerate() {
        let norm = b.iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f32>().sqrt();
        for (x, y) in a.iter().zip(b) {
            let same = x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
            assert!(same || (x - y).abs() <= tolerance * norm, "{x} {y}, row {row}, {context}");
        }
    }
}

/// Attention over what a cache holds against exact attention over the model's rows.
fn compare_attention(
    random: &mut Random,
    cache: &mut dyn Cache,
    model: &Model,
    layer: usize,
    tolerance: f32,
    context: &str,
) -> Result<()> {
    let lengths: Vec<u32> = (0..model.sequences()).map(|s| model.len(s) as u32).collect();
    let queries = any(random, &[1, 1, 3]);
    let heads = model.shape.kv_heads * any(random, &[1, 2, 7]);
    let shape = Shape::new(model.sequences(), heads, queries, model.shape.key_dim)?;
    let numbers: Vec<f32> = random.normals(shape.elements()).iter().map(|&x| x as f32).collect();
    let queries = Tensor::from_f32(&numbers, model.shape.dtype, shape)?;
    let logits: Vec<f32> = random.normals(heads).iter().map(|&x| x as f32).collect();
    let mut options = AttendOptions::default().causal(random.uniform() < 0.5);
    if random.uniform() < 0.3 {
        options = options.window(1 + below(random, 60) as u32);
    }
    if random.uniform() < 0.3 {
        options = options.soft_cap(20.0).sink_logits(&logits);
    }
    let have = cache.attend(layer, &queries, &options)?;
    let (keys, values) = (model.whole(layer, 0), model.whole(layer, 1));
    let want = exact(&queries.view(), &keys.view(), &values.view(), Some(&lengths), &options)?;
    let largest = values.view().to_f32().iter().filter(|x| x.is_finite()).fold(0f32, |m, x| m.max(x.abs()));
    for (i, (x, y)) in have.iter().zip(&want).enumerate() {
        assert!((x - y).abs() <= tolerance * largest, "{x} {y}, element {i}, {options:?}, {context}");
    }
    Ok(())
}

/// A whole life, compared again and again.
pub fn life(
    seed: u64,
    events: usize,
    tolerance: impl Fn(&Model) -> Tolerance,
    make: impl Fn(&Model) -> Result<Box<dyn Cache>>,
) -> Result<()> {
    let mut random = Random(seed);
    let mut model = made_up(&mut random);
    let context = format!("seed {seed:#x}, {:?}, {:?}", model.shape, model.options);
    let mut cache = make(&model)?;
    for event in 0..events {
        live(&mut random, cache.as_mut(), &mut model)?;
        if random.uniform() < 0.25 || event + 1 == events {
            let tolerance = tolerance(&model);
            check(&mut random, cache.as_mut(), &mut model, &tolerance, &format!("event {event}, {context}"))?;
        }
    }
    Ok(())
}
