//! Blocks of raw rows of one sequence and layer: what a cache keeps of tokens that it has not folded.
//!
//! Blocks follow each other without gaps and never move; one is made when the last is full and dropped when all its rows are
//! folded. Copies of a tail share their blocks (a fork), and whoever writes first takes a copy of the one it writes to.

use std::sync::Arc;

use crate::error::{Error, Result};

/// Rows of one block.
#[derive(Debug)]
pub(crate) struct Block<B> {
    /// Token of the sequence that its first row holds.
    pub(crate) start: usize,
    /// Tokens it has room for.
    pub(crate) capacity: usize,
    pub(crate) rows: Arc<B>,
}

impl<B> Clone for Block<B> {
    fn clone(&self) -> Self {
        Self { start: self.start, capacity: self.capacity, rows: Arc::clone(&self.rows) }
    }
}

impl<B> Block<B> {
    fn end(&self) -> usize {
        self.start + self.capacity
    }
}

/// Part of a step that one block takes.
#[derive(Debug)]
pub(crate) struct Write<B> {
    #[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "the host finds its blocks by their tokens"))]
    pub(crate) rows: Arc<B>,
    /// Row of the block.
    #[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "the host writes through its tail"))]
    pub(crate) at: usize,
    /// Token of the step.
    pub(crate) from: usize,
    pub(crate) count: usize,
}

/// Live rows of one block.
#[derive(Debug)]
pub(crate) struct Piece<'a, B> {
    pub(crate) rows: &'a Arc<B>,
    /// First live row of the block.
    pub(crate) at: usize,
    /// Its token.
    pub(crate) start: usize,
    pub(crate) tokens: usize,
}

/// The raw rows of one sequence and layer.
#[derive(Debug)]
pub(crate) struct Tail<B> {
    blocks: Vec<Block<B>>,
    /// First token that is still raw; earlier rows of the first block are folded.
    first: usize,
    /// One past the last token.
    end: usize,
}

impl<B> Clone for Tail<B> {
    fn clone(&self) -> Self {
        Self { blocks: self.blocks.clone(), first: self.first, end: self.end }
    }
}

impl<B> Default for Tail<B> {
    fn default() -> Self {
        Self { blocks: Vec::new(), first: 0, end: 0 }
    }
}

/// How a backend makes blocks.
pub(crate) trait MakeBlock<B> {
    /// Tokens for the next block, of at least one that `tokens` more may follow.
    fn capacity(&self, start: usize, tokens: usize) -> usize;

    /// A block with room for `capacity` tokens.
    fn make(&mut self, capacity: usize) -> Result<B>;

    /// A block that holds what `block` holds.
    fn copy(&mut self, block: &Block<B>) -> Result<B>;
}

impl<B> Tail<B> {
    /// A tail of these blocks; `None` where they have gaps or do not hold the tokens from `first` to `end`.
    pub(crate) fn from_blocks(blocks: Vec<Block<B>>, first: usize, end: usize) -> Option<Self> {
        let ends = blocks.iter().map(|block| block.start.checked_add(block.capacity));
        let ends: Vec<usize> = ends.collect::<Option<_>>()?;
        let gapless = blocks.iter().skip(1).zip(&ends).all(|(block, &end)| block.start == end);
        let held = match (blocks.first(), ends.last()) {
            (Some(block), Some(&last)) => block.start <= first && end <= last,
            _ => first == end,
        };
        (first <= end && gapless && held).then_some(Self { blocks, first, end })
    }

    /// This tail with its blocks kept elsewhere.
    #[cfg(feature = "gpu")]
    pub(crate) fn carried<C>(&self, block: &impl Fn(&Arc<B>) -> Result<Arc<C>>) -> Result<Tail<C>> {
        let carry =
            |old: &Block<B>| Ok(Block { start: old.start, capacity: old.capacity, rows: block(&old.rows)? });
        let blocks = self.blocks.iter().map(carry).collect::<Result<_>>()?;
        Ok(Tail { blocks, first: self.first, end: self.end })
    }

