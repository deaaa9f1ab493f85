//! Rows on the host: what the CPU's cache keeps them in, and the form that is written to files.

use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use super::super::cut::Cut;
use super::super::folded::Folded;
use super::sequence::Backing;
use crate::cache::tail::{Block, MakeBlock, Write};
use crate::cache::{LayerShape, Step};
use crate::error::{Error, Result};
use crate::tensor::{Shape, Tensor, TensorView, checked_bytes};

/// Tokens of the smallest block.
const MIN_BLOCK: usize = 128;

/// Rows on the host.
#[derive(Debug)]
pub(crate) struct Host;

impl Backing for Host {
    type Block = HostBlock;
    type Fold = Folded;
    type Cut = Cut;
}

/// Keys and values of one sequence and layer, `[kv_heads, capacity, dim]` each.
#[derive(Debug)]
pub(crate) struct HostBlock {
    shape: LayerShape,
    capacity: usize,
    parts: [RwLock<Vec<u8>>; 2],
}

impl HostBlock {
    pub(crate) fn new(shape: LayerShape, capacity: usize) -> Result<Self> {
        let part = |dim| {
            let bytes = checked_bytes("raw rows", &[shape.kv_heads, capacity, dim], shape.dtype.size())?;
            Ok::<_, Error>(RwLock::new(vec![0; bytes]))
        };
        Ok(Self { shape, capacity, parts: [part(shape.key_dim)?, part(shape.value_dim)?] })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.read().unwrap_or_else(PoisonError::into_inner).len() as u64).sum()
    }

    /// Bytes of `tokens` rows of one head.
    fn place(&self, part: usize, head: usize, row: usize, tokens: usize) -> Range<usize> {
        let [key_dim, value_dim] = self.shape.dims();
        let width = if part == 0 { key_dim } else { value_dim } * self.shape.dtype.size();
        let start = (head * self.capacity + row) * width;
        start..start + tokens * width
    }

    /// A block of these bytes, keys and values `[kv_heads, capacity, dim]`.
    #[cfg(feature = "gpu")]
    pub(crate) fn of(shape: LayerShape, capacity: usize, parts: [Vec<u8>; 2]) -> Self {
        Self { shape, capacity, parts: parts.map(RwLock::new) }
    }

    /// Keys and values, `[kv_heads, capacity, dim]`.
    #[cfg(feature = "gpu")]
    pub(crate) fn bytes_of_parts(&self) -> [Vec<u8>; 2] {
        self.parts.each_ref().map(|part| part.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// The shape of its layer, and the tokens it has room for.
    #[cfg(feature = "gpu")]
    pub(crate) fn sizes(&self) -> (LayerShape, usize) {
        (self.shape, self.capacity)
    }

    /// Copies `tokens` rows of one head from `rows` on, each given by `from`.
    fn write<'a>(&self, part: usize, at: usize, tokens: usize, from: impl Fn(usize, usize) -> &'a [u8]) {
        let Some(bytes) = self.parts.get(part) else { return };
        let mut bytes = bytes.write().unwrap_or_else(PoisonError::into_inner);
        for (head, token) in (0..self.shape.kv_heads).flat_map(|h| (0..tokens).map(move |t| (h, t))) {
            let row = from(head, token);
            if let Some(place) = bytes.get_mut(self.place(part, head, at + token, 1))
                && place.len() == row.len()
            {
                place.copy_from_slice(row);
            }
        }
    }

    /// Takes part of a step.
    pub(crate) fn put(&self, sequence: usize, write: &Write<Self>, step: &Step<'_, TensorView<'_>>) {
        for (part, view) in [step.keys, step.values].into_iter().enumerate() {
            let row = |head, token| view.row_bytes(sequence, head, write.from + token);
            self.write(part, write.at, write.count, row);
        }
    }

    /// Replaces rows by those of tensors `[1, kv_heads, tokens, dim]`, keys and values.
    pub(crate) fn replace(&self, at: usize, tensors: [&Tensor; 2], from: usize, tokens: usize) {
        for (part, tensor) in tensors.into_iter().enumerate() {
            self.replace_part(part, at, tensor, from, tokens);
        }
    }

    /// Replaces rows of keys (0) or values (1).
    pub(crate) fn replace_part(&self, part: usize, at: usize, tensor: &Tensor, from: usize, tokens: usize) {
        let view = tensor.view();
        self.write(part, at, tokens, |head, token| view.row_bytes(0, head, from + token));
    }

    /// Rows as a tensor `[1, kv_heads, tokens, dim]`.
    pub(crate) fn tensor(&self, part: usize, at: usize, tokens: usize) -> Result<Tensor> {
        let [key_dim, value_dim] = self.shape.dims();
        let dim = if part == 0 { key_dim } else { value_dim };
        let shape = Shape::new(1, self.shape.kv_heads, tokens, dim)?;
        let mut all = Vec::with_capacity(shape.bytes(self.shape.dtype));
        if let Some(bytes) = self.parts.get(part) {
            let bytes = bytes.read().unwrap_or_else(PoisonError::into_inner);
            for head in 0..self.shape.kv_heads {
                all.extend_from_slice(bytes.get(self.place(part, head, at, tokens)).unwrap_or_default());
            }
        }
        Tensor::new(all, self.shape.dtype, shape)
    }

    pub(crate) fn with_row<T>(
        &self,
        part: usize,
        head: usize,
        row: usize,
        take: impl FnOnce(&[u8]) -> T,
    ) -> T {
        let Some(bytes) = self.parts.get(part) else { return take(&[]) };
        let bytes = bytes.read().unwrap_or_else(PoisonError::into_inner);
        take(bytes.get(self.place(part, head, row, 1)).unwrap_or_default())
    }
}

/// Makes blocks for one layer.
pub(crate) struct HostBlocks {
    pub(crate) shape: LayerShape,
}

impl MakeBlock<HostBlock> for HostBlocks {
    fn capacity(&self, _: usize, tokens: usize) -> usize {
        tokens.next_multiple_of(32).max(MIN_BLOCK)
    }

    fn make(&mut self, capacity: usize) -> Result<HostBlock> {
        HostBlock::new(self.shape, capacity)
    }

    fn copy(&mut self, block: &Block<HostBlock>) -> Result<HostBlock> {
        let copy = HostBlock::new(self.shape, block.capacity)?;
        for (from, to) in block.rows.parts.iter().zip(&copy.parts) {
            let from = from.read().unwrap_or_else(PoisonError::into_inner);
            to.write().unwrap_or_else(PoisonError::into_inner).clone_from(&from);
        }
        Ok(copy)
    }
}
