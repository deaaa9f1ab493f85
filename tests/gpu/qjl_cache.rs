//! The cache on the device against the simplest one that keeps its promises.

use kvfold::attention::{AttendOptions, Precision};
use kvfold::cache::{LayerShape, Step};
use kvfold::capture::RopeLayout;
use kvfold::qjl::cache::{CacheOptions, Coding, CpuQjlCache, QjlCache};
use kvfold::qjl::planes::{Balance, Centring, PlanesOptions, Preset};
use kvfold::rope::{Positions, Rope};
use kvfold::{DType, Gpu, KvView, Shape, Tensor, wgpu};

use crate::cache_model::walk::{Batch, Setting, Subject, Walk};
use crate::numbers::Random;
use crate::rows::{download, upload};
use crate::{Test, device, settings};

pub(crate) const TESTS: &[Test] = &[
    ("qjl_cache_equals_the_simplest_cache", any_interleaving),
    ("qjl_cache_takes_every_width_and_group", widths),
    ("qjl_cache_takes_sequences_of_every_length", lengths),
    ("a_fixed_qjl_cache_takes_what_was_reserved", fixed),
    ("qjl_cache_attends_as_its_host_form", host_form),
    ("qjl_cache_goes_on_bit_for_bit_when_loaded", resumes),
    ("qjl_cache_forgets_positions_that_were_trimmed", trimmed_positions),
    ("qjl_cache_takes_forks_of_one_block_from_the_host", uploaded_forks),
    ("qjl_cache_of_many_blocks_attends_many_queries", many_queries),
    ("qjl_cache_fits_the_bindings_of_its_device", small_bindings),
];

/// Codes at the border of a cell, and tables at that of an f16, may fall to either side on a device: a few numbers of a
/// thousand are then a step apart. A row that is lost or misplaced is an error many times larger.
const TOLERANCE: f64 = 0.02;

pub(crate) struct Device<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) cache: QjlCache,
}

impl Subject for Device<'_> {
    fn append(&mut self, layer: usize, batch: &Batch) -> kvfold::Result<()> {
        let up = |tensor: &Tensor| upload(self.gpu, tensor);
        let (keys, values) = (up(&batch.keys), up(&batch.values));
        let queries = batch.queries.as_ref().map(up);
        let mut step = Step::new(&keys, &values).counts(&batch.counts);
        step.queries = queries.as_ref();
        step.positions = batch.starts.as_deref().map(Positions::Start);
        let cache = &mut self.cache;
        self.gpu.submit(|encoder| cache.append(encoder, layer, &step))
    }

    fn attend(
        &mut self,
        layer: usize,
        queries: &Tensor,
        options: &AttendOptions,
    ) -> kvfold::Result<Vec<f32>> {
        let shape = Shape { dim: self.cache.layers()[layer].value_dim, ..queries.shape() };
        let buffer = self.gpu.storage("output", shape.bytes(DType::F32).max(4) as u64)?;
        let output = KvView::new(&buffer, DType::F32, shape);
        let queries = upload(self.gpu, queries);
        // Every comparison here is of equals; `host_form` asks for the other kind by name.
        let precision =
            if options.precision == Precision::Auto { Precision::Exact } else { options.precision };
        let options = options.precision(precision);
        self.gpu.submit(|encoder| self.cache.attend(encoder, layer, &queries, &output, &options))?;
        Ok(download(self.gpu, &output).view().to_f32())
    }

    fn commit(&mut self, all: bool) -> kvfold::Result<()> {
        let cache = &mut self.cache;
        self.gpu.submit(|encoder| if all { cache.settle(encoder) } else { cache.commit(encoder) })
    }

    fn len(&self, sequence: usize) -> kvfold::Result<usize> {
        self.cache.len(sequence)
    }

    fn evicted(&self, sequence: usize) -> kvfold::Result<usize> {
        self.cache.evicted(sequence)
    }

    fn trim(&mut self, sequence: usize, tokens: usize) -> kvfold::Result<()> {
        self.cache.trim(sequence, tokens)
    }

    fn fork(&mut self, sequence: usize) -> kvfold::Result<usize> {
        self.cache.fork(sequence)
    }

    fn gather(&mut self, sources: &[u32]) -> kvfold::Result<()> {
        self.cache.gather(sources)
    }

    fn add_sequence(&mut self) -> usize {
        self.cache.add_sequence()
    }

    fn remove_sequence(&mut self, sequence: usize) -> kvfold::Result<()> {
        self.cache.remove_sequence(sequence)
    }

    fn clear(&mut self, sequence: usize) -> kvfold::Result<()> {
        self.cache.clear(sequence)
    }

    fn reserve(&mut self, sequence: usize, tokens: usize) -> kvfold::Result<()> {
        self.cache.reserve_blocking(sequence, tokens)
    }

    fn reload(&mut self) -> kvfold::Result<()> {
        let bytes = self.cache.save_blocking()?;
        self.cache = QjlCache::load(self.gpu, &bytes)?;
        assert_eq!(self.cache.save_blocking()?, bytes, "a loaded cache is saved as it was");
        Ok(())
    }

    fn bytes(&self) -> [u64; 2] {
        [self.cache.bytes(), self.cache.payload_bytes()]
    }
}

