//! kvfold's cache on a device of its own: a step's rows go up and its attention comes back, since the model runs on the host.

use std::time::{Duration, Instant};

use anyhow::Result;
use kvfold::attention::Precision;
use kvfold::cache::Step;
use kvfold::fold::{FoldedCache, Policy};
use kvfold::gpu::{ReadBack, Request};
use kvfold::{DType, Gpu, KvView, Shape, Tensor};

use crate::cache::{Bytes, Cache, StepTensors, model_of, options, raw_bytes};
use crate::model::{Attention, Config, Rows};

/// A cache of one sequence.
pub(crate) struct DeviceCache {
    config: Config,
    gpu: Gpu,
    cache: FoldedCache,
    precision: Precision,
    spent: Duration,
    recorded: Duration,
}

impl DeviceCache {
    pub(crate) fn new(config: &Config, policy: Policy, precision: Precision) -> Result<Self> {
        let mut request = Request::default();
        if let Ok(name) = std::env::var("KVFOLD_ADAPTER") {
            request = request.name(name);
        }
        let gpu = Gpu::request_blocking(request)?;
        let cache = FoldedCache::new(&gpu, model_of(config, &policy), policy, 1)?;
        Ok(Self {
            config: config.clone(),
            gpu,
            cache,
            precision,
            spent: Duration::ZERO,
            recorded: Duration::ZERO,
        })
    }

    fn view(&self, tensor: &Tensor) -> Result<KvView> {
        let buffer = self.gpu.upload("rows", tensor.bytes())?;
        Ok(KvView::new(&buffer, tensor.dtype(), tensor.shape()))
    }
}

impl Attention for DeviceCache {
    fn attend(&mut self, layer: usize, rows: Rows<'_>) -> Result<Vec<f32>> {
        let step = StepTensors::new(rows, &self.config)?;
        let start = Instant::now();
        let [keys, values, queries] =
            [self.view(&step.keys)?, self.view(&step.values)?, self.view(&step.queries)?];
        let shape = Shape::new(1, self.config.heads, rows.tokens, self.config.head_dim)?;
        let output = self.gpu.storage("attended", shape.bytes(DType::F32) as u64)?;
        let view = KvView::new(&output, DType::F32, shape);
        let options = options(&self.config, layer).precision(self.precision);
        let (gpu, cache, recorded) = (&self.gpu, &mut self.cache, &mut self.recorded);
        let read_back = gpu.submit(|encoder| {
            let start = Instant::now();
            cache.append(encoder, layer, &Step::new(&keys, &values).queries(&queries))?;
            cache.attend(encoder, layer, &queries, &view, &options)?;
            *recorded += start.elapsed();
            ReadBack::schedule(gpu, encoder, &output)
        })?;
        let bytes = read_back.wait_blocking()?;
        let attended = bytes.as_chunks::<4>().0.iter().map(|&four| f32::from_le_bytes(four)).collect();
        self.spent += start.elapsed();
        Ok(attended)
    }

    fn commit(&mut self) -> Result<()> {
        let start = Instant::now();
        // What a commit asks of the device is folded by a later one; waiting makes every step see all that can be folded.
        self.gpu.submit(|encoder| self.cache.commit(encoder))?;
        self.gpu.wait_blocking()?;
        self.gpu.submit(|encoder| self.cache.commit(encoder))?;
        self.spent += start.elapsed();
        Ok(())
    }
}

impl Cache for DeviceCache {
    fn bytes(&self) -> Bytes {
        let cache = &self.cache;
        let raw = raw_bytes(&self.config, cache.len(0).unwrap_or_default());
        Bytes { held: cache.bytes(), needed: cache.payload_bytes(), raw }
    }

    fn spent(&self) -> Duration {
        self.spent
    }

    fn recorded(&self) -> Option<Duration> {
        Some(self.recorded)
    }
}
