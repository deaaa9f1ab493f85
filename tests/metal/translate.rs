//! WGSL to Metal's language as wgpu 30 does it (wgpu-hal, `metal/device.rs`: `create_pipeline_layout` and `load_shader`).

use std::collections::BTreeMap;

use kvfold::wgpu::{BindGroupLayoutEntry, BindingType, BufferBindingType, ShaderRuntimeChecks, ShaderStages};
use naga::back::msl::{BindTarget, EntryPointResources, Options, PipelineOptions};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Module, ResourceBinding, ShaderStage, StorageAccess};

/// Metal 3.0, macOS 13. naga's text for these kernels is the same from 2.4 to 4.0 but for the line that names the version.
const LANGUAGE: (u8, u8) = (3, 0);

/// A kernel as Metal gets it.
#[derive(Debug)]
pub(crate) struct Metal {
    /// The text that `newLibraryWithSource` would compile.
    pub(crate) text: String,
    /// Name of its function.
    pub(crate) entry: String,
    pub(crate) workgroup: [u32; 3],
    /// Buffer slot of each binding number.
    pub(crate) slots: BTreeMap<u32, u32>,
    /// Slot of the buffer of sizes, and the binding numbers whose sizes it lists.
    pub(crate) sizes: (u32, Vec<u32>),
}

/// The layout of the bindings that a module declares, as the library makes it.
pub(crate) fn layout(module: &Module) -> Vec<BindGroupLayoutEntry> {
    let entry = |variable: &naga::GlobalVariable| {
        let ty = match variable.space {
            AddressSpace::Storage { access } => {
                BufferBindingType::Storage { read_only: !access.contains(StorageAccess::STORE) }
            }
            _ => BufferBindingType::Uniform,
        };
        Some(BindGroupLayoutEntry {
            binding: variable.binding?.binding,
            visibility: ShaderStages::COMPUTE,
            ty: BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
            count: None,
        })
    };
    let mut entries: Vec<_> =
        module.global_variables.iter().filter_map(|(_, variable)| entry(variable)).collect();
    entries.sort_by_key(|entry| entry.binding);
    entries
}

/// Slots in the order of the layout's entries, then the sizes: no immediates, one group, buffers only.
fn resources(layout: &[BindGroupLayoutEntry]) -> EntryPointResources {
    let mut resources = EntryPointResources::default();
    let mut next = 0;
    for entry in layout {
        let BindingType::Buffer { ty, .. } = entry.ty else {
            panic!("binding {} is no buffer", entry.binding)
        };
        let mut target = BindTarget { buffer: Some(next), ..BindTarget::default() };
        if let BufferBindingType::Storage { read_only } = ty {
            target.mutable = !read_only;
            resources.sizes_buffer = Some(0);
        }
        resources.resources.insert(ResourceBinding { group: 0, binding: entry.binding }, target);
        next += 1;
    }
    resources.sizes_buffer = resources.sizes_buffer.map(|_| next);
    resources
}

/// Translates the entry point `name` of a WGSL module.
pub(crate) fn translate(
    source: &str,
    name: &str,
    layout: &[BindGroupLayoutEntry],
    checks: ShaderRuntimeChecks,
) -> Result<Metal, String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(source))?;
    written(&module, &info, name, layout, checks)
}

/// The same of a module that was read and validated.
pub(crate) fn written(
    module: &Module,
    info: &ModuleInfo,
    name: &str,
    layout: &[BindGroupLayoutEntry],
    checks: ShaderRuntimeChecks,
) -> Result<Metal, String> {
    let stage = Some((ShaderStage::Compute, name));
    let (module, info) =
        naga::back::pipeline_constants::process_overrides(module, info, stage, &Default::default())
            .map_err(|error| error.to_string())?;
    let resources = resources(layout);
    let policy =
        if checks.bounds_checks { BoundsCheckPolicy::Restrict } else { BoundsCheckPolicy::Unchecked };
    let options = Options {
        lang_version: LANGUAGE,
        per_entry_point_map: [(name.to_owned(), resources.clone())].into(),
        fake_missing_bindings: false,
        spirv_cross_compatibility: false,
        bounds_check_policies: BoundsCheckPolicies {
            index: policy,
            buffer: policy,
            image_load: policy,
            binding_array: BoundsCheckPolicy::Unchecked,
        },
        // wgpu's default for a pipeline, which this library keeps.
        zero_initialize_workgroup_memory: true,
        force_loop_bounding: checks.force_loop_bounding,
        emit_int_div_checks: checks.int_div_checks,
        ..Options::default()
    };
    let pipeline = PipelineOptions {
        entry_point: Some((ShaderStage::Compute, name.to_owned())),
        vertex_pulling_transform: true,
        ..PipelineOptions::default()
    };
    let (text, translated) = naga::back::msl::write_string(&module, &info, &options, &pipeline)
        .map_err(|error| error.to_string())?;
    let entry = translated.entry_point_names[0].clone().map_err(|error| error.to_string())?;
    let sized = module.global_variables.iter().filter(|(_, variable)| {
        let space = matches!(variable.space, AddressSpace::Uniform | AddressSpace::Storage { .. });
        space && module.types[variable.ty].inner.needs_host_buffer_byte_size(&module.types)
    });
    let sized = sized.filter_map(|(_, variable)| Some(variable.binding?.binding)).collect();
    let slots = resources.resources.iter();
    let slots = slots.filter_map(|(binding, target)| Some((binding.binding, u32::from(target.buffer?))));
    Ok(Metal {
        text,
        entry,
        workgroup: module.entry_points[0].workgroup_size,
        slots: slots.collect(),
        sizes: (resources.sizes_buffer.map_or(u32::MAX, u32::from), sized),
    })
}
