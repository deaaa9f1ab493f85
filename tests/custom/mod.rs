//! A wgpu device of the tests' own: buffers are bytes of this program, and a [`Machine`] compiles kernels and runs them. The
//! library records into it as into any other, so what runs are its own dispatches, uniforms and bindings. Only what a compute
//! library uses is there.

#![allow(
    unsafe_code,
    reason = "wgpu declares some functions of a backend unsafe; none does anything unsafe here"
)]

/// Functions of an interface that a compute library does not call.
macro_rules! absent {
    () => {};
    (fn $name:ident($($ty:ty),*) $(-> $result:ty)?; $($rest:tt)*) => {
        fn $name(&self, $(_: $ty),*) $(-> $result)? { unimplemented!(stringify!($name)) }
        absent! { $($rest)* }
    };
    (mut fn $name:ident($($ty:ty),*); $($rest:tt)*) => {
        fn $name(&mut self, $(_: $ty),*) { unimplemented!(stringify!($name)) }
        absent! { $($rest)* }
    };
    (unsafe fn $name:ident($($ty:ty),*) $(-> $result:ty)?; $($rest:tt)*) => {
        unsafe fn $name(&self, $(_: $ty),*) $(-> $result)? { unimplemented!(stringify!($name)) }
        absent! { $($rest)* }
    };
}

mod buffer;
mod commands;
pub(crate) mod mutation;
pub(crate) mod ran;

use std::fmt::Debug;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::Arc;

use kvfold::Gpu;
use kvfold::wgpu::{self, custom as api};

pub(crate) use buffer::Buffer;
use mutation::Mutation;

/// What compiles kernels and runs them.
pub(crate) trait Machine: Debug + Send + Sync + 'static {
    /// What the adapter says of itself: the sizes of subgroups, above all.
    fn info(&self) -> wgpu::AdapterInfo;
    fn subgroups(&self) -> bool;
    /// # Errors
    /// What is wrong with the text.
    fn compile(&self, label: &str, kernel: &Kernel<'_>) -> Result<Arc<dyn Program>, String>;
}

/// A kernel's text, and how it is to be compiled.
pub(crate) struct Kernel<'a> {
    pub(crate) source: &'a str,
    pub(crate) entry: &'a str,
    /// In the order of the binding numbers.
    pub(crate) layout: &'a [wgpu::BindGroupLayoutEntry],
    pub(crate) checks: wgpu::ShaderRuntimeChecks,
}

/// A compiled kernel.
pub(crate) trait Program: Debug + Send + Sync {
    /// Runs so many workgroups, which may change the bytes of what is writable; bindings are in the order of their numbers.
    ///
    /// # Errors
    /// Why it did not run to its end.
    fn run(&self, bindings: &mut [Bound], groups: [u32; 3]) -> Result<(), String>;
}

/// The bytes that a binding shows.
pub(crate) struct Bound {
    pub(crate) number: u32,
    pub(crate) writable: bool,
    pub(crate) bytes: Vec<u8>,
}

/// The library on a machine, one of whose kernels may have a fault.
pub(crate) fn open(machine: impl Machine, mutation: Option<Mutation>) -> kvfold::Result<Gpu> {
    let device = Device { machine: Box::new(machine), mutation };
    Gpu::from_wgpu(wgpu::Device::from_custom(device), wgpu::Queue::from_custom(commands::Queue))
}

#[derive(Debug)]
struct Device {
    machine: Box<dyn Machine>,
    mutation: Option<Mutation>,
}

#[derive(Debug)]
struct ShaderModule {
    source: String,
    checks: wgpu::ShaderRuntimeChecks,
}

#[derive(Debug)]
struct BindGroupLayout(Vec<wgpu::BindGroupLayoutEntry>);

#[derive(Debug)]
struct PipelineLayout(Vec<wgpu::BindGroupLayoutEntry>);

/// Part of a buffer, bound.
#[derive(Clone, Debug)]
struct Binding {
    number: u32,
    writable: bool,
    buffer: Buffer,
    offset: usize,
    size: usize,
}

