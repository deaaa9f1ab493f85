//! The device and everything between it and the kernels. The only module, with the `gpu.rs` and `gpu_cache.rs` of the
//! methods, that names wgpu.
//!
//! Recording never waits, submits or polls: operations prepare all they need first (an error means that nothing was
//! recorded) and then write into the caller's encoder. Waiting is `async`; native programs also have `*_blocking`.

pub(crate) mod block;
#[cfg(not(target_arch = "wasm32"))]
mod blocking;
mod caps;
mod late;
mod pipeline;
mod readback;
mod record;
mod request;
mod shader;
mod strip;
mod view;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

#[cfg(not(target_arch = "wasm32"))]
pub use blocking::adapters_blocking;
pub use caps::Caps;
pub use readback::ReadBack;
pub use request::{Request, adapters};
pub use shader::{Target, Variant};
pub use view::KvView;

pub(crate) use caps::{Arithmetic, listed_widths};
pub(crate) use pipeline::Pipeline;
pub(crate) use readback::{Prepared as ReadBackPrepared, words};
pub(crate) use record::{Dispatch, Recording, Window};
pub(crate) use shader::{Access, Const, Kernel, Module};
pub(crate) use view::{BoundView, InputParams, OutputParams, ViewUse, index32};

use crate::error::{Error, Result};

/// A device with the kernels made for it so far. Cheap to clone; clones share everything.
#[derive(Clone, Debug)]
pub struct Gpu {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    device: wgpu::Device,
    queue: wgpu::Queue,
    caps: Caps,
    pipelines: Mutex<HashMap<Variant, Arc<Pipeline>>>,
    /// Why the device was lost, where it is our own.
    lost: Arc<Mutex<Option<String>>>,
    /// Buffers that calls fill before they read them, by what they are for.
    scratch: Mutex<HashMap<&'static str, wgpu::Buffer>>,
    /// Error scopes that a browser has not answered yet.
    late: late::Scopes,
}

