//! MiniCache as a cache on a device, driven through the same lives as the CPU's.

use kvfold::attention::AttendOptions;
use kvfold::cache::{LayerShape, Step};
use kvfold::gpu::ReadBack;
use kvfold::minicache::{CacheOptions, CacheReport, CpuMiniCache, MergeOptions, MiniCache, Retention, pair_layers_depth};
use kvfold::{DType, Error, Gpu, KvView, Result, Shape, Strides, Tensor};

use crate::Test;
use crate::caches::{self, Cache, Model, Random, Tolerance};
use crate::rows::{download, upload};

pub(crate) const TESTS: &[Test] = &[
    ("random_lives_of_a_cache_agree_with_a_simple_one", lives),
];

struct Device {
    gpu: Gpu,
    cache: MiniCache,
}

impl Device {
    /// Room for a tensor whose rows begin at whole words.
    fn room(&self, shape: Shape, dtype: DType) -> KvView {
        let pitch = shape.dim.next_multiple_of(2);
        let heads = shape.tokens * pitch;
        let strides = Strides { batch: shape.heads * heads, heads, tokens: pitch };
        let bytes = (shape.rows() * pitch * dtype.size()) as u64;
        let buffer = self.gpu.storage("room", bytes.next_multiple_of(4).max(4)).unwrap();
        KvView::new(&buffer, dtype, shape).strides(strides)
    }

    /// The rows of such a tensor.
    fn rows(&self, view: &KvView) -> Tensor {
        let (shape, dtype) = (view.shape(), view.dtype());
        let read_back = self.gpu.submit(|encoder| ReadBack::schedule(&self.gpu, encoder, view.buffer())).unwrap();
        let bytes = read_back.wait_blocking().unwrap();
        let pitch = shape.dim.next_multiple_of(2) * dtype.size();
        let rows = bytes.chunks(pitch).take(shape.rows()).flat_map(|row| &row[..shape.dim * dtype.size()]);
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
        let shape = queries.shape();
        let dim = self.cache.report().layers.len().min(1).max(1); // replaced below
        let _ = dim;
        let value_dim = self.value_dim(layer);
        let output = self.room(Shape::new(shape.batch, shape.heads, shape.tokens, value_dim)?, DType::F32);
        let queries = upload(&self.gpu, queries);
        self.gpu.submit(|encoder| self.cache.attend(encoder, layer, &queries, &output, options))?;
        Ok(self.rows(&output).view().to_f32())
    }
    fn restore(&mut self, layer: usize) -> Result<[Tensor; 2]> {
        unimplemented!()
    }
    fn commit(&mut self) -> Result<()> {
        self.gpu.submit(|encoder| self.cache.commit(encoder))?;
        self.cache.settle_blocking()
    }
    fn settle(&mut self) -> Result<()> {
        self.cache.settle_blocking()
    }
    fn report(&self) -> CacheReport {
        self.cache.report()
    }
}
