//! What kvfold is compared with: keys and values as integers per token, the same sinks and recent tokens raw.

use std::time::{Duration, Instant};

use anyhow::Result;
use kvfold::attention::exact;
use kvfold::metrics::{INT4_GROUP, asymmetric, int4_bits, int8_bits, int8_row};
use kvfold::{DType, Shape, Tensor};

use crate::cache::{Bytes, Cache, options, raw_bytes};
use crate::model::{Attention, Config, Rows};

/// First and last tokens that stay raw, and tokens that are coded together, as in kvfold's presets.
const SINKS: usize = 4;
const RECENT: usize = 64;
const PAGE: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codes {
    /// Symmetric, one scale a token.
    Int8,
    /// Asymmetric, a scale and a zero for each 32 channels.
    Int4,
}

impl Codes {
    fn apply(self, row: &mut [f32]) {
        match self {
            Self::Int8 => int8_row(row),
            Self::Int4 => row.chunks_mut(INT4_GROUP).for_each(|group| asymmetric(group, 4)),
        }
    }

    fn bits(self, dim: usize) -> f64 {
        match self {
            Self::Int8 => int8_bits(dim),
            Self::Int4 => int4_bits(dim),
        }
    }
}

/// Rows that went through codes and back, in f16 as attention reads them; nothing is packed.
pub(crate) struct Baseline {
    config: Config,
    codes: Codes,
    /// Of every layer, of every KV head, its keys and its values.
    rows: Vec<Vec<[Vec<f32>; 2]>>,
    tokens: usize,
    coded: usize,
    spent: Duration,
}

impl Baseline {
    pub(crate) fn new(config: &Config, codes: Codes) -> Self {
        let rows = vec![vec![[Vec::new(), Vec::new()]; config.kv_heads]; config.layers];
        Self { config: config.clone(), codes, rows, tokens: 0, coded: 0, spent: Duration::ZERO }
    }
}

/// A number as f16 has it.
fn rounded(x: &f32) -> f32 {
    half::f16::from_f32(*x).to_f32()
}

impl Attention for Baseline {
    fn attend(&mut self, layer: usize, rows: Rows<'_>) -> Result<Vec<f32>> {
        let start = Instant::now();
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        let mut tensors = Vec::new();
        for (part, new) in [rows.keys, rows.values].into_iter().enumerate() {
            let held = self.rows.get_mut(layer).into_iter().flatten();
            let held = held.filter_map(|head| head.get_mut(part));
            let mut all = Vec::new();
            for (held, new) in held.zip(new.chunks_exact(rows.tokens * head_dim)) {
                held.extend(new.iter().map(rounded));
                all.extend_from_slice(held);
            }
            let tokens = all.len() / (kv_heads * head_dim);
            tensors.push(Tensor::from_f32(&all, DType::F16, Shape::new(1, kv_heads, tokens, head_dim)?)?);
            self.tokens = tokens;
        }
        let queries =
            Tensor::from_f32(rows.queries, DType::F32, Shape::new(1, heads, rows.tokens, head_dim)?)?;
        let options = options(&self.config, layer);
        let out = match tensors.as_slice() {
            [keys, values] => exact(&queries.view(), &keys.view(), &values.view(), None, &options)?,
            _ => Vec::new(),
        };
        self.spent += start.elapsed();
        Ok(out)
    }

    fn commit(&mut self) -> Result<()> {
        let start = Instant::now();
        let old = self.tokens.saturating_sub(SINKS + RECENT) / PAGE * PAGE;
        let dim = self.config.head_dim;
        for rows in self.rows.iter_mut().flatten().flatten() {
            let new = rows.get_mut((SINKS + self.coded) * dim..(SINKS + old) * dim).unwrap_or_default();
            for row in new.chunks_exact_mut(dim) {
                self.codes.apply(row);
                row.iter_mut().for_each(|x| *x = rounded(x));
            }
        }
        self.coded = self.coded.max(old);
        self.spent += start.elapsed();
        Ok(())
    }
}

impl Cache for Baseline {
    /// Bytes that the codes would take packed, without the rows that no window sees.
    fn bytes(&self) -> Bytes {
        let dim = self.config.head_dim;
        let channels = (2 * self.config.kv_heads * dim) as f64;
        let layer = |window: &Option<u32>| {
            let seen = window.map_or(self.tokens, |window| self.tokens.min(window as usize));
            let first = SINKS.max(self.tokens - seen);
            let coded = (SINKS + self.coded).saturating_sub(first);
            channels * (coded as f64 * self.codes.bits(dim) / 8.0 + 2.0 * (seen - coded) as f64)
        };
        let needed = self.config.windows.iter().map(layer).sum::<f64>().ceil() as u64;
        Bytes { held: needed, needed, raw: raw_bytes(&self.config, self.tokens) }
    }

    fn spent(&self) -> Duration {
        self.spent
    }
}
