//! The caches that the model attends through.

use std::time::{Duration, Instant};

use anyhow::Result;
use kvfold::attention::AttendOptions;
use kvfold::cache::{LayerShape, Step};
use kvfold::fold::{CpuFoldedCache, Fold, Model, Policy};
use kvfold::{DType, Shape, Tensor};

use crate::model::{Attention, Config, Rows};

/// Bytes of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bytes {
    /// Of everything held.
    pub(crate) held: u64,
    /// That the rows need.
    pub(crate) needed: u64,
    /// That those which the model can see would need in f16.
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

/// What a cache must know of a model. Layers that a policy has in MiniCache groups keep all their rows, since no row leaves a
/// group; [`options`] hides those outside the window.
pub(crate) fn model_of(config: &Config, policy: &Policy) -> Model {
    let layer = LayerShape::new(config.kv_heads, config.head_dim, DType::F16);
    let windows = config.windows.iter().zip(&policy.layers);
    let windows =
        windows.map(|(window, layer)| window.filter(|_| !matches!(layer.fold, Fold::Minicache(_)))).collect();
    let ropes = config.ropes.iter().cloned().map(Some).collect();
    Model::new(vec![layer; config.layers]).ropes(ropes).windows(windows)
}

/// How a model's layer attends.
pub(crate) fn options(config: &Config, layer: usize) -> AttendOptions<'static> {
    let mut options = AttendOptions::default().causal(true).scale(config.scale);
    options.window = config.windows.get(layer).copied().flatten();
    options
}

/// Bytes in f16 of all rows that some token to come can still see, or that the last one saw.
pub(crate) fn raw_bytes(config: &Config, tokens: usize) -> u64 {
    let token = 2 * 2 * config.kv_heads * config.head_dim;
    let seen =
        config.windows.iter().map(|window| window.map_or(tokens, |window| tokens.min(window as usize)));
    (token * seen.sum::<usize>()) as u64
}

/// kvfold's cache on the host, of one sequence.
pub(crate) struct HostCache {
    config: Config,
    cache: CpuFoldedCache,
    spent: Duration,
}

impl HostCache {
    pub(crate) fn new(config: &Config, policy: Policy) -> Result<Self> {
        let cache = CpuFoldedCache::new(model_of(config, &policy), policy, 1)?;
        Ok(Self { config: config.clone(), cache, spent: Duration::ZERO })
    }
}

impl Attention for HostCache {
    fn attend(&mut self, layer: usize, rows: Rows<'_>) -> Result<Vec<f32>> {
        let step = StepTensors::new(rows, &self.config)?;
        let start = Instant::now();
        let (keys, values, queries) = (step.keys.view(), step.values.view(), step.queries.view());
        self.cache.append(layer, &Step::new(&keys, &values).queries(&queries))?;
        let out = self.cache.attend(layer, &queries, &options(&self.config, layer))?;
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
        let raw = raw_bytes(&self.config, cache.len(0).unwrap_or_default());
        Bytes { held: cache.bytes(), needed: cache.payload_bytes(), raw }
    }

    fn spent(&self) -> Duration {
        self.spent
    }
}
