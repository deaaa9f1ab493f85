//! The time that one more call adds to a submit.

use std::time::Instant;

use kvfold::{Gpu, Result, wgpu};

use crate::cases::Case;

const COPY: &str = "
@group(0) @binding(0) var<storage, read> from_buffer: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> to_buffer: array<vec4<u32>>;

@compute @workgroup_size(256)
fn copy(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = (group.y * 16384u + group.x) * 256u + lane;
    to_buffer[at] = from_buffer[at];
}";

/// Seconds of a call, and half the distance between the quartiles over the median.
pub(crate) struct Time {
    pub(crate) median: f64,
    pub(crate) spread: f64,
}

pub(crate) struct Timer {
    gpu: Gpu,
    /// Seconds that the longer submit of a pair takes at least, and how many pairs there are.
    enough: f64,
    pairs: usize,
}

impl Timer {
    pub(crate) fn new(gpu: &Gpu, quick: bool) -> Result<Self> {
        let (enough, pairs) = if quick { (0.01, 5) } else { (0.03, 15) };
        Ok(Self { gpu: gpu.clone(), enough, pairs })
    }

    /// Seconds of a submit of so many calls.
    fn submit(
        &self,
        calls: usize,
        record: &dyn Fn(usize, &mut wgpu::CommandEncoder) -> Result<()>,
    ) -> Result<f64> {
        let mut encoder =
            self.gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for call in 0..calls {
            record(call, &mut encoder)?;
        }
        let commands = encoder.finish();
        // What was written to new buffers must not count as this submit's work.
        self.gpu.queue().submit([]);
        self.gpu.wait_blocking()?;
        let start = Instant::now();
        self.gpu.queue().submit([commands]);
        self.gpu.wait_blocking()?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn measure(
        &self,
        most: usize,
        record: &dyn Fn(usize, &mut wgpu::CommandEncoder) -> Result<()>,
    ) -> Result<Time> {
        // The first submit compiles, the second shows how many calls are enough.
        self.submit(2, record)?;
        let once = (self.submit(10, record)? / 10.0).max(1e-7);
        let many = ((self.enough / once) as usize).clamp(8, most);
        let few = many / 4;
        let mut times = Vec::with_capacity(self.pairs);
        for _ in 0..self.pairs {
            let long = self.submit(many, record)?;
            let short = self.submit(few, record)?;
            times.push((long - short) / (many - few) as f64);
        }
        times.sort_by(f64::total_cmp);
        let at = |part: f64| times[((times.len() - 1) as f64 * part).round() as usize];
        let median = at(0.5);
        Ok(Time { median, spread: (at(0.75) - at(0.25)) / 2.0 / median })
    }

    pub(crate) fn time(&self, case: &Case) -> Result<Time> {
        self.measure(case.most, &*case.record)
    }

    /// Bytes a second, read and written, of a kernel that copies one buffer to another, 16 bytes an invocation: what a kernel can
    /// hope for. A copy by the driver may be slower.
    pub(crate) fn copy(&self) -> Result<f64> {
        let size: u64 = if self.gpu.caps().software { 16 << 20 } else { 256 << 20 };
        let buffers = [self.gpu.storage("a", size)?, self.gpu.storage("b", size)?];
        let device = self.gpu.device();
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some("copy"),
            source: wgpu::ShaderSource::Wgsl(COPY.into()),
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some("copy"),
            layout: None,
            module: &module,
            entry_point: None,
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        let group = |from: &wgpu::Buffer, to: &wgpu::Buffer| {
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some("copy"),
                layout: &pipeline.get_bind_group_layout(0),
                entries: &[
                    wgpu::BindGroupEntry { binding: 0, resource: from.as_entire_binding() },
                    wgpu::BindGroupEntry { binding: 1, resource: to.as_entire_binding() },
                ],
            })
        };
        let [a, b] = &buffers;
        let groups = [group(a, b), group(b, a)];
        let time = self.measure(64, &|call, encoder| {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &groups[call % 2], &[]);
            let workgroups = (size / 16 / 256) as u32;
            pass.dispatch_workgroups(workgroups.min(16_384), workgroups.div_ceil(16_384), 1);
            Ok(())
        })?;
        Ok(2.0 * size as f64 / time.median)
    }
}
