//! Rows of a cache on the host: raw blocks, and a layer's rows wherever they stand.

use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use super::super::cache::{Held, Ledger};
use super::super::cpu::{read_bytes, read_row};
use super::Host;
use crate::attention::Rows;
use crate::cache::tail::{Block, MakeBlock, Write};
use crate::cache::{LayerShape, Segment, Step};
use crate::error::{Error, Result};
use crate::tensor::{Shape, Tensor, TensorView, checked_bytes, decode};

/// Tokens of the smallest block.
const MIN_BLOCK: usize = 128;

/// Keys and values of one sequence and layer, `[kv_heads, capacity, dim]` each.
#[derive(Debug)]
pub(crate) struct HostBlock {
    shape: LayerShape,
    capacity: usize,
    parts: [RwLock<Vec<u8>>; 2],
}

impl HostBlock {
    fn new(shape: LayerShape, capacity: usize) -> Result<Self> {
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
    pub(super) fn put(&self, sequence: usize, write: &Write<Self>, step: &Step<'_, TensorView<'_>>) {
        for (part, view) in [step.keys, step.values].into_iter().enumerate() {
            let row = |head, token| view.row_bytes(sequence, head, write.from + token);
            self.write(part, write.at, write.count, row);
        }
    }

    /// Replaces rows by those of tensors `[1, kv_heads, tokens, dim]`.
    pub(super) fn replace(&self, at: usize, tensors: [&Tensor; 2], from: usize, tokens: usize) {
        for (part, tensor) in tensors.into_iter().enumerate() {
            let view = tensor.view();
            self.write(part, at, tokens, |head, token| view.row_bytes(0, head, from + token));
        }
    }

    /// Rows as a tensor `[1, kv_heads, tokens, dim]`.
    pub(super) fn tensor(&self, part: usize, at: usize, tokens: usize) -> Result<Tensor> {
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

    fn with_row<T>(&self, part: usize, head: usize, row: usize, take: impl FnOnce(&[u8]) -> T) -> T {
        let Some(bytes) = self.parts.get(part) else { return take(&[]) };
        let bytes = bytes.read().unwrap_or_else(PoisonError::into_inner);
        take(bytes.get(self.place(part, head, row, 1)).unwrap_or_default())
    }
}

/// Makes blocks for one layer.
pub(super) struct HostBlocks {
    pub(super) shape: LayerShape,
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

/// Keys or values of one layer, wherever they stand.
pub(super) struct LayerRows<'a> {
    shape: LayerShape,
    part: usize,
    /// Of every sequence, in order of their tokens.
    sequences: Vec<Vec<(Segment, Held<'a, Host>)>>,
}

impl<'a> LayerRows<'a> {
    pub(super) fn new(ledger: &'a Ledger<Host>, layer: usize, part: usize) -> Self {
        let shape = ledger.layers.get(layer).copied();
        let shape = shape.unwrap_or(LayerShape::new(0, 0, crate::DType::F32));
        let mut sequences: Vec<Vec<_>> = ledger.sequences.iter().map(|_| Vec::new()).collect();
        for (segment, held) in ledger.segments(layer) {
            if let Some(sequence) = sequences.get_mut(segment.sequence) {
                sequence.push((segment, held));
            }
        }
        Self { shape, part, sequences }
    }

    /// Where a token stands, and its row there.
    fn find(&self, sequence: usize, token: usize) -> Option<(&Held<'a, Host>, usize)> {
        let segments = self.sequences.get(sequence)?;
        let after = segments.partition_point(|(segment, _)| segment.start <= token);
        let (segment, held) = segments.get(after.checked_sub(1)?)?;
        let row = token - segment.start;
        (row < segment.tokens).then_some((held, row))
    }

    fn bytes(&self, sequence: usize, head: usize, token: usize, bytes: &mut Vec<u8>) {
        match self.find(sequence, token) {
            Some((Held::Raw(block, at), row)) => {
                block.with_row(self.part, head, at + row, |row| bytes.extend_from_slice(row));
            }
            Some((Held::Folded(run, member), row)) => {
                if let Some(fold) = run.folds.get(self.part) {
                    read_bytes(fold, (0, head, row), *member, bytes);
                }
            }
            None => bytes.resize(bytes.len() + self.width() * self.shape.dtype.size(), 0),
        }
    }

    /// Tokens of one sequence, `[1, kv_heads, tokens, dim]`.
    pub(super) fn tensor(&self, sequence: usize, tokens: Range<usize>) -> Result<Tensor> {
        let shape = Shape::new(1, self.shape.kv_heads, tokens.len(), self.width())?;
        let mut bytes = Vec::with_capacity(shape.bytes(self.shape.dtype));
        for head in 0..self.shape.kv_heads {
            tokens.clone().for_each(|token| self.bytes(sequence, head, token, &mut bytes));
        }
        Tensor::new(bytes, self.shape.dtype, shape)
    }

    /// All tokens of all sequences.
    pub(super) fn restore(&self) -> Result<Tensor> {
        let ends = self.sequences.iter().map(|s| s.last().map_or(0, |(s, _)| s.start + s.tokens));
        let tokens = ends.max().unwrap_or(0);
        let shape = Shape::new(self.sequences.len(), self.shape.kv_heads, tokens, self.width())?;
        let mut bytes = Vec::with_capacity(shape.bytes(self.shape.dtype));
        shape.iter_rows().for_each(|(b, h, t)| self.bytes(b, h, t, &mut bytes));
        Tensor::new(bytes, self.shape.dtype, shape)
    }
}

impl Rows for LayerRows<'_> {
    fn width(&self) -> usize {
        let [key_dim, value_dim] = self.shape.dims();
        if self.part == 0 { key_dim } else { value_dim }
    }

    fn read(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32> {
        match self.find(batch, token)? {
            (Held::Raw(block, at), index) => {
                let dtype = self.shape.dtype;
                block.with_row(self.part, head, at + index, |bytes| decode(bytes, dtype, row));
                if row.iter().all(|x| x.is_finite()) {
                    return Some(1.0);
                }
                row.fill(0.0);
                None
            }
            (Held::Folded(run, member), index) => {
                read_row(run.folds.get(self.part)?, (0, head, index), *member, row)
            }
        }
    }
}
