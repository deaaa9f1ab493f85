//! Reading results back: scheduled in the caller's encoder, awaited after the caller's submit.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use super::{Gpu, late, lock};
use crate::error::{Error, Result};

#[derive(Debug, Default)]
struct State {
    done: Option<Result<(), String>>,
    waker: Option<Waker>,
}

/// Tells the read-back what became of its mapping; dropped without a word when its encoder is dropped.
struct Reporter(Arc<Mutex<State>>);

impl Reporter {
    fn report(&self, result: Result<(), String>) {
        let mut state = lock(&self.0);
        if state.done.is_none() {
            state.done = Some(result);
            if let Some(waker) = state.waker.take() {
                waker.wake();
            }
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.report(Err("the encoder that carries it was not submitted".to_owned()));
    }
}

/// Bytes on their way to the host: a future that is ready once the submit that carries it has run. Natively somebody must
/// poll the device meanwhile, or call [`wait_blocking`](Self::wait_blocking).
#[derive(Debug)]
#[must_use = "a read-back is awaited"]
pub struct ReadBack {
    pub(super) gpu: Gpu,
    staging: Option<wgpu::Buffer>,
    state: Arc<Mutex<State>>,
    /// The error scopes from before the recording, and with the first poll those up to it: that of the submit among them.
    late: late::Awaited,
    polled: bool,
}

/// A read-back with its staging buffer, not yet recorded: what can fail has been done.
#[derive(Debug)]
pub(crate) struct Prepared {
    gpu: Gpu,
    buffers: Vec<wgpu::Buffer>,
    staging: Option<wgpu::Buffer>,
}

const WHAT: &str = "read-back";

impl Prepared {
    /// Records the copy and the mapping.
    pub(crate) fn record(self, encoder: &mut wgpu::CommandEncoder) -> ReadBack {
        let state = Arc::new(Mutex::new(State::default()));
        match &self.staging {
            None => lock(&state).done = Some(Ok(())),
            Some(staging) => {
                let mut at = 0;
                for buffer in &self.buffers {
                    encoder.copy_buffer_to_buffer(buffer, 0, staging, at, buffer.size());
                    at += buffer.size();
                }
                let reporter = Reporter(Arc::clone(&state));
                encoder.map_buffer_on_submit(staging, wgpu::MapMode::Read, .., move |result| {
                    reporter.report(result.map_err(|cause| cause.to_string()));
                });
            }
        }
        let late = self.gpu.shared.late.awaited();
        ReadBack { gpu: self.gpu, staging: self.staging, state, late, polled: false }
    }
}

impl ReadBack {
    /// Schedules a copy of the whole `buffer`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or [`Error::Limit`] when the staging buffer cannot be made, [`Error::Usage`] when `buffer`
    /// cannot be copied from, [`Error::Alignment`] when it does not end on a whole word.
    pub fn schedule(gpu: &Gpu, encoder: &mut wgpu::CommandEncoder, buffer: &wgpu::Buffer) -> Result<Self> {
        Ok(Self::prepare(gpu, &[buffer])?.record(encoder))
    }

    /// Makes the staging buffer for whole buffers, one after the other, so that nothing can fail once recording has begun.
    pub(crate) fn prepare(gpu: &Gpu, buffers: &[&wgpu::Buffer]) -> Result<Prepared> {
        let what = || WHAT.to_owned();
        for buffer in buffers {
            if !buffer.usage().contains(wgpu::BufferUsages::COPY_SRC) {
                let have = format!("{:?}", buffer.usage());
                return Err(Error::Usage { what: what(), want: "COPY_SRC".to_owned(), have });
            }
            if !buffer.size().is_multiple_of(4) {
                let (want, have) = ("whole 32-bit words".to_owned(), format!("{} bytes", buffer.size()));
                return Err(Error::Alignment { what: what(), want, have });
            }
        }
        let descriptor = wgpu::BufferDescriptor {
            label: Some("kvfold read-back"),
            size: buffers.iter().map(|buffer| buffer.size()).sum(),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        };
        let staging = if descriptor.size == 0 {
            None
        } else {
            Some(gpu.scoped(WHAT, descriptor.size, |device| device.create_buffer(&descriptor))?)
        };
        Ok(Prepared {
            gpu: gpu.clone(),
            buffers: buffers.iter().map(|&buffer| buffer.clone()).collect(),
            staging,
        })
    }

    /// The bytes where they have come.
    pub(crate) fn try_take(&mut self) -> Option<Result<Vec<u8>>> {
        match Pin::new(self).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => None,
            Poll::Ready(bytes) => Some(bytes),
        }
    }

    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn is_done(&self) -> bool {
        lock(&self.state).done.is_some()
    }

    fn take(&mut self) -> Result<Vec<u8>> {
        let Some(staging) = self.staging.take() else {
            return Ok(Vec::new());
        };
        let refused =
            |cause: wgpu::MapRangeError| Error::Device { what: WHAT.to_owned(), cause: cause.to_string() };
        let bytes = staging.get_mapped_range(..).map_err(refused)?.to_vec();
        staging.unmap();
        staging.destroy();
        Ok(bytes)
    }
}

impl Future for ReadBack {
    type Output = Result<Vec<u8>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        // What a browser says late of the objects that made these bytes: they would be zeros.
        let scopes = &this.gpu.shared.late;
        if !std::mem::replace(&mut this.polled, true) {
            scopes.join(&mut this.late);
        }
        match scopes.poll(&mut this.late, context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) => {}
        }
        let mut state = lock(&this.state);
        match state.done.clone() {
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
            Some(Ok(())) => {
                drop(state);
                Poll::Ready(this.take())
            }
            Some(Err(cause)) => {
                drop(state);
                this.gpu.check_lost()?;
                Poll::Ready(Err(Error::Device { what: WHAT.to_owned(), cause }))
            }
        }
    }
}

/// Little-endian words of a read-back.
pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}
