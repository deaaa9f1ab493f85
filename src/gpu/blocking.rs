//! The only place that waits. It does not exist on wasm32, where nothing may block the page.

use std::thread;
use std::time::{Duration, Instant};

use super::{Caps, Gpu, ReadBack, Request};
use crate::error::{Error, Result};

/// How long another thread that polls the device may take to pass on what it was told.
const PASSED_ON: Duration = Duration::from_secs(1);

impl Gpu {
    /// [`request`](Self::request), waiting for it.
    ///
    /// # Errors
    /// As [`request`](Self::request).
    pub fn request_blocking(request: Request) -> Result<Self> {
        pollster::block_on(Self::request(request))
    }

    /// Waits until everything submitted so far has run.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] when the device is known to be lost, [`Error::Device`] when waiting fails.
    pub fn wait_blocking(&self) -> Result<()> {
        self.check_lost()?;
        let waited = self.device().poll(wgpu::PollType::wait_indefinitely());
        waited
            .map(|_| ())
            .map_err(|cause| Error::Device { what: "waiting".to_owned(), cause: cause.to_string() })
    }

    /// Awaits `future`, driving the device until it is ready: for futures of this library on a device that nobody else
    /// polls. A read-back whose encoder was dropped is an error; one whose encoder is still held never comes.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        loop {
            if let std::task::Poll::Ready(result) = future.as_mut().poll(&mut context) {
                return result;
            }
            // Where waiting fails, mappings have failed with it, and the future says so when it is polled.
            let _ = self.wait_blocking();
        }
    }
}

/// [`adapters`](super::adapters), waiting for them.
#[must_use]
pub fn adapters_blocking(backends: wgpu::Backends) -> Vec<Caps> {
    pollster::block_on(super::adapters(backends))
}

impl ReadBack {
    /// Waits for the bytes, driving the device, which other threads may do too.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] when the device is gone, [`Error::Device`] when the bytes cannot be mapped or their
    /// encoder was not submitted.
    pub fn wait_blocking(self) -> Result<Vec<u8>> {
        let gpu = self.gpu.clone();
        gpu.wait_blocking()?;
        // Everything submitted has run. A thread that polled at the same time may have been told of it and not yet have
        // called this read-back's callback.
        let end = Instant::now() + PASSED_ON;
        while !self.is_done() {
            if Instant::now() > end {
                let cause = "the encoder that carries it was not submitted".to_owned();
                return Err(Error::Device { what: "read-back".to_owned(), cause });
            }
            thread::sleep(Duration::from_millis(1));
        }
        gpu.block_on(self)
    }
}
