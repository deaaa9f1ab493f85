//! The rows of one sequence and layer: raw sinks, coded blocks, raw rows; and their positions.

use std::ops::Range;
use std::sync::Arc;

use crate::cache::LayerShape;
use crate::cache::tail::{MakeBlock, Piece, Tail, Write};
use crate::error::{Error, Result};
use crate::rope::Positions;

use super::super::planes::CALIBRATION_TOKENS;
use super::options::{CacheOptions, PAGE};
use super::runs::Runs;

/// Tokens of a coded block at the least: few enough that little is made before it is needed.
const BLOCK: usize = 1024;

/// Bytes of one side of a coded block at the most: half of what WebGPU lets a device bind at once where it asks for no more.
const MAX_BLOCK_BYTES: u64 = 64 << 20;

/// Raw rows that no longer count, beyond those that do, above which the others move to a block of their own.
const SLACK: usize = 128;

/// What rows become, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// First tokens that stay raw.
    pub(crate) sinks: usize,
    recent: usize,
    page: usize,
    /// Tokens that are coded together at the least.
    pub(crate) least: usize,
    /// Tokens of a coded block at the least, whole pages.
    block: usize,
    /// And at the most.
    most: usize,
    capacity: Option<usize>,
    pinned: usize,
}

impl Rules {
    /// Rules for coded blocks of at most so many bytes a side, what the backend can hold.
    pub(crate) fn new(layers: &[LayerShape], options: &CacheOptions, block_bytes: u64) -> Result<Self> {
        let [page, least] = options.coding.units()?;
        let sinks = options.coding.sinks() as usize;
        let row_bytes =
            layers.iter().map(|layer| layer.kv_heads * options.coding.most_row_bytes(layer)).max();
        let page_bytes = (page * row_bytes.unwrap_or(1).max(1)) as u64;
        let most = match (block_bytes.min(MAX_BLOCK_BYTES) / page_bytes) as usize {
            // A host binds nothing.
            0 if block_bytes == u64::MAX => page,
            0 => {
                return Err(Error::Limit {
                    what: "bytes of one binding",
                    need: page_bytes,
                    have: block_bytes.min(MAX_BLOCK_BYTES),
                });
            }
            pages => pages * page,
        };
        let block = BLOCK.next_multiple_of(page).min(most);
        // Tokens leave a ring block by block.
        let most = options.capacity.map_or(most, |capacity| most.min(capacity / 4));
        Ok(Self {
            sinks,
            recent: options.coding.recent() as usize,
            page,
            least,
            block,
            most: (most / page * page).max(block),
            capacity: options.capacity,
            pinned: if options.pin_sinks { sinks } else { 0 },
        })
    }

    /// New tokens, of `count` behind the first `len`, whose queries tables are made of, those counted already left out.
    pub(crate) fn learnt(&self, counted: usize, len: usize, count: usize) -> Range<usize> {
        let start = len.max(counted).max(self.sinks).min(CALIBRATION_TOKENS);
        start..(len + count).min(CALIBRATION_TOKENS).max(start)
    }

    /// The room of a block whose first tokens are so many: more of them may come, unless the cache is to be `tight`.
    fn room(&self, tokens: usize, tight: bool) -> usize {
        let least = if tight { self.page } else { self.block };
        tokens.next_multiple_of(self.page).clamp(least, self.most)
    }

    /// First tokens that never leave.
    pub(crate) const fn pinned(&self) -> usize {
        self.pinned
    }
}

/// Coded rows of consecutive tokens.
#[derive(Debug)]
pub(crate) struct Coded<C> {
    /// The token of its first row.
    pub(crate) start: usize,
    pub(crate) tokens: usize,
    /// Tokens it has room for.
    pub(crate) capacity: usize,
    pub(crate) codes: Arc<C>,
}

impl<C> Clone for Coded<C> {
    fn clone(&self) -> Self {
        let codes = Arc::clone(&self.codes);
        Self { start: self.start, tokens: self.tokens, capacity: self.capacity, codes }
    }
}

impl<C> Coded<C> {
    pub(crate) fn end(&self) -> usize {
        self.start + self.tokens
    }
}

/// Rows to code: tokens of the sequence, the coded block that takes them, and the row of it that the first becomes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fill {
    pub(crate) tokens: Range<usize>,
    pub(crate) block: usize,
    pub(crate) at: usize,
}

