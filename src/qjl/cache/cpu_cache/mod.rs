//! The cache on the host, in f32: the twin of [`QjlCache`](super::QjlCache) and what runs where there is no device.

pub(crate) mod arrays;
mod attend;
mod codes;
mod commit;
mod file;
mod load;
mod rows;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

pub(crate) use codes::HostCodes;

use super::super::Counts;
use super::super::planes::{QueryEnergy, Tables};
use super::bytes::OriginalAccounting;
use super::coders::Coders;
use super::ledger::Ledger;
use super::options::CacheOptions;
use super::track::{Rules, Track};
use crate::attention::{AttendOptions, heads_ratio};
use crate::cache::host::{HostBlock, HostBlocks};
use crate::cache::{LayerShape, Step};
use crate::error::Result;
use crate::tensor::TensorView;

/// Tokens of the smallest block of raw rows.
const MIN_BLOCK: usize = 32;

/// What a track knows of its keys and queries.
#[derive(Clone, Debug, Default)]
pub(crate) struct Learnt {
    pub(crate) tables: Option<Arc<Tables>>,
    /// One for each KV head, until there are tables.
    pub(in crate::qjl) energies: Vec<QueryEnergy>,
    /// Tokens whose queries are in the energies, or came without.
    pub(crate) counted: usize,
}

pub(crate) type HostTrack = Track<HostBlock, HostCodes, Learnt>;

/// A cache of sequences on the host, for one layer or many. Rows enter raw, and are coded when they leave the window of
/// recent ones.
///
/// A step is, for every layer, [`append`](Self::append) and [`attend`](Self::attend), and then, once,
/// [`commit`](Self::commit). An error means that nothing has changed.
#[derive(Debug)]
pub struct CpuQjlCache {
    pub(crate) ledger: Ledger<HostBlock, HostCodes, Learnt>,
    pub(crate) coders: Coders,
    pub(crate) status: [Counts; 2],
}

impl std::fmt::Display for CpuQjlCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        super::display::write(f, "CpuQjlCache", &self.ledger, self.bytes())
    }
}

impl CpuQjlCache {
    /// A cache of so many empty sequences.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) or [`Error::Shape`](crate::Error::Shape) on layers or options that do not fit.
    pub fn new(layers: &[LayerShape], sequences: usize, options: CacheOptions) -> Result<Self> {
        let ledger = Ledger::new(layers, sequences, options, u64::MAX)?;
        let coders = Coders::new(layers, &ledger.options, &BTreeMap::new())?;
        Ok(Self { ledger, coders, status: [Counts::default(); 2] })
    }

    /// The layers.
    #[must_use]
    pub fn layers(&self) -> &[LayerShape] {
        &self.ledger.layers
    }

    /// The options.
    #[must_use]
    pub const fn options(&self) -> &CacheOptions {
        &self.ledger.options
    }