#[derive(Debug)]
struct BindGroup(Vec<Binding>);

#[derive(Clone, Debug)]
struct Pipeline {
    label: Arc<str>,
    program: Arc<dyn Program>,
}

impl api::ShaderModuleInterface for ShaderModule {
    fn get_compilation_info(&self) -> Pin<Box<dyn api::ShaderCompilationInfoFuture>> {
        unimplemented!("messages of a module")
    }
}
impl api::BindGroupLayoutInterface for BindGroupLayout {}
impl api::PipelineLayoutInterface for PipelineLayout {}
impl api::BindGroupInterface for BindGroup {}
impl api::ComputePipelineInterface for Pipeline {
    fn get_bind_group_layout(&self, _: u32) -> api::DispatchBindGroupLayout {
        unimplemented!("layouts of pipelines")
    }
}

/// The device's own object behind one of wgpu's.
fn own<T>(object: Option<&T>) -> &T {
    object.expect("an object of this device")
}

fn binding(entry: &wgpu::BindGroupEntry<'_>, layout: &[wgpu::BindGroupLayoutEntry]) -> Binding {
    let wgpu::BindingResource::Buffer(bound) = &entry.resource else { panic!("binding {}", entry.binding) };
    let declared = layout.iter().find(|declared| declared.binding == entry.binding);
    let read_write = wgpu::BufferBindingType::Storage { read_only: false };
    let writable = matches!(
        declared.expect("a binding of the layout").ty,
        wgpu::BindingType::Buffer { ty, .. } if ty == read_write
    );
    let buffer = own(bound.buffer.as_custom::<Buffer>()).clone();
    let size = bound.size.map_or(bound.buffer.size() - bound.offset, NonZeroU64::get);
    assert!(size > 0 && bound.offset + size <= bound.buffer.size(), "binding {}", entry.binding);
    Binding { number: entry.binding, writable, buffer, offset: bound.offset as usize, size: size as usize }
}

impl api::DeviceInterface for Device {
    fn features(&self) -> wgpu::Features {
        let mut features = wgpu::Features::empty();
        features.set(wgpu::Features::SUBGROUP, self.machine.subgroups());
        features
    }

    fn limits(&self) -> wgpu::Limits {
        wgpu::Limits::default()
    }

    fn adapter_info(&self) -> wgpu::AdapterInfo {
        self.machine.info()
    }

    fn create_shader_module(
        &self,
        descriptor: wgpu::ShaderModuleDescriptor<'_>,
        checks: wgpu::ShaderRuntimeChecks,
    ) -> api::DispatchShaderModule {
        let wgpu::ShaderSource::Wgsl(source) = descriptor.source else { unimplemented!("other than WGSL") };
        api::DispatchShaderModule::custom(ShaderModule { source: source.into_owned(), checks })
    }

    fn create_bind_group_layout(
        &self,
        descriptor: &wgpu::BindGroupLayoutDescriptor<'_>,
    ) -> api::DispatchBindGroupLayout {
        let mut entries = descriptor.entries.to_vec();
        entries.sort_by_key(|entry| entry.binding);
        api::DispatchBindGroupLayout::custom(BindGroupLayout(entries))
    }

    fn create_bind_group(&self, descriptor: &wgpu::BindGroupDescriptor<'_>) -> api::DispatchBindGroup {
        let layout = own(descriptor.layout.as_custom::<BindGroupLayout>());
        let mut bindings: Vec<_> = descriptor.entries.iter().map(|entry| binding(entry, &layout.0)).collect();
        bindings.sort_by_key(|binding| binding.number);
        api::DispatchBindGroup::custom(BindGroup(bindings))
    }

    fn create_pipeline_layout(
        &self,
        descriptor: &wgpu::PipelineLayoutDescriptor<'_>,
    ) -> api::DispatchPipelineLayout {
        let [Some(layout)] = descriptor.bind_group_layouts else { unimplemented!("other than one group") };
        assert_eq!(descriptor.immediate_size, 0);
        let entries = own(layout.as_custom::<BindGroupLayout>()).0.clone();
        api::DispatchPipelineLayout::custom(PipelineLayout(entries))
    }