impl Fill {
    /// The same in parts of at most so many tokens, in order.
    #[cfg(feature = "gpu")]
    pub(crate) fn parts(&self, tokens: usize) -> impl Iterator<Item = Self> {
        let Self { tokens: Range { start, end }, block, at } = self.clone();
        let part =
            move |first| Self { tokens: first..end.min(first + tokens), block, at: at + first - start };
        (start..end).step_by(tokens).map(part)
    }
}

/// How a backend makes coded blocks.
pub(crate) trait MakeCodes<C> {
    /// A block with room for `capacity` tokens.
    fn make(&mut self, capacity: usize) -> Result<C>;

    /// A block that holds what `codes` holds, with the same room.
    fn copy(&mut self, codes: &C, capacity: usize) -> Result<C>;
}

/// The rows of one sequence and layer. `X` is what a backend knows beside them.
#[derive(Debug)]
pub(crate) struct Track<B, C, X> {
    pub(crate) sinks: Tail<B>,
    pub(crate) coded: Vec<Coded<C>>,
    /// Raw rows behind the coded ones.
    pub(crate) tail: Tail<B>,
    pub(crate) runs: Runs,
    /// Tokens before this one are gone, but for pinned sinks.
    pub(crate) evicted: usize,
    /// Tokens, counted from the first, that room was reserved for.
    pub(crate) reserved: usize,
    pub(crate) extra: X,
}

impl<B, C, X: Clone> Clone for Track<B, C, X> {
    fn clone(&self) -> Self {
        Self {
            sinks: self.sinks.clone(),
            coded: self.coded.clone(),
            tail: self.tail.clone(),
            runs: self.runs.clone(),
            evicted: self.evicted,
            reserved: self.reserved,
            extra: self.extra.clone(),
        }
    }
}

impl<B, C, X: Clone + Default> Track<B, C, X> {
    pub(crate) fn new(rules: &Rules) -> Self {
        Self {
            sinks: Tail::default(),
            coded: Vec::new(),
            tail: Tail::starting(rules.sinks),
            runs: Runs::default(),
            evicted: 0,
            reserved: 0,
            extra: X::default(),
        }
    }

    /// Tokens so far, those that are gone included.
    pub(crate) fn len(&self, rules: &Rules) -> usize {
        if self.sinks.end() < rules.sinks { self.sinks.end() } else { self.tail.end() }
    }

    /// Coded blocks with the tokens of each that have not left.
    pub(crate) fn visible_coded(&self) -> impl Iterator<Item = (&Coded<C>, Range<usize>)> {
        self.coded.iter().map(|block| (block, block.start.max(self.evicted)..block.end()))
    }

