//! The cache on the device.

mod attend;
mod blocks;
mod bytes;
mod codes;
mod commit;
mod scores;
mod transfer;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::Counts;
use super::super::planes::gpu::{Ops as PlaneOps, TableBuffer};
use super::coders::Coders;
use super::ledger::Ledger;
use super::options::CacheOptions;
use super::track::Track;
use crate::attention::AttendOptions;
use crate::cache::{LayerShape, Step};
use crate::error::{Error, Result};
use crate::gpu::block::{Copies, RawBlock, append};
use crate::gpu::{Gpu, KvView, ReadBack, Recording, words};
pub use transfer::CacheReadBack;

use blocks::makers;
use codes::{DeviceCodec, DeviceCodes, upload_tables};
use commit::{Committed, energies_for};

/// What a track knows of its keys and queries.
#[derive(Clone, Debug, Default)]
pub(crate) struct Learnt {
    tables: Option<Arc<TableBuffer>>,
    /// Until there are tables.
    energies: Option<Arc<wgpu::Buffer>>,
    /// Tokens whose queries are in the energies, or came without.
    counted: usize,
}

type DeviceTrack = Track<RawBlock, DeviceCodes, Learnt>;

/// A cache of sequences on the device, for one layer or many. Rows enter raw, and are coded when they leave the window of
/// recent ones.
///
/// A step is, for every layer, [`append`](Self::append) and [`attend`](Self::attend), and then, once,
/// [`commit`](Self::commit), all recorded into the caller's encoder, in this order. Recordings take effect in the order in
/// which their encoders are submitted, which must be that of the calls. An error means that nothing was recorded and nothing
/// has changed.
#[derive(Debug)]
pub struct QjlCache {
    gpu: Gpu,
    pub(crate) ledger: Ledger<RawBlock, DeviceCodes, Learnt>,
    coders: Coders,
    devices: Vec<DeviceCodec>,
    /// Of every layer: tables that all sequences share, where they make none of their own.
    shared: Vec<Option<TableBuffer>>,
    /// Counts of odd keys, and of odd values.
    status: [wgpu::Buffer; 2],
}

impl std::fmt::Display for QjlCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        super::display::write(f, "QjlCache", &self.ledger, self.bytes())
    }
}

