//! Buffers, and their bytes while they are mapped.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvfold::wgpu::{self, custom as api};

/// A buffer; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Buffer(Arc<Mutex<Vec<u8>>>);

impl Buffer {
    /// Zeros, as wgpu promises.
    pub(super) fn new(size: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![0; size])))
    }

    pub(super) fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl api::BufferInterface for Buffer {
    fn map_async(&self, _: wgpu::MapMode, _: Range<u64>, callback: api::BufferMapCallback) {
        callback(Ok(()));
    }

    fn get_mapped_range(
        &self,
        range: Range<u64>,
    ) -> Result<api::DispatchBufferMappedRange, wgpu::MapRangeError> {
        let (start, end) = (range.start as usize, range.end as usize);
        let bytes = self.bytes()[start..end].to_vec();
        Ok(api::DispatchBufferMappedRange::custom(Mapped { buffer: self.clone(), start, bytes }))
    }

    fn unmap(&self) {}
    fn destroy(&self) {}
}

/// A copy of a buffer's bytes, which goes back when it is dropped.
#[derive(Debug)]
struct Mapped {
    buffer: Buffer,
    start: usize,
    bytes: Vec<u8>,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.buffer.bytes()[self.start..][..self.bytes.len()].copy_from_slice(&self.bytes);
    }
}

impl api::BufferMappedRangeInterface for Mapped {
    fn len(&self) -> usize {
        self.bytes.len()
    }

    unsafe fn read_slice(&self) -> &[u8] {
        &self.bytes
    }

    unsafe fn write_slice(&mut self) -> wgpu::WriteOnly<'_, [u8]> {
        wgpu::WriteOnly::from_mut(&mut self.bytes)
    }
}
