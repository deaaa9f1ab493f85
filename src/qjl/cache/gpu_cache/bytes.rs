//! What the cache on the device holds and needs, in bytes.

use std::sync::Arc;

use super::super::bytes::{OriginalAccounting, Unique, original, payload};
use super::codes::DeviceCodec;
use super::{QjlCache, TableBuffer};

impl QjlCache {
    /// Bytes of all buffers held: raw rows with the room beside them, coded blocks, tables, rotations or projections.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let mut unique = Unique::default();
        for track in self.ledger.all_tracks() {
            for block in track.sinks.blocks().iter().chain(track.tail.blocks()) {
                unique.add(&block.rows, || block.rows.bytes());
            }
            track.coded.iter().for_each(|block| unique.add(&block.codes, || block.codes.bytes()));
            if let Some(tables) = &track.extra.tables {
                unique.add(tables, || tables.bytes());
            }
            if let Some(energies) = &track.extra.energies {
                unique.add(energies, || energies.size());
            }
        }
        let shared = self.shared.iter().flatten().map(TableBuffer::bytes).sum::<u64>();
        let status = self.status.iter().map(wgpu::Buffer::size).sum::<u64>();
        unique.total() + shared + status + self.devices.iter().map(DeviceCodec::bytes).sum::<u64>()
    }

    /// Bytes of all rows that have not left, as they came: what the cache stands for.
    #[must_use]
    pub fn raw_bytes(&self) -> u64 {
        self.ledger.raw_bytes()
    }

    /// Bytes that the rows need: coded rows, raw rows, tables, rotations or projections.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        payload(&self.ledger, &self.coders, |learnt| learnt.tables.as_ref().map(Arc::as_ptr))
    }

    /// Bytes of the buffers in which calls leave what they need while they run, partial results above all: all caches of a device
    /// share them ([`Gpu::scratch_bytes`](crate::gpu::Gpu::scratch_bytes)), and the cache has none of its own.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        self.gpu.scratch_bytes()
    }

    /// The original's figures for every layer of sketches; `None` of sign planes, which it does not have.
    #[must_use]
    pub fn original_accounting(&self) -> Option<Vec<OriginalAccounting>> {
        original(&self.ledger, &self.coders)
    }
}