    /// A tail without rows whose first token will be this one.
    pub(crate) fn starting(token: usize) -> Self {
        Self { blocks: Vec::new(), first: token, end: token }
    }

    /// A tail of these blocks, each its first token and the tokens that it has room for, which the caller has checked.
    pub(crate) fn loaded(first: usize, end: usize, blocks: Vec<(usize, usize, B)>) -> Self {
        let shared = blocks.into_iter().map(|(start, capacity, rows)| (start, capacity, Arc::new(rows)));
        Self::sharing(first, end, shared.collect())
    }

    /// As [`Tail::loaded`], of blocks that others may share.
    pub(crate) fn sharing(first: usize, end: usize, blocks: Vec<(usize, usize, Arc<B>)>) -> Self {
        let block = |(start, capacity, rows)| Block { start, capacity, rows };
        Self { blocks: blocks.into_iter().map(block).collect(), first, end }
    }

    /// Tokens of the sequence, folded ones included.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// First token that is still raw.
    pub(crate) fn first(&self) -> usize {
        self.first
    }

    /// The blocks, for those who count bytes.
    pub(crate) fn blocks(&self) -> &[Block<B>] {
        &self.blocks
    }

    /// The blocks, for those who write rows that no other tail shares.
    pub(crate) fn blocks_mut(&mut self) -> &mut [Block<B>] {
        &mut self.blocks
    }

    /// Tokens that the blocks have room for, folded ones included.
    pub(crate) fn capacity(&self) -> usize {
        self.blocks.iter().map(|block| block.capacity).sum()
    }

    /// Tokens that can be appended without a new block.
    pub(crate) fn room(&self) -> usize {
        self.blocks.last().map_or(0, |block| block.end() - self.end)
    }

    /// This tail with room for `tokens` more.
    pub(crate) fn reserved(&self, tokens: usize, make: &mut impl MakeBlock<B>) -> Result<Self> {
        let (need, have) = ((self.end as u64).saturating_add(tokens as u64), u64::from(u32::MAX));
        if need > have {
            // Kernels count tokens in 32 bits.
            return Err(Error::Limit { what: "tokens of a sequence", need, have });
        }
        let mut tail = self.clone();
        while tail.room() < tokens {
            let start = tail.blocks.last().map_or(tail.end, Block::end);
            let capacity = make.capacity(start, tokens - tail.room());
            tail.blocks.push(Block { start, capacity, rows: Arc::new(make.make(capacity)?) });
        }
        Ok(tail)
    }

    /// This tail with `tokens` more, and where they go. Blocks that another tail shares are copied before they are written.
    pub(crate) fn extended(
        &self,
        tokens: usize,
        make: &mut impl MakeBlock<B>,
    ) -> Result<(Self, Vec<Write<B>>)> {
        let shared = |block: &Block<B>| Arc::strong_count(&block.rows) > 1;
        let shared: Vec<bool> = self.blocks.iter().map(shared).collect();
        let mut tail = self.reserved(tokens, make)?;
        let mut writes = Vec::new();
        let end = tail.end + tokens;
        for (index, block) in tail.blocks.iter_mut().enumerate() {
            let (from, to) = (tail.end.max(block.start), end.min(block.end()));
            if from >= to {
                continue;
            }
            if shared.get(index) == Some(&true) {
                block.rows = Arc::new(make.copy(block)?);
            }
            let (at, rows) = (from - block.start, Arc::clone(&block.rows));
            writes.push(Write { rows, at, from: from - tail.end, count: to - from });
        }
        tail.end = end;
        Ok((tail, writes))
    }

