//! Asking for an adapter and a device.

use std::sync::Arc;

use super::caps::{Caps, backend_name};
use super::{Gpu, lock};
use crate::error::{Error, Result};

/// Which device to ask for. The default takes the fastest adapter there is, with subgroups where it has them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    /// Backends to look at.
    pub backends: wgpu::Backends,
    /// Part of the adapter's name, in any case; the first adapter that matches is taken.
    pub name: Option<String>,
    /// Use subgroup operations in shaders where the adapter can.
    pub subgroups: bool,
}

impl Default for Request {
    fn default() -> Self {
        Self { backends: wgpu::Backends::all(), name: None, subgroups: true }
    }
}

impl Request {
    /// Sets [`backends`](Self::backends).
    #[must_use]
    pub fn backends(mut self, backends: wgpu::Backends) -> Self {
        self.backends = backends;
        self
    }

    /// Sets [`name`](Self::name).
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets [`subgroups`](Self::subgroups).
    #[must_use]
    pub fn subgroups(mut self, subgroups: bool) -> Self {
        self.subgroups = subgroups;
        self
    }
}

/// Every adapter of these backends, with what a device of it could do. In a browser at most one.
pub async fn adapters(backends: wgpu::Backends) -> Vec<Caps> {
    let described =
        |adapter: &wgpu::Adapter| Caps::new(&adapter.get_info(), adapter.features(), &adapter.limits());
    candidates(&instance(backends), backends).await.iter().map(described).collect()
}

fn instance(backends: wgpu::Backends) -> wgpu::Instance {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = backends;
    // No validation layers: they are the host's choice, and old ones misread naga's SPIR-V.
    descriptor.flags = wgpu::InstanceFlags::empty();
    wgpu::Instance::new(descriptor)
}

/// Adapters that compute, the most capable kind first.
async fn candidates(instance: &wgpu::Instance, backends: wgpu::Backends) -> Vec<wgpu::Adapter> {
    #[cfg(target_arch = "wasm32")]
    let mut adapters: Vec<wgpu::Adapter> = {
        let _ = backends;
        let options = wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            ..Default::default()
        };
        instance.request_adapter(&options).await.into_iter().collect()
    };
    #[cfg(not(target_arch = "wasm32"))]
    let mut adapters = instance.enumerate_adapters(backends).await;
    let rank = |adapter: &wgpu::Adapter| match adapter.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    };
    adapters.sort_by_key(rank);
    adapters
}

/// The adapter that a request means.
async fn choose(request: &Request) -> Result<wgpu::Adapter> {
    let adapters = candidates(&instance(request.backends), request.backends).await;
    let wanted = request.name.as_ref().map(|name| name.to_lowercase());
    let matches = |adapter: &&wgpu::Adapter| {
        wanted.as_ref().is_none_or(|name| adapter.get_info().name.to_lowercase().contains(name))
    };
    let Some(adapter) = adapters.iter().find(matches) else {
        let names: Vec<String> = adapters
            .iter()
            .map(|adapter| {
                format!("{} ({})", adapter.get_info().name, backend_name(adapter.get_info().backend))
            })
            .collect();
        let backends: Vec<String> = request
            .backends
            .iter_names()
            .map(|(name, _)| name.to_lowercase().replace("browser_", ""))
            .collect();
        let backends = if request.backends == wgpu::Backends::all() {
            "any backend".to_owned()
        } else {
            backends.join(" or ")
        };
        let want = request.name.as_ref().map_or(backends.clone(), |name| format!("{name:?} on {backends}"));
        let have = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        return Err(Error::NoAdapter { want, have });
    };
    refuse_null(&adapter.get_info())?;
    Ok(adapter.clone())
}

/// A no-op adapter accepts everything and computes nothing.
pub(super) fn refuse_null(info: &wgpu::AdapterInfo) -> Result<()> {
    if info.backend == wgpu::Backend::Noop {
        Err(Error::NullAdapter { name: info.name.clone() })
    } else {
        Ok(())
    }
}

/// The default limits, with the sizes of buffers and dispatches raised as far as the adapter goes.
fn limits(adapter: &wgpu::Limits) -> wgpu::Limits {
    wgpu::Limits {
        max_buffer_size: adapter.max_buffer_size,
        max_storage_buffer_binding_size: adapter.max_storage_buffer_binding_size,
        ..wgpu::Limits::default().or_worse_values_from(adapter)
    }
}

impl Gpu {
    /// A device of its own.
    ///
    /// # Errors
    /// [`Error::NoAdapter`] when no adapter matches, naming those there are, [`Error::NullAdapter`] when it computes
    /// nothing, [`Error::NoDevice`] when it gives no device, [`Error::Limit`] as [`Gpu::from_wgpu`].
    pub async fn request(request: Request) -> Result<Self> {
        let adapter = choose(&request).await?;
        let mut wanted = wgpu::Features::empty();
        wanted.set(wgpu::Features::SUBGROUP, request.subgroups);
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("kvfold"),
            required_features: adapter.features() & wanted,
            required_limits: limits(&adapter.limits()),
            ..Default::default()
        };
        let no_device = |cause: wgpu::RequestDeviceError| Error::NoDevice {
            adapter: adapter.get_info().name,
            cause: cause.to_string(),
        };
        let (device, queue) = adapter.request_device(&descriptor).await.map_err(no_device)?;
        let gpu = Self::with_subgroups(device, queue, request.subgroups)?;
        gpu.own_hooks();
        Ok(gpu)
    }

    /// On a device of our own, the loss is remembered. A host's hooks are the host's.
    fn own_hooks(&self) {
        let lost = Arc::clone(&self.shared.lost);
        self.shared.device.set_device_lost_callback(move |reason, message| {
            *lock(&lost) = Some(format!("{reason:?}: {message}"));
        });
    }
}
