//! Recording, and running what was recorded.

use std::sync::{Arc, Mutex, PoisonError};

use kvfold::wgpu::{self, custom as api};

use super::{BindGroup, Binding, Bound, Buffer, Pipeline, own, ran};

/// One thing to do.
#[derive(Debug)]
enum Command {
    Copy { from: Buffer, from_offset: usize, to: Buffer, to_offset: usize, size: usize },
    Dispatch { pipeline: Pipeline, bindings: Vec<Binding>, groups: [u32; 3] },
}

type Commands = Arc<Mutex<Vec<Command>>>;

fn push(commands: &Commands, command: Command) {
    commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
}

#[derive(Debug, Default)]
pub(super) struct Encoder(Commands);

#[derive(Debug)]
struct CommandBuffer(Commands);

impl api::CommandBufferInterface for CommandBuffer {}

impl api::CommandEncoderInterface for Encoder {
    fn copy_buffer_to_buffer(
        &self,
        from: &api::DispatchBuffer,
        from_offset: u64,
        to: &api::DispatchBuffer,
        to_offset: u64,
        size: Option<u64>,
    ) {
        let [from, to] = [from, to].map(|buffer| own(buffer.as_custom::<Buffer>()).clone());
        let (from_offset, to_offset) = (from_offset as usize, to_offset as usize);
        let size = size.map_or_else(|| from.bytes().len() - from_offset, |size| size as usize);
        push(&self.0, Command::Copy { from, from_offset, to, to_offset, size });
    }

    fn begin_compute_pass(&self, _: &wgpu::ComputePassDescriptor<'_>) -> api::DispatchComputePass {
        let pass = Pass { commands: Arc::clone(&self.0), pipeline: None, bindings: Vec::new() };
        api::DispatchComputePass::custom(pass)
    }

    fn finish(&mut self) -> api::DispatchCommandBuffer {
        api::DispatchCommandBuffer::custom(CommandBuffer(std::mem::take(&mut self.0)))
    }

    absent! {
        fn copy_buffer_to_texture(wgpu::TexelCopyBufferInfo<'_>, wgpu::TexelCopyTextureInfo<'_>, wgpu::Extent3d);
        fn copy_texture_to_buffer(wgpu::TexelCopyTextureInfo<'_>, wgpu::TexelCopyBufferInfo<'_>, wgpu::Extent3d);
        fn copy_texture_to_texture(wgpu::TexelCopyTextureInfo<'_>, wgpu::TexelCopyTextureInfo<'_>, wgpu::Extent3d);
        fn begin_render_pass(&wgpu::RenderPassDescriptor<'_>) -> api::DispatchRenderPass;
        fn clear_texture(&api::DispatchTexture, &wgpu::ImageSubresourceRange);
        fn clear_buffer(&api::DispatchBuffer, u64, Option<u64>);
        fn insert_debug_marker(&str);
        fn push_debug_group(&str);
        fn pop_debug_group();
        fn write_timestamp(&api::DispatchQuerySet, u32);
        fn resolve_query_set(&api::DispatchQuerySet, u32, u32, &api::DispatchBuffer, u64);
    }
    fn mark_acceleration_structures_built<'a>(
        &self,
        _: &mut dyn Iterator<Item = &'a wgpu::Blas>,
        _: &mut dyn Iterator<Item = &'a wgpu::Tlas>,
    ) {
        unimplemented!("ray tracing")
    }
    fn build_acceleration_structures<'a>(
        &self,
        _: &mut dyn Iterator<Item = &'a wgpu::BlasBuildEntry<'a>>,
        _: &mut dyn Iterator<Item = &'a wgpu::Tlas>,
    ) {
        unimplemented!("ray tracing")
    }
    fn transition_resources<'a>(
        &mut self,
        _: &mut dyn Iterator<Item = wgpu::wgt::BufferTransition<&'a api::DispatchBuffer>>,
        _: &mut dyn Iterator<Item = wgpu::wgt::TextureTransition<&'a api::DispatchTexture>>,
    ) {
        unimplemented!("transitions")
    }
}

#[derive(Debug)]
struct Pass {
    commands: Commands,
    pipeline: Option<Pipeline>,
    bindings: Vec<Binding>,
}

impl Drop for Pass {
    fn drop(&mut self) {}
}

impl api::ComputePassInterface for Pass {
    fn set_pipeline(&mut self, pipeline: &api::DispatchComputePipeline) {
        self.pipeline = Some(own(pipeline.as_custom::<Pipeline>()).clone());
    }

