//! The caches that the model attends through.

use std::time::{Duration, Instant};

use anyhow::Result;
use kvfold::attention::AttendOptions;
use kvfold::cache::{LayerShape, Step};
use kvfold::fold::{CpuFoldedCache, Model, Policy};
use kvfold::{DType, Shape, Tensor};

use crate::model::{Attention, Config, Rows};

/// Bytes of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bytes {
    /// Of everything held.
    pub(crate) held: u64,
    /// That the rows need.
    pub(crate) needed: u64,
    /// That they would need in f16.
    pub(crate) raw: u64,
}

impl Bytes {
    pub(crate) fn ratio(&self) -> f64 {
        self.raw as f64 / self.needed.max(1) as f64
    }
}

/// A cache that says what it takes.
pub(crate) trait Cache: Attention {
    fn bytes(&self) -> Bytes;

    /// Time spent so far in appending, attending and committing, waiting for the device included.
    fn spent(&self) -> Duration;

    /// Time spent so far in recording for a device.
    fn recorded(&self) -> Option<Duration> {
        None
    }
}

/// A layer's rows as a cache takes them: keys and values in f16, queries in f32.
pub(crate) struct StepTensors {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    pub(crate) queries: Tensor,
}

impl StepTensors {
    pub(crate) fn new(rows: Rows<'_>, config: &Config) -> Result<Self> {
        let tensor = |numbers: &[f32], heads, dtype| {
            Tensor::from_f32(numbers, dtype, Shape::new(1, heads, rows.tokens, config.head_dim)?)
        };
        Ok(Self {
            keys: tensor(rows.keys, config.kv_heads, DType::F16)?,
            values: tensor(rows.values, config.kv_heads, DType::F16)?,
            queries: tensor(rows.queries, config.heads, DType::F32)?,
        })
    }
}

/// What a cache must know of a model.
pub(crate) fn model_of(config: &Config) -> Model {
    let layer = LayerShape::new(config.kv_heads, config.head_dim, DType::F16);
    Model::new(vec![layer; config.layers]).rope(config.rope.clone())
}

/// kvfold's cache on the host, of one sequence.
pub(crate) struct HostCache {
    config: Config,
    cache: CpuFoldedCache,
    spent: Duration,
}

impl HostCache {
    pub(crate) fn new(config: &Config, policy: Policy) -> Result<Self> {
        let cache = CpuFoldedCache::new(model_of(config), policy, 1)?;
        Ok(Self { config: config.clone(), cache, spent: Duration::ZERO })
    }
}

impl Attention for HostCache {
    fn attend(&mut self, layer: usize, rows: Rows<'_>) -> Result<Vec<f32>> {
        let step = StepTensors::new(rows, &self.config)?;
        let start = Instant::now();
        let (keys, values, queries) = (step.keys.view(), step.values.view(), step.queries.view());
        self.cache.append(layer, &Step::new(&keys, &values).queries(&queries))?;
        let out = self.cache.attend(layer, &queries, &AttendOptions::default().causal(true))?;
        self.spent += start.elapsed();
        Ok(out)
    }

    fn commit(&mut self) -> Result<()> {
        let start = Instant::now();
        self.cache.commit()?;
        self.spent += start.elapsed();
        Ok(())
    }
}

impl Cache for HostCache {
    fn bytes(&self) -> Bytes {
        let cache = &self.cache;
        Bytes { held: cache.bytes(), needed: cache.payload_bytes(), raw: cache.raw_bytes() }
    }

    fn spent(&self) -> Duration {
        self.spent
    }
}
