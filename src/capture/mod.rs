//! Captured KV tensors: what a model's cache held, read from and written to safetensors.
//!
//! A capture is a file of keys, values and, where attention is to be measured, queries of every layer of one run. The
//! format is described in `docs/capture-format.md`; [`Capture::open`] reads it and [`Capture::save`] writes it.
//!
//! ```
//! use kvfold::capture::{Capture, CaptureInfo, Layer};
//! use kvfold::{DType, Shape, Tensor};
//!
//! # fn main() -> kvfold::Result<()> {
//! let shape = Shape::new(1, 2, 5, 4)?; // [batch, heads, tokens, head_dim]
//! let zeros = Tensor::from_f32(&vec![0.0; shape.elements()], DType::F16, shape)?;
//! let capture = Capture::new(vec![Layer::new(zeros.clone(), zeros)], CaptureInfo::default())?;
//! let again = Capture::from_bytes(&capture.to_bytes()?)?;
//! assert_eq!((again.batch(), again.tokens(), again.bytes()), (1, 5, 2 * 40 * 2));
//! # Ok(())
//! # }
//! ```

mod check;
pub(crate) mod metadata;
mod read;
mod write;

use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) use check::MAX_SIZE;
pub use read::ReadOptions;

use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// The newest version of the format, metadata `kvfold.capture`; the only one there is so far.
pub const VERSION: u32 = 1;

/// The keys, values and queries of every layer, and what the file says about them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Capture {
    /// The layers from the first on, at least one.
    pub layers: Vec<Layer>,
    /// What the metadata says.
    pub info: CaptureInfo,
}

/// One layer's tensors, `[batch, heads, tokens, head_dim]` each, each of its own element type.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Layer {
    /// Keys as the model caches them, after RoPE. A capture made for looking at RoPE may have only
    /// [`keys_pre_rope`](Self::keys_pre_rope); [`Capture::keys`] turns their absence into an error with a name.
    pub keys: Option<Tensor>,
    /// Values; their `head_dim` may differ from the keys'.
    pub values: Tensor,
    /// Queries after RoPE, not scaled, at the positions that [`Capture::query_positions`] gives. Their heads are a
    /// multiple of the KV heads.
    pub queries: Option<Tensor>,
    /// Keys before RoPE, of the shape of `keys`.
    pub keys_pre_rope: Option<Tensor>,
}

/// How RoPE pairs the rotated channels of a head.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RopeLayout {
    /// Channel `c` with `c + rotary_dim / 2`, as Hugging Face transformers stores Llama and its kin.
    HalfSplit,
    /// Channel `2 c` with `2 c + 1`, as in RoFormer (Su et al. 2021, section 3.4.2).
    Interleaved,
    /// Any other, by the name that the file gives; multi-axis positions, for one.
    Other(String),
}

/// What a capture's metadata says. Everything is optional; [`CaptureInfo::default`] says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CaptureInfo {
    /// The model's name.
    pub model: Option<String>,
    /// Layers of the model, when the capture may hold only its first ones. Metadata `n_layers`.
    pub model_layers: Option<usize>,
    /// What the model multiplies `q . k` with; `1 / sqrt(key_dim)` is usual.
    pub attn_scale: Option<f32>,
    /// The tokens whose queries were captured, as indices of the token axis, for every sequence. Without it they are
    /// the last of each sequence.
    pub query_positions: Option<Range<usize>>,
    /// Tokens of each sequence; rows from there on are padding. Without it every sequence fills the token axis.
    pub lengths: Option<Vec<usize>>,
    /// The position, in RoPE's sense, of the first token of each sequence; 0 without it.
    pub position_start: Option<Vec<u32>>,
    /// Channels of a key that RoPE rotates, the first ones; all of them without it.
    pub rotary_dim: Option<usize>,
    /// RoPE's frequencies in radians per position, `rotary_dim / 2` of them, the same in every layer. Models whose
    /// layers differ give `rope_theta`.
    pub inv_freq: Option<Vec<f32>>,
    /// RoPE's base of each layer.
    pub rope_theta: Option<Vec<f32>>,
    /// How RoPE pairs channels.
    pub rope_layout: Option<RopeLayout>,
    /// Each layer's attention window in tokens, `None` where it sees everything; empty when the file does not say.
    pub sliding_window: Vec<Option<u32>>,
    /// The prompt's token ids, `[batch, tokens]` in row-major order. Tensor `tokens`, not metadata.
    pub token_ids: Option<Vec<i32>>,
    /// All other metadata, kept and written back.
    pub extra: BTreeMap<String, String>,
}

impl Layer {
    /// Keys as cached, and values.
    #[must_use]
    pub fn new(keys: Tensor, values: Tensor) -> Self {
        Self { keys: Some(keys), values, queries: None, keys_pre_rope: None }
    }

    /// Keys before RoPE, and values, without the keys as cached.
    #[must_use]
    pub fn pre_rope(keys_pre_rope: Tensor, values: Tensor) -> Self {
        Self { keys: None, values, queries: None, keys_pre_rope: Some(keys_pre_rope) }
    }

