//! The cache on the device against the simplest one that keeps its promises.

use kvfold::attention::AttendOptions;
use kvfold::cache::Step;
use kvfold::qjl::cache::QjlCache;
use kvfold::rope::Positions;
use kvfold::{DType, Gpu, KvView, Shape, Tensor};

use crate::cache_model::walk::{Batch, Setting, Subject, Walk};
use crate::rows::{download, upload};
use crate::{Test, settings};

pub(crate) const TESTS: &[Test] = &[
    ("qjl_cache_equals_the_simplest_cache", any_interleaving),
    ("qjl_cache_takes_every_width_and_group", widths),
];

/// Codes at the border of a cell, and tables at that of an f16, may fall to either side on a device: a few numbers of a
/// thousand are then a step apart. A row that is lost or misplaced is an error many times larger.
const TOLERANCE: f64 = 0.02;

struct Device<'a> {
    gpu: &'a Gpu,
    cache: QjlCache,
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
        self.gpu.submit(|encoder| self.cache.attend(encoder, layer, &queries, options, &output))?;
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

    fn reserve(&mut self, tokens: usize) -> kvfold::Result<()> {
        self.cache.reserve(tokens)
    }

    fn reload(&mut self) -> kvfold::Result<()> {
        Ok(())
    }

    fn bytes(&self) -> [u64; 2] {
        [self.cache.bytes(), self.cache.payload_bytes()]
    }
}

fn walk(gpu: &Gpu, setting: &mut Setting, seed: u64, acts: usize) -> kvfold::Result<()> {
    setting.tolerance = TOLERANCE;
    let cache = QjlCache::new(gpu, &setting.layers, setting.sequences, setting.options.clone())?;
    let mut walk = Walk::new(setting, Device { gpu, cache }, seed);
    (0..acts).for_each(|_| walk.act());
    Ok(())
}

fn any_interleaving(gpu: &Gpu) -> kvfold::Result<()> {
    for (index, setting) in settings::settings().iter_mut().enumerate() {
        walk(gpu, setting, 900 + index as u64, 25)?;
    }
    Ok(())
}

fn widths(gpu: &Gpu) -> kvfold::Result<()> {
    for (index, setting) in settings::widths().iter_mut().enumerate() {
        walk(gpu, setting, index as u64, 8)?;
    }
    Ok(())
}
