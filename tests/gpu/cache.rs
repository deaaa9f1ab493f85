//! MiniCache as a cache on a device, driven through the same lives as the CPU's.

use std::cell::Cell;

use kvfold::attention::AttendOptions;
use kvfold::cache::{LayerShape, Step};
use kvfold::gpu::ReadBack;
use kvfold::minicache::{
    CacheOptions, CacheReport, CpuMiniCache, Layer, MergeOptions, MiniCache, Mode, Retention, cpu,
    pair_layers_depth,
};
use kvfold::{DType, Error, Gpu, KvView, Result, Shape, Strides, Tensor};

use crate::Test;
use crate::caches::{self, Cache, Model, Tolerance, similar_layers};
use crate::golden::reader::{Golden, STACK_STEPS};
use crate::rows::{download, upload};

pub(crate) const TESTS: &[Test] = &[
    ("random_lives_of_a_minicache_agree_with_a_simple_cache", lives),
    ("a_minicache_folds_while_it_decodes", decoding),
    ("a_minicache_keeps_one_threshold_after_its_prefill", prefill),
    ("a_minicache_counts_the_bytes_of_its_buffers", bytes),
    ("a_minicache_in_compat_agrees_with_the_original", stacks),
    ("a_fixed_minicache_takes_what_was_reserved", fixed),
    ("a_minicache_of_many_blocks_attends_many_queries", long),
    ("a_folded_pair_attends_as_its_rows", folded_pair),
];

/// A cache on a device whose layers all have one shape.
pub(crate) struct Device {
    gpu: Gpu,
    shape: LayerShape,
    pub(crate) cache: MiniCache,
}

impl Device {
    pub(crate) fn new(gpu: &Gpu, model: &Model) -> Result<Self> {
        let layers = vec![model.shape; model.plan.len()];
        let cache = MiniCache::new(gpu, layers, model.plan.clone(), model.options.clone())?;
        Ok(Self { gpu: gpu.clone(), shape: model.shape, cache })
    }

    /// Room for a tensor whose rows begin at whole words.
    fn room(&self, shape: Shape, dtype: DType) -> KvView {
        let pitch = shape.dim.next_multiple_of(2);
        let heads = shape.tokens * pitch;
        let strides = Strides { batch: shape.heads * heads, heads, tokens: pitch };
        let bytes = (shape.rows() * pitch * dtype.size()) as u64;
        let buffer = self.gpu.storage("room", bytes.max(4)).unwrap();
        KvView::new(&buffer, dtype, shape).strides(strides)
    }

    /// The rows of such a tensor.
    fn rows(&self, view: &KvView) -> Tensor {
        let (shape, dtype) = (view.shape(), view.dtype());
        let schedule = |encoder: &mut _| ReadBack::schedule(&self.gpu, encoder, view.buffer());
        let bytes = self.gpu.submit(schedule).unwrap().wait_blocking().unwrap();
        let pitch = shape.dim.next_multiple_of(2) * dtype.size();
        let rows = bytes.chunks(pitch).take(shape.rows());
        let rows = rows.flat_map(|row| &row[..shape.dim * dtype.size()]);
        Tensor::new(rows.copied().collect(), dtype, shape).unwrap()
    }
}

