//! MiniCache as a cache on the CPU: the twin of `gpu_cache`, for machines without a GPU and for a browser's fallback.

mod rows;

use std::sync::Arc;

use super::cache::{
    CacheOptions, CacheReport, Decided, FoldRange, Host, Ledger, OriginalAccounting, Verdict,
};
use super::config::Mode;
use super::cpu::{self, Probe, join, retain_in, threshold};
use super::cut::{Cut, Frame};
use super::folded::{Layer, PAGE};
use super::plan::LayerRole;
use crate::attention::{AttendOptions, Geometry, attend_rows};
use crate::cache::host::HostBlocks;
use crate::cache::{LayerShape, Step};
use crate::error::Result;
use crate::tensor::{Shape, Tensor, TensorView};
use rows::LayerRows;

/// The most tokens of one folded run.
const RUN_TOKENS: usize = 2048;
/// Tokens of the smallest block.
const MIN_BLOCK: usize = 128;

/// Makes blocks for one layer.
const fn blocks(shape: LayerShape) -> HostBlocks {
    HostBlocks { shape, least: MIN_BLOCK, unit: PAGE }
}

/// A MiniCache on the CPU: all layers of a model, any number of sequences.
///
/// Every layer takes its rows by [`append`](Self::append) and answers queries by [`attend`](Self::attend); once a step,
/// [`commit`](Self::commit) folds the groups' whole pages (arXiv 2405.14366; 32 tokens of a KV head). The order within a
/// group is the model's: lower layers first.
#[derive(Debug)]
pub struct CpuMiniCache {
    pub(crate) ledger: Ledger<Host>,
}