    /// Raw rows that have not left, block by block.
    pub(crate) fn visible_raw(&self) -> impl Iterator<Item = Piece<'_, B>> {
        // Pinned sinks stand before what has left, others fold their rows themselves.
        let first = self.tail.first().max(self.evicted);
        self.sinks.pieces().chain(self.tail.pieces_of(first, self.tail.end()))
    }

    /// The positions of `tokens` new tokens of this sequence.
    pub(crate) fn next_positions(
        &self,
        rules: &Rules,
        positions: Option<Positions<'_>>,
        sequence: usize,
        [width, tokens]: [usize; 2],
    ) -> Result<Vec<u32>> {
        let len = self.len(rules);
        let start = match positions {
            Some(Positions::Explicit(all)) => {
                let own = all.get(sequence * width..).unwrap_or_default();
                return Ok(own.iter().copied().take(tokens).collect());
            }
            Some(Positions::Start(starts)) => starts.get(sequence).copied().unwrap_or(0).into(),
            None => len.checked_sub(1).map_or(0, |last| u64::from(self.runs.position(last)) + 1),
        };
        let last = start + tokens as u64;
        if last > u64::from(u32::MAX) {
            return Err(Error::range("position", format!("at most {}", u32::MAX), last));
        }
        Ok((start..last).map(|position| position as u32).collect())
    }

    /// This track with new tokens, and where their rows go: in the sinks, and behind them.
    pub(crate) fn extended(
        &self,
        rules: &Rules,
        positions: &[u32],
        [sinks, tail]: [&mut impl MakeBlock<B>; 2],
    ) -> Result<(Self, [Vec<Write<B>>; 2])> {
        let len = self.len(rules);
        let first = self.to_sinks(rules, positions.len());
        let (sinks, to_sinks) = self.sinks.extended(first, sinks)?;
        let (tail, mut to_tail) = self.tail.extended(positions.len() - first, tail)?;
        to_tail.iter_mut().for_each(|write| write.from += first);
        let runs = self.runs.extended(len, positions);
        let track = Self { sinks, tail, runs, ..self.clone() };
        Ok((track, [to_sinks, to_tail]))
    }

    /// Of so many new tokens, those that become sinks.
    fn to_sinks(&self, rules: &Rules, tokens: usize) -> usize {
        tokens.min(rules.sinks.saturating_sub(self.len(rules)))
    }

    /// Tokens that can be appended without a new block.
    pub(crate) fn room(&self, rules: &Rules) -> usize {
        let sinks = rules.sinks.saturating_sub(self.len(rules));
        if self.sinks.room() < sinks { self.sinks.room() } else { sinks + self.tail.room() }
    }

    /// This track with room for `tokens` more.
    pub(crate) fn reserved(
        &self,
        rules: &Rules,
        tokens: usize,
        [sinks, tail]: [&mut impl MakeBlock<B>; 2],
    ) -> Result<Self> {
        let first = self.to_sinks(rules, tokens);
        let (sinks, tail) = (self.sinks.reserved(first, sinks)?, self.tail.reserved(tokens - first, tail)?);
        let reserved = self.reserved.max(self.len(rules) + tokens);
        Ok(Self { sinks, tail, reserved, ..self.clone() })
    }

    /// Checks that the parts of a loaded track follow each other, its coded blocks `[first token, tokens, room]`.
    pub(crate) fn check_loaded(&self, rules: &Rules, coded: &[[usize; 3]]) -> Result<()> {
        let len = self.len(rules);
        let mut whole = self.sinks.end() <= rules.sinks
            && (self.sinks.end() == rules.sinks || self.tail.end() == rules.sinks)
            && self.tail.first() >= rules.sinks
            && self.evicted <= len;
        let mut next = None;
        for &[start, tokens, capacity] in coded {
            whole &= start >= rules.sinks && (1..=capacity).contains(&tokens);
            whole &= (rules.page..=rules.most).contains(&capacity) && capacity.is_multiple_of(rules.page);
            whole &= next.is_none_or(|next| next == start);
            next = start.checked_add(tokens);
        }
        whole &= next.is_none_or(|next| next == self.tail.first());
        whole &= self.runs.are_of(len);
        if whole {
            return Ok(());
        }
        let want = format!("sinks, coded blocks and raw rows that follow each other, {len} tokens");
        let have = format!("coded blocks {coded:?} before token {}", self.tail.first());
        Err(Error::range("saved rows", want, have))
    }

    /// Lets go of what exceeds the capacity.
    pub(crate) fn evict(&mut self, rules: &Rules) {
        let Some(capacity) = rules.capacity else { return };
        let floor = self.len(rules).saturating_sub(capacity - rules.pinned);
        if floor <= self.evicted.max(rules.pinned) {
            return;
        }
        self.evicted = floor;
        if rules.pinned == 0 {
            self.sinks.fold_up_to(floor.min(rules.sinks));
        }
        self.coded.retain(|block| block.end() > floor);
        // Rows are coded in whole steps from the first raw one on, which must stay at one.
        let first = self.tail.first();
        let steps = floor.saturating_sub(first) / rules.least;
        if self.coded.is_empty() {
            self.tail.fold_up_to(first + steps * rules.least);
        }
    }

    /// The end of the rows that can be coded: of whole pages, or of `all` that are not recent.
    pub(crate) fn codable(&self, rules: &Rules, all: bool) -> usize {
        let first = self.tail.first();
        let old = self.tail.end().saturating_sub(rules.recent).saturating_sub(first);
        let unit = if all { rules.least } else { rules.page };
        first + old / unit * unit
    }

    /// This track, a clone of the ledger's, with the rows before `end` coded, and what has to be coded. The rows are still to be
    /// read from this track.
    pub(crate) fn coded(
        &self,
        rules: &Rules,
        (end, tight): (usize, bool),
        make: &mut impl MakeCodes<C>,
    ) -> Result<(Self, Vec<Fill>)> {
        let mut track = self.clone();
        let mut fills = Vec::new();
        let mut token = self.tail.first();
        while token < end {
            let full = |block: &Coded<C>| {
                block.end() != token
                    || block.tokens == block.capacity
                    || !block.tokens.is_multiple_of(rules.least)
            };
            if track.coded.last().is_none_or(full) {
                let capacity = rules.room(end - token, tight);
                let codes = Arc::new(make.make(capacity)?);
                track.coded.push(Coded { start: token, tokens: 0, capacity, codes });
            }
            let index = track.coded.len() - 1;
            let Some(block) = track.coded.last_mut() else { break };
            if block.tokens > 0 && self.is_shared(index, block) {
                block.codes = Arc::new(make.copy(&block.codes, block.capacity)?);
            }
            let count = (end - token).min(block.capacity - block.tokens);
            fills.push(Fill { tokens: token..token + count, block: index, at: block.tokens });
            block.tokens += count;
            token += count;
        }
        track.tail.fold_up_to(end);
        Ok((track, fills))
    }

    /// Whether another sequence holds the block too: beside the ledger's track, this one, which is a clone of it, and the one
    /// that this becomes.
    fn is_shared(&self, index: usize, block: &Coded<C>) -> bool {
        let own = self.coded.get(index).is_some_and(|own| Arc::ptr_eq(&own.codes, &block.codes));
        Arc::strong_count(&block.codes) > if own { 3 } else { 1 }
    }

    /// The raw rows behind the coded ones in blocks of their own, where too much of the blocks that hold them no longer counts
    /// (`tight`: where anything does not), and what has to be copied. Blocks with reserved room stay.
    pub(crate) fn compacted(
        &self,
        tight: bool,
        make: &mut impl MakeBlock<B>,
    ) -> Result<Option<Compacted<B>>> {
        let live = self.tail.end() - self.tail.first();
        let dead =
            self.tail.blocks().first().map_or(0, |block| self.tail.first().saturating_sub(block.start));
        let wasteful = dead > live + SLACK || tight && self.tail.capacity() > live.next_multiple_of(PAGE);
        if !wasteful || self.reserved > self.tail.end() {
            return Ok(None);
        }
        let (tail, writes) = Tail::starting(self.tail.first()).extended(live, make)?;
        let mut moves = Vec::new();
        for write in writes {
            let start = self.tail.first() + write.from;
            for piece in self.tail.pieces_of(start, start + write.count) {
                moves.push(Move {
                    from: Arc::clone(piece.rows),
                    row: piece.at,
                    start: piece.start,
                    tokens: piece.tokens,
                });
            }
        }
        Ok(Some((tail, moves)))
    }

    /// Gives up the tokens from `token` on.
    ///
    /// # Errors
    /// [`Error::Range`] when there are not so many tokens, or those before are gone.
    pub(crate) fn check_trim(&self, rules: &Rules, token: usize) -> Result<()> {
        let len = self.len(rules);
        let held = self.evicted <= rules.pinned || token >= self.evicted;
        if token <= len && held {
            return Ok(());
        }
        let first = if self.evicted <= rules.pinned { 0 } else { self.evicted };
        Err(Error::range("tokens to keep", format!("{first} to {len}"), token))
    }

    /// Gives up the tokens from `token` on, as [`Self::check_trim`] allows.
    pub(crate) fn trim(&mut self, rules: &Rules, token: usize) {
        let spare = self.reserved.saturating_sub(token);
        self.sinks.truncate(token, spare.min(rules.sinks));
        self.tail.truncate(token.max(rules.sinks), spare.min(self.reserved.saturating_sub(rules.sinks)));
        self.coded.retain(|block| block.start < token);
        if let Some(block) = self.coded.last_mut() {
            block.tokens = block.tokens.min(token - block.start);
        }
        self.runs.truncate(token);
        // Rows behind coded ones that were cut begin a block of their own, and what was reserved is given up.
        self.reserved = self.reserved.min(token + self.room(rules));
    }
}

/// Raw rows in new blocks, and what has to be copied to them.
pub(crate) type Compacted<B> = (Tail<B>, Vec<Move<B>>);

/// Raw rows that move to another block.
#[derive(Debug)]
pub(crate) struct Move<B> {
    pub(crate) from: Arc<B>,
    /// First row in the old block.
    pub(crate) row: usize,
    /// Its token.
    pub(crate) start: usize,
    pub(crate) tokens: usize,
}