/// A walk whose tolerance is a device's.
fn walk<'a>(gpu: &'a Gpu, setting: &'a mut Setting, seed: u64) -> kvfold::Result<Walk<'a, Device<'a>>> {
    setting.tolerance = TOLERANCE;
    let cache = QjlCache::new(gpu, &setting.layers, setting.sequences, setting.options.clone())?;
    Ok(Walk::new(setting, Device { gpu, cache }, seed))
}

fn any_interleaving(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, setting) in (900..).zip(&mut settings::settings()) {
        let mut walk = walk(gpu, setting, seed)?;
        (0..25).for_each(|_| walk.act());
    }
    Ok(())
}

fn widths(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, setting) in (0..).zip(&mut settings::widths()) {
        let mut walk = walk(gpu, setting, seed)?;
        (0..8).for_each(|_| walk.act());
    }
    Ok(())
}

fn lengths(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, setting) in (0..).zip(&mut settings::three()) {
        walk(gpu, setting, seed)?.lengths_of(&[0, 1, 777]);
    }
    Ok(())
}

fn fixed(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, setting) in (0..).zip(&mut settings::fixed()) {
        walk(gpu, setting, seed)?.takes_what_was_reserved();
    }
    Ok(())
}

pub(crate) fn batch(random: &mut Random, layer: LayerShape, [sequences, tokens]: [usize; 2]) -> Batch {
    let mut rows = |heads, dim| {
        let shape = Shape::new(sequences, heads, tokens, dim).unwrap();
        let numbers: Vec<f32> =
            (0..shape.elements()).map(|i| (random.normal() + (i % 5) as f64 - 2.0) as f32).collect();
        Tensor::from_f32(&numbers, layer.dtype, shape).unwrap()
    };
    let (keys, values) = (rows(layer.kv_heads, layer.key_dim), rows(layer.kv_heads, layer.value_dim));
    let queries = Some(rows(2 * layer.kv_heads, layer.key_dim));
    Batch { keys, values, queries, counts: vec![tokens as u32; sequences], starts: None }
}

fn queries(random: &mut Random, layer: LayerShape, sequences: usize) -> Tensor {
    queries_of(random, layer, [sequences, 2])
}

fn queries_of(random: &mut Random, layer: LayerShape, [sequences, queries]: [usize; 2]) -> Tensor {
    let shape = Shape::new(sequences, 2 * layer.kv_heads, queries, layer.key_dim).unwrap();
    let numbers: Vec<f32> = (0..shape.elements()).map(|_| random.normal() as f32).collect();
    Tensor::from_f32(&numbers, DType::F32, shape).unwrap()
}

/// |a - b| / |b|.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    let squares = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| x * x).sum::<f32>();
    (squares(&mut a.iter().zip(b).map(|(a, b)| a - b)) / squares(&mut b.iter().copied())).sqrt()
}