    fn create_compute_pipeline(
        &self,
        descriptor: &wgpu::ComputePipelineDescriptor<'_>,
    ) -> api::DispatchComputePipeline {
        let module = own(descriptor.module.as_custom::<ShaderModule>());
        let layout = descriptor.layout.expect("an explicit layout");
        let layout = own(layout.as_custom::<PipelineLayout>());
        assert!(descriptor.compilation_options.zero_initialize_workgroup_memory);
        let entry = descriptor.entry_point.expect("a named entry point");
        let label = descriptor.label.unwrap_or(entry);
        let source = match self.mutation {
            Some(mutation) => mutation.apply(entry, &module.source),
            None => module.source.clone(),
        };
        let kernel = Kernel { source: &source, entry, layout: &layout.0, checks: module.checks };
        let program = self.machine.compile(label, &kernel).unwrap_or_else(|error| panic!("{label}: {error}"));
        api::DispatchComputePipeline::custom(Pipeline { label: label.into(), program })
    }

    fn create_buffer(&self, descriptor: &wgpu::BufferDescriptor<'_>) -> api::DispatchBuffer {
        api::DispatchBuffer::custom(Buffer::new(descriptor.size as usize))
    }

    fn create_command_encoder(&self, _: &wgpu::CommandEncoderDescriptor<'_>) -> api::DispatchCommandEncoder {
        api::DispatchCommandEncoder::custom(commands::Encoder::default())
    }

    // What is submitted has run before `submit` returns, and what is wrong panics: a test that panics fails.
    fn push_error_scope(&self, _: wgpu::ErrorFilter) -> u32 {
        0
    }

    fn pop_error_scope(&self, _: u32) -> Pin<Box<dyn api::PopErrorScopeFuture>> {
        Box::pin(std::future::ready(None))
    }

    fn poll(&self, _: wgpu::wgt::PollType<u64>) -> Result<wgpu::PollStatus, wgpu::PollError> {
        Ok(wgpu::PollStatus::QueueEmpty)
    }

    fn generate_allocator_report(&self) -> Option<wgpu::AllocatorReport> {
        None
    }

    fn set_device_lost_callback(&self, _: api::BoxDeviceLostCallback) {}
    fn on_uncaptured_error(&self, _: Arc<dyn wgpu::UncapturedErrorHandler>) {}
    fn destroy(&self) {}

    absent! {
        fn create_render_pipeline(&wgpu::RenderPipelineDescriptor<'_>) -> api::DispatchRenderPipeline;
        fn create_mesh_pipeline(&wgpu::MeshPipelineDescriptor<'_>) -> api::DispatchRenderPipeline;
        fn create_texture(&wgpu::TextureDescriptor<'_>) -> api::DispatchTexture;
        fn create_external_texture(&wgpu::ExternalTextureDescriptor<'_>, &[&wgpu::TextureView])
            -> api::DispatchExternalTexture;
        fn create_blas(&wgpu::CreateBlasDescriptor<'_>, wgpu::BlasGeometrySizeDescriptors)
            -> (Option<u64>, api::DispatchBlas);
        fn create_tlas(&wgpu::CreateTlasDescriptor<'_>) -> api::DispatchTlas;
        fn create_sampler(&wgpu::SamplerDescriptor<'_>) -> api::DispatchSampler;
        fn create_query_set(&wgpu::QuerySetDescriptor<'_>) -> api::DispatchQuerySet;
        fn create_render_bundle_encoder(&wgpu::RenderBundleEncoderDescriptor<'_>)
            -> api::DispatchRenderBundleEncoder;
        fn get_internal_counters() -> wgpu::InternalCounters;
        unsafe fn create_shader_module_passthrough(&wgpu::ShaderModuleDescriptorPassthrough<'_>)
            -> api::DispatchShaderModule;
        unsafe fn create_pipeline_cache(&wgpu::PipelineCacheDescriptor<'_>) -> api::DispatchPipelineCache;
        unsafe fn start_graphics_debugger_capture();
        unsafe fn stop_graphics_debugger_capture();
    }
}
