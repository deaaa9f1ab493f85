//! The forward pass of a Llama (Touvron et al. 2023, arXiv 2302.13971): RMS norm, rotary positions, grouped queries, SwiGLU;
//! all in f32, with attention left to a cache.

use anyhow::{Context, Result, bail};
use candle_core::{D, Device, Tensor};
use kvfold::capture::RopeLayout;
use kvfold::rope::Rope;

use crate::gguf::Gguf;

/// What attends: takes a layer's new rows and answers its queries.
pub(crate) trait Attention {
    /// Appends keys and values `[kv_heads, tokens, head_dim]`, after RoPE, and gives the attention of queries
    /// `[heads, tokens, head_dim]` over everything appended so far, each seeing what stands at or before it.
    fn attend(&mut self, layer: usize, rows: Rows<'_>) -> Result<Vec<f32>>;

    /// Ends a step, once all layers have attended.
    fn commit(&mut self) -> Result<()>;
}

/// One layer's rows of a step.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) tokens: usize,
    pub(crate) keys: &'a [f32],
    pub(crate) values: &'a [f32],
    pub(crate) queries: &'a [f32],
}

/// Sizes of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) epsilon: f64,
    pub(crate) rope: Rope,
}

/// Weights of one layer; matrices `[out, in]`.
pub(crate) struct Layer {
    pub(crate) attention_norm: Tensor,
    pub(crate) queries: Tensor,
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    pub(crate) output: Tensor,
    pub(crate) feed_norm: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    pub(crate) down: Tensor,
}

/// A model in memory.
pub(crate) struct Model {
    pub(crate) config: Config,
    /// `[vocabulary, width]`.
    pub(crate) embedding: Tensor,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Tensor,
    /// `[vocabulary, width]`; the embedding itself where the file has no other.
    pub(crate) output: Tensor,
}

impl Model {
    /// Reads a model, its quantisation undone.
    pub(crate) fn from_gguf(file: &mut Gguf) -> Result<Self> {
        let config = config(file)?;
        let embedding = file.tensor("token_embd.weight")?;
        let output =
            if file.has_tensor("output.weight") { file.tensor("output.weight")? } else { embedding.clone() };
        let layers = (0..config.layers).map(|layer| read_layer(file, &config, layer));
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self { embedding, layers, norm: file.tensor("output_norm.weight")?, output, config })
    }

    /// Hidden states `[tokens, width]` behind the last layer of tokens that stand at `start` and after.
    pub(crate) fn forward(&self, tokens: &[u32], start: usize, cache: &mut dyn Attention) -> Result<Tensor> {
        let ids = Tensor::new(tokens, &Device::Cpu)?;
        let mut x = self.embedding.index_select(&ids, 0)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let h = norm(&x, &layer.attention_norm, self.config.epsilon)?;
            let attended = self.attend(&h, index, layer, start, cache)?;
            x = (x + attended)?;
            let h = norm(&x, &layer.feed_norm, self.config.epsilon)?;
            let gated = (linear(&h, &layer.gate)?.silu()? * linear(&h, &layer.up)?)?;
            x = (x + linear(&gated, &layer.down)?)?;
        }
        cache.commit()?;
        norm(&x, &self.norm, self.config.epsilon)
    }

    /// Logits `[tokens, vocabulary]` of hidden states.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        linear(hidden, &self.output)
    }

    fn attend(
        &self,
        h: &Tensor,
        index: usize,
        layer: &Layer,
        start: usize,
        cache: &mut dyn Attention,
    ) -> Result<Tensor> {
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        let tokens = h.dim(0)?;
        let project = |weights: &Tensor, heads: usize| -> Result<Vec<f32>> {
            let rows = linear(h, weights)?.reshape((tokens, heads, head_dim))?.transpose(0, 1)?;
            Ok(rows.contiguous()?.flatten_all()?.to_vec1()?)
        };
        let mut queries = project(&layer.queries, heads)?;
        let mut keys = project(&layer.keys, kv_heads)?;
        let values = project(&layer.values, kv_heads)?;
        for rows in [&mut queries, &mut keys] {
            for (row, token) in rows.chunks_exact_mut(head_dim).zip((0..tokens).cycle()) {
                let rope = &self.config.rope;
                rope.rotate(row, &rope.angles(u32::try_from(start + token)?));
            }
        }
        let rows = Rows { tokens, keys: &keys, values: &values, queries: &queries };
        let attended = cache.attend(index, rows).with_context(|| format!("attention of layer {index}"))?;
        let attended = Tensor::from_vec(attended, (heads, tokens, head_dim), &Device::Cpu)?;
        let attended = attended.transpose(0, 1)?.reshape((tokens, heads * head_dim))?;
        linear(&attended, &layer.output)
    }
}

