//! What MiniCache keeps on the device.

use super::super::Row;
use super::super::config::{Cause, Counts};
use super::super::folded::{Folded, Layout, Page, Totals};
use super::TOTALS_AT;
use crate::error::{Error, Result};
use crate::gpu::{Gpu, KvView, ReadBack, words};

/// Rows measured by [`encode_similarity`](super::Ops::encode_similarity), on the device.
#[derive(Clone, Debug)]
pub struct Rows {
    pub(super) gpu: Gpu,
    pub(super) layout: Layout,
    pub(super) buffer: wgpu::Buffer,
}

/// The rows that are folded.
#[derive(Debug)]
pub(super) enum Source {
    Pair {
        lower: KvView,
        upper: KvView,
    },
    /// `[layers, heads, tokens, dim]`, and of every row each layer's norm and weight.
    Group {
        layers: KvView,
        scales: wgpu::Buffer,
    },
}

/// Measured and decided rows of a pair or a group, laid out as pages.
#[derive(Debug)]
pub(in crate::minicache) struct Decided {
    pub(super) rows: Rows,
    pub(super) source: Source,
    /// The page table.
    pub(in crate::minicache) pages: wgpu::Buffer,
    /// Counts by cause, and sizes.
    pub(in crate::minicache) status: wgpu::Buffer,
    /// Each row's cause in four bits.
    pub(in crate::minicache) causes: wgpu::Buffer,
}

/// Rows decided by [`encode_decide`](super::Ops::encode_decide), on the device; their totals are on the way to the host.
#[derive(Debug)]
pub struct Decision {
    pub(super) decided: Decided,
    pub(super) totals: Awaited,
}

/// Totals on their way, or come.
#[derive(Debug)]
pub(super) enum Awaited {
    Coming(ReadBack),
    Come(Totals),
    Failed,
}

/// A folded pair on the device: one buffer of exactly what it holds, [`Sections`](crate::minicache::Sections) one after the
/// other; none where there is nothing to hold.
#[derive(Clone, Debug)]
pub struct FoldedBuffers {
    /// Sizes.
    pub layout: Layout,
    /// Slots, side rows, raw pages and counts.
    pub totals: Totals,
    pub(in crate::minicache) store: Option<wgpu::Buffer>,
}

impl Rows {
    pub(in crate::minicache) fn new(gpu: &Gpu, layout: Layout, buffer: wgpu::Buffer) -> Self {
        Self { gpu: gpu.clone(), layout, buffer }
    }

    pub(in crate::minicache) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(in crate::minicache) fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// Schedules the read-back of the measured rows.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back(&self, encoder: &mut wgpu::CommandEncoder) -> Result<ReadBack> {
        ReadBack::schedule(&self.gpu, encoder, &self.buffer)
    }

    /// The rows in a read-back's bytes, as the twin gives them.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Vec<Row> {
        let row = |words: &[u32; 6]| {
            let [cosine, lower, upper, weight_lower, weight_upper, fault] = *words;
            Row {
                cosine: f32::from_bits(cosine),
                lower: f32::from_bits(lower),
                upper: f32::from_bits(upper),
                weight_lower: f32::from_bits(weight_lower),
                weight_upper: f32::from_bits(weight_upper),
                fault: Cause::from_code(fault),
            }
        };
        words(bytes).as_chunks::<6>().0.iter().map(row).collect()
    }
}

impl Decided {
    pub(in crate::minicache) fn layout(&self) -> &Layout {
        &self.rows.layout
    }

    /// Bytes of the buffers.
    pub(in crate::minicache) fn bytes(&self) -> u64 {
        [&self.rows.buffer, &self.pages, &self.status, &self.causes].map(wgpu::Buffer::size).iter().sum()
    }
}

impl Decision {
    /// The measured rows.
    #[must_use]
    pub fn rows(&self) -> &Rows {
        &self.decided.rows
    }

    /// Schedules the read-back of the page table, which says which rows stay raw.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back_pages(&self, encoder: &mut wgpu::CommandEncoder) -> Result<ReadBack> {
        ReadBack::schedule(&self.decided.rows.gpu, encoder, &self.decided.pages)
    }

    /// The page table in a read-back's bytes.
    #[must_use]
    pub fn parse_pages(bytes: &[u8]) -> Vec<Page> {
        let page = |&[slots, side, retained]: &[u32; 3]| Page { slots, side, retained };
        words(bytes).as_chunks::<3>().0.iter().map(page).collect()
    }

    /// The totals, once the submit that carries the decision has run; [`encode_merge`](super::Ops::encode_merge) needs them to
    /// have been awaited.
    ///
    /// # Errors
    /// [`Error::Device`] or [`Error::DeviceLost`] when they do not come.
    pub async fn totals(&mut self) -> Result<Totals> {
        if let Awaited::Coming(read_back) = std::mem::replace(&mut self.totals, Awaited::Failed) {
            self.totals = Awaited::Come(parse_totals(&words(&read_back.await?)));
        }
        self.known_totals()
    }

    /// The totals, where they have been awaited.
    pub(super) fn known_totals(&self) -> Result<Totals> {
        let cause = match &self.totals {
            Awaited::Come(totals) => return Ok(*totals),
            Awaited::Coming(_) => "they were not awaited",
            Awaited::Failed => "they did not come",
        };
        Err(Error::Device { what: "totals of a decision".to_owned(), cause: cause.to_owned() })
    }
}

/// The totals in the words of a status buffer.
pub(in crate::minicache) fn parse_totals(status: &[u32]) -> Totals {
    let at = |index: u32| status.get(index as usize).copied().unwrap_or_default();
    let counts = Counts {
        merged: at(0),
        non_finite: at(1),
        sink: at(2),
        rule: at(3),
        antiparallel: at(4),
        range: at(5),
    };
    Totals { slots: at(TOTALS_AT), side: at(TOTALS_AT + 1), raw_pages: at(TOTALS_AT + 2), counts }
}

impl FoldedBuffers {
    /// Bytes of the buffer that holds the pair.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.store.as_ref().map_or(0, wgpu::Buffer::size)
    }

    /// Schedules the read-back of everything stored; [`parse`](Self::parse) makes a [`Folded`] of it.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<Option<ReadBack>> {
        self.store.as_ref().map(|store| ReadBack::schedule(gpu, encoder, store)).transpose()
    }

    /// The folded pair on the host, from a read-back.
    ///
    /// # Errors
    /// What the read-back says.
    pub async fn parse(&self, read_back: Option<ReadBack>) -> Result<Folded> {
        let bytes = match read_back {
            Some(read_back) => read_back.await?,
            None => Vec::new(),
        };
        Folded::from_words(self.layout, self.totals, &words(&bytes))
    }
}
