//! A device with timestamps, where there is one.

use std::error::Error;

use kvfold::{Gpu, wgpu};

use crate::Options;

/// The adapter that is asked for, else the first discrete one, else the first, with what features it has of those wanted.
pub(crate) fn open(options: &Options) -> Result<Gpu, Box<dyn Error>> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.flags = wgpu::InstanceFlags::empty();
    let instance = wgpu::Instance::new(descriptor);
    let wanted = std::env::var("KVFOLD_ADAPTER").unwrap_or_default().to_lowercase();
    let mut adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY));
    adapters.retain(|adapter| adapter.get_info().name.to_lowercase().contains(&wanted));
    adapters.sort_by_key(|adapter| adapter.get_info().device_type != wgpu::DeviceType::DiscreteGpu);
    let adapter = adapters.first().ok_or_else(|| format!("no adapter has {wanted:?} in its name"))?;
    let mut features = wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS;
    if !options.no_subgroups {
        features |= wgpu::Features::SUBGROUP;
    }
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        label: Some("bench"),
        required_features: adapter.features() & features,
        required_limits: adapter.limits(),
        ..wgpu::DeviceDescriptor::default()
    }))?;
    Ok(Gpu::from_wgpu(device, queue)?)
}
