//! Making and moving blocks of raw rows.

use std::ops::Range;
use std::sync::Arc;

use super::super::track::Rules;
use crate::cache::LayerShape;
use crate::cache::tail::{Block, MakeBlock, Tail, Write};
use crate::error::Result;
use crate::gpu::block::{Blocks, Copies, RawBlock, append};
use crate::gpu::{Gpu, KvView, Recording};

/// Tokens of the smallest block behind the sinks: little beside the rows that stay raw, and few blocks for them.
pub(super) const MIN_BLOCK: usize = 64;

/// Makes blocks of at least so many tokens, in whole steps of `unit`.
pub(super) struct Sized<'a> {
    pub(super) blocks: Blocks<'a>,
    pub(super) least: usize,
    pub(super) unit: usize,
}

impl<'a> Sized<'a> {
    pub(super) fn new(
        gpu: &'a Gpu,
        shape: LayerShape,
        copies: &'a mut Copies,
        [least, unit]: [usize; 2],
    ) -> Self {
        Self { blocks: Blocks { gpu, shape, grows: false, copies }, least, unit }
    }
}

impl MakeBlock<RawBlock> for Sized<'_> {
    fn capacity(&self, start: usize, tokens: usize) -> usize {
        // What the blocks say is rounded up, and never more than one binding can show.
        tokens
            .next_multiple_of(self.unit)
            .max(self.least)
            .min(self.blocks.capacity(start, tokens.max(self.least)))
    }

    fn make(&mut self, capacity: usize) -> Result<RawBlock> {
        self.blocks.make(capacity)
    }

    fn copy(&mut self, block: &Block<RawBlock>) -> Result<RawBlock> {
        self.blocks.copy(block)
    }
}

/// What makes the blocks of sinks, and of the rows behind them.
pub(super) fn makers<'a>(
    gpu: &'a Gpu,
    rules: &Rules,
    shape: LayerShape,
    [sinks, tail]: &'a mut [Copies; 2],
) -> [Sized<'a>; 2] {
    [Sized::new(gpu, shape, sinks, [rules.sinks, 1]), Sized::new(gpu, shape, tail, [MIN_BLOCK, 32])]
}

/// Views of the raw rows of these tokens, gathered in one place where blocks part them.
pub(super) fn rows(
    recording: &mut Recording<'_>,
    gpu: &Gpu,
    shape: LayerShape,
    tail: &Tail<RawBlock>,
    tokens: Range<usize>,
) -> Result<[KvView; 2]> {
    let pieces: Vec<_> = tail.pieces_of(tokens.start, tokens.end).collect();
    if let [piece] = pieces.as_slice() {
        return Ok(piece.rows.views(piece.at, piece.tokens));
    }
    let mut copies = Copies::default();
    let mut make = Sized::new(gpu, shape, &mut copies, [0, 2]);
    let gathered = Arc::new(make.make(tokens.len())?);
    for piece in pieces {
        let [keys, values] = piece.rows.views(piece.at, piece.tokens);
        let at = piece.start - tokens.start;
        let write = Write { rows: Arc::clone(&gathered), at, from: 0, count: piece.tokens };
        append(recording, gpu, [&keys, &values], 0, &write)?;
    }
    Ok(gathered.views(0, tokens.len()))
}