impl QjlCache {
    /// A cache of so many empty sequences.
    ///
    /// # Errors
    /// [`Error::Range`] or [`Error::Shape`] on layers or options that do not fit, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn new(gpu: &Gpu, layers: &[LayerShape], sequences: usize, options: CacheOptions) -> Result<Self> {
        options.check(layers.len())?;
        let coders = Coders::new(layers, &options, &BTreeMap::new())?;
        let mut cache = Self::with_coders(gpu, layers, options, coders)?;
        (0..sequences).for_each(|_| {
            cache.add_sequence();
        });
        Ok(cache)
    }

    /// A cache without sequences.
    fn with_coders(gpu: &Gpu, layers: &[LayerShape], options: CacheOptions, coders: Coders) -> Result<Self> {
        let ledger = Ledger::new(layers, 0, options, gpu.caps().largest_binding())?;
        let devices = coders.all.iter().map(|codec| DeviceCodec::upload(gpu, codec));
        let devices = devices.collect::<Result<_>>()?;
        let mut cache = Self {
            gpu: gpu.clone(),
            ledger,
            coders,
            devices,
            shared: Vec::new(),
            status: [gpu.storage("status", 12)?, gpu.storage("status", 12)?],
        };
        for (index, layer) in layers.iter().enumerate() {
            let tables = cache.ledger.options.tables.as_ref().and_then(|tables| tables.get(index));
            let learns = cache.ledger.options.learns();
            let codec = cache.device_codec(index)?;
            let shared = if learns { None } else { Some(upload_tables(gpu, codec, layer, tables)?) };
            cache.shared.push(shared);
        }
        Ok(cache)
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
    /// [`Error::Range`] when there is no such sequence.
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

    /// Schedules the reading of what was odd among the rows coded so far; [`StatusReadBack::counts`] gives it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Limit`].
    pub fn read_status(&self, encoder: &mut wgpu::CommandEncoder) -> Result<StatusReadBack> {
        let [keys, values] = &self.status;
        let (keys, values) =
            (ReadBack::prepare(&self.gpu, &[keys])?, ReadBack::prepare(&self.gpu, &[values])?);
        Ok(StatusReadBack([keys.record(encoder), values.record(encoder)]))
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
    /// [`Error::Range`] when there are fewer, or tokens before have left.
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

    /// Makes room for `tokens` more tokens of a sequence in every layer, and waits until the device has said that it has it: in a
    /// browser out of memory is known late. A [fixed](CacheOptions::fixed) cache takes no rows beyond it. Room that was reserved
    /// stays until it is used, or given back by [`clear`](Self::clear) or a trim into coded rows; files do not remember it.
    ///
    /// # Errors
    /// [`Error::Range`] when there is no such sequence, [`Error::Overflow`], [`Error::Limit`], [`Error::OutOfMemory`]; nothing is
    /// reserved then.
    pub async fn reserve(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        let (gpu, rules) = (self.gpu.clone(), self.ledger.rules);
        let mut reserved = Vec::with_capacity(self.ledger.layers.len());
        for (track, &layer) in self.ledger.sequence(sequence)?.iter().zip(&self.ledger.layers) {
            let mut copies = [Copies::default(), Copies::default()];
            let [mut sinks, mut tail] = makers(&gpu, &rules, layer, &mut copies);
            let mut next = track.reserved(&rules, tokens, [&mut sinks, &mut tail])?;
            let extra = &mut next.extra;
            if self.ledger.options.learns() && extra.tables.is_none() && extra.energies.is_none() {
                extra.energies = Some(Arc::new(energies_for(&gpu, &layer)?));
            }
            reserved.push(next);
        }
        gpu.late_errors().await?;
        self.ledger.take(sequence, reserved);
        Ok(())
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

    /// Records the appending of one layer's new rows of every sequence.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::HeadRatio`] or [`Error::Range`] on a step that does not fit,
    /// [`Error::Capacity`] when a [fixed](CacheOptions::fixed) cache has no room, the errors of a view that cannot be bound,
    /// [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn append(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        layer: usize,
        step: &Step<'_, KvView>,
    ) -> Result<()> {
        let positions = self.ledger.check_step(layer, step)?;
        let (shape, rules) = (*self.ledger.layer(layer)?, self.ledger.rules);
        let mut all_copies = [Copies::default(), Copies::default()];
        let mut recording = Recording::new(&self.gpu);
        let mut tracks = Vec::with_capacity(self.sequences());
        for (sequence, (track, positions)) in self.ledger.tracks(layer).zip(&positions).enumerate() {
            let [mut sinks, mut tail] = makers(&self.gpu, &rules, shape, &mut all_copies);
            let (mut next, writes) = track.extended(&rules, positions, [&mut sinks, &mut tail])?;
            for write in writes.iter().flatten().filter(|write| write.count > 0) {
                append(&mut recording, &self.gpu, [step.keys, step.values], sequence, write)?;
            }
            if self.ledger.options.learns() && next.extra.tables.is_none() {
                let len = track.len(&rules);
                let new = rules.learnt(next.extra.counted, len, positions.len());
                if let Some(queries) = step.queries {
                    let own = queries.part(sequence, new.start.saturating_sub(len), new.len());
                    let [_, copies] = &mut all_copies;
                    self.learn(&mut recording, copies, &shape, &own, &mut next.extra)?;
                }
                next.extra.counted = next.extra.counted.max(new.end);
            }
            tracks.push(next);
        }
        all_copies.iter().for_each(|copies| copies.record(encoder));
        recording.record(encoder);
        self.ledger.replace(layer, tracks);
        Ok(())
    }

    /// Adds the energy of a sequence's first queries.
    fn learn(
        &self,
        recording: &mut Recording<'_>,
        copies: &mut Copies,
        shape: &LayerShape,
        queries: &KvView,
        learnt: &mut Learnt,
    ) -> Result<()> {
        if queries.shape().tokens == 0 {
            return Ok(());
        }
        let held = learnt.energies.take();
        // The ledger's track holds them too.
        let energies = match held {
            Some(held) if Arc::strong_count(&held) <= 2 => held,
            Some(held) => {
                let copy = Arc::new(energies_for(&self.gpu, shape)?);
                copies.add(&held, &copy);
                copy
            }
            None => Arc::new(energies_for(&self.gpu, shape)?),
        };
        PlaneOps::new(&self.gpu).query_energy(recording, queries, shape.kv_heads, &energies)?;
        learnt.energies = Some(energies);
        Ok(())
    }

    /// Records attention of one layer over everything appended to it: `queries` `[sequences, query_heads, queries, key_dim]`
    /// of any type, the last tokens' where masks are causal, into `output`, `[sequences, query_heads, queries, value_dim]` of
    /// any type.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::HeadRatio`] or [`Error::Range`] when queries, output or options do not fit, the errors of a
    /// view that cannot be bound or written, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn attend(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: usize,
        queries: &KvView,
        output: &KvView,
        options: &AttendOptions<'_>,
    ) -> Result<()> {
        attend::attend(self, encoder, layer, queries, options, output)
    }

    /// Records the scores of queries, `[sequences, query_heads, queries, key_dim]` of any type, and the keys of everything appended
    /// to a layer: `q . k` of raw keys, what the codes estimate of the others; neither scaled nor masked, 0 for keys and queries
    /// that are not finite. `output` is contiguous f32, `[sequences, query_heads, queries, n]`, `n` at least the longest sequence;
    /// column `t` is a sequence's token `t`, and columns of tokens that it does not hold are left as they are.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::HeadRatio`], [`Error::DType`] or [`Error::Alignment`] when queries or output do not fit, the
    /// errors of a view that cannot be bound, [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn scores(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: usize,
        queries: &KvView,
        output: &KvView,
    ) -> Result<()> {
        scores::scores(self, encoder, layer, queries, output)
    }

    /// Records the end of a step: lets go of what exceeds the capacity, makes tables where there are tokens enough, and codes
    /// whole pages of the rows that are no longer recent.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::OutOfMemory`].
    pub fn commit(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        let committed = commit::commit(self, encoder, false)?;
        self.take(committed);
        Ok(())
    }

    /// As [`commit`](Self::commit), coding all rows that are no longer recent, but for an odd one or a block mean's part, and
    /// giving back room that no row needs and that was not reserved.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn settle(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        let committed = commit::commit(self, encoder, true)?;
        self.take(committed);
        Ok(())
    }

    fn take(&mut self, committed: Committed) {
        self.ledger.sequences = committed.sequences;
        for (device, grown) in self.devices.iter_mut().zip(committed.angles) {
            if let Some(grown) = grown {
                device.angles = grown;
            }
        }
    }

    /// Makes angles for positions up to `last`.
    fn grow(&mut self, layer: usize, last: u32) -> Result<()> {
        let grown = self.device_codec(layer)?.grown(&self.gpu, last)?;
        let device = self.coders.index(layer).and_then(|index| self.devices.get_mut(index));
        if let (Some(device), Some(grown)) = (device, grown) {
            device.angles = grown;
        }
        Ok(())
    }

    fn device_codec(&self, layer: usize) -> Result<&DeviceCodec> {
        let missing = || Error::range("layer", format!("below {}", self.ledger.layers.len()), layer);
        self.coders.index(layer).and_then(|index| self.devices.get(index)).ok_or_else(missing)
    }

    /// The tables with which a sequence's rows are coded.
    fn tables<'a>(&'a self, layer: usize, learnt: &'a Learnt) -> Option<&'a TableBuffer> {
        learnt.tables.as_deref().or_else(|| self.shared.get(layer).and_then(Option::as_ref))
    }

    /// Where odd keys and odd values are counted.
    fn status(&self) -> [&wgpu::Buffer; 2] {
        let [keys, values] = &self.status;
        [keys, values]
    }
}

/// Counts of odd rows on their way to the host.
#[derive(Debug)]
pub struct StatusReadBack([ReadBack; 2]);

impl StatusReadBack {
    /// What was odd among the keys, and among the values.
    ///
    /// # Errors
    /// What the read-backs say.
    pub async fn counts(self) -> Result<[Counts; 2]> {
        let [keys, values] = self.0;
        let counts = |words: &[u32]| {
            let at = |index: usize| words.get(index).copied().unwrap_or_default();
            Counts { non_finite: at(0), zero: at(1), overflow: at(2) }
        };
        Ok([counts(&words(&keys.await?)), counts(&words(&values.await?))])
    }
}
