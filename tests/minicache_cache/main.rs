//! MiniCache as a cache on the CPU: against a simple cache through random lives, and what it must refuse.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics is a test that fails"
)]

#[path = "../golden/mod.rs"]
#[allow(unreachable_pub, reason = "shared with suites that are crates of their own")]
mod golden;
mod groups;
mod refusals;
mod stacks;
mod store;

#[path = "../random/mod.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with suites that are crates of their own")]
mod numbers;

#[path = "../caches/mod.rs"]
#[allow(unreachable_pub, reason = "shared with suites that are crates of their own")]
mod caches;

use caches::{Cache, Model, Tolerance};
use kvfold::attention::AttendOptions;
use kvfold::cache::Step;
use kvfold::minicache::{CacheReport, CpuMiniCache};
use kvfold::{DType, Result, Tensor};

struct Host(CpuMiniCache);

impl Cache for Host {
    fn add_sequence(&mut self) -> usize {
        self.0.add_sequence()
    }
    fn remove_sequence(&mut self, sequence: usize) -> Result<()> {
        self.0.remove_sequence(sequence)
    }
    fn clear(&mut self, sequence: usize) -> Result<()> {
        self.0.clear(sequence)
    }
    fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        self.0.trim(sequence, tokens)
    }
    fn fork(&mut self, sequence: usize) -> Result<usize> {
        self.0.fork(sequence)
    }
    fn gather(&mut self, indices: &[u32]) -> Result<()> {
        self.0.gather(indices)
    }
    fn append(&mut self, layer: usize, [keys, values]: &[Tensor; 2], counts: &[u32]) -> Result<()> {
        self.0.append(layer, &Step::new(&keys.view(), &values.view()).counts(counts))
    }
    fn attend(&mut self, layer: usize, queries: &Tensor, options: &AttendOptions<'_>) -> Result<Vec<f32>> {
        self.0.attend(layer, &queries.view(), options)
    }
    fn restore(&mut self, layer: usize) -> Result<[Tensor; 2]> {
        self.0.restore(layer)
    }
    fn commit(&mut self) -> Result<()> {
        self.0.commit()
    }
    fn settle(&mut self) -> Result<()> {
        self.0.settle()
    }
    fn report(&self) -> CacheReport {
        self.0.report()
    }
    fn reload(&mut self) -> Result<()> {
        let file = self.0.save()?;
        self.0 = CpuMiniCache::load(&file)?;
        assert_eq!(self.0.save()?, file);
        Ok(())
    }
}

/// A cache's rows are the model's bit for bit. Attention reads merged rows unrounded, which the model rounds to the layer's type
/// (half an ulp of each number of keys and values), and sums in another order.
pub(crate) fn tolerance(model: &Model) -> Tolerance {
    let ulp = match model.shape.dtype {
        DType::F16 => 2f32.powi(-11),
        DType::Bf16 => 2f32.powi(-8),
        DType::F32 => 2f32.powi(-22),
    };
    // Coded directions are restored by way of f16.
    let ulp = if model.options.merge.planes.is_some() { ulp.max(2f32.powi(-11)) } else { ulp };
    // A score moves by at most half an ulp of |q||k|, a few nats here; a weight by as much again.
    Tolerance { row: 0.0, attention: 16.0 * ulp + 2e-6 }
}

#[test]
fn random_lives_agree_with_a_simple_cache() {
    for seed in 0..48 {
        let make = |model: &Model| {
            let layers = vec![model.shape; model.plan.len()];
            let cache = CpuMiniCache::new(layers, model.plan.clone(), model.options.clone())?;
            Ok(Box::new(Host(cache)) as Box<dyn Cache>)
        };
        caches::life(seed, 24, tolerance, make).unwrap();
    }
}
