//! Llamas (Touvron et al. 2023, arXiv 2302.13971), and what their files have of their own: the two channels of a rotary pair side by
//! side, and Llama 3's frequencies.

use anyhow::{Result, anyhow};
use candle_core::{Device, Tensor};

use super::read::slowed;
use super::{Config, Layer};
use crate::gguf::Gguf;

pub(super) const NAME: &str = "llama";

pub(super) fn config(file: &mut Gguf) -> Result<Config> {
    let mut config = Config::read(file, NAME)?;
    if file.has_tensor("rope_freqs.weight") {
        let factors: Vec<f32> = file.tensor("rope_freqs.weight")?.to_vec1()?;
        let factor = |pair: usize| -> Result<f64> {
            let factor = factors.get(pair).copied().map(f64::from);
            factor
                .ok_or_else(|| anyhow!("rope_freqs.weight: wanted one for each pair, had {}", factors.len()))
        };
        for rope in &mut config.ropes {
            *rope = slowed(rope, config.head_dim, factor)?;
        }
    }
    Ok(config)
}

pub(super) fn layer(file: &mut Gguf, config: &Config, index: usize) -> Result<Layer> {
    let rotary_dim = config.ropes.get(index).map_or(config.head_dim, kvfold::rope::Rope::rotary_dim);
    let mut layer = Layer::read(file, index)?;
    layer.queries = half_split(&layer.queries, config.heads, config.head_dim, rotary_dim)?;
    layer.keys = half_split(&layer.keys, config.kv_heads, config.head_dim, rotary_dim)?;
    Ok(layer)
}

/// Rows of a projection in the order in which RoPE turns channel `c` with `c + rotary_dim / 2`: GGUF files of Llamas have the
/// two of a pair side by side.
fn half_split(weights: &Tensor, heads: usize, head_dim: usize, rotary_dim: usize) -> Result<Tensor> {
    let order = (0..heads).flat_map(|head| {
        (0..head_dim).map(move |c| {
            let from = if c >= rotary_dim {
                c
            } else if c < rotary_dim / 2 {
                2 * c
            } else {
                2 * (c - rotary_dim / 2) + 1
            };
            (head * head_dim + from) as u32
        })
    });
    let order = Tensor::from_iter(order, &Device::Cpu)?;
    Ok(weights.index_select(&order, 0)?)
}