/// A mutex whose holder cannot panic half-way through a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// Brings the host's device. Nothing of it is changed: no hook is set, nothing is submitted or polled, and no optional
    /// feature is needed; subgroups are used where the device was made with them.
    ///
    /// # Errors
    /// [`Error::NullAdapter`] for the no-op backend; [`Error::Limit`] when the device allows fewer than 7 storage buffers,
    /// 256 invocations or 16 KiB of workgroup memory (WebGPU's defaults allow them all).
    pub fn from_wgpu(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self> {
        Self::with_subgroups(device, queue, true)
    }

    fn with_subgroups(device: wgpu::Device, queue: wgpu::Queue, subgroups: bool) -> Result<Self> {
        let info = device.adapter_info();
        request::refuse_null(&info)?;
        let mut caps = Caps::new(&info, device.features(), &device.limits());
        caps.subgroups = caps.subgroups.filter(|_| subgroups);
        let needs = [
            ("storage buffers of a stage", 7, caps.max_storage_buffers_per_shader_stage),
            ("invocations of a workgroup", 256, caps.max_compute_invocations_per_workgroup),
            ("bytes of workgroup memory", 16384, caps.max_compute_workgroup_storage_size),
        ];
        for (what, need, have) in needs {
            if have < need {
                return Err(Error::Limit { what, need: need.into(), have: have.into() });
            }
        }
        let (pipelines, scratch) = (Mutex::default(), Mutex::default());
        let (lost, late) = (Arc::default(), late::Scopes::default());
        Ok(Self { shared: Arc::new(Shared { device, queue, caps, pipelines, scratch, lost, late }) })
    }

    /// The wgpu device.
    #[must_use]
    pub fn device(&self) -> &wgpu::Device {
        &self.shared.device
    }

    /// The wgpu queue.
    #[must_use]
    pub fn queue(&self) -> &wgpu::Queue {
        &self.shared.queue
    }

    /// What the device can do, and what of it the kernels use.
    #[must_use]
    pub fn caps(&self) -> &Caps {
        &self.shared.caps
    }

    /// The [labels](Variant::label) of the kernel variants compiled so far, in alphabetical order.
    #[must_use]
    pub fn variants(&self) -> Vec<String> {
        let mut labels: Vec<String> = lock(&self.shared.pipelines).keys().map(Variant::label).collect();
        labels.sort_unstable();
        labels
    }

    /// Makes an encoder and hands it to `record`, then submits what was recorded; for callers without an encoder of
    /// their own.
    ///
    /// # Errors
    /// What `record` returns; nothing is submitted then. [`Error::Device`] when the device refuses what was recorded.
    pub fn submit<T>(&self, record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<T>) -> Result<T> {
        let mut encoder = self.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let result = record(&mut encoder)?;
        self.scoped("submit", 0, |_| self.queue().submit([encoder.finish()]))?;
        Ok(result)
    }

    /// A storage buffer of exactly `bytes`, to be filled by kernels and copies.
    ///
    /// # Errors
    /// [`Error::Limit`] when it exceeds the device's largest buffer, [`Error::OutOfMemory`] when it cannot be allocated.
    pub fn storage(&self, label: &str, bytes: u64) -> Result<wgpu::Buffer> {
        self.buffer(label, bytes, None)
    }

    /// A storage buffer of at least `bytes` for what one call writes before it reads it. Calls share it: what a queue executes,
    /// it executes in order, and a call is recorded as a whole. Megabytes would else be made, and cleared by wgpu, for each.
    pub(crate) fn scratch(&self, label: &'static str, bytes: u64) -> Result<wgpu::Buffer> {
        if let Some(held) = lock(&self.shared.scratch).get(label).filter(|held| held.size() >= bytes) {
            return Ok(held.clone());
        }
        let most = self.caps().max_storage_buffer_binding_size;
        let buffer = self.storage(label, bytes.next_power_of_two().min(most).max(bytes))?;
        lock(&self.shared.scratch).insert(label, buffer.clone());
        Ok(buffer)
    }

    /// Bytes of the buffers that calls share for what they need while they run: partial results of attention above all.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        lock(&self.shared.scratch).values().map(wgpu::Buffer::size).sum()
    }

    /// A storage buffer that holds `bytes`, padded with zeros to whole 32-bit words.
    ///
    /// # Errors
    /// As [`storage`](Self::storage).
    pub fn upload(&self, label: &str, bytes: &[u8]) -> Result<wgpu::Buffer> {
        self.buffer(label, (bytes.len() as u64).next_multiple_of(4).max(4), Some(bytes))
    }

    fn buffer(&self, label: &str, size: u64, contents: Option<&[u8]>) -> Result<wgpu::Buffer> {
        let have = self.caps().max_buffer_size;
        if size > have {
            return Err(Error::Limit { what: "bytes of a buffer", need: size, have });
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let descriptor = wgpu::BufferDescriptor {
            label: Some(label),
            size,
            usage,
            mapped_at_creation: contents.is_some(),
        };
        let buffer = self.scoped(label, size, |device| device.create_buffer(&descriptor))?;
        if let Some(contents) = contents {
            let refused = |cause: wgpu::MapRangeError| Error::Device {
                what: label.to_owned(),
                cause: cause.to_string(),
            };
            let mut mapped = buffer.get_mapped_range_mut(..).map_err(refused)?;
            mapped.slice(..contents.len()).copy_from_slice(contents);
            drop(mapped);
            buffer.unmap();
        }
        Ok(buffer)
    }

    /// Runs `create` inside error scopes, so that no error reaches wgpu's default handler. Natively errors are known at
    /// once. In a browser they arrive later: the objects made are then inert, and the read-backs of what they would have
    /// computed end in the error.
    pub(crate) fn scoped<T>(
        &self,
        what: &str,
        bytes: u64,
        create: impl FnOnce(&wgpu::Device) -> T,
    ) -> Result<T> {
        self.check_lost()?;
        let device = self.device();
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let made = create(device);
        let errors: [late::Answer; 3] =
            [Box::pin(validation.pop()), Box::pin(internal.pop()), Box::pin(memory.pop())];
        let mut context = Context::from_waker(Waker::noop());
        for mut error in errors {
            match error.as_mut().poll(&mut context) {
                Poll::Ready(None) => {}
                Poll::Ready(Some(cause)) => return Err(late::device_error(what, bytes, &cause)),
                Poll::Pending => self.shared.late.keep(what, bytes, error),
            }
        }
        Ok(made)
    }

    /// Waits until the device has said what became of all that was made so far, and returns the first error of it.
    pub(crate) async fn late_errors(&self) -> Result<()> {
        let mut awaited = self.shared.late.awaited();
        std::future::poll_fn(|context| self.shared.late.poll(&mut awaited, context)).await
    }

    /// [`Error::DeviceLost`] where the device is our own and known to be lost.
    fn check_lost(&self) -> Result<()> {
        lock(&self.shared.lost).clone().map_or(Ok(()), |cause| Err(Error::DeviceLost { cause }))
    }
}