impl Device<'_> {
    /// The cache as it stands, on the host.
    fn on_host(&self) -> kvfold::Result<CpuQjlCache> {
        let read = self.gpu.submit(|encoder| self.cache.read_back(encoder))?;
        self.gpu.block_on(read.parse())
    }

    fn scores(&self, layer: usize, queries: &Tensor) -> kvfold::Result<Vec<f32>> {
        let lengths = (0..self.cache.sequences()).map(|sequence| self.cache.len(sequence));
        let longest = lengths.collect::<kvfold::Result<Vec<_>>>()?.into_iter().max().unwrap_or(0);
        let shape = Shape { dim: longest, ..queries.shape() };
        let output =
            KvView::new(&self.gpu.storage("scores", shape.bytes(DType::F32) as u64)?, DType::F32, shape);
        let queries = upload(self.gpu, queries);
        let narrow = KvView::new(output.buffer(), DType::F32, Shape { dim: longest - 1, ..shape });
        let refused = self.gpu.submit(|encoder| self.cache.scores(encoder, layer, &queries, &narrow));
        assert!(matches!(refused, Err(kvfold::Error::Shape { .. })), "{refused:?}");
        self.gpu.submit(|encoder| self.cache.scores(encoder, layer, &queries, &output))?;
        Ok(download(self.gpu, &output).view().to_f32())
    }
}

/// Over 4,096 tokens in coded blocks and raw ones the device and the host say the same of the same codes.
fn host_form(gpu: &Gpu) -> kvfold::Result<()> {
    let layer = LayerShape::new(2, 64, DType::F16).value_dim(80);
    let rope = Rope::from_theta(64, 64, 10_000.0, RopeLayout::HalfSplit)?;
    let planes = |preset: Preset| CacheOptions::from(preset).rope(rope.clone());
    for options in [planes(Preset::Balanced), planes(Preset::Extreme), CacheOptions::qjl_orth()] {
        let mut random = Random(5);
        let mut device = Device { gpu, cache: QjlCache::new(gpu, &[layer], 2, options)? };
        for (tokens, from) in [(1500, None), (2596, Some(vec![9000, 1]))] {
            let mut batch = batch(&mut random, layer, [2, tokens]);
            batch.starts = from;
            device.append(0, &batch)?;
            device.commit(false)?;
        }
        let host = device.on_host()?;
        let queries = queries(&mut random, layer, 2);
        for options in [AttendOptions::default().causal(true), AttendOptions::default().window(2000)] {
            let had = device.attend(0, &queries, &options)?;
            let want = host.attend(0, &queries.view(), &options)?;
            assert!(apart(&had, &want) <= 1e-5, "{}", apart(&had, &want));
            let fast = device.attend(0, &queries, &options.precision(Precision::Fast))?;
            assert!(apart(&fast, &want) <= 3e-2, "{}", apart(&fast, &want));
        }
        let want = host.scores(0, &queries.view())?;
        let had = device.scores(0, &queries)?;
        assert_eq!(want.len(), had.len());
        assert!(apart(&had, &want) <= 1e-5, "scores: {}", apart(&had, &want));
        let raw = device.cache.raw_bytes();
        device.commit(true)?;
        assert_eq!(device.cache.payload_bytes(), device.on_host()?.payload_bytes());
        assert!(device.cache.bytes() < raw / 2, "{} of {raw}", device.cache.bytes());
        assert!(device.cache.to_string().starts_with("QjlCache of 1 layers, 2 sequences of 4096, 4096"));
    }
    Ok(())
}

/// Every number is the same whether the cache was saved and loaded half-way or not.
fn resumes(gpu: &Gpu) -> kvfold::Result<()> {
    let layer = LayerShape::new(2, 48, DType::F16);
    let rope = Rope::from_theta(48, 32, 10_000.0, RopeLayout::Interleaved)?;
    let planes = |preset: Preset| CacheOptions::from(preset).rope(rope.clone());
    for options in [planes(Preset::Balanced).capacity(300), planes(Preset::Compact), CacheOptions::qjl_orth()]
    {
        // Before there are tables, and after.
        for first in [60, 250] {
            let mut random = Random(6);
            let mut device = Device { gpu, cache: QjlCache::new(gpu, &[layer], 2, options.clone())? };
            device.append(0, &batch(&mut random, layer, [2, first]))?;
            device.commit(false)?;
            let bytes = device.cache.save_blocking()?;
            let mut loaded = Device { gpu, cache: QjlCache::load(gpu, &bytes)? };
            for _ in 0..4 {
                let batch = batch(&mut random, layer, [2, 40]);
                let queries = queries(&mut random, layer, 2);
                let mut outputs = Vec::new();
                for cache in [&mut device, &mut loaded] {
                    cache.append(0, &batch)?;
                    outputs.push(cache.attend(0, &queries, &AttendOptions::default())?);
                    cache.commit(false)?;
                    let bytes = cache.cache.save_blocking()?;
                    outputs.push(bytes.into_iter().map(f32::from).collect());
                }
                assert_eq!(outputs[0], outputs[2], "attention");
                assert!(outputs[1] == outputs[3], "what is saved");
            }
        }
    }
    Ok(())
}