    /// The raw rows, block by block.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece<'_, B>> {
        self.pieces_of(self.first, self.end)
    }

    /// Raw rows from one token up to another, block by block.
    pub(crate) fn pieces_of(&self, first: usize, end: usize) -> impl Iterator<Item = Piece<'_, B>> {
        self.blocks.iter().filter_map(move |block| {
            let (start, end) = (first.max(block.start), end.min(block.end()));
            let at = start.checked_sub(block.start)?;
            (start < end).then(|| Piece { rows: &block.rows, at, start, tokens: end - start })
        })
    }

    /// Gives up the rows before `token`, which are folded.
    pub(crate) fn fold_up_to(&mut self, token: usize) {
        self.first = token.max(self.first);
        self.blocks.retain(|block| block.end() > token);
    }

    /// Gives up the rows from `token` on, and blocks that are then empty but for those with room for `reserve` tokens.
    pub(crate) fn truncate(&mut self, token: usize, reserve: usize) {
        self.end = self.end.min(token);
        if token < self.first {
            // The rows before are folded and stay so; what comes next begins a block of its own.
            self.first = token;
            self.blocks.clear();
        }
        let keep = self.end + reserve;
        self.blocks.retain(|block| block.start < keep);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of four tokens that know how they came about.
    #[derive(Default)]
    struct Made {
        made: usize,
        copied: usize,
    }

    impl MakeBlock<u8> for Made {
        fn capacity(&self, _: usize, tokens: usize) -> usize {
            tokens.next_multiple_of(4)
        }

        fn make(&mut self, _: usize) -> Result<u8> {
            self.made += 1;
            Ok(0)
        }

        fn copy(&mut self, block: &Block<u8>) -> Result<u8> {
            self.copied += 1;
            Ok(*block.rows)
        }
    }

    fn spans(tail: &Tail<u8>) -> Vec<(usize, usize, usize)> {
        tail.pieces().map(|piece| (piece.start, piece.at, piece.tokens)).collect()
    }

    #[test]
    fn rows_fill_blocks_in_order_and_leave_them_in_order() {
        let mut made = Made::default();
        let (tail, writes) = Tail::default().extended(6, &mut made).unwrap();
        assert_eq!(writes.iter().map(|w| (w.at, w.from, w.count)).collect::<Vec<_>>(), [(0, 0, 6)]);
        drop(writes);
        let (mut tail, writes) = tail.extended(3, &mut made).unwrap();
        assert_eq!(
            writes.iter().map(|w| (w.at, w.from, w.count)).collect::<Vec<_>>(),
            [(6, 0, 2), (0, 2, 1)]
        );
        assert_eq!((tail.end(), tail.room(), made.made), (9, 3, 2));
        tail.fold_up_to(4);
        assert_eq!(spans(&tail), [(4, 4, 4), (8, 0, 1)]);
        tail.fold_up_to(8);
        assert_eq!((spans(&tail), tail.blocks().len()), (vec![(8, 0, 1)], 1));
        tail.truncate(8, 0);
        assert_eq!((spans(&tail), tail.blocks().len(), tail.end()), (vec![], 0, 8));
    }

    #[test]
    fn trimming_into_folded_tokens_starts_a_new_block() {
        let mut made = Made::default();
        let (mut tail, _) = Tail::default().extended(8, &mut made).unwrap();
        tail.fold_up_to(4);
        tail.truncate(3, 0);
        assert_eq!((tail.first(), tail.end(), tail.blocks().len()), (3, 3, 0));
        let (tail, _) = tail.extended(2, &mut made).unwrap();
        assert_eq!(spans(&tail), [(3, 0, 2)]);
    }

    #[test]
    fn a_shared_block_is_copied_before_it_is_written() {
        let mut made = Made::default();
        let (first, writes) = Tail::default().extended(2, &mut made).unwrap();
        drop(writes);
        let fork = first.clone();
        let (longer, _) = first.extended(1, &mut made).unwrap();
        assert_eq!(made.copied, 1);
        drop((first, longer));
        fork.extended(1, &mut made).unwrap();
        assert_eq!(made.copied, 1, "the other tails are gone");
    }

    #[test]
    fn reserved_blocks_survive_a_trim() {
        let mut made = Made::default();
        let tail = Tail::<u8>::default().reserved(8, &mut made).unwrap();
        let (mut tail, _) = tail.extended(6, &mut made).unwrap();
        tail.truncate(1, 7);
        assert_eq!((tail.room(), tail.end(), made.made), (7, 1, 1));
        tail.truncate(0, 0);
        assert_eq!(tail.blocks().len(), 0);
    }
}
