//! Pipelines with explicit layouts, one per variant, made on first use.

use std::sync::Arc;

use super::{Access, Gpu, Target, Variant, lock};
use crate::error::{Error, Result};

/// A compiled variant.
#[derive(Debug)]
pub(crate) struct Pipeline {
    pub(crate) pipeline: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
}

impl Gpu {
    /// The pipeline of a variant, compiled on first use; without shuffles where subgroups may be wider than its workgroups.
    pub(crate) fn pipeline(&self, variant: &Variant) -> Result<Arc<Pipeline>> {
        if !variant.is_default() && !self.caps().fills_subgroups(variant.workgroup()) {
            return self.pipeline(&variant.clone().with_subgroups(None));
        }
        if let Some(pipeline) = lock(&self.shared.pipelines).get(variant) {
            return Ok(Arc::clone(pipeline));
        }
        // Compiled outside the lock; if two threads meet here, the second result replaces an equal one.
        let pipeline = Arc::new(self.compile(variant)?);
        lock(&self.shared.pipelines).insert(variant.clone(), Arc::clone(&pipeline));
        Ok(pipeline)
    }

    fn compile(&self, variant: &Variant) -> Result<Pipeline> {
        let label = variant.label();
        let spec = variant.kernel().spec();
        let target = if cfg!(target_arch = "wasm32") { Target::Web } else { Target::Native };
        let entries: Vec<wgpu::BindGroupLayoutEntry> =
            (0..).zip(spec.bindings).map(|(binding, &access)| layout_entry(binding, access)).collect();
        self.scoped(&label, 0, |device| {
            let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(&label),
                source: wgpu::ShaderSource::Wgsl(variant.source(target).into()),
            });
            let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: Some(spec.name),
                entries: &entries,
            });
            let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some(spec.name),
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            });
            let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(&label),
                layout: Some(&pipeline_layout),
                module: &module,
                entry_point: Some(variant.entry_point()),
                compilation_options: wgpu::PipelineCompilationOptions::default(),
                cache: None,
            });
            Pipeline { pipeline, layout }
        })
        .map_err(|error| match error {
            // A browser's compiler says why only in the module's own messages; the label tells which variant it was.
            Error::Device { what, cause } => Error::Device { what: format!("kernel {what}"), cause },
            other => other,
        })
    }
}

fn layout_entry(binding: u32, access: Access) -> wgpu::BindGroupLayoutEntry {
    let ty = match access {
        Access::Uniform => wgpu::BufferBindingType::Uniform,
        Access::Read => wgpu::BufferBindingType::Storage { read_only: true },
        Access::Write => wgpu::BufferBindingType::Storage { read_only: false },
    };
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
        count: None,
    }
}