impl Cache for Device {
    fn add_sequence(&mut self) -> usize {
        self.cache.add_sequence()
    }
    fn remove_sequence(&mut self, sequence: usize) -> Result<()> {
        self.cache.remove_sequence(sequence)
    }
    fn clear(&mut self, sequence: usize) -> Result<()> {
        self.cache.clear(sequence)
    }
    fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        self.cache.trim(sequence, tokens)
    }
    fn fork(&mut self, sequence: usize) -> Result<usize> {
        self.cache.fork(sequence)
    }
    fn gather(&mut self, indices: &[u32]) -> Result<()> {
        self.cache.gather(indices)
    }
    fn append(&mut self, layer: usize, [keys, values]: &[Tensor; 2], counts: &[u32]) -> Result<()> {
        let (keys, values) = (upload(&self.gpu, keys), upload(&self.gpu, values));
        let step = Step::new(&keys, &values).counts(counts);
        self.gpu.submit(|encoder| self.cache.append(encoder, layer, &step))
    }
    fn attend(&mut self, layer: usize, queries: &Tensor, options: &AttendOptions<'_>) -> Result<Vec<f32>> {
        let shape = Shape { dim: self.shape.value_dim, ..queries.shape() };
        let output = self.room(shape, DType::F32);
        let queries = upload(&self.gpu, queries);
        self.gpu.submit(|encoder| self.cache.attend(encoder, layer, &queries, &output, options))?;
        Ok(self.rows(&output).view().to_f32())
    }
    fn restore(&mut self, layer: usize) -> Result<[Tensor; 2]> {
        let sequences = self.cache.sequences();
        let lengths = (0..sequences).map(|sequence| self.cache.len(sequence).unwrap());
        let tokens = lengths.max().unwrap_or(0);
        let shape = |dim| Shape::new(sequences, self.shape.kv_heads, tokens, dim).unwrap();
        let room = self.shape.dims().map(|dim| self.room(shape(dim), self.shape.dtype));
        let [keys, values] = &room;
        self.gpu.submit(|encoder| self.cache.restore(encoder, layer, [keys, values]))?;
        Ok(room.map(|view| self.rows(&view)))
    }
    fn commit(&mut self) -> Result<()> {
        self.gpu.submit(|encoder| self.cache.commit(encoder))?;
        self.settle()
    }
    fn settle(&mut self) -> Result<()> {
        self.cache.settle_blocking()
    }
    fn report(&self) -> CacheReport {
        self.cache.report()
    }
    fn reload(&mut self) -> Result<()> {
        let file = self.cache.save_blocking()?;
        self.cache = MiniCache::load(&self.gpu, &file)?;
        assert_eq!(self.cache.save_blocking()?, file);
        // The CPU's cache reads the same file and says the same of it.
        let host = CpuMiniCache::load(&file)?;
        assert_eq!(host.save()?, file);
        assert_eq!(host.report().layers, self.report().layers);
        self.attends_as(&host)
    }
}

impl Device {
    /// The host's cache of the same file holds the same codes, so that both attend alike but for the order of sums.
    fn attends_as(&mut self, host: &CpuMiniCache) -> Result<()> {
        let (sequences, dim) = (self.cache.sequences(), self.shape.key_dim);
        let queries = Shape::new(sequences, 2 * self.shape.kv_heads, 2, dim)?;
        let queries = similar_layers(3, 1, queries, 0.5).remove(0);
        let sinks = vec![0.5; 2 * self.shape.kv_heads];
        let options = AttendOptions::default().causal(true).soft_cap(20.0).sink_logits(&sinks);
        for layer in 0..self.cache.layers() {
            let have = self.attend(layer, &queries, &options)?;
            let want = host.attend(layer, &queries.view(), &options)?;
            for (x, y) in have.chunks(self.shape.value_dim).zip(want.chunks(self.shape.value_dim)) {
                let length = y.iter().map(|y| y * y).sum::<f32>().sqrt();
                let apart = x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum::<f32>().sqrt();
                assert!(apart <= 1e-3 * length, "layer {layer}: {apart} of {length}");
            }
        }
        Ok(())
    }
}

/// A merged number is one ulp of its direction, one of its magnitude and one of the layer's type from the model's, and a
/// direction below f16's normal range may have been flushed to zero; attention follows its rows.
fn tolerance(model: &Model) -> Tolerance {
    let ulp = if model.shape.dtype == DType::Bf16 { 2f32.powi(-7) } else { 2f32.powi(-10) };
    if model.options.merge.planes.is_some() {
        // A number within rounding of a bound may fall on either side of it: a step of one level, of which a row is as long as
        // the root of its channels at least. That both attend alike to the same codes is seen at every reload.
        let [key_dim, value_dim] = model.shape.dims();
        let step = 2.0 / (key_dim.min(value_dim) as f32).sqrt();
        return Tolerance { row: step, attention: step };
    }
    Tolerance { row: 3.0 * ulp, attention: 16.0 * ulp }
}

fn lives(gpu: &Gpu) -> Result<()> {
    let coded = Cell::new(0);
    for seed in [0, 1, 3] {
        let make = |model: &Model| {
            coded.set(coded.get() + usize::from(model.options.merge.planes.is_some()));
            Ok(Box::new(Device::new(gpu, model)?) as Box<dyn Cache>)
        };
        caches::life(seed, 16, tolerance, make)?;
    }
    assert_eq!(coded.get(), 1, "of three lives");
    Ok(())
}

