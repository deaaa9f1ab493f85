//! The device and everything between it and the kernels. The only module, with the `gpu.rs` and `gpu_cache.rs` of the
//! methods, that names wgpu.
//!
//! Recording never waits, submits or polls: operations prepare all they need first (an error means that nothing was
//! recorded) and then write into the caller's encoder. Waiting is `async`; native programs also have `*_blocking`.

#[cfg(not(target_arch = "wasm32"))]
mod blocking;
mod caps;
mod pipeline;
mod readback;
mod record;
mod request;
mod shader;
mod view;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(not(target_arch = "wasm32"))]
pub use blocking::adapters_blocking;
pub use caps::Caps;
pub use readback::ReadBack;
pub use request::{Request, adapters};
pub use shader::{Target, Variant};
pub use view::KvView;

pub(crate) use pipeline::Pipeline;
pub(crate) use readback::words;
pub(crate) use record::{Dispatch, Recording, Window};
pub(crate) use shader::{Access, Const, Kernel, Module};
pub(crate) use view::{BoundView, InputParams, OutputParams, ViewUse, index32};

use crate::error::{Error, Result};

/// Which optional capabilities kernels may use, beside what the device has.
#[derive(Clone, Copy, Debug)]
struct Switches {
    f16: bool,
    subgroups: bool,
}

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
}

/// A mutex whose holder cannot panic half-way through a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// Brings the host's device. Nothing of it is changed: no hook is set, nothing is submitted or polled, and no optional
    /// feature is needed; f16 and subgroups are used where the device was made with them.
    ///
    /// # Errors
    /// [`Error::NullAdapter`] for the no-op backend; [`Error::Limit`] when the device allows fewer than 7 storage buffers,
    /// 256 invocations or 16 KiB of workgroup memory (WebGPU's defaults allow them all).
    pub fn from_wgpu(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self> {
        Self::with_switches(device, queue, Switches { f16: true, subgroups: true })
    }

    fn with_switches(device: wgpu::Device, queue: wgpu::Queue, switches: Switches) -> Result<Self> {
        let info = device.adapter_info();
        request::refuse_null(&info)?;
        let mut caps = Caps::new(&info, device.features(), &device.limits());
        caps.f16 &= switches.f16;
        caps.subgroups = caps.subgroups.filter(|_| switches.subgroups);
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
        let pipelines = Mutex::default();
        let lost = Arc::default();
        Ok(Self { shared: Arc::new(Shared { device, queue, caps, pipelines, lost }) })
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

    /// Makes an encoder and hands it to `record`, then submits what was recorded; for callers without an encoder of
    /// their own.
    ///
    /// # Errors
    /// What `record` returns; nothing is submitted then.
    pub fn submit<T>(&self, record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<T>) -> Result<T> {
        let mut encoder = self.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let result = record(&mut encoder)?;
        self.queue().submit([encoder.finish()]);
        Ok(result)
    }

    /// A storage buffer of exactly `bytes`, to be filled by kernels and copies.
    ///
    /// # Errors
    /// [`Error::Limit`] when it exceeds the device's largest buffer, [`Error::OutOfMemory`] when it cannot be allocated.
    pub fn storage(&self, label: &str, bytes: u64) -> Result<wgpu::Buffer> {
        self.buffer(label, bytes, None)
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
    /// once; in a browser they arrive later, and the objects made are inert.
    pub(crate) fn scoped<T>(
        &self,
        what: &str,
        bytes: u64,
        create: impl FnOnce(&wgpu::Device) -> T,
    ) -> Result<T> {
        if let Some(cause) = lock(&self.shared.lost).clone() {
            return Err(Error::DeviceLost { cause });
        }
        let device = self.device();
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let made = create(device);
        let errors = [ready(validation.pop()), ready(internal.pop()), ready(memory.pop())];
        match errors.into_iter().flatten().next() {
            None => Ok(made),
            Some(wgpu::Error::OutOfMemory { .. }) => {
                Err(Error::OutOfMemory { what: what.to_owned(), need: bytes })
            }
            Some(other) => Err(Error::Device { what: what.to_owned(), cause: other.to_string() }),
        }
    }
}

/// The result of a future that is already there.
fn ready<T>(future: impl Future<Output = Option<T>>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).poll(&mut context) {
        std::task::Poll::Ready(result) => result,
        std::task::Poll::Pending => None,
    }
}
