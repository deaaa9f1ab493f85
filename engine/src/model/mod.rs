//! The forward pass of a decoder: RMS norm, rotary positions, grouped queries, a gated feed-forward; all in f32, with attention left
//! to a cache. What architectures differ in is data: their modules read it from a file.

mod gemma3;
mod llama;
mod read;

use anyhow::{Context, Result};
use candle_core::{D, Device, Tensor};
use kvfold::rope::Rope;

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

/// What gates the feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// SwiGLU (Shazeer 2020, arXiv 2002.05202).
    Silu,
    /// GEGLU of the same paper, by the approximation with tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415).
    Gelu,
}

/// Sizes of a model, and what it does apart from its weights.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub(crate) layers: usize,
    /// Channels between layers.
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) epsilon: f64,
    /// Of every layer.
    pub(crate) ropes: Vec<Rope>,
    /// Tokens that every layer sees, the query's own included; none where it sees all.
    pub(crate) windows: Vec<Option<u32>>,
    /// What `q . k` is multiplied with.
    pub(crate) scale: f32,
    /// What embeddings are multiplied with.
    pub(crate) embedding_scale: f64,
    pub(crate) activation: Activation,
}

/// Weights of one layer; matrices `[out, in]`.
pub(crate) struct Layer {
    pub(crate) attention_norm: Tensor,
    pub(crate) queries: Tensor,
    /// `[head_dim]`, on every head before RoPE; as for keys.
    pub(crate) query_norm: Option<Tensor>,
    pub(crate) keys: Tensor,
    pub(crate) key_norm: Option<Tensor>,
    pub(crate) values: Tensor,
    pub(crate) output: Tensor,
    /// On what attention adds to the hidden state.
    pub(crate) output_norm: Option<Tensor>,
    pub(crate) feed_norm: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    pub(crate) down: Tensor,
    /// On what the feed-forward adds.
    pub(crate) down_norm: Option<Tensor>,
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
    /// Hidden states `[tokens, width]` behind the last layer of tokens that stand at `start` and after.
    pub(crate) fn forward(&self, tokens: &[u32], start: usize, cache: &mut dyn Attention) -> Result<Tensor> {
        let ids = Tensor::new(tokens, &Device::Cpu)?;
        let epsilon = self.config.epsilon;
        let mut x = (self.embedding.index_select(&ids, 0)? * self.config.embedding_scale)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let h = norm(&x, &layer.attention_norm, epsilon)?;
            let attended = self.attend(&h, index, layer, start, cache)?;
            x = (x + normed(attended, layer.output_norm.as_ref(), epsilon)?)?;
            let h = norm(&x, &layer.feed_norm, epsilon)?;
            let gate = linear(&h, &layer.gate)?;
            let gate = match self.config.activation {
                Activation::Silu => gate.silu()?,
                Activation::Gelu => gate.gelu()?,
            };
            let fed = linear(&(gate * linear(&h, &layer.up)?)?, &layer.down)?;
            x = (x + normed(fed, layer.down_norm.as_ref(), epsilon)?)?;
        }
        cache.commit()?;
        norm(&x, &self.norm, epsilon)
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
        let Config { heads, kv_heads, head_dim, epsilon, .. } = self.config;
        let tokens = h.dim(0)?;
        let project = |weights: &Tensor, norm: Option<&Tensor>, heads: usize| -> Result<Vec<f32>> {
            let rows = linear(h, weights)?.reshape((tokens, heads, head_dim))?;
            let rows = normed(rows, norm, epsilon)?.transpose(0, 1)?;
            Ok(rows.contiguous()?.flatten_all()?.to_vec1()?)
        };
        let mut queries = project(&layer.queries, layer.query_norm.as_ref(), heads)?;
        let mut keys = project(&layer.keys, layer.key_norm.as_ref(), kv_heads)?;
        let values = project(&layer.values, None, kv_heads)?;
        if let Some(rope) = self.config.ropes.get(index) {
            for rows in [&mut queries, &mut keys] {
                for (row, token) in rows.chunks_exact_mut(head_dim).zip((0..tokens).cycle()) {
                    rope.rotate(row, &rope.angles(u32::try_from(start + token)?));
                }
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

/// [`norm`], where there are weights for it.
fn normed(x: Tensor, weights: Option<&Tensor>, epsilon: f64) -> Result<Tensor> {
    match weights {
        Some(weights) => norm(&x, weights, epsilon),
        None => Ok(x),
    }
}