/// A coded block whose positions broke off, and follow each other again once it is trimmed and goes on.
fn trimmed_positions(gpu: &Gpu) -> kvfold::Result<()> {
    let layer = LayerShape::new(2, 64, DType::F16);
    let options = CacheOptions::default().rope(Rope::from_theta(64, 64, 10_000.0, RopeLayout::HalfSplit)?);
    let mut random = Random(8);
    let mut device = Device { gpu, cache: QjlCache::new(gpu, &[layer], 1, options)? };
    for (tokens, from) in [(200, None), (200, Some(vec![9000])), (300, None)] {
        if tokens == 300 {
            device.trim(0, 180)?;
        }
        let mut batch = batch(&mut random, layer, [1, tokens]);
        batch.starts = from;
        device.append(0, &batch)?;
        device.commit(true)?;
    }
    let host = device.on_host()?;
    let queries = queries(&mut random, layer, 1);
    let options = AttendOptions::default();
    let (had, want) = (device.attend(0, &queries, &options)?, host.attend(0, &queries.view(), &options)?);
    assert!(apart(&had, &want) <= 1e-5, "{}", apart(&had, &want));
    let (had, want) = (device.scores(0, &queries)?, host.scores(0, &queries.view())?);
    assert!(apart(&had, &want) <= 1e-5, "scores: {}", apart(&had, &want));
    Ok(())
}

/// Forks on the host share a block whose positions break off; the one that is trimmed to before the break comes first.
fn uploaded_forks(gpu: &Gpu) -> kvfold::Result<()> {
    let layer = LayerShape::new(2, 64, DType::F16);
    let options = CacheOptions::default().rope(Rope::from_theta(64, 64, 10_000.0, RopeLayout::HalfSplit)?);
    let mut random = Random(10);
    let mut host = CpuQjlCache::new(&[layer], 1, options)?;
    for (tokens, from) in [(150, None), (150, Some(vec![9000]))] {
        let batch = batch(&mut random, layer, [1, tokens]);
        let (keys, values) = (batch.keys.view(), batch.values.view());
        let mut step = Step::new(&keys, &values).counts(&batch.counts);
        step.positions = from.as_deref().map(Positions::Start);
        host.append(0, &step)?;
        host.settle()?;
    }
    host.fork(0)?;
    host.trim(0, 140)?;
    let mut device = Device { gpu, cache: QjlCache::upload(gpu, &host)? };
    let queries = queries(&mut random, layer, 2);
    let options = AttendOptions::default();
    let (had, want) = (device.attend(0, &queries, &options)?, host.attend(0, &queries.view(), &options)?);
    assert!(apart(&had, &want) <= 1e-5, "{}", apart(&had, &want));
    Ok(())
}

/// A device whose buffers and bindings have at most so many bytes.
fn small(gpu: &Gpu, bytes: u64) -> kvfold::Result<Gpu> {
    let limits = wgpu::Limits {
        max_buffer_size: bytes,
        max_storage_buffer_binding_size: bytes,
        ..wgpu::Limits::default()
    };
    device::limited(gpu, limits)
}

