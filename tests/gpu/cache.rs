//! MiniCache as a cache on a device, driven through the same lives as the CPU's.

use kvfold::attention::AttendOptions;
use kvfold::cache::{LayerShape, Step};
use kvfold::gpu::ReadBack;
use kvfold::minicache::{CacheReport, CpuMiniCache, MiniCache};
use kvfold::{DType, Gpu, KvView, Result, Shape, Strides, Tensor};

use crate::Test;
use crate::caches::{self, Cache, Model, Tolerance};
use crate::rows::upload;

pub(crate) const TESTS: &[Test] = &[("random_lives_of_a_minicache_agree_with_a_simple_cache", lives)];

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
        Ok(())
    }
}

/// A merged number is one ulp of its direction, one of its magnitude and one of the layer's type from the model's, and a
/// direction below f16's normal range may have been flushed to zero; attention follows its rows.
fn tolerance(model: &Model) -> Tolerance {
    let ulp = if model.shape.dtype == DType::Bf16 { 2f32.powi(-7) } else { 2f32.powi(-10) };
    Tolerance { row: 3.0 * ulp, attention: 16.0 * ulp }
}

fn lives(gpu: &Gpu) -> Result<()> {
    for seed in 0..3 {
        let make = |model: &Model| Ok(Box::new(Device::new(gpu, model)?) as Box<dyn Cache>);
        caches::life(seed, 20, tolerance, make)?;
    }
    Ok(())
}