const HALF: DType = DType::F16;

/// A pair on a device and one on the CPU, of one sequence each.
fn pair(gpu: &Gpu, shape: LayerShape, options: &CacheOptions) -> Result<(Device, CpuMiniCache)> {
    let plan = pair_layers_depth(2, 0.0, 2)?;
    let mut host = CpuMiniCache::new(vec![shape; 2], plan.clone(), options.clone())?;
    let mut device = Device::new(gpu, &Model::new(shape, plan, options.clone()))?;
    assert_eq!(host.add_sequence(), device.add_sequence());
    Ok((device, host))
}

fn cut(rows: &Tensor, from: usize, to: usize) -> Tensor {
    let shape = Shape { tokens: to - from, ..rows.shape() };
    let bytes = shape.iter_rows().flat_map(|(b, h, t)| rows.view().row_bytes(b, h, from + t).to_vec());
    Tensor::new(bytes.collect(), rows.dtype(), shape).unwrap()
}

/// A step whose keys serve as values, recorded as an engine would: one encoder for all layers, one submit, no waiting.
fn step(device: &mut Device, layers: &[Tensor], from: usize, to: usize) -> Result<()> {
    let gpu = device.gpu.clone();
    let rows: Vec<KvView> = layers.iter().map(|rows| upload(&gpu, &cut(rows, from, to))).collect();
    gpu.submit(|encoder| {
        for (layer, rows) in rows.iter().enumerate() {
            device.cache.append(encoder, layer, &Step::new(rows, rows))?;
        }
        device.cache.commit(encoder)
    })
}

/// Commits that never wait fold what comes back, and leave what one big step leaves.
fn decoding(gpu: &Gpu) -> Result<()> {
    let shape = LayerShape::new(2, 64, HALF);
    let layers = similar_layers(1, 2, Shape::new(1, 2, 170, 64)?, 0.97);
    let options = CacheOptions::default().merge(MergeOptions::default().retention(Retention::Cosine(0.97)));
    let (mut device, mut host) = pair(gpu, shape, &options)?;
    step(&mut device, &layers, 0, 70)?;
    for token in 70..170 {
        step(&mut device, &layers, token, token + 1)?;
        // As a frame's end or an engine's own waiting would.
        gpu.wait_blocking()?;
    }
    let folded = device.report().layers[0].folded;
    assert!(folded >= 96, "{folded} of 170 tokens folded without settling");
    device.settle()?;
    for (layer, rows) in layers.iter().enumerate() {
        host.append(layer, &Step::new(&rows.view(), &rows.view()))?;
    }
    host.settle()?;
    assert_eq!(device.report().layers, host.report().layers);
    let (mut whole, _) = pair(gpu, shape, &options)?;
    step(&mut whole, &layers, 0, 170)?;
    whole.settle()?;
    for layer in 0..2 {
        assert_eq!(device.restore(layer)?, whole.restore(layer)?, "bit for bit, layer {layer}");
    }
    Ok(())
}

/// Fraction and Range decide once, in whatever blocks the prefill stands.
fn prefill(gpu: &Gpu) -> Result<()> {
    let shape = LayerShape::new(2, 64, HALF);
    let layers = similar_layers(5, 2, Shape::new(1, 2, 500, 64)?, 0.9);
    for retention in [Retention::Fraction(0.25), Retention::Range(0.4)] {
        let options = CacheOptions::default().merge(MergeOptions::default().retention(retention));
        let (mut device, mut host) = pair(gpu, shape, &options)?;
        for (from, to) in [(0, 50), (50, 330), (330, 500)] {
            step(&mut device, &layers, from, to)?;
            for (layer, rows) in layers.iter().enumerate() {
                let rows = cut(rows, from, to);
                host.append(layer, &Step::new(&rows.view(), &rows.view()))?;
            }
            if to == 330 {
                assert_eq!(device.report().layers[0].folded, 0);
                gpu.submit(|encoder| device.cache.end_prefill(encoder, 0))?;
                host.end_prefill(0)?;
            }
        }
        device.settle()?;
        host.settle()?;
        // A cosine within rounding of the threshold may fall on either side.
        let (have, want) = (device.report().layers[1], host.report().layers[1]);
        assert_eq!(have.folded, want.folded);
        for (have, want) in [(have.keys, want.keys), (have.values, want.values)] {
            assert_eq!(have.sink, want.sink);
            assert!(have.rule.abs_diff(want.rule) <= 1, "{have:?} {want:?}");
        }
        let file = device.cache.save_blocking()?;
        assert_eq!(MiniCache::load(gpu, &file)?.save_blocking()?, file, "frozen thresholds go along");
    }
    Ok(())
}

