//! The cache on the host against the simplest one that keeps its promises.

#![allow(
    missing_docs,
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics fails; its modules are shared"
)]

#[path = "../cache_model/mod.rs"]
mod cache_model;
#[path = "../golden/mod.rs"]
mod golden;
#[path = "../random/mod.rs"]
mod numbers;
mod promises;
#[path = "../cache_model/settings.rs"]
mod settings;

use cache_model::walk::{Batch, Setting, Subject, Walk};
use kvfold::Tensor;
use kvfold::attention::AttendOptions;
use kvfold::cache::Step;
use kvfold::qjl::cache::CpuQjlCache;
use kvfold::rope::Positions;

struct Host(CpuQjlCache);

impl Subject for Host {
    fn append(&mut self, layer: usize, batch: &Batch) -> kvfold::Result<()> {
        let (keys, values) = (batch.keys.view(), batch.values.view());
        let queries = batch.queries.as_ref().map(Tensor::view);
        let mut step = Step::new(&keys, &values).counts(&batch.counts);
        step.queries = queries.as_ref();
        step.positions = batch.starts.as_deref().map(Positions::Start);
        self.0.append(layer, &step)
    }

    fn attend(
        &mut self,
        layer: usize,
        queries: &Tensor,
        options: &AttendOptions,
    ) -> kvfold::Result<Vec<f32>> {
        self.0.attend(layer, &queries.view(), options)
    }

    fn commit(&mut self, all: bool) -> kvfold::Result<()> {
        if all { self.0.settle() } else { self.0.commit() }
    }

    fn len(&self, sequence: usize) -> kvfold::Result<usize> {
        self.0.len(sequence)
    }

    fn evicted(&self, sequence: usize) -> kvfold::Result<usize> {
        self.0.evicted(sequence)
    }

    fn trim(&mut self, sequence: usize, tokens: usize) -> kvfold::Result<()> {
        self.0.trim(sequence, tokens)
    }

    fn fork(&mut self, sequence: usize) -> kvfold::Result<usize> {
        self.0.fork(sequence)
    }

    fn gather(&mut self, sources: &[u32]) -> kvfold::Result<()> {
        self.0.gather(sources)
    }

    fn add_sequence(&mut self) -> usize {
        self.0.add_sequence()
    }

    fn remove_sequence(&mut self, sequence: usize) -> kvfold::Result<()> {
        self.0.remove_sequence(sequence)
    }

    fn clear(&mut self, sequence: usize) -> kvfold::Result<()> {
        self.0.clear(sequence)
    }

    fn reserve(&mut self, sequence: usize, tokens: usize) -> kvfold::Result<()> {
        self.0.reserve(sequence, tokens)
    }

    fn reload(&mut self) -> kvfold::Result<()> {
        let bytes = self.0.save()?;
        self.0 = CpuQjlCache::load(&bytes)?;
        assert_eq!(self.0.save()?, bytes, "a loaded cache is saved as it was");
        Ok(())
    }

    fn bytes(&self) -> [u64; 2] {
        [self.0.bytes(), self.0.payload_bytes()]
    }
}

fn walk(setting: &Setting, seed: u64, acts: usize) {
    let cache = CpuQjlCache::new(&setting.layers, setting.sequences, setting.options.clone()).unwrap();
    let mut walk = Walk::new(setting, Host(cache), seed);
    (0..acts).for_each(|_| walk.act());
}

#[test]
fn any_interleaving_equals_the_simplest_cache() {
    for (index, setting) in settings::settings().iter().enumerate() {
        for seed in 0..4 {
            walk(setting, 100 * index as u64 + seed, 30);
        }
    }
}

#[test]
fn sequences_of_every_length_equal_the_simplest_cache() {
    for (index, setting) in settings::three().iter().enumerate() {
        let cache = CpuQjlCache::new(&setting.layers, 3, setting.options.clone()).unwrap();
        Walk::new(setting, Host(cache), index as u64).lengths_of(&[0, 1, 777]);
    }
}

#[test]
fn a_fixed_cache_takes_what_was_reserved() {
    for (index, setting) in settings::fixed().iter().enumerate() {
        let cache = CpuQjlCache::new(&setting.layers, 1, setting.options.clone()).unwrap();
        Walk::new(setting, Host(cache), index as u64).takes_what_was_reserved();
    }
}

#[test]
fn every_width_and_group_equals_the_simplest_cache() {
    for (index, setting) in settings::widths().iter().enumerate() {
        walk(setting, index as u64, 10);
    }
}
