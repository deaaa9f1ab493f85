//! Folding on the device: what is decided on its way to the host, and what is done with it when it has come.

use std::sync::Arc;

use super::super::cache::{Backing, CAUSE_WORDS, FoldRange, Ledger, Verdict};
use super::super::cut::Frame;
use super::super::folded::{Layout, Page, Sections, Totals};
use super::super::gpu::{Decided, FoldedBuffers, Ops, parse_totals};
use super::super::join::{Joined, Outline};
use crate::error::{Error, Result};
use crate::gpu::block::{RawBlock, copy, room};
use crate::gpu::{Gpu, KvView, ReadBack, ReadBackPrepared, Recording, words};
use crate::tensor::Shape;

/// Rows on a device.
#[derive(Debug)]
pub(crate) struct Device;

impl Backing for Device {
    type Block = RawBlock;
    type Fold = DeviceFold;
    type Cut = wgpu::Buffer;
}

/// Folded keys or values of one run, and their page table on the host.
#[derive(Debug)]
pub(crate) struct DeviceFold {
    pub(super) buffers: FoldedBuffers,
    pub(super) pages: Vec<Page>,
}

impl DeviceFold {
    fn outline(&self) -> Outline<'_> {
        Outline { layout: &self.buffers.layout, totals: &self.buffers.totals, pages: &self.pages }
    }
}

/// Decided rows of keys and of values, their sizes and causes on the way to the host.
#[derive(Debug)]
pub(super) struct Verdicts {
    decided: [Decided; 2],
    /// `None` once it has come.
    read_back: Option<ReadBack>,
    bytes: Vec<u8>,
}

/// What one part's verdict says on the host.
pub(super) struct Known {
    pub(super) totals: Totals,
    pub(super) pages: Vec<Page>,
    pub(super) causes: Vec<u32>,
}

impl Known {
    pub(super) fn verdict(self) -> Verdict {
        Verdict::from_words(self.causes)
    }
}

/// Words of a status buffer.
const STATUS_WORDS: usize = super::super::gpu::STATUS_BYTES as usize / 4;

impl Verdicts {
    /// The read-back of everything that the host must know.
    pub(super) fn prepare(gpu: &Gpu, decided: &[Decided; 2]) -> Result<ReadBackPrepared> {
        let [keys, values] = decided;
        let parts = [&keys.status, &keys.pages, &keys.causes, &values.status, &values.pages, &values.causes];
        ReadBack::prepare(gpu, &parts)
    }

    pub(super) fn new(decided: [Decided; 2], read_back: ReadBack) -> Self {
        Self { decided, read_back: Some(read_back), bytes: Vec::new() }
    }

    /// Whether everything has come.
    pub(super) fn poll(&mut self) -> Result<bool> {
        if let Some(read_back) = &mut self.read_back {
            match read_back.try_take() {
                None => return Ok(false),
                Some(bytes) => {
                    self.read_back = None;
                    self.bytes = bytes?;
                }
            }
        }
        Ok(true)
    }

    /// Waits until everything has come.
    pub(super) async fn wait(&mut self) -> Result<()> {
        if let Some(read_back) = self.read_back.take() {
            self.bytes = read_back.await?;
        }
        Ok(())
    }

    /// Bytes of the buffers that hold what was decided.
    pub(super) fn bytes(&self) -> u64 {
        self.decided.iter().map(Decided::bytes).sum()
    }

    /// What the host knows of keys and of values.
    pub(super) fn known(&self) -> Vec<Known> {
        let all = words(&self.bytes);
        let mut rest = all.as_slice();
        let parts = self.decided.iter().map(|decided| {
            let pages = decided.layout().pages();
            let mut take = |count: usize| {
                let (taken, left) = rest.split_at(count.min(rest.len()));
                rest = left;
                taken
            };
            let totals = parse_totals(take(STATUS_WORDS));
            let entry = |&[slots, side, retained]: &[u32; 3]| Page { slots, side, retained };
            let table = take(pages * 3).as_chunks::<3>().0.iter().map(entry).collect();
            Known { totals, pages: table, causes: take(pages * CAUSE_WORDS).to_vec() }
        });
        parts.collect()
    }
}

/// Decides the rows of a range, keys and values, by frozen verdicts where there are any.
pub(super) fn decide(
    recording: &mut Recording<'_>,
    gpu: &Gpu,
    ops: &Ops,
    ledger: &Ledger<Device>,
    range: &FoldRange,
) -> Result<[Decided; 2]> {
    let options = ledger.options.merge_at(range.start);
    let prefill = ledger.sequence(range.sequence)?.prefill.unwrap_or(0);
    let frame = Frame { first: range.start, tokens: prefill };
    let cuts = ledger.state(range).and_then(|state| state.cuts.as_ref());
    let blocks = ledger.blocks(range);
    let mut decide = |part: usize| {
        let views =
            blocks.iter().filter_map(|&(block, at)| block.views(at, range.tokens).into_iter().nth(part));
        let views: Vec<KvView> = views.collect();
        let frozen = cuts.and_then(|cuts| cuts.get(part)).map(|cut| (cut.as_ref(), frame));
        match views.as_slice() {
            [lower, upper] => ops.decide(recording, [lower, upper], &options, frozen),
            _ => {
                let stacked = stack(recording, gpu, &views)?;
                ops.decide_group(recording, &stacked, &options, frozen)
            }
        }
    };
    Ok([decide(0)?, decide(1)?])
}