/// `x w^T`.
fn linear(x: &Tensor, weights: &Tensor) -> Result<Tensor> {
    Ok(x.matmul(&weights.t()?)?)
}

/// `x / rms(x) * w` (Zhang and Sennrich 2019, arXiv 1910.07467).
fn norm(x: &Tensor, weights: &Tensor, epsilon: f64) -> Result<Tensor> {
    let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + epsilon)?.sqrt()?;
    Ok(x.broadcast_div(&rms)?.broadcast_mul(weights)?)
}

fn config(file: &mut Gguf) -> Result<Config> {
    let architecture = file.text("general.architecture")?;
    if architecture != "llama" {
        bail!("architecture: wanted llama, had {architecture}");
    }
    if let Some(scaling) = file.find("llama.rope.scaling.type").and_then(|value| value.to_string().ok())
        && scaling != "none"
    {
        bail!("RoPE: wanted one without scaling, had {scaling}");
    }
    let width = file.size("llama.embedding_length")?;
    let heads = file.size("llama.attention.head_count")?;
    let kv_heads = file.size_or("llama.attention.head_count_kv", heads)?;
    let head_dim = file.size_or("llama.attention.key_length", width / heads.max(1))?;
    let rotary_dim = file.size_or("llama.rope.dimension_count", head_dim)?;
    let theta =
        if file.find("llama.rope.freq_base").is_some() { file.float("llama.rope.freq_base")? } else { 1e4 };
    let plain = Rope::from_theta(head_dim, rotary_dim, f64::from(theta), RopeLayout::HalfSplit)?;
    let rope = if file.has_tensor("rope_freqs.weight") {
        // Llama 3: what each pair's frequency is divided by.
        let factors: Vec<f32> = file.tensor("rope_freqs.weight")?.to_vec1()?;
        let frequencies = plain.inv_freq().iter().zip(factors).map(|(f, by)| f / f64::from(by)).collect();
        Rope::new(head_dim, rotary_dim, frequencies, RopeLayout::HalfSplit)?
    } else {
        plain
    };
    Ok(Config {
        layers: file.size("llama.block_count")?,
        heads,
        kv_heads,
        head_dim,
        epsilon: f64::from(file.float("llama.attention.layer_norm_rms_epsilon")?),
        rope,
    })
}

fn read_layer(file: &mut Gguf, config: &Config, layer: usize) -> Result<Layer> {
    let mut weight = |name: &str| file.tensor(&format!("blk.{layer}.{name}.weight"));
    Ok(Layer {
        attention_norm: weight("attn_norm")?,
        queries: half_split(&weight("attn_q")?, config.heads, config.head_dim, config.rope.rotary_dim())?,
        keys: half_split(&weight("attn_k")?, config.kv_heads, config.head_dim, config.rope.rotary_dim())?,
        values: weight("attn_v")?,
        output: weight("attn_output")?,
        feed_norm: weight("ffn_norm")?,
        gate: weight("ffn_gate")?,
        up: weight("ffn_up")?,
        down: weight("ffn_down")?,
    })
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
