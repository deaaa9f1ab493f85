//! Blocks of raw keys and values on the host: the twin of `gpu/block.rs`.

use std::sync::Arc;

use super::LayerShape;
use super::tail::{Block, MakeBlock, Tail};
use crate::error::Result;
use crate::tensor::{Shape, Strides, TensorView, checked_bytes};

/// Keys and values of one sequence and layer, `[kv_heads, capacity, dim]` each.
#[derive(Clone, Debug)]
pub(crate) struct HostBlock {
    rows: [Vec<u8>; 2],
    shape: LayerShape,
    capacity: usize,
}

impl HostBlock {
    pub(crate) fn new(shape: LayerShape, capacity: usize) -> Result<Self> {
        let room = |dim| -> Result<Vec<u8>> {
            Ok(vec![0; checked_bytes("raw rows", &[shape.kv_heads, capacity, dim], shape.dtype.size())?])
        };
        let [keys, values] = shape.dims().map(room);
        Ok(Self { rows: [keys?, values?], shape, capacity })
    }

    /// A block of rows each of which begins at a whole word, as a device keeps them.
    #[cfg(feature = "gpu")]
    pub(crate) fn padded(shape: LayerShape, capacity: usize, rows: [&[u8]; 2]) -> Result<Self> {
        let mut block = Self::new(shape, capacity)?;
        for ((own, dim), padded) in block.rows.iter_mut().zip(shape.dims()).zip(rows) {
            let size = dim * shape.dtype.size();
            let rows = own.chunks_exact_mut(size).zip(padded.chunks_exact(size.next_multiple_of(4)));
            for (own, padded) in rows {
                own.iter_mut().zip(padded).for_each(|(own, &byte)| *own = byte);
            }
        }
        Ok(block)
    }

    /// Keys and values, each row at a whole word.
    #[cfg(feature = "gpu")]
    pub(crate) fn padded_bytes(&self) -> [Vec<u8>; 2] {
        let ([keys, values], [key_dim, value_dim]) = (&self.rows, self.shape.dims());
        [(keys, key_dim), (values, value_dim)].map(|(rows, dim)| {
            let size = dim * self.shape.dtype.size();
            let padding = size.next_multiple_of(4) - size;
            rows.chunks_exact(size).flat_map(|row| row.iter().copied().chain(vec![0; padding])).collect()
        })
    }

    /// Keys and values of `tokens` tokens from row `first` on, `[1, kv_heads, tokens, dim]`.
    pub(crate) fn views(&self, first: usize, tokens: usize) -> Result<[TensorView<'_>; 2]> {
        let view = |bytes, dim| -> Result<TensorView<'_>> {
            let shape = Shape { batch: 1, heads: self.shape.kv_heads, tokens: self.capacity, dim };
            Ok(TensorView::strided(bytes, self.shape.dtype, shape, Strides::contiguous(shape))?
                .part(0, first, tokens))
        };
        let ([keys, values], [key_dim, value_dim]) = (&self.rows, self.shape.dims());
        Ok([view(keys, key_dim)?, view(values, value_dim)?])
    }

    /// Copies `count` tokens of one sequence of a step, from token `from` on, to row `at`.
    pub(crate) fn write(
        &mut self,
        step: [&TensorView<'_>; 2],
        sequence: usize,
        from: usize,
        at: usize,
        count: usize,
    ) {
        for ((rows, dim), view) in self.rows.iter_mut().zip(self.shape.dims()).zip(step) {
            let size = dim * self.shape.dtype.size();
            for (head, t) in (0..self.shape.kv_heads).flat_map(|head| (0..count).map(move |t| (head, t))) {
                let start = (head * self.capacity + at + t) * size;
                let bytes = view.row_bytes(sequence, head, from + t);
                if let Some(row) = rows.get_mut(start..start + size).filter(|row| row.len() == bytes.len()) {
                    row.copy_from_slice(bytes);
                }
            }
        }
    }

    /// A row of keys (0) or values (1); empty where there is none.
    pub(crate) fn row(&self, part: usize, head: usize, row: usize) -> &[u8] {
        let [key_dim, value_dim] = self.shape.dims();
        let width = if part == 0 { key_dim } else { value_dim } * self.shape.dtype.size();
        let start = (head * self.capacity + row) * width;
        self.rows.get(part).and_then(|rows| rows.get(start..start + width)).unwrap_or_default()
    }

    /// The shape of its layer, and the tokens it has room for.
    #[cfg(feature = "gpu")]
    pub(crate) fn sizes(&self) -> (LayerShape, usize) {
        (self.shape, self.capacity)
    }

    /// Bytes of all rows.
    pub(crate) fn bytes(&self) -> u64 {
        self.rows.iter().map(|rows| rows.len() as u64).sum()
    }
}

impl Tail<HostBlock> {
    /// Copies `tokens` tokens of one sequence of a step, from its token `from` on, into the blocks that hold the tail's from
    /// `start` on. A block that another tail shares becomes this one's own.
    pub(crate) fn put(
        &mut self,
        start: usize,
        step: [&TensorView<'_>; 2],
        sequence: usize,
        from: usize,
        tokens: usize,
    ) {
        for block in self.blocks_mut() {
            let (first, end) = (start.max(block.start), (start + tokens).min(block.start + block.capacity));
            if first < end {
                let (at, from) = (first - block.start, from + first - start);
                Arc::make_mut(&mut block.rows).write(step, sequence, from, at, end - first);
            }
        }
    }
}

/// Makes blocks for one layer.
pub(crate) struct HostBlocks {
    pub(crate) shape: LayerShape,
    /// Tokens of the smallest block.
    pub(crate) least: usize,
    /// Tokens are rounded up to a multiple of this.
    pub(crate) unit: usize,
}

impl MakeBlock<HostBlock> for HostBlocks {
    fn capacity(&self, _: usize, tokens: usize) -> usize {
        tokens.next_multiple_of(self.unit).max(self.least)
    }

    fn make(&mut self, capacity: usize) -> Result<HostBlock> {
        HostBlock::new(self.shape, capacity)
    }

    fn copy(&mut self, block: &Block<HostBlock>) -> Result<HostBlock> {
        Ok(HostBlock::clone(&block.rows))
    }
}
