//! MiniCache as a cache on a device: recorded into the caller's encoder, one submit for all layers of a step.

mod attend;
mod compat;
mod file;
mod folds;
mod prefill;

use std::collections::VecDeque;

use super::cache::{CacheOptions, CacheReport, FoldRange, Ledger, OriginalAccounting};
use super::config::Mode;
use super::gpu::Ops;
use super::plan::LayerRole;
use crate::cache::{LayerShape, Step};
use crate::error::{Error, Result};
use crate::gpu::block::{Blocks, Copies, append};
use crate::gpu::{Gpu, KvView, Recording};
use folds::{Device, Moves, Verdicts};

/// The most tokens of one folded run, where a binding can show them.
const RUN_TOKENS: usize = 2048;

/// A range whose verdicts are on their way.
#[derive(Debug)]
struct Job {
    range: FoldRange,
    /// The layer whose rows have been rebuilt at once (Compat); else the range is to be folded.
    rebuilt: Option<usize>,
    verdicts: Verdicts,
}

/// A MiniCache on a device: all layers of a model, any number of sequences.
///
/// In a step every layer takes its rows by [`append`](Self::append) and answers queries by [`attend`](Self::attend), lower
/// layers first; then [`commit`](Self::commit) folds the groups' whole pages (arXiv 2405.14366; 32 tokens of a KV head). All
/// is recorded into the caller's encoders, which must be submitted in the order of their recording. How many rows of a page
/// stay raw is known to the device alone: a commit asks, and a later one folds with sizes that have come back by themselves.
/// [`settle`](Self::settle) waits for that. Nothing else submits or waits.
#[derive(Debug)]
pub struct MiniCache {
    gpu: Gpu,
    ops: Ops,
    pub(crate) ledger: Ledger<Device>,
    jobs: VecDeque<Job>,
}

impl MiniCache {
    /// A cache of no sequence. `layers` are the shapes of all layers and `plan` their parts, for instance of
    /// [`pair_layers_depth`](super::pair_layers_depth).
    ///
    /// # Errors
    /// [`Error::Shape`] when plan and layers differ in number, or layers of one group in shape; [`Error::Range`] on options,
    /// heads or dimensions out of range; [`Error::Limit`] when a page of 32 tokens exceeds one binding.
    pub fn new(
        gpu: &Gpu,
        layers: Vec<LayerShape>,
        plan: Vec<LayerRole>,
        options: CacheOptions,
    ) -> Result<Self> {
        let limit = gpu.caps().largest_binding();
        let run_tokens = |layer: &LayerShape, layers: usize| {
            // A raw row of every layer and token at most, or a slot with its magnitudes beside them, and the page table.
            let dim = layer.key_dim.max(layer.value_dim).next_multiple_of(2);
            let row = (layers * layer.dtype.size() + 2) * dim + 2 * layers + 2;
            let page = (32 * layer.kv_heads * row) as u64;
            match (limit / page) as usize {
                0 => Err(Error::Limit { what: "bytes of one binding", need: page, have: limit }),
                pages => Ok(RUN_TOKENS.min(32 * pages)),
            }
        };
        let ledger = Ledger::new(layers, plan, options, run_tokens)?;
        Ok(Self { gpu: gpu.clone(), ops: Ops::new(gpu), ledger, jobs: VecDeque::new() })
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
    /// [`Error::Range`] when there is no such sequence.
    pub fn remove_sequence(&mut self, sequence: usize) -> Result<()> {
        self.ledger.sequence(sequence)?;
        let left: Vec<u32> = (0..self.sequences()).filter(|&s| s != sequence).map(|s| s as u32).collect();
        self.gather(&left)
    }

    /// Tokens of a sequence that every layer holds.
    ///
    /// # Errors
    /// [`Error::Range`] when there is no such sequence.
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
    /// [`Error::Range`] when there is no such sequence, or it is shorter.
    pub fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        self.ledger.trim(sequence, tokens)?;
        self.jobs.retain_mut(|job| {
            let range = &mut job.range;
            if job.rebuilt.is_some() && range.sequence == sequence {
                range.tokens = range.tokens.min(tokens.saturating_sub(range.start));
                return range.tokens > 0;
            }
            range.sequence != sequence || range.end() <= tokens
        });
        // What is still on its way need not be asked for again.
        let folds = self.jobs.iter().filter(|job| job.rebuilt.is_none());
        folds.for_each(|job| self.ledger.plan_fold(&job.range));
        Ok(())
    }

