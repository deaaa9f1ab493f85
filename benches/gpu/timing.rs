//! The time of one call: by timestamps where the device has them, else what one more call adds to a submit.

use std::time::Instant;

use kvfold::{Error, Gpu, Result, wgpu};

use crate::cases::Case;

const COPY: &str = "
@group(0) @binding(0) var<storage, read> from_buffer: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> to_buffer: array<vec4<u32>>;

@compute @workgroup_size(256)
fn copy(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = (group.y * 16384u + group.x) * 256u + lane;
    to_buffer[at] = from_buffer[at];
}";

/// Records the call of this number.
type Record<'a> = &'a dyn Fn(usize, &mut wgpu::CommandEncoder) -> Result<()>;

/// Seconds of a call, and half the distance between the quartiles over the median.
pub(crate) struct Time {
    pub(crate) median: f64,
    pub(crate) spread: f64,
}

/// Two timestamps and their way to the host.
struct Stamps {
    set: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    /// Seconds of a tick.
    tick: f64,
}

pub(crate) struct Timer {
    gpu: Gpu,
    stamps: Option<Stamps>,
    copier: Copier,
    /// Seconds that a submit takes at least, how many submits there are, and copies before each.
    enough: f64,
    submits: usize,
    warming: usize,
}

impl Timer {
    pub(crate) fn new(gpu: &Gpu, quick: bool) -> Result<Self> {
        let (enough, submits) = if quick { (0.005, 5) } else { (0.01, 11) };
        let wanted = wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS;
        let stamps = gpu.device().features().contains(wanted).then(|| Stamps {
            set: gpu.device().create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("stamps"),
                ty: wgpu::QueryType::Timestamp,
                count: 2,
            }),
            resolved: gpu.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some("stamps"),
                size: 16,
                usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            }),
            tick: f64::from(gpu.queue().get_timestamp_period()) * 1e-9,
        });
        // A card that rests between submits lowers its clock; copies of a tenth of a second raise it again.
        let warming = if gpu.caps().software { 0 } else { 800 };
        Ok(Self { gpu: gpu.clone(), stamps, copier: Copier::new(gpu)?, enough, submits, warming })
    }

    /// How calls are timed.
    pub(crate) fn clock(&self) -> &'static str {
        if self.stamps.is_some() { "timestamps" } else { "differences of submits" }
    }

    /// Seconds of so many calls.
    fn submit(&self, calls: usize, record: Record<'_>) -> Result<f64> {
        let encoder = || self.gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let (mut warm, mut timed) = (encoder(), encoder());
        self.copier.record(&mut warm, self.warming);
        if let Some(stamps) = &self.stamps {
            timed.write_timestamp(&stamps.set, 0);
        }
        (0..calls).try_for_each(|call| record(call, &mut timed))?;
        let end = match &self.stamps {
            Some(stamps) => {
                timed.write_timestamp(&stamps.set, 1);
                timed.resolve_query_set(&stamps.set, 0..2, &stamps.resolved, 0);
                Some(kvfold::gpu::ReadBack::schedule(&self.gpu, &mut timed, &stamps.resolved)?)
            }
            None => None,
        };
        let commands = [warm.finish(), timed.finish()];
        // What was written to new buffers must not count as this submit's work.
        self.gpu.queue().submit([]);
        self.gpu.wait_blocking()?;
        let start = Instant::now();
        self.gpu.queue().submit(commands);
        self.gpu.wait_blocking()?;
        let Some((end, stamps)) = end.zip(self.stamps.as_ref()) else {
            return Ok(start.elapsed().as_secs_f64());
        };
        let bytes = end.wait_blocking()?;
        let ticks: Vec<u64> = bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
        match ticks.as_slice() {
            [first, last] => Ok(last.saturating_sub(*first) as f64 * stamps.tick),
            _ => Err(Error::Device { what: "timestamps".to_owned(), cause: format!("{} of 2", ticks.len()) }),
        }
    }

    fn measure(&self, most: usize, record: Record<'_>) -> Result<Time> {
        // The first submit compiles, the second shows how many calls are enough.
        self.submit(2, record)?;
        let once = (self.submit(10, record)? / 10.0).max(1e-7);
        let many = ((self.enough / once) as usize).clamp(8, most);
        let few = if self.stamps.is_some() { 0 } else { many / 4 };
        let mut times = Vec::with_capacity(self.submits);
        for _ in 0..self.submits {
            let short = if few > 0 { self.submit(few, record)? } else { 0.0 };
            times.push((self.submit(many, record)? - short) / (many - few) as f64);
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
    /// hope for.
    pub(crate) fn copy(&self) -> Result<f64> {
        let time = self.measure(64, &|_, encoder| {
            self.copier.record(encoder, 1);
            Ok(())
        })?;
        Ok(2.0 * self.copier.size as f64 / time.median)
    }
}

/// Copies one buffer to another by a kernel.
struct Copier {
    pipeline: wgpu::ComputePipeline,
    group: wgpu::BindGroup,
    size: u64,
}

impl Copier {
    fn new(gpu: &Gpu) -> Result<Self> {
        let size: u64 = if gpu.caps().software { 16 << 20 } else { 256 << 20 };
        let [from, to] = [gpu.storage("from", size)?, gpu.storage("to", size)?];
        let device = gpu.device();
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
        let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("copy"),
            layout: &pipeline.get_bind_group_layout(0),
            entries: &[
                wgpu::BindGroupEntry { binding: 0, resource: from.as_entire_binding() },
                wgpu::BindGroupEntry { binding: 1, resource: to.as_entire_binding() },
            ],
        });
        Ok(Self { pipeline, group, size })
    }

    fn record(&self, encoder: &mut wgpu::CommandEncoder, times: usize) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.group, &[]);
        let workgroups = (self.size / 16 / 256) as u32;
        for _ in 0..times {
            pass.dispatch_workgroups(workgroups.min(16_384), workgroups.div_ceil(16_384), 1);
        }
    }
}