/// More queries than one binding can show made ready, or with what is found for them: of three sequences, 4 heads and 250 tokens
/// they take 1.8 MB, and of one sequence 336 kB in each of 5 splits.
fn many_queries(gpu: &Gpu) -> kvfold::Result<()> {
    let gpu = &small(gpu, 1 << 20)?;
    let layer = LayerShape::new(2, 64, DType::F16).value_dim(80);
    let rope = Rope::from_theta(64, 64, 10_000.0, RopeLayout::HalfSplit)?;
    let mut random = Random(9);
    let plain = AttendOptions::default();
    let cases = [
        (CacheOptions::default().rope(rope.clone()), vec![plain, plain.window(70).sink_logits(&[0.5; 4])]),
        (CacheOptions::qjl_orth().rope(rope), vec![plain.causal(true)]),
    ];
    for (options, all) in cases {
        let mut device = Device { gpu, cache: QjlCache::new(gpu, &[layer], 3, options)? };
        for lengths in [[400, 200, 0], [331, 0, 1]] {
            let mut batch = batch(&mut random, layer, [3, 400]);
            batch.counts = lengths.to_vec();
            device.append(0, &batch)?;
            device.commit(true)?;
        }
        let (host, queries) = (device.on_host()?, queries_of(&mut random, layer, [3, 250]));
        // Queries before a sequence's first token see nothing, in whatever part of a call they stand.
        for options in all {
            let had = device.attend(0, &queries, &options)?;
            let want = host.attend(0, &queries.view(), &options)?;
            assert!(apart(&had, &want) <= 1e-5, "{}, {options:?}", apart(&had, &want));
        }
    }
    // Rows of an odd number of halves share words, so that no part of them can be written alone.
    let layer = LayerShape::new(2, 64, DType::F16).value_dim(33);
    let mut device = Device { gpu, cache: QjlCache::new(gpu, &[layer], 1, CacheOptions::qjl())? };
    device.append(0, &batch(&mut random, layer, [1, 700]))?;
    device.commit(true)?;
    let (queries, shape) = (queries_of(&mut random, layer, [1, 900]), Shape::new(1, 4, 900, 33)?);
    let output = KvView::new(&gpu.storage("output", shape.bytes(DType::F16) as u64)?, DType::F16, shape);
    let attend = |encoder: &mut wgpu::CommandEncoder| {
        device.cache.attend(encoder, 0, &upload(gpu, &queries), &output, &AttendOptions::default())
    };
    let refused = gpu.submit(attend).unwrap_err();
    assert!(matches!(refused, kvfold::Error::Limit { .. }), "{refused}");
    Ok(())
}

/// Where a binding shows 160 tokens coded and 128 raw, blocks are as small, and rows are gathered to be coded in parts.
fn small_bindings(gpu: &Gpu) -> kvfold::Result<()> {
    let gpu = &small(gpu, 512 << 10)?;
    let layer = LayerShape::new(8, 128, DType::F32);
    let rope = Rope::from_theta(128, 128, 10_000.0, RopeLayout::HalfSplit)?;
    let blocks = PlanesOptions::default().centring(Centring::BlockMean(24)).balance(Balance::None);
    let blocks = CacheOptions::new(Coding::Planes(blocks.recent(8)));
    for options in [CacheOptions::default().rope(rope), blocks] {
        let mut random = Random(10);
        let mut device = Device { gpu, cache: QjlCache::new(gpu, &[layer], 1, options.clone())? };
        let mut host = CpuQjlCache::new(&[layer], 1, options)?;
        for tokens in [100, 120, 120, 60] {
            let batch = batch(&mut random, layer, [1, 120]);
            let counts = [tokens];
            let batch = Batch { queries: None, counts: counts.to_vec(), ..batch };
            device.append(0, &batch)?;
            host.append(0, &Step::new(&batch.keys.view(), &batch.values.view()).counts(&counts))?;
        }
        device.commit(false)?;
        host.commit()?;
        let queries = queries(&mut random, layer, 1);
        let options = AttendOptions::default();
        let (had, want) = (device.attend(0, &queries, &options)?, host.attend(0, &queries.view(), &options)?);
        assert!(apart(&had, &want) <= TOLERANCE as f32, "{}", apart(&had, &want));
        let want = device.on_host()?.attend(0, &queries.view(), &options)?;
        assert!(apart(&had, &want) <= 1e-5, "{}", apart(&had, &want));
    }
    let tiny = small(gpu, 4096)?;
    let refused = QjlCache::new(&tiny, &[layer], 1, CacheOptions::default()).unwrap_err();
    assert!(matches!(refused, kvfold::Error::Limit { have: 4096, .. }), "{refused}");
    Ok(())
}
