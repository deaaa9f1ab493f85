//! What every streaming cache shares: the shapes of its layers, the steps it takes, and blocks of raw rows.

pub(crate) mod host;
pub(crate) mod tail;

use serde::{Deserialize, Serialize};

use crate::attention::heads_ratio;
use crate::error::{Error, Result};
use crate::rope::Positions;
use crate::tensor::{DType, MAX_HEAD_DIM, Shape, TensorView};

/// What one layer of a cache holds for every token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerShape {
    /// KV heads.
    pub kv_heads: usize,
    /// Channels of a key, 1 to 512.
    pub key_dim: usize,
    /// Channels of a value, 1 to 512.
    pub value_dim: usize,
    /// Element type of keys and values.
    pub dtype: DType,
}

impl LayerShape {
    /// A layer whose keys and values have equally many channels.
    #[must_use]
    pub const fn new(kv_heads: usize, head_dim: usize, dtype: DType) -> Self {
        Self { kv_heads, key_dim: head_dim, value_dim: head_dim, dtype }
    }

    /// Sets the channels of a value.
    #[must_use]
    pub const fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// Checks that there are heads and channels.
    ///
    /// # Errors
    /// [`Error::Range`] naming the first size that is out of range.
    pub fn check(&self) -> Result<()> {
        if self.kv_heads == 0 {
            return Err(Error::range("KV heads", "at least 1", 0));
        }
        for (what, dim) in [("key dimension", self.key_dim), ("value dimension", self.value_dim)] {
            if !(1..=MAX_HEAD_DIM).contains(&dim) {
                return Err(Error::range(what, format!("1 to {MAX_HEAD_DIM}"), dim));
            }
        }
        Ok(())
    }

    /// Channels of a key and of a value.
    #[must_use]
    pub const fn dims(&self) -> [usize; 2] {
        [self.key_dim, self.value_dim]
    }

    /// Bytes of the key and value rows of one token, all heads.
    #[must_use]
    pub const fn token_bytes(&self) -> usize {
        self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.size()
    }
}

/// A tensor of rows that a cache can take, on the host or on a device.
pub trait RowsView {
    /// `[batch, heads, tokens, dim]`.
    fn shape(&self) -> Shape;

    /// The element type.
    fn dtype(&self) -> DType;
}

impl RowsView for TensorView<'_> {
    fn shape(&self) -> Shape {
        Self::shape(self)
    }

    fn dtype(&self) -> DType {
        Self::dtype(self)
    }
}

#[cfg(feature = "gpu")]
impl RowsView for crate::gpu::KvView {
    fn shape(&self) -> Shape {
        Self::shape(self)
    }

    fn dtype(&self) -> DType {
        Self::dtype(self)
    }
}

/// One layer's new rows of every sequence: keys `[sequences, kv_heads, tokens, key_dim]` and values
/// `[sequences, kv_heads, tokens, value_dim]`, as the model caches them, after RoPE.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Step<'a, V> {
    /// The keys.
    pub keys: &'a V,
    /// The values.
    pub values: &'a V,
    /// The queries of these tokens, `[sequences, query_heads, tokens, key_dim]`, after RoPE and not scaled, where the cache
    /// learns from them.
    pub queries: Option<&'a V>,
    /// How many of the tokens, from the first, each sequence takes; all where this is `None`.
    pub counts: Option<&'a [u32]>,
    /// Positions of the tokens in RoPE's sense; where this is `None` each sequence goes on from its last, or from 0.
    pub positions: Option<Positions<'a>>,
}

impl<'a, V: RowsView> Step<'a, V> {
    /// A step that gives every sequence all of its tokens.
    #[must_use]
    pub const fn new(keys: &'a V, values: &'a V) -> Self {
        Self { keys, values, queries: None, counts: None, positions: None }
    }

    /// Sets the queries of these tokens.
    #[must_use]
    pub const fn queries(mut self, queries: &'a V) -> Self {
        self.queries = Some(queries);
        self
    }

    /// Sets the positions of these tokens.
    #[must_use]
    pub const fn positions(mut self, positions: Positions<'a>) -> Self {
        self.positions = Some(positions);
        self
    }

    /// Sets how many of the tokens, from the first, each sequence takes: 0 leaves a sequence as it is.
    #[must_use]
    pub const fn counts(mut self, counts: &'a [u32]) -> Self {
        self.counts = Some(counts);
        self
    }

    /// Checks the step against its layer and gives the tokens of every sequence.
    pub(crate) fn check(&self, layer: &LayerShape, sequences: usize) -> Result<Vec<usize>> {
        let keys = self.keys.shape();
        let want = |dim| Shape { batch: sequences, heads: layer.kv_heads, tokens: keys.tokens, dim };
        keys.check_equal("keys", want(layer.key_dim))?;
        self.values.shape().check_equal("values", want(layer.value_dim))?;
        for (what, view) in [("keys", self.keys), ("values", self.values)] {
            if view.dtype() != layer.dtype {
                let (want, have) = (layer.dtype.to_string(), view.dtype().to_string());
                return Err(Error::DType { what: what.to_owned(), want, have });
            }
        }
        if let Some(queries) = self.queries.map(RowsView::shape) {
            heads_ratio(queries.heads, layer.kv_heads)?;
            queries.check_equal("queries", Shape { heads: queries.heads, ..want(layer.key_dim) })?;
        }
        let Some(counts) = self.counts else { return Ok(vec![keys.tokens; sequences]) };
        if counts.len() != sequences {
            return Err(Error::shape("token counts", format_args!("[{sequences}]"), counts.len()));
        }
        match counts.iter().find(|&&count| count as usize > keys.tokens) {
            Some(count) => Err(Error::range("token count", format!("at most {}", keys.tokens), count)),
            None => Ok(counts.iter().map(|&count| count as usize).collect()),
        }
    }
}

/// Consecutive tokens of one sequence that one store holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) sequence: usize,
    /// The token that the store's first row holds.
    pub(crate) start: usize,
    pub(crate) tokens: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    fn tensor(batch: usize, tokens: usize, dim: usize, dtype: DType) -> Tensor {
        let shape = Shape::new(batch, 2, tokens, dim).unwrap();
        Tensor::from_f32(&vec![0.0; shape.elements()], dtype, shape).unwrap()
    }

    #[test]
    fn a_step_that_does_not_fit_names_what_it_lacks() {
        let layer = LayerShape::new(2, 4, DType::F16).value_dim(6);
        let (keys, values) = (tensor(3, 5, 4, DType::F16), tensor(3, 5, 6, DType::F16));
        let (keys, values) = (keys.view(), values.view());
        let step = Step::new(&keys, &values);
        assert_eq!(step.check(&layer, 3).unwrap(), [5, 5, 5]);
        assert_eq!(step.counts(&[0, 5, 1]).check(&layer, 3).unwrap(), [0, 5, 1]);
        let message = |result: Result<Vec<usize>>| result.unwrap_err().to_string();
        assert_eq!(message(step.check(&layer, 2)), "keys: wanted [2, 2, 5, 4], had [3, 2, 5, 4]");
        assert_eq!(message(step.counts(&[1]).check(&layer, 3)), "token counts: wanted [3], had 1");
        assert_eq!(message(step.counts(&[1, 6, 0]).check(&layer, 3)), "token count: wanted at most 5, had 6");
        let full = tensor(3, 5, 6, DType::F32);
        let message = message(Step::new(&keys, &full.view()).check(&layer, 3));
        assert_eq!(message, "values: wanted element type f16, had f32");
    }
}