    /// KV heads.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        self.values.shape().heads
    }

    /// Query heads, where queries were captured.
    #[must_use]
    pub fn query_heads(&self) -> Option<usize> {
        self.queries.as_ref().map(|queries| queries.shape().heads)
    }

    /// Channels of a key, whether after or before RoPE; 0 in a layer without keys, which no checked capture has.
    #[must_use]
    pub fn key_dim(&self) -> usize {
        self.any_keys().map_or(0, |keys| keys.shape().dim)
    }

    /// Channels of a value.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        self.values.shape().dim
    }

    /// Length of the token axis.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.values.shape().tokens
    }

    /// Bytes that the layer takes in a cache: its values and one set of keys.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.values.bytes().len() + self.any_keys().map_or(0, |keys| keys.bytes().len())
    }

    fn any_keys(&self) -> Option<&Tensor> {
        self.keys.as_ref().or(self.keys_pre_rope.as_ref())
    }

    /// The tensors that are there, with the part each plays, in the order in which they are written.
    fn tensors(&self) -> impl Iterator<Item = (Part, &Tensor)> {
        let parts = [
            (Part::Key, self.keys.as_ref()),
            (Part::KeyPre, self.keys_pre_rope.as_ref()),
            (Part::Value, Some(&self.values)),
            (Part::Query, self.queries.as_ref()),
        ];
        parts.into_iter().filter_map(|(part, tensor)| Some((part, tensor?)))
    }
}

impl Capture {
    /// A capture of these layers, checked.
    ///
    /// # Errors
    /// As [`Capture::check`].
    pub fn new(layers: Vec<Layer>, info: CaptureInfo) -> Result<Self> {
        let capture = Self { layers, info };
        capture.check()?;
        Ok(capture)
    }

    /// Sequences.
    #[must_use]
    pub fn batch(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.values.shape().batch)
    }

    /// Length of the token axis, the tokens of the longest sequence.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.layers.first().map_or(0, Layer::tokens)
    }

    /// Bytes that the layers take in a cache: the sum of [`Layer::bytes`], padding included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(Layer::bytes).sum()
    }

    /// Tokens of a sequence; the whole token axis where the file does not say.
    #[must_use]
    pub fn length(&self, sequence: usize) -> usize {
        let lengths = self.info.lengths.as_deref().unwrap_or(&[]);
        lengths.get(sequence).copied().unwrap_or_else(|| self.tokens())
    }

    /// A layer's keys as cached.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] naming `layer.{i}.key` when there are only keys before RoPE or no such layer.
    pub fn keys(&self, layer: usize) -> Result<&Tensor> {
        self.tensor(layer, Part::Key)
    }

    /// A layer's queries.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] naming `layer.{i}.query` when none were captured or there is no such layer.
    pub fn queries(&self, layer: usize) -> Result<&Tensor> {
        self.tensor(layer, Part::Query)
    }

    fn tensor(&self, index: usize, wanted: Part) -> Result<&Tensor> {
        let missing = |have| Error::MissingTensor { tensor: wanted.name(index), have };
        let layer = self.layers.get(index).ok_or_else(|| missing(format!("{} layers", self.layers.len())))?;
        let found = layer.tensors().find(|&(part, _)| part == wanted).map(|(_, tensor)| tensor);
        found.ok_or_else(|| missing(names(layer.tensors().map(|(part, _)| part.name(index)))))
    }

    /// The tokens, as indices of the token axis, at which a layer's queries stand in a sequence; `None` where the layer
    /// has no queries.
    #[must_use]
    pub fn query_positions(&self, layer: usize, sequence: usize) -> Option<Range<usize>> {
        let count = self.layers.get(layer)?.queries.as_ref()?.shape().tokens;
        let last = || {
            let length = self.length(sequence);
            length.saturating_sub(count)..length
        };
        Some(self.info.query_positions.clone().unwrap_or_else(last))
    }

    /// RoPE's frequencies in a layer, in radians per position: metadata `inv_freq`, else
    /// `theta^(-2 i / rotary_dim)` for `i` below `rotary_dim / 2` (Su et al. 2021, section 3.2.2) from metadata
    /// `rope_theta`; `None` where the file gives neither.
    #[must_use]
    pub fn inv_freq(&self, layer: usize) -> Option<Vec<f32>> {
        self.info.layer_inv_freq(layer, self.layers.get(layer)?.key_dim())
    }
}

impl CaptureInfo {
    /// [`Capture::inv_freq`] of a layer whose keys have so many channels.
    pub(crate) fn layer_inv_freq(&self, layer: usize, key_dim: usize) -> Option<Vec<f32>> {
        if let Some(inv_freq) = &self.inv_freq {
            return Some(inv_freq.clone());
        }
        let theta = f64::from(*self.rope_theta.as_ref()?.get(layer)?);
        let rotary = self.rotary_dim.unwrap_or(key_dim);
        let frequency = |i: usize| theta.powf(-2.0 * i as f64 / rotary as f64) as f32;
        Some((0..rotary / 2).map(frequency).collect())
    }
}

/// What a tensor of a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Key,
    KeyPre,
    Value,
    Query,
}

impl Part {
    const ALL: [Self; 4] = [Self::Key, Self::KeyPre, Self::Value, Self::Query];

    const fn suffix(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::KeyPre => "key_pre",
            Self::Value => "value",
            Self::Query => "query",
        }
    }

    /// The tensor's name in the file.
    fn name(self, layer: usize) -> String {
        format!("layer.{layer}.{}", self.suffix())
    }

    /// The part and layer that a name says; only names as [`Part::name`] writes them.
    fn parse(name: &str) -> Option<(usize, Self)> {
        let (layer, suffix) = name.strip_prefix("layer.")?.split_once('.')?;
        let layer = layer.parse().ok()?;
        let part = Self::ALL.into_iter().find(|part| part.suffix() == suffix)?;
        (part.name(layer) == name).then_some((layer, part))
    }
}

/// A list of names for an error: the first few, and how many more.
fn names(all: impl Iterator<Item = String>) -> String {
    const SHOWN: usize = 4;
    let mut all = all.peekable();
    if all.peek().is_none() {
        return "0 tensors".to_owned();
    }
    let shown: Vec<String> = all.by_ref().take(SHOWN).collect();
    match all.count() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
