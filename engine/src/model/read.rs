//! What GGUF files of all architectures say alike.

use anyhow::{Result, bail};
use candle_core::Tensor;
use kvfold::capture::RopeLayout;
use kvfold::rope::Rope;

use super::{Activation, Config, Layer, Model, gemma3, llama};
use crate::gguf::Gguf;

/// Reads a layer, the order of its rows that which RoPE expects here.
type ReadLayer = fn(&mut Gguf, &Config, usize) -> Result<Layer>;

impl Model {
    /// Reads a model, its quantisation undone.
    pub(crate) fn from_gguf(file: &mut Gguf) -> Result<Self> {
        let architecture = file.text("general.architecture")?.to_owned();
        let (config, layer): (_, ReadLayer) = match architecture.as_str() {
            llama::NAME => (llama::config(file)?, llama::layer),
            gemma3::NAME => (gemma3::config(file)?, gemma3::layer),
            _ => bail!("architecture: wanted {} or {}, had {architecture}", llama::NAME, gemma3::NAME),
        };
        let embedding = file.tensor("token_embd.weight")?;
        let output =
            if file.has_tensor("output.weight") { file.tensor("output.weight")? } else { embedding.clone() };
        let layers = (0..config.layers).map(|index| layer(file, &config, index));
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self { embedding, layers, norm: file.tensor("output_norm.weight")?, output, config })
    }
}

impl Config {
    /// What a file says under the name of its architecture, and otherwise what a Llama is.
    pub(super) fn read(file: &Gguf, name: &str) -> Result<Self> {
        let key = |part: &str| format!("{name}.{part}");
        let layers = file.size(&key("block_count"))?;
        let width = file.size(&key("embedding_length"))?;
        let heads = file.size(&key("attention.head_count"))?;
        let head_dim = file.size_or(&key("attention.key_length"), width / heads.max(1))?;
        let value_dim = file.size_or(&key("attention.value_length"), head_dim)?;
        if value_dim != head_dim {
            bail!("{}: wanted that of keys, {head_dim}, had {value_dim}", key("attention.value_length"));
        }
        let theta = f64::from(file.float_or(&key("rope.freq_base"), 1e4)?);
        let rotary_dim = file.size_or(&key("rope.dimension_count"), head_dim)?;
        let rope = Rope::from_theta(head_dim, rotary_dim, theta, RopeLayout::HalfSplit)?;
        let factor = scaling(file, name)?;
        Ok(Self {
            layers,
            width,
            heads,
            kv_heads: file.size_or(&key("attention.head_count_kv"), heads)?,
            head_dim,
            epsilon: f64::from(file.float(&key("attention.layer_norm_rms_epsilon"))?),
            ropes: vec![slowed(&rope, head_dim, |_| Ok(factor))?; layers],
            windows: vec![None; layers],
            scale: (1.0 / (head_dim as f64).sqrt()) as f32,
            embedding_scale: 1.0,
            activation: Activation::Silu,
        })
    }
}

/// By what the file has frequencies divided (linear interpolation of positions, Chen et al. 2023, arXiv 2306.15595).
fn scaling(file: &Gguf, name: &str) -> Result<f64> {
    let key = format!("{name}.rope.scaling.type");
    match if file.find(&key).is_some() { file.text(&key)? } else { "none" } {
        "none" => Ok(1.0),
        "linear" => Ok(f64::from(file.float(&format!("{name}.rope.scaling.factor"))?)),
        other => bail!("RoPE scaling: wanted none or linear, had {other}"),
    }
}

/// The same RoPE, its frequencies divided by these.
pub(super) fn slowed(rope: &Rope, head_dim: usize, by: impl Fn(usize) -> Result<f64>) -> Result<Rope> {
    let frequencies = rope.inv_freq().iter().enumerate().map(|(pair, frequency)| Ok(frequency / by(pair)?));
    let frequencies = frequencies.collect::<Result<_>>()?;
    Ok(Rope::new(head_dim, rope.rotary_dim(), frequencies, rope.layout().clone())?)
}

/// A layer's weight of this name.
pub(super) fn weight(file: &mut Gguf, layer: usize, name: &str) -> Result<Tensor> {
    file.tensor(&format!("blk.{layer}.{name}.weight"))
}

impl Layer {
    /// The weights that all architectures have, as they stand in the file.
    pub(super) fn read(file: &mut Gguf, layer: usize) -> Result<Self> {
        let mut weight = |name: &str| weight(file, layer, name);
        Ok(Self {
            attention_norm: weight("attn_norm")?,
            queries: weight("attn_q")?,
            query_norm: None,
            keys: weight("attn_k")?,
            key_norm: None,
            values: weight("attn_v")?,
            output: weight("attn_output")?,
            output_norm: None,
            feed_norm: weight("ffn_norm")?,
            gate: weight("ffn_gate")?,
            up: weight("ffn_up")?,
            down: weight("ffn_down")?,
            down_norm: None,
        })
    }
}
