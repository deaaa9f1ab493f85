//! Reading results back: scheduled in the caller's encoder, awaited after the caller's submit.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use super::{Gpu, lock};
use crate::error::{Error, Result};

#[derive(Debug, Default)]
struct State {
    done: Option<Result<(), String>>,
    waker: Option<Waker>,
}

/// Bytes on their way to the host: a future that is ready once the submit that carries it has run. Natively somebody must
/// poll the device meanwhile, or call [`wait_blocking`](Self::wait_blocking).
#[derive(Debug)]
#[must_use = "a read-back is awaited"]
pub struct ReadBack {
    pub(super) gpu: Gpu,
    what: String,
    staging: Option<wgpu::Buffer>,
    state: Arc<Mutex<State>>,
}

impl ReadBack {
    /// Schedules a copy of the whole `buffer`, which is a multiple of four bytes long.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or [`Error::Limit`] when the staging buffer cannot be made, [`Error::Usage`] when `buffer`
    /// cannot be copied from.
    pub fn schedule(gpu: &Gpu, encoder: &mut wgpu::CommandEncoder, buffer: &wgpu::Buffer) -> Result<Self> {
        let what = "read-back".to_owned();
        if !buffer.usage().contains(wgpu::BufferUsages::COPY_SRC) {
            let have = format!("{:?}", buffer.usage());
            return Err(Error::Usage { what, want: "COPY_SRC".to_owned(), have });
        }
        let state = Arc::new(Mutex::new(State::default()));
        if buffer.size() == 0 {
            lock(&state).done = Some(Ok(()));
            return Ok(Self { gpu: gpu.clone(), what, staging: None, state });
        }
        let descriptor = wgpu::BufferDescriptor {
            label: Some("kvfold read-back"),
            size: buffer.size(),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        };
        let staging = gpu.scoped(&what, descriptor.size, |device| device.create_buffer(&descriptor))?;
        encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, Some(buffer.size()));
        let shared = Arc::clone(&state);
        encoder.map_buffer_on_submit(&staging, wgpu::MapMode::Read, .., move |result| {
            let mut state = lock(&shared);
            state.done = Some(result.map_err(|cause| cause.to_string()));
            if let Some(waker) = state.waker.take() {
                waker.wake();
            }
        });
        Ok(Self { gpu: gpu.clone(), what, staging: Some(staging), state })
    }

    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn is_done(&self) -> bool {
        lock(&self.state).done.is_some()
    }

    fn take(&mut self) -> Result<Vec<u8>> {
        let Some(staging) = self.staging.take() else {
            return Ok(Vec::new());
        };
        let mapped = staging.get_mapped_range(..);
        let bytes = mapped
            .map_err(|cause| Error::Device { what: self.what.clone(), cause: cause.to_string() })?
            .to_vec();
        staging.unmap();
        staging.destroy();
        Ok(bytes)
    }
}

impl Future for ReadBack {
    type Output = Result<Vec<u8>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = lock(&self.state);
        match state.done.clone() {
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
            Some(Ok(())) => {
                drop(state);
                Poll::Ready(self.take())
            }
            Some(Err(cause)) => {
                drop(state);
                let lost = lock(&self.gpu.shared.lost).clone();
                Poll::Ready(Err(match lost {
                    Some(cause) => Error::DeviceLost { cause },
                    None => Error::Device { what: self.what.clone(), cause },
                }))
            }
        }
    }
}

/// Little-endian words of a read-back.
pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}