/// `bytes` is what the device has allocated under the cache's names, where its allocator tells.
fn bytes(gpu: &Gpu) -> Result<()> {
    let held = |gpu: &Gpu| {
        let report = gpu.device().generate_allocator_report()?;
        let ours = ["raw keys", "raw values", "folded pair"];
        let live = report.allocations.iter().filter(|one| ours.iter().any(|name| one.name.contains(name)));
        Some(live.map(|one| one.size).sum::<u64>())
    };
    gpu.wait_blocking()?;
    let before = held(gpu);
    let shape = LayerShape::new(2, 128, HALF);
    let layers = similar_layers(7, 2, Shape::new(1, 2, 1024, 128)?, 0.97);
    let (mut device, _) = pair(gpu, shape, &CacheOptions::default())?;
    step(&mut device, &layers, 0, 1024)?;
    device.settle()?;
    gpu.wait_blocking()?;
    let report = device.report();
    assert_eq!(report.bytes, report.payload_bytes, "no block is left");
    assert!(report.raw_bytes as f64 / report.bytes as f64 > 1.9, "{report:?}");
    if let (Some(before), Some(after)) = (before, held(gpu)) {
        // The allocator rounds each of the two buffers up to its alignment.
        let live = after - before;
        assert!(live >= report.bytes && live < report.bytes + 2 * 4096, "{live} of {}", report.bytes);
    }
    device.clear(0)?;
    assert_eq!((device.report().bytes, device.cache.scratch_bytes()), (0, 0));
    Ok(())
}

/// The original's stacks: rebuilt rows as the CPU's cache has them, and the original's figures.
fn stacks(gpu: &Gpu) -> Result<()> {
    for (name, layers, group) in [("minicache_stack_g2", 6, 2), ("minicache_stack_g3", 7, 3)] {
        let golden = Golden::open(name);
        let merge = MergeOptions::default().mode(Mode::Compat).retention(Retention::Cosine(0.9)).sinks(0);
        let (plan, options) = (pair_layers_depth(layers, 0.5, group)?, CacheOptions::default().merge(merge));
        let shape = LayerShape::new(2, 64, HALF);
        let mut host = CpuMiniCache::new(vec![shape; layers], plan.clone(), options.clone())?;
        let mut device = Device::new(gpu, &Model::new(shape, plan, options))?;
        assert_eq!(host.add_sequence(), device.add_sequence());
        for (step, tokens) in STACK_STEPS.into_iter().enumerate() {
            for layer in 0..layers {
                let rows = |part| golden.f32(&format!("in/l{layer}/s{step}/{part}"));
                let tensor =
                    |part| Tensor::from_f32(&rows(part), HALF, Shape::new(1, 2, tokens, 64).unwrap());
                let rows = [tensor("k")?, tensor("v")?];
                device.append(layer, &rows, &[tokens as u32])?;
                host.append(layer, &Step::new(&rows[0].view(), &rows[1].view()))?;
            }
        }
        device.settle()?;
        assert_eq!(device.cache.original_accounting(), host.original_accounting(), "{name}");
        for layer in 0..layers {
            for (have, want) in device.restore(layer)?.iter().zip(&host.restore(layer)?) {
                let (have, want) = (have.view().to_f32(), want.view().to_f32());
                let close =
                    |(x, y): (&f32, &f32)| (x - y).abs() <= 2f32.powi(-10) * y.abs().max(2f32.powi(-14));
                assert!(have.iter().zip(&want).all(close), "{name} layer {layer}");
            }
        }
    }
    Ok(())
}