    /// Empties a sequence, and forgets what its prefill froze.
    ///
    /// # Errors
    /// [`Error::Range`] when there is no such sequence.
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.ledger.clear(sequence)?;
        self.jobs.retain(|job| job.range.sequence != sequence);
        Ok(())
    }

    /// The sequences become those at `indices`, which may repeat (beams): what they share is stored once, and nothing is
    /// copied until two that share a block write to it.
    ///
    /// # Errors
    /// [`Error::Range`] naming the first that does not exist; nothing is changed then.
    pub fn gather(&mut self, indices: &[u32]) -> Result<()> {
        self.ledger.gather(indices)?;
        self.jobs.retain_mut(|job| {
            let place = indices.iter().position(|&index| index as usize == job.range.sequence);
            job.range.sequence = place.unwrap_or_default();
            place.is_some()
        });
        Ok(())
    }

    /// Adds a sequence that begins as a copy of another (a shared prompt), stored once until the two differ.
    ///
    /// # Errors
    /// [`Error::Range`] when there is no such sequence.
    pub fn fork(&mut self, sequence: usize) -> Result<usize> {
        self.ledger.fork(sequence)
    }

    /// Makes room for `tokens` more tokens of a sequence in every layer, and waits until the device has said that it has it: in a
    /// browser out of memory is known late. A [fixed](CacheOptions::fixed) cache takes no rows beyond it; room is given back by
    /// [`clear`](Self::clear).
    ///
    /// # Errors
    /// [`Error::Range`] when there is no such sequence, [`Error::Limit`], [`Error::OutOfMemory`]; nothing is reserved then.
    pub async fn reserve(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        let mut copies = Copies::default();
        let mut tails = Vec::new();
        for (layer, tail) in self.ledger.sequence(sequence)?.tails.iter().enumerate() {
            let (shape, grows) = (self.ledger.shape(layer)?, self.ledger.member(layer).is_none());
            let mut blocks = Blocks { gpu: &self.gpu, shape, grows, copies: &mut copies };
            tails.push(tail.reserved(tokens, &mut blocks)?);
        }
        self.gpu.late_errors().await?;
        self.ledger.reserve(sequence, tails)
    }

    /// [`reserve`](Self::reserve), waiting for it.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    #[cfg(not(target_arch = "wasm32"))]
    pub fn reserve_blocking(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        let gpu = self.gpu.clone();
        gpu.block_on(self.reserve(sequence, tokens))
    }

    /// Records the appending of a layer's new rows of every sequence. In [`Mode::Compat`] an upper layer's rows are rebuilt at
    /// once.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Range`] when the step does not fit the layer; [`Error::Order`] when a
    /// lower layer's rows are missing or were another number; [`Error::Capacity`] when a
    /// [fixed](CacheOptions::fixed) cache has no room; the errors of a view that cannot be bound; [`Error::Limit`],
    /// [`Error::OutOfMemory`]. Nothing is recorded or changed then.
    pub fn append(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        layer: usize,
        step: &Step<'_, KvView>,
    ) -> Result<()> {
        let shape = self.ledger.shape(layer)?;
        let mut copies = Copies::default();
        let grows = self.ledger.member(layer).is_none();
        let mut blocks = Blocks { gpu: &self.gpu, shape, grows, copies: &mut copies };
        let extended = self.ledger.extend(layer, step, &mut blocks)?;
        let mut recording = Recording::new(&self.gpu);
        for (sequence, write) in &extended.writes {
            append(&mut recording, &self.gpu, [step.keys, step.values], *sequence, write)?;
        }
        let rebuilt = if self.ledger.options.merge.mode == Mode::Compat {
            self.rebuild(&mut recording, layer, step, &extended.writes)?
        } else {
            Vec::new()
        };
        copies.record(encoder);
        recording.record(encoder);
        self.jobs.extend(rebuilt.into_iter().map(|rebuilt| rebuilt.record(encoder)));
        self.ledger.take(layer, extended.tails);
        Ok(())
    }

    /// Records the folding of what can be folded: once a step, after every layer has taken its rows. Rows whose verdicts have
    /// come back since an earlier commit are folded, and verdicts of new whole pages are asked for.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`]; [`Error::Device`] or [`Error::DeviceLost`] when verdicts cannot come, for
    /// instance since the encoder of an earlier commit was dropped: they are then asked for again by the next.
    pub fn commit(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        self.fold_known(encoder)?;
        for range in self.ledger.ranges() {
            let mut recording = Recording::new(&self.gpu);
            let decided = folds::decide(&mut recording, &self.gpu, &self.ops, &self.ledger, &range)?;
            let read_back = Verdicts::prepare(&self.gpu, &decided)?;
            recording.record(encoder);
            let verdicts = Verdicts::new(decided, read_back.record(encoder));
            self.ledger.plan_fold(&range);
            self.jobs.push_back(Job { range, rebuilt: None, verdicts });
        }
        Ok(())
    }

    /// Folds, in order, the ranges whose verdicts have come.
    fn fold_known(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        while let Some(job) = self.jobs.front_mut() {
            match job.verdicts.poll() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.ask_again();
                    return Err(error);
                }
            }
            let range = job.range;
            if let Some(layer) = job.rebuilt {
                let known = job.verdicts.known();
                self.take_rebuilt(&range, layer, known)?;
                self.jobs.pop_front();
                continue;
            }
            let run_tokens = self.ledger.groups.get(range.group).map_or(0, |group| group.run_tokens);
            let before = self.ledger.state(&range).and_then(|state| state.joins(range.start, run_tokens));
            let before = before.map(|run| &run.folds);
            let (mut recording, mut moves) = (Recording::new(&self.gpu), Moves::default());
            let (folds, verdicts) =
                folds::fold(&mut recording, &self.gpu, &self.ops, &job.verdicts, before, &mut moves)?;
            recording.record(encoder);
            moves.record(encoder);
            self.ledger.fold(&range, folds, verdicts);
            self.jobs.pop_front();
        }
        Ok(())
    }

    /// Forgets the verdicts on their way, so that the next commit asks for them anew.
    fn ask_again(&mut self) {
        self.jobs.clear();
        for sequence in &mut self.ledger.sequences {
            sequence.groups.iter_mut().for_each(|group| group.planned = group.folded());
        }
    }

    /// Folds all that can be folded: submits to the device's queue and waits for verdicts until none are missing. What was
    /// recorded before must have been submitted. Natively somebody must poll the device meanwhile.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub async fn settle(&mut self) -> Result<()> {
        let gpu = self.gpu.clone();
        loop {
            gpu.submit(|encoder| self.commit(encoder))?;
            let Some(job) = self.jobs.back_mut() else { return Ok(()) };
            // The last to have been asked for is the last to come.
            if let Err(error) = job.verdicts.wait().await {
                self.ask_again();
                return Err(error);
            }
        }
    }

    /// [`settle`](Self::settle), waiting for it.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    #[cfg(not(target_arch = "wasm32"))]
    pub fn settle_blocking(&mut self) -> Result<()> {
        let gpu = self.gpu.clone();
        gpu.block_on(self.settle())
    }

    /// Bytes of the buffers that hold the rows: folded runs, blocks of raw rows and frozen verdicts, each once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let (blocks, folds) = self.ledger.unique();
        let blocks: u64 = blocks.iter().map(|block| block.bytes()).sum();
        let folds: u64 = folds.iter().map(|fold| fold.buffers.bytes()).sum();
        blocks + folds + self.ledger.cuts().iter().map(|cut| cut.size()).sum::<u64>()
    }

    /// Bytes of buffers whose verdicts are on their way.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        self.jobs.iter().map(|job| job.verdicts.bytes()).sum()
    }

    /// Bytes that the rows need: folded runs, and raw rows without the room left in their blocks.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        let (_, folds) = self.ledger.unique();
        folds.iter().map(|fold| fold.buffers.bytes()).sum::<u64>() + self.ledger.raw_payload()
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

    /// The original's figures for every layer; they mean something in [`Mode::Compat`](super::Mode::Compat) alone.
    #[must_use]
    pub fn original_accounting(&self) -> Vec<OriginalAccounting> {
        self.ledger.original_accounting()
    }
}