impl CpuMiniCache {
    /// A cache of no sequence. `layers` are the shapes of all layers and `plan` their parts, for instance of
    /// [`pair_layers_depth`](super::pair_layers_depth).
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) when plan and layers differ in number, or layers of one group in shape; [`Error::Range`](crate::Error::Range) on options,
    /// heads or dimensions out of range.
    pub fn new(layers: Vec<LayerShape>, plan: Vec<LayerRole>, options: CacheOptions) -> Result<Self> {
        Ok(Self { ledger: Ledger::new(layers, plan, options, |_, _| Ok(RUN_TOKENS))? })
    }

    /// The bytes of a file that holds the whole cache (safetensors, version 1, under a digest; `docs/minicache-format.md`). What
    /// sequences share is written for each.
    ///
    /// # Errors
    /// [`Error::Safetensors`](crate::Error::Safetensors) when the metadata exceeds what safetensors allows (100 MB).
    pub fn save(&self) -> Result<Vec<u8>> {
        self.ledger.to_bytes()
    }

    /// The cache that a file holds, of the CPU or of a device: it goes on as if it had never stopped.
    ///
    /// # Errors
    /// * [`Error::Safetensors`](crate::Error::Safetensors), [`Error::TooShort`](crate::Error::TooShort): not safetensors, or
    ///   cut short;
    /// * [`Error::Metadata`](crate::Error::Metadata): not a cache, a newer one, or an entry that cannot be read or contradicts
    ///   the tensors;
    /// * [`Error::Digest`](crate::Error::Digest): the contents are not those that were written;
    /// * [`Error::MissingTensor`](crate::Error::MissingTensor), [`Error::UnknownTensor`](crate::Error::UnknownTensor),
    ///   [`Error::DType`](crate::Error::DType), [`Error::Shape`](crate::Error::Shape),
    ///   [`Error::Range`](crate::Error::Range): a tensor or number that is missing, not wanted, or of another type, size or
    ///   range.
    pub fn load(file: &[u8]) -> Result<Self> {
        Ok(Self { ledger: Ledger::from_bytes(file, |_, _| Ok(RUN_TOKENS))? })
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.ledger.layers.len()
    }

    /// Number of sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.ledger.sequences.len()
    }

    /// Adds an empty sequence and says its index: its place in the batch of every step.
    pub fn add_sequence(&mut self) -> usize {
        self.ledger.add_sequence()
    }

    /// Removes a sequence; those after it move down by one.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence.
    pub fn remove_sequence(&mut self, sequence: usize) -> Result<()> {
        self.ledger.sequence(sequence)?;
        self.ledger.sequences.remove(sequence);
        Ok(())
    }

    /// Tokens of a sequence that every layer holds.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence.
    pub fn len(&self, sequence: usize) -> Result<usize> {
        Ok(self.ledger.sequence(sequence)?.len())
    }

    /// Whether no sequence holds a token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ledger.sequences.iter().all(|sequence| sequence.len() == 0)
    }

    /// Gives up the tokens of a sequence from `tokens` on. A folded page that is cut keeps its size.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence, or it is shorter.
    pub fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        self.ledger.trim(sequence, tokens)
    }

    /// Empties a sequence, and forgets what its prefill froze.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence.
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.ledger.clear(sequence)
    }

    /// The sequences become those at `indices`, which may repeat (beams): what they share is stored once.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) naming the first that does not exist; nothing is changed then.
    pub fn gather(&mut self, indices: &[u32]) -> Result<()> {
        self.ledger.gather(indices)
    }

    /// Adds a sequence that begins as a copy of another (a shared prompt), stored once until the two differ.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence.
    pub fn fork(&mut self, sequence: usize) -> Result<usize> {
        self.ledger.fork(sequence)
    }

    /// Makes room for `tokens` more tokens of a sequence in every layer. A [fixed](CacheOptions::fixed) cache takes no rows
    /// beyond it; room is given back by [`clear`](Self::clear).
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence, [`Error::Overflow`](crate::Error::Overflow) when the
    /// room does not fit the address space.
    pub fn reserve(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        let tails = self.ledger.sequence(sequence)?.tails.iter().zip(&self.ledger.layers);
        let tails = tails.map(|(tail, &shape)| tail.reserved(tokens, &mut blocks(shape)));
        let tails = tails.collect::<Result<_>>()?;
        self.ledger.reserve(sequence, tails)
    }

    /// Appends a layer's new rows of every sequence. In [`Mode::Compat`] an upper layer's rows are rebuilt at once.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType) or [`Error::Range`](crate::Error::Range) when the step does not fit the layer; [`Error::Order`](crate::Error::Order) when a
    /// lower layer's rows are missing or were another number; [`Error::Capacity`](crate::Error::Capacity) when a
    /// [fixed](CacheOptions::fixed) cache has no room. Nothing is changed then.
    pub fn append(&mut self, layer: usize, step: &Step<'_, TensorView<'_>>) -> Result<()> {
        let shape = self.ledger.shape(layer)?;
        let extended = self.ledger.extend(layer, step, &mut blocks(shape))?;
        let starts = self.ledger.lengths(layer);
        let writes = extended.writes.into_iter().map(|(sequence, write)| [sequence, write.from, write.count]);
        let writes: Vec<[usize; 3]> = writes.collect();
        self.ledger.take(layer, extended.tails);
        for [sequence, from, count] in writes {
            let start = starts.get(sequence).copied().unwrap_or_default() + from;
            if let Some(tail) = self.ledger.sequence_mut(sequence)?.tails.get_mut(layer) {
                tail.put(start, [step.keys, step.values], sequence, from, count);
            }
        }
        if self.ledger.options.merge.mode == Mode::Compat {
            self.rebuild(layer, &starts)?;
        }
        Ok(())
    }

    /// Compat: replaces a merged layer's rows from `starts` on by what the original gives back.
    fn rebuild(&mut self, layer: usize, starts: &[usize]) -> Result<()> {
        let Some((group, _)) = self.ledger.member(layer).filter(|&(_, member)| member > 0) else {
            return Ok(());
        };
        let primary = self.ledger.groups.get(group).and_then(|group| group.layers.first().copied());
        let primary = primary.unwrap_or(layer);
        let ends = self.ledger.lengths(layer);
        for (index, (&start, end)) in starts.iter().zip(ends).enumerate().filter(|(_, (s, e))| *s < e) {
            let options = self.ledger.options.merge_at(start);
            let mut rebuilt = Vec::new();
            let mut verdicts = Vec::new();
            for part in 0..2 {
                let rows = |layer| self.rows(layer, part).tensor(index, start..end);
                let (lower, upper) = (rows(primary)?, rows(layer)?);
                let members = [lower.view(), upper.view()];
                let probe = Probe::of(&members, &options)?;
                let cuts = threshold(&probe.rows, &probe.layout, &options);
                let causes = cpu::retain(&probe.rows, &cuts, &probe.layout, &options);
                rebuilt.push(cpu::restore(&probe.fold(&members, &causes, &options), Layer::Upper)?);
                verdicts.push(Arc::new(Verdict::pack(&causes, &probe.layout)));
            }
            let (Ok(verdicts), [keys, values]) = (verdicts.try_into(), rebuilt.as_slice()) else { continue };
            let sequence = self.ledger.sequence_mut(index)?;
            if let Some(tail) = sequence.tails.get_mut(layer) {
                tail.put(start, [&keys.view(), &values.view()], 0, 0, end - start);
            }
            if let Some(decided) = sequence.decided.get_mut(layer) {
                decided.push(Decided { start, tokens: end - start, verdicts });
            }
        }
        Ok(())
    }

    /// Attention of one layer, `[sequences, query_heads, queries, value_dim]` in f32: query `i` of `n` of a sequence stands at
    /// position `length - n + i`. `queries` are `[sequences, query_heads, queries, key_dim]` of any element type.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::HeadRatio`](crate::Error::HeadRatio) or [`Error::Range`](crate::Error::Range) when layer, shapes or options do not fit.
    pub fn attend(
        &self,
        layer: usize,
        queries: &TensorView<'_>,
        options: &AttendOptions<'_>,
    ) -> Result<Vec<f32>> {
        let shape = self.ledger.shape(layer)?;
        let lengths = self.ledger.lengths(layer);
        let tokens = lengths.iter().copied().max().unwrap_or(0);
        let keys = Shape::new(self.sequences(), shape.kv_heads, tokens, shape.key_dim)?;
        let g = Geometry::of(queries.shape(), keys)?;
        let lengths: Vec<u32> = lengths.iter().map(|&length| length as u32).collect();
        attend_rows(g, queries, &self.rows(layer, 0), &self.rows(layer, 1), Some(&lengths), options)
    }

    /// Keys and values of one layer as they are attended to, in the layer's element type, `[sequences, kv_heads, tokens, dim]`;
    /// shorter sequences end in zeros.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such layer, [`Error::Overflow`](crate::Error::Overflow) when the tensors do not fit the address space.
    pub fn restore(&self, layer: usize) -> Result<[Tensor; 2]> {
        self.ledger.shape(layer)?;
        Ok([self.rows(layer, 0).restore()?, self.rows(layer, 1).restore()?])
    }

    /// Ends a sequence's prefill: rules that look at all of its rows ([`Range`](super::Retention::Range),
    /// [`Fraction`](super::Retention::Fraction)) decide here, once, and nothing is folded before. Other rules do not need it.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence, or its prefill has ended before.
    pub fn end_prefill(&mut self, sequence: usize) -> Result<()> {
        let tokens = self.ledger.prefill_tokens(sequence)?;
        let mut all = Vec::new();
        let waiting = self.ledger.options.waits_for_prefill();
        for group in self.ledger.groups.iter().filter(|_| waiting) {
            let mut cuts = Vec::new();
            for part in 0..2 {
                let rows = |&layer: &usize| self.rows(layer, part).tensor(sequence, 0..tokens);
                let members: Vec<Tensor> = group.layers.iter().map(rows).collect::<Result<_>>()?;
                let members: Vec<TensorView<'_>> = members.iter().map(Tensor::view).collect();
                let options = &self.ledger.options.merge;
                let probe = Probe::of(&members, options)?;
                let cut = threshold(&probe.rows, &probe.layout, options);
                cuts.push(Arc::new(cut.first().copied().unwrap_or(Cut::NOTHING)));
            }
            all.push(cuts.try_into().ok());
        }
        self.ledger.freeze(sequence, tokens, all)
    }

    /// Folds what can be folded; once a step, after every layer has taken its rows.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) when a page does not fit 32-bit indices.
    pub fn commit(&mut self) -> Result<()> {
        for range in self.ledger.ranges() {
            self.fold(&range)?;
        }
        Ok(())
    }

    /// Folds all that can be folded. On the CPU this is [`commit`](Self::commit).
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn settle(&mut self) -> Result<()> {
        self.commit()
    }

    fn fold(&mut self, range: &FoldRange) -> Result<()> {
        let options = self.ledger.options.merge_at(range.start);
        let prefill = self.ledger.sequence(range.sequence)?.prefill.unwrap_or(0);
        let frame = Frame { first: range.start, tokens: prefill };
        let state = self.ledger.state(range);
        let blocks = self.ledger.blocks(range);
        let before = state.and_then(|state| state.joins(range.start, RUN_TOKENS));
        let (mut folds, mut verdicts) = (Vec::new(), Vec::new());
        for part in 0..2 {
            let both = blocks.iter().map(|(block, at)| block.views(*at, range.tokens));
            let members: Vec<[TensorView<'_>; 2]> = both.collect::<Result<_>>()?;
            let members: Vec<_> = members.into_iter().filter_map(|both| both.into_iter().nth(part)).collect();
            let probe = Probe::of(&members, &options)?;
            let frozen = state.and_then(|state| state.cuts.as_ref()?.get(part).map(|cut| vec![**cut]));
            let cuts = frozen.unwrap_or_else(|| threshold(&probe.rows, &probe.layout, &options));
            let causes = retain_in(&probe.rows, &cuts, &probe.layout, &options, frame);
            let folded = probe.fold(&members, &causes, &options);
            let folded = match before.and_then(|run| run.folds.get(part)) {
                Some(before) => join(before, &folded)?,
                None => folded,
            };
            folds.push(Arc::new(folded));
            verdicts.push(Verdict::pack(&causes, &probe.layout));
        }
        if let (Ok(folds), Ok(verdicts)) = (folds.try_into(), verdicts.try_into()) {
            self.ledger.fold(range, folds, verdicts);
        }
        Ok(())
    }

    /// Bytes of everything held: folded runs and blocks of raw rows, each once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let (blocks, folds) = self.ledger.unique();
        let blocks: u64 = blocks.iter().map(|block| block.bytes()).sum();
        let folds: u64 = folds.iter().map(|fold| fold.bytes()).sum();
        blocks + folds
    }

    /// Bytes that the rows need: folded runs, and raw rows without the room left in their blocks.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        let (_, folds) = self.ledger.unique();
        folds.iter().map(|fold| fold.bytes()).sum::<u64>() + self.ledger.raw_payload()
    }

    /// Bytes that the tokens held would take raw.
    #[must_use]
    pub fn raw_bytes(&self) -> u64 {
        self.ledger.raw_bytes()
    }

    /// What the cache holds, layer by layer.
    #[must_use]
    pub fn report(&self) -> CacheReport {
        CacheReport {
            layers: self.ledger.layer_reports(),
            bytes: self.bytes(),
            payload_bytes: self.payload_bytes(),
            raw_bytes: self.ledger.raw_bytes(),
        }
    }

    /// The original's figures for every layer; they mean something in [`Mode::Compat`] alone.
    #[must_use]
    pub fn original_accounting(&self) -> Vec<OriginalAccounting> {
        self.ledger.original_accounting()
    }

    /// Keys (0) or values (1) of one layer.
    fn rows(&self, layer: usize, part: usize) -> LayerRows<'_> {
        LayerRows::new(&self.ledger, layer, part)
    }
}
