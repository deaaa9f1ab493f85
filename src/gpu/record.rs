//! Recording: dispatches are prepared with everything they need and then written into the caller's encoder in one pass.

use std::sync::Arc;

use bytemuck::Pod;

use super::view::BoundView;
use super::{Gpu, Pipeline, Variant};
use crate::error::{Error, Result};

/// Part of a buffer, bound to a kernel.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl Window {
    /// A whole buffer.
    pub(crate) fn whole(buffer: &wgpu::Buffer) -> Self {
        Self { buffer: buffer.clone(), offset: 0, size: buffer.size() }
    }
}

impl From<&BoundView> for Window {
    fn from(view: &BoundView) -> Self {
        view.window.clone()
    }
}

/// One dispatch to prepare.
pub(crate) struct Dispatch<'a, P> {
    pub(crate) variant: Variant,
    pub(crate) params: P,
    /// One for each binding after the uniform.
    pub(crate) buffers: &'a [Window],
    pub(crate) workgroups: u64,
}

struct Prepared {
    pipeline: Arc<Pipeline>,
    bind_group: wgpu::BindGroup,
    workgroups: [u32; 2],
}

/// Dispatches that are ready to be recorded. Preparing can fail; recording cannot.
pub(crate) struct Recording<'a> {
    gpu: &'a Gpu,
    dispatches: Vec<Prepared>,
}

impl<'a> Recording<'a> {
    pub(crate) fn new(gpu: &'a Gpu) -> Self {
        Self { gpu, dispatches: Vec::new() }
    }

    /// Prepares a dispatch: pipeline, uniform and bind group. A dispatch of no workgroups is left out.
    pub(crate) fn add<P: Pod>(&mut self, dispatch: Dispatch<'_, P>) -> Result<()> {
        if dispatch.workgroups == 0 {
            return Ok(());
        }
        let spec = dispatch.variant.kernel().spec();
        let workgroups = fold(dispatch.workgroups, self.gpu.caps().max_compute_workgroups_per_dimension)?;
        let pipeline = self.gpu.pipeline(&dispatch.variant)?;
        let limit = self.gpu.caps().max_storage_buffer_binding_size;
        let mut windows: Vec<Window> = dispatch.buffers.to_vec();
        if let Some(window) = windows.iter().find(|window| window.size > limit) {
            return Err(Error::Limit { what: "bytes of one binding", need: window.size, have: limit });
        }
        let uniform = self.uniform(spec.name, bytemuck::bytes_of(&dispatch.params))?;
        windows.insert(0, Window::whole(&uniform));
        let entries: Vec<wgpu::BindGroupEntry<'_>> =
            (0..).zip(&windows).map(|(i, window)| entry(i, window)).collect();
        let bind_group = self.gpu.scoped(spec.name, 0, |device| {
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(spec.name),
                layout: &pipeline.layout,
                entries: &entries,
            })
        })?;
        self.dispatches.push(Prepared { pipeline, bind_group, workgroups });
        Ok(())
    }

    /// A fresh buffer for each recording: a queue write would land before the whole submit, so that two recordings in one
    /// submit would both see the last value.
    fn uniform(&self, label: &str, bytes: &[u8]) -> Result<wgpu::Buffer> {
        let descriptor = wgpu::BufferDescriptor {
            label: Some(label),
            size: (bytes.len() as u64).next_multiple_of(16),
            usage: wgpu::BufferUsages::UNIFORM,
            mapped_at_creation: true,
        };
        let buffer = self.gpu.scoped(label, descriptor.size, |device| device.create_buffer(&descriptor))?;
        let refused =
            |cause: wgpu::MapRangeError| Error::Device { what: label.to_owned(), cause: cause.to_string() };
        let mut mapped = buffer.get_mapped_range_mut(..).map_err(refused)?;
        mapped.slice(..bytes.len()).copy_from_slice(bytes);
        drop(mapped);
        buffer.unmap();
        Ok(buffer)
    }

    /// Writes the dispatches into one pass.
    pub(crate) fn record(self, encoder: &mut wgpu::CommandEncoder) {
        if self.dispatches.is_empty() {
            return;
        }
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for dispatch in &self.dispatches {
            let [x, y] = dispatch.workgroups;
            pass.set_pipeline(&dispatch.pipeline.pipeline);
            pass.set_bind_group(0, &dispatch.bind_group, &[]);
            pass.dispatch_workgroups(x, y, 1);
        }
    }
}

fn entry(binding: u32, window: &Window) -> wgpu::BindGroupEntry<'_> {
    let resource = wgpu::BindingResource::Buffer(wgpu::BufferBinding {
        buffer: &window.buffer,
        offset: window.offset,
        size: std::num::NonZeroU64::new(window.size),
    });
    wgpu::BindGroupEntry { binding, resource }
}

/// Spreads workgroups over two dimensions, so that neither exceeds the device's limit; kernels guard the few too many.
fn fold(workgroups: u64, limit: u32) -> Result<[u32; 2]> {
    let rows = workgroups.div_ceil(u64::from(limit));
    let columns = workgroups.div_ceil(rows.max(1));
    let error =
        || Error::Limit { what: "workgroups", need: workgroups, have: u64::from(limit) * u64::from(limit) };
    let rows = u32::try_from(rows).ok().filter(|&rows| rows <= limit).ok_or_else(error)?;
    Ok([u32::try_from(columns).map_err(|_| error())?, rows])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dispatches_fold_to_two_dimensions() {
        assert_eq!(fold(1, 65_535).unwrap(), [1, 1]);
        assert_eq!(fold(65_535, 65_535).unwrap(), [65_535, 1]);
        assert_eq!(fold(65_536, 65_535).unwrap(), [32_768, 2]);
        let [x, y] = fold(1_000_003, 65_535).unwrap();
        assert!(u64::from(x) * u64::from(y) >= 1_000_003 && x <= 65_535);
        assert!(matches!(fold(17, 4), Err(Error::Limit { need: 17, have: 16, .. })));
    }
}
