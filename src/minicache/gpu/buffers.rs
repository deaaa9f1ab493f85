//! What MiniCache keeps on the device.

use super::super::config::{Cause, Counts};
use super::super::cpu::Row;
use super::super::folded::{Folded, Layout, Page, Totals};
use super::TOTALS_AT;
use crate::error::{Error, Result};
use crate::gpu::{Gpu, KvView, ReadBack, words};

/// Rows measured by [`Ops::encode_similarity`], on the device.
#[derive(Clone, Debug)]
pub struct Rows {
    pub(super) gpu: Gpu,
    pub(super) layout: Layout,
    pub(super) buffer: wgpu::Buffer,
}

/// Rows decided by [`Ops::encode_decide`], on the device; their totals are on the way to the host.
#[derive(Debug)]
pub struct Decision {
    pub(super) rows: Rows,
    pub(super) lower: KvView,
    pub(super) upper: KvView,
    pub(super) pages: wgpu::Buffer,
    pub(super) totals: Option<ReadBack>,
}

/// A folded pair on the device: exact buffers, `None` where there is nothing to hold.
#[derive(Clone, Debug)]
pub struct FoldedBuffers {
    /// Sizes.
    pub layout: Layout,
    /// Slots, side rows, raw pages and counts.
    pub totals: Totals,
    pub(super) pages: Option<wgpu::Buffer>,
    pub(super) slots: Option<wgpu::Buffer>,
    pub(super) magnitudes: Option<wgpu::Buffer>,
    pub(super) side: Option<wgpu::Buffer>,
}

impl Rows {
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

impl Decision {
    /// The measured rows.
    #[must_use]
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// The totals, once the submit that carries the decision has run. They come once.
    ///
    /// # Errors
    /// [`Error::Device`] or [`Error::DeviceLost`] when they do not come, or were taken before.
    pub async fn totals(&mut self) -> Result<Totals> {
        let taken =
            || Error::Device { what: "totals".to_owned(), cause: "they were taken before".to_owned() };
        let bytes = self.totals.take().ok_or_else(taken)?.await?;
        let status = words(&bytes);
        let at = |index: u32| status.get(index as usize).copied().unwrap_or_default();
        let counts = Counts {
            merged: at(0),
            non_finite: at(1),
            sink: at(2),
            rule: at(3),
            antiparallel: at(4),
            range: at(5),
        };
        Ok(Totals { slots: at(TOTALS_AT), side: at(TOTALS_AT + 1), raw_pages: at(TOTALS_AT + 2), counts })
    }
}

impl FoldedBuffers {
    fn buffers(&self) -> [Option<&wgpu::Buffer>; 4] {
        [self.pages.as_ref(), self.slots.as_ref(), self.magnitudes.as_ref(), self.side.as_ref()]
    }

    /// Bytes of the buffers that hold the pair.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffers().into_iter().flatten().map(wgpu::Buffer::size).sum()
    }

    /// Schedules the read-back of everything stored; [`Self::parse`] makes a [`Folded`] of the bytes.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<[Option<ReadBack>; 4]> {
        let mut read_backs = [None, None, None, None];
        for (read_back, buffer) in read_backs.iter_mut().zip(self.buffers()) {
            *read_back = buffer.map(|buffer| ReadBack::schedule(gpu, encoder, buffer)).transpose()?;
        }
        Ok(read_backs)
    }

    /// The folded pair on the host, from the bytes of a read-back.
    ///
    /// # Errors
    /// What the read-backs say.
    pub async fn parse(&self, read_backs: [Option<ReadBack>; 4]) -> Result<Folded> {
        let mut stores: [Vec<u32>; 4] = Default::default();
        for (store, read_back) in stores.iter_mut().zip(read_backs) {
            if let Some(read_back) = read_back {
                *store = words(&read_back.await?);
            }
        }
        let [pages, slots, magnitudes, side] = stores;
        let page = |&[slots, side, retained]: &[u32; 3]| Page { slots, side, retained };
        let pages = pages.as_chunks::<3>().0.iter().map(page).collect();
        Ok(Folded { layout: self.layout, pages, slots, magnitudes, side, totals: self.totals })
    }
}