    /// Sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.ledger.sequences.len()
    }

    /// Tokens of a sequence that every layer has, those that have left included.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence.
    pub fn len(&self, sequence: usize) -> Result<usize> {
        self.ledger.len(sequence)
    }

    /// Tokens of a sequence that have left, the capacity exceeded.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn evicted(&self, sequence: usize) -> Result<usize> {
        self.ledger.evicted(sequence)
    }

    /// What was odd among the keys, and among the values, coded so far.
    #[must_use]
    pub const fn status(&self) -> [Counts; 2] {
        self.status
    }

    /// Adds an empty sequence, the last, and gives its index.
    pub fn add_sequence(&mut self) -> usize {
        self.ledger.add_sequence()
    }

    /// Removes a sequence; those after it move up.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn remove_sequence(&mut self, sequence: usize) -> Result<()> {
        self.ledger.remove_sequence(sequence)
    }

    /// Empties a sequence; tables that it made are forgotten.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.ledger.clear(sequence)
    }

    /// Gives up all but the first `tokens` tokens of a sequence. What is coded stays coded, and tables stay.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there are fewer, or tokens before have left.
    pub fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        self.ledger.trim(sequence, tokens)
    }

    /// Makes the sequences anew as copies of these, in this order: beams. Copies share rows until one writes.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn gather(&mut self, sources: &[u32]) -> Result<()> {
        self.ledger.gather(sources)
    }

    /// Copies a sequence to a new one, the last, and gives its index. Copies share rows and tables until one writes.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn fork(&mut self, sequence: usize) -> Result<usize> {
        self.ledger.fork(sequence)
    }

    /// Makes room for `tokens` more tokens of a sequence in every layer. A [fixed](CacheOptions::fixed) cache takes no rows beyond
    /// it. Room that was reserved stays until it is used, or given back by [`clear`](Self::clear) or a trim into coded rows; files do
    /// not remember it.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence, [`Error::Limit`](crate::Error::Limit) when it would
    /// have more than 2^32 - 1 tokens, [`Error::Overflow`](crate::Error::Overflow). Nothing is reserved then.
    pub fn reserve(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        let rules = self.ledger.rules;
        self.ledger.remake(sequence, |(track, &layer)| {
            let [mut sinks, mut tail] = makers(&rules, layer);
            track.reserved(&rules, tokens, [&mut sinks, &mut tail])
        })
    }

    /// Appends one layer's new rows of every sequence.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType),
    /// [`Error::HeadRatio`](crate::Error::HeadRatio) or [`Error::Range`](crate::Error::Range) on a step that does not fit,
    /// [`Error::Capacity`](crate::Error::Capacity) when a [fixed](CacheOptions::fixed) cache has no room.
    pub fn append(&mut self, layer: usize, step: &Step<'_, TensorView<'_>>) -> Result<()> {
        let positions = self.ledger.check_step(layer, step)?;
        let shape = *self.ledger.layer(layer)?;
        let rules = self.ledger.rules;
        let [mut sinks, mut tail] = makers(&rules, shape);
        let mut appended = Vec::new();
        for (track, positions) in self.ledger.tracks(layer).zip(&positions) {
            appended.push(track.extended(&rules, positions, [&mut sinks, &mut tail])?);
        }
        let learns = self.ledger.options.learns();
        let each = appended.into_iter().zip(&positions).enumerate();
        for (sequence, ((track, writes), positions)) in each {
            let Some(held) = self.ledger.sequences.get_mut(sequence).and_then(|tracks| tracks.get_mut(layer))
            else {
                continue;
            };
            let len = held.len(&rules);
            // The old track goes, so that the new one alone holds the blocks that it writes to.
            *held = track;
            if learns {
                learn(&mut held.extra, &rules, step, sequence, shape.kv_heads, len, positions.len());
            }
            let places = writes.map(|writes| -> Vec<[usize; 2]> {
                writes.into_iter().map(|write| [write.from, write.count]).collect()
            });
            for (tail, places) in [&mut held.sinks, &mut held.tail].into_iter().zip(places) {
                for [from, count] in places {
                    tail.put(len + from, [step.keys, step.values], sequence, from, count);
                }
            }
        }
        Ok(())
    }

    /// Attention of one layer over everything appended to it: `queries` `[sequences, query_heads, queries, key_dim]`, the
    /// last tokens' where masks are causal; gives `[sequences, query_heads, queries, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::HeadRatio`](crate::Error::HeadRatio) or
    /// [`Error::Range`](crate::Error::Range) when queries or options do not fit.
    pub fn attend(
        &self,
        layer: usize,
        queries: &TensorView<'_>,
        options: &AttendOptions<'_>,
    ) -> Result<Vec<f32>> {
        attend::attend(self, layer, queries, options)
    }

    /// Scores of queries, `[sequences, query_heads, queries, key_dim]`, and the keys of everything appended to a layer: `q . k` of
    /// raw keys, what the codes estimate of the others; neither scaled nor masked, 0 for keys and queries that are not finite.
    /// `[sequences, query_heads, queries, n]`, `n` the longest sequence; 0 for tokens that a sequence does not hold.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) or [`Error::HeadRatio`](crate::Error::HeadRatio) when queries do not fit.
    pub fn scores(&self, layer: usize, queries: &TensorView<'_>) -> Result<Vec<f32>> {
        attend::scores(self, layer, queries)
    }

    /// Ends a step: lets go of what exceeds the capacity, makes tables where there are tokens enough, and codes whole pages of
    /// the rows that are no longer recent.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow).
    pub fn commit(&mut self) -> Result<()> {
        commit::commit(self, false)
    }

    /// As [`commit`](Self::commit), coding all rows that are no longer recent, but for an odd one or a block mean's part, and
    /// giving back room that no row needs and that was not reserved.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn settle(&mut self) -> Result<()> {
        commit::commit(self, true)
    }

    /// The bytes of a file that holds the cache: safetensors, under a digest (`docs/cache-format.md`). Equal caches give equal bytes. Sequences that
    /// share rows are saved each with its own.
    ///
    /// # Errors
    /// [`Error::Safetensors`](crate::Error::Safetensors) when the metadata exceeds what safetensors allows (100 MB).
    pub fn save(&self) -> Result<Vec<u8>> {
        file::to_bytes(self)
    }

    /// Loads a cache from the bytes of a file and checks all of it. It goes on exactly as the saved one would have.
    ///
    /// # Errors
    /// * [`Error::Safetensors`](crate::Error::Safetensors), [`Error::TooShort`](crate::Error::TooShort): not safetensors, or
    ///   cut short;
    /// * [`Error::Metadata`](crate::Error::Metadata): not a saved cache, or a newer one;
    /// * [`Error::Digest`](crate::Error::Digest): the contents are not those that were saved, or a rotation is drawn otherwise
    ///   on this machine;
    /// * [`Error::MissingTensor`](crate::Error::MissingTensor), [`Error::UnknownTensor`](crate::Error::UnknownTensor),
    ///   [`Error::DType`](crate::Error::DType), [`Error::Shape`](crate::Error::Shape), [`Error::Range`](crate::Error::Range),
    ///   [`Error::NonFinite`](crate::Error::NonFinite): parts that contradict each other.
    pub fn load(file: &[u8]) -> Result<Self> {
        load::from_bytes(file)
    }

    /// Bytes held: raw rows with the room beside them, coded blocks, tables, rotations or projections.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let mut unique = super::bytes::Unique::default();
        for track in self.ledger.all_tracks() {
            for block in track.sinks.blocks().iter().chain(track.tail.blocks()) {
                unique.add(&block.rows, || block.rows.bytes());
            }
            track.coded.iter().for_each(|block| unique.add(&block.codes, || block.codes.bytes()));
            if let Some(tables) = &track.extra.tables {
                unique.add(tables, || tables.bytes() as u64);
            }
        }
        let shared = self.ledger.options.tables.iter().flatten().map(|tables| tables.bytes() as u64);
        unique.total()
            + shared.sum::<u64>()
            + self.coders.all.iter().map(|codec| codec.bytes() as u64).sum::<u64>()
    }

    /// Bytes of all rows that have not left, as they came: what the cache stands for.
    #[must_use]
    pub fn raw_bytes(&self) -> u64 {
        self.ledger.raw_bytes()
    }

    /// Bytes that the rows need: coded rows, raw rows, tables, rotations or projections.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        super::bytes::payload(&self.ledger, &self.coders, |learnt| learnt.tables.as_ref().map(Arc::as_ptr))
    }

    /// The original's figures for every layer of sketches; `None` of sign planes, which it does not have.
    #[must_use]
    pub fn original_accounting(&self) -> Option<Vec<OriginalAccounting>> {
        super::bytes::original(&self.ledger, &self.coders)
    }
}

/// What makes the blocks of sinks, and of the rows behind them.
fn makers(rules: &Rules, layer: LayerShape) -> [HostBlocks; 2] {
    [
        HostBlocks { shape: layer, least: rules.sinks, unit: 1 },
        HostBlocks { shape: layer, least: MIN_BLOCK, unit: 32 },
    ]
}

/// Adds the queries of new tokens to what tables are made of; each of the first tokens counts once.
fn learn(
    learnt: &mut Learnt,
    rules: &Rules,
    step: &Step<'_, TensorView<'_>>,
    sequence: usize,
    kv_heads: usize,
    len: usize,
    count: usize,
) {
    if learnt.tables.is_some() {
        return;
    }
    let new: Range<usize> = rules.learnt(learnt.counted, len, count);
    learnt.counted = learnt.counted.max(new.end);
    let Some(queries) = step.queries else { return };
    learnt.energies.resize(kv_heads, QueryEnergy::default());
    let Ok(group) = heads_ratio(queries.shape().heads, kv_heads) else { return };
    for (head, energy) in learnt.energies.iter_mut().enumerate() {
        for token in new.clone() {
            energy.add(queries, sequence, head * group..(head + 1) * group, token - len);
        }
    }
}