/// Copies the rows of several layers into one tensor `[layers, heads, tokens, dim]`, every row at a whole word.
pub(super) fn stack(recording: &mut Recording<'_>, gpu: &Gpu, views: &[KvView]) -> Result<KvView> {
    let first = views.first().ok_or_else(|| Error::range("layers folded together", "2 or more", 0))?;
    let shape = Shape { batch: views.len(), ..first.shape() };
    let stacked = room(gpu, "layers of a group", shape, first.dtype())?;
    for (layer, view) in views.iter().enumerate() {
        copy(recording, gpu, view, &stacked.part(layer, 0, shape.tokens))?;
    }
    Ok(stacked)
}

/// Copies within the encoder, prepared.
#[derive(Default)]
pub(super) struct Moves(Vec<Move>);

struct Move {
    from: wgpu::Buffer,
    at: u64,
    to: wgpu::Buffer,
    to_at: u64,
    bytes: u64,
}

impl Moves {
    pub(super) fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        for part in self.0.iter().filter(|part| part.bytes > 0) {
            encoder.copy_buffer_to_buffer(&part.from, part.at, &part.to, part.to_at, part.bytes);
        }
    }

    /// Moves words `[from, end)` of a store to word `to` of another, and says where they end there.
    fn words(&mut self, source: &wgpu::Buffer, [from, end]: [u32; 2], target: &wgpu::Buffer, to: u32) -> u32 {
        let [at, to_at, bytes] = [from, to, end - from].map(|words| u64::from(words) * 4);
        self.0.push(Move { from: source.clone(), at, to: target.clone(), to_at, bytes });
        to + end - from
    }
}

/// Folds what was decided, joined to the run before where there is one; the verdicts have come. The moves come after the
/// recording's dispatches.
pub(super) fn fold(
    recording: &mut Recording<'_>,
    gpu: &Gpu,
    ops: &Ops,
    verdicts: &Verdicts,
    before: Option<&[Arc<DeviceFold>; 2]>,
    moves: &mut Moves,
) -> Result<([Arc<DeviceFold>; 2], [Verdict; 2])> {
    let (mut folds, mut causes) = (Vec::new(), Vec::new());
    for (part, (known, decided)) in verdicts.known().into_iter().zip(&verdicts.decided).enumerate() {
        let buffers = ops.merge(recording, decided, known.totals)?;
        let fresh = DeviceFold { buffers, pages: known.pages.clone() };
        let fold = match before.and_then(|before| before.get(part)) {
            Some(before) => join(gpu, before, &fresh, moves)?,
            None => fresh,
        };
        folds.push(Arc::new(fold));
        causes.push(known.verdict());
    }
    let incomplete =
        || Error::Device { what: "fold".to_owned(), cause: "verdicts are incomplete".to_owned() };
    Ok((folds.try_into().map_err(|_| incomplete())?, causes.try_into().map_err(|_| incomplete())?))
}

/// Joins two folded pairs in a new store, section by section.
fn join(gpu: &Gpu, first: &DeviceFold, second: &DeviceFold, moves: &mut Moves) -> Result<DeviceFold> {
    let Joined { layout, totals, pages } = Joined::of(first.outline(), second.outline())?;
    let store = gpu.storage("folded pair", totals.bytes(&layout))?;
    let table = gpu.upload("page table", bytemuck::cast_slice(&pages))?;
    let at = totals.sections(&layout);
    moves.words(&table, [0, at.slots], &store, at.pages);
    let ends = |layout: &Layout, totals: &Totals| {
        let Sections { slots, magnitudes, side, .. } = totals.sections(layout);
        [[slots, magnitudes], [magnitudes, side], [side, (totals.bytes(layout) / 4) as u32]]
    };
    let mut to = [at.slots, at.magnitudes, at.side];
    for fold in [first, second] {
        let FoldedBuffers { layout, totals, store: source } = &fold.buffers;
        let Some(source) = source else { continue };
        for (section, to) in ends(layout, totals).into_iter().zip(&mut to) {
            *to = moves.words(source, section, &store, *to);
        }
    }
    Ok(DeviceFold { buffers: FoldedBuffers { layout, totals, store: Some(store) }, pages })
}