    fn set_bind_group(&mut self, index: u32, group: Option<&api::DispatchBindGroup>, offsets: &[u32]) {
        assert_eq!((index, offsets.len()), (0, 0), "one group without dynamic offsets");
        let group = group.and_then(|group| group.as_custom::<BindGroup>());
        self.bindings = own(group).0.clone();
    }

    fn dispatch_workgroups(&mut self, x: u32, y: u32, z: u32) {
        let pipeline = self.pipeline.clone().expect("a pipeline");
        let limit = wgpu::Limits::default().max_compute_workgroups_per_dimension;
        assert!(x <= limit && y <= limit && z <= limit, "{x} x {y} x {z} workgroups");
        push(
            &self.commands,
            Command::Dispatch { pipeline, bindings: self.bindings.clone(), groups: [x, y, z] },
        );
    }

    absent! {
        mut fn set_immediates(u32, &[u8]);
        mut fn insert_debug_marker(&str);
        mut fn push_debug_group(&str);
        mut fn pop_debug_group();
        mut fn write_timestamp(&api::DispatchQuerySet, u32);
        mut fn begin_pipeline_statistics_query(&api::DispatchQuerySet, u32);
        mut fn end_pipeline_statistics_query();
        mut fn dispatch_workgroups_indirect(&api::DispatchBuffer, u64);
    }
    fn transition_resources<'a>(
        &mut self,
        _: &mut dyn Iterator<Item = wgpu::wgt::BufferTransition<&'a api::DispatchBuffer>>,
        _: &mut dyn Iterator<Item = wgpu::wgt::TextureTransition<&'a api::DispatchTextureView>>,
    ) {
        unimplemented!("transitions")
    }
}

#[derive(Debug)]
pub(super) struct Queue;

impl api::QueueInterface for Queue {
    fn submit(&self, buffers: &mut dyn Iterator<Item = api::DispatchCommandBuffer>) -> u64 {
        // All are taken before anything runs, since a kernel that fails panics.
        let buffers: Vec<_> = buffers.collect();
        for buffer in &buffers {
            let commands = &own(buffer.as_custom::<CommandBuffer>()).0;
            for command in commands.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                run(command);
            }
        }
        0
    }

    fn on_submitted_work_done(&self, callback: api::BoxSubmittedWorkDoneCallback) {
        callback();
    }

    absent! {
        fn write_buffer(&api::DispatchBuffer, u64, &[u8]);
        fn create_staging_buffer(wgpu::BufferSize) -> Option<api::DispatchQueueWriteBuffer>;
        fn validate_write_buffer(&api::DispatchBuffer, u64, wgpu::BufferSize) -> Option<()>;
        fn write_staging_buffer(&api::DispatchBuffer, u64, &api::DispatchQueueWriteBuffer);
        fn write_texture(wgpu::TexelCopyTextureInfo<'_>, &[u8], wgpu::TexelCopyBufferLayout, wgpu::Extent3d);
        fn get_timestamp_period() -> f32;
        fn compact_blas(&api::DispatchBlas) -> (Option<u64>, api::DispatchBlas);
        fn present(&api::DispatchSurfaceOutputDetail);
    }
}

fn run(command: &Command) {
    match command {
        Command::Copy { from, from_offset, to, to_offset, size } => {
            let bytes = from.bytes()[*from_offset..][..*size].to_vec();
            to.bytes()[*to_offset..][..*size].copy_from_slice(&bytes);
        }
        Command::Dispatch { pipeline, bindings, groups } => {
            if let Err(error) = dispatch(pipeline, bindings, *groups) {
                panic!("{}: {error}", pipeline.label);
            }
        }
    }
}

/// Runs a kernel on the buffers as they are and puts back what it wrote.
fn dispatch(pipeline: &Pipeline, bindings: &[Binding], groups: [u32; 3]) -> Result<(), String> {
    let bound = |binding: &Binding| Bound {
        number: binding.number,
        writable: binding.writable,
        bytes: binding.buffer.bytes()[binding.offset..][..binding.size].to_vec(),
    };
    let mut bound: Vec<Bound> = bindings.iter().map(bound).collect();
    pipeline.program.run(&mut bound, groups)?;
    ran::add(&pipeline.label);
    for (binding, bound) in bindings.iter().zip(&bound).filter(|(binding, _)| binding.writable) {
        binding.buffer.bytes()[binding.offset..][..binding.size].copy_from_slice(&bound.bytes);
    }
    Ok(())
}