fn fixed(gpu: &Gpu) -> Result<()> {
    let shape = LayerShape::new(1, 16, HALF);
    let layers = similar_layers(4, 2, Shape::new(1, 1, 300, 16)?, 0.97);
    let (mut device, _) = pair(gpu, shape, &CacheOptions::default().fixed(true))?;
    let refused = step(&mut device, &layers, 0, 1).unwrap_err();
    assert!(matches!(refused, Error::Capacity { need: 1, have: 0, .. }), "{refused}");
    device.cache.reserve_blocking(0, 300)?;
    let reserved = device.report().bytes;
    step(&mut device, &layers, 0, 200)?;
    assert_eq!(device.report().bytes, reserved, "an append allocates nothing");
    let refused = device.cache.reserve_blocking(0, usize::MAX / 1024).unwrap_err();
    assert!(matches!(refused, Error::Limit { what: "tokens of a sequence", .. }), "{refused}");
    Ok(())
}

/// Many stores, and more partial results than one call may keep: later stores add to those of earlier ones.
fn long(gpu: &Gpu) -> Result<()> {
    let shape = LayerShape::new(1, 4, HALF).value_dim(512);
    let options = CacheOptions::default();
    let plan = pair_layers_depth(1, 0.0, 2)?;
    let mut host = CpuMiniCache::new(vec![shape], plan.clone(), options.clone())?;
    let mut device = Device::new(gpu, &Model::new(shape, plan, options))?;
    assert_eq!(host.add_sequence(), device.add_sequence());
    for seed in 0..5 {
        let rows = |dim| similar_layers(seed, 1, Shape::new(1, 1, 128, dim).unwrap(), 0.5).remove(0);
        let rows = [rows(4), rows(512)];
        device.append(0, &rows, &[128])?;
        host.append(0, &Step::new(&rows[0].view(), &rows[1].view()))?;
    }
    let queries = &similar_layers(8, 1, Shape::new(1, 8, 260, 4)?, 0.5)[0];
    let causal = AttendOptions::default().causal(true);
    let (have, want) = (device.attend(0, queries, &causal)?, host.attend(0, &queries.view(), &causal)?);
    // f32 sums of 640 terms in another order.
    for (x, y) in have.iter().zip(&want) {
        assert!((x - y).abs() <= 1e-5, "{x} {y}");
    }
    Ok(())
}

/// The operation on a folded pair, batched, against its twin and against exact attention over its restored rows.
fn folded_pair(gpu: &Gpu) -> Result<()> {
    let ops = kvfold::minicache::gpu::Ops::new(gpu);
    for (seed, dtype) in (0..).zip(DType::ALL) {
        for mode in [Mode::Shared, Mode::Anchor, Mode::Compat] {
            let options = MergeOptions::default().mode(mode);
            let parts = [Shape::new(2, 2, 75, 24)?, Shape::new(2, 2, 75, 9)?];
            let pairs = parts.map(|shape| crate::rows::pair(seed, shape, dtype));
            let mut folds = Vec::new();
            for [lower, upper] in &pairs {
                let (lower, upper) = (upload(gpu, lower), upload(gpu, upper));
                let mut decision =
                    gpu.submit(|encoder| ops.encode_decide(encoder, &lower, &upper, &options))?;
                gpu.block_on(decision.totals())?;
                folds.push(gpu.submit(|encoder| ops.encode_merge(encoder, &decision))?);
            }
            let queries = similar_layers(9, 1, Shape::new(2, 6, 3, 24)?, 0.5).remove(0);
            let views = upload(gpu, &queries);
            let output =
                KvView::new(&gpu.storage("output", 2 * 6 * 3 * 9 * 4)?, DType::F32, Shape::new(2, 6, 3, 9)?);
            let attend = AttendOptions::default().causal(true);
            for which in [Layer::Lower, Layer::Upper] {
                gpu.submit(|encoder| {
                    let (keys, values) = (&folds[0], &folds[1]);
                    ops.encode_attend(encoder, &views, keys, values, which, Some(&[75, 33]), &attend, &output)
                })?;
                let have = download(gpu, &output).view().to_f32();
                let twins =
                    pairs.each_ref().map(|[lower, upper]| cpu::merge(&lower.view(), &upper.view(), &options));
                let [keys, values] = twins;
                let (keys, values) = (keys?, values?);
                let want = cpu::attend(&queries.view(), &keys, &values, which, Some(&[75, 33]), &attend)?;
                let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
                for (x, y) in have.iter().zip(&want) {
                    assert!((x - y).abs() <= 4e-3 * largest, "{x} {y}, {dtype} {mode:?} {which:?}");
                }
            }
        }
    }
    Ok(())
}
