//! What the native backends of wgpu 30 make of a module: Metal's text, HLSL and SPIR-V, with the options that they use
//! (wgpu-hal: `metal/device.rs`, `dx12/device.rs`, `vulkan/adapter.rs`; a pipeline's defaults, all runtime checks).

use std::ops::RangeInclusive;

use kvfold::wgpu::{BindGroupLayoutEntry, BindingType, BufferBindingType, ShaderRuntimeChecks};
use naga::back::hlsl::{self, ShaderModel};
use naga::back::spv::{self, Capability, WriterFlags};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::ModuleInfo;
use naga::{Module, ResourceBinding, ShaderStage};

use crate::{counts, metal, rules};

/// The first shader model with products of four bytes, and the last without.
const MODELS: [ShaderModel; 2] = [ShaderModel::V6_4, ShaderModel::V6_3];
/// Without Microsoft's newer compiler beside the program wgpu takes the one of Windows, which knows no subgroups.
const WINDOWS: ShaderModel = ShaderModel::V5_1;
/// Vulkan 1.3, which has products of four bytes, and 1.1, which has them by an extension.
const VERSIONS: [(u8, u8); 2] = [(1, 6), (1, 3)];

const OP_NAME: u32 = 5;
const OP_ENTRY_POINT: u32 = 15;
const OP_LOOP_MERGE: u32 = 246;
const OP_SIGNED_DOT: u32 = 4450;

/// What a translation holds, in any of the languages.
#[derive(Debug)]
struct Seen {
    /// Entry points of the kernel's name.
    entries: usize,
    /// Loops that wgpu bounds.
    guards: usize,
    /// Whether bytes are multiplied by an instruction for it.
    instruction: bool,
}

/// Translates a module into all three languages; one line for each thing that is not as it must be.
pub(crate) fn breaches(module: &Module, info: &ModuleInfo, entry: &str, subgroups: bool) -> Vec<String> {
    let layout = metal::layout(module);
    let products = counts::multiplies_bytes(module);
    let mut found = Vec::new();
    let mut hold =
        |language: &str, seen: Result<Seen, String>, guards: RangeInclusive<usize>, instruction| match seen {
            Err(error) => found.push(format!("{language}: {error}")),
            Ok(seen) if seen.entries != 1 => found.push(format!("{language}: no {entry}, {seen:?}")),
            Ok(seen) if !guards.contains(&seen.guards) || seen.instruction != instruction => {
                found
                    .push(format!("{language}: {seen:?}, {guards:?} loops, products of bytes {instruction}"));
            }
            Ok(_) => {}
        };
    // Texts hold every function of the module, SPIR-V at least those that are called.
    let (all, run) = (counts::loops(module), counts::loops_run(module));
    hold("Metal", metal_text(module, info, entry, &layout), all..=all, false);
    let older = if subgroups { MODELS[1] } else { WINDOWS };
    // Of variants with subgroups older devices get other text only where bytes are multiplied.
    let ages = if products || !subgroups { 2 } else { 1 };
    for (age, (model, version)) in [MODELS[0], older].into_iter().zip(VERSIONS).take(ages).enumerate() {
        let has = products && age == 0;
        hold(model.to_str(), direct_text(module, info, entry, &layout, model), all..=all, has);
        hold("SPIR-V", vulkan_words(module, info, entry, version), run..=all, has);
    }
    found
}

fn metal_text(
    module: &Module,
    info: &ModuleInfo,
    entry: &str,
    layout: &[BindGroupLayoutEntry],
) -> Result<Seen, String> {
    let text = metal::written(module, info, entry, layout, ShaderRuntimeChecks::checked())?.text;
    let entries = text.matches(&format!("kernel void {entry}(")).count();
    Ok(Seen { entries, guards: bounds(&text), instruction: false })
}

/// Loops that a text bounds, by the declarations of their counters.
fn bounds(text: &str) -> usize {
    text.lines().filter(|line| line.trim_start().starts_with("uint2 loop_bound")).count()
}

fn direct_text(
    module: &Module,
    info: &ModuleInfo,
    entry: &str,
    layout: &[BindGroupLayoutEntry],
    shader_model: ShaderModel,
) -> Result<Seen, String> {
    // Registers are counted by kind, in the order of the layout; the constants for the number of workgroups come last.
    let [mut uniforms, mut reads, mut writes] = [hlsl::BindTarget::default(); 3];
    let mut options = hlsl::Options {
        shader_model,
        fake_missing_bindings: false,
        zero_initialize_workgroup_memory: true,
        restrict_indexing: true,
        force_loop_bounding: true,
        ..hlsl::Options::default()
    };
    for &BindGroupLayoutEntry { binding, ty, .. } in layout {
        let next = match ty {
            BindingType::Buffer { ty: BufferBindingType::Uniform, .. } => &mut uniforms,
            BindingType::Buffer { ty: BufferBindingType::Storage { read_only: true }, .. } => &mut reads,
            _ => &mut writes,
        };
        options.binding_map.insert(ResourceBinding { group: 0, binding }, *next);
        next.register += 1;
    }
    options.special_constants_binding = Some(uniforms);
    let pipeline = hlsl::PipelineOptions { entry_point: Some((ShaderStage::Compute, entry.to_owned())) };
    let mut text = String::new();
    let written = hlsl::Writer::new(&mut text, &options, &pipeline).write(module, info, None);
    let names = written.map_err(|error| error.to_string())?.entry_point_names;
    let names = names.into_iter().collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
    let [x, y, z] = module.entry_points[0].workgroup_size;
    let head = format!("[numthreads({x}, {y}, {z})]\nvoid {entry}(");
    Ok(Seen {
        entries: names.iter().filter(|name| *name == entry).count() * text.matches(&head).count(),
        guards: bounds(&text),
        instruction: text.contains("dot4add_i8packed(") || text.contains("dot4add_u8packed("),
    })
}

fn vulkan_words(
    module: &Module,
    info: &ModuleInfo,
    entry: &str,
    lang_version: (u8, u8),
) -> Result<Seen, String> {
    let mut capabilities = vec![Capability::Shader, Capability::Matrix];
    capabilities.extend([
        Capability::GroupNonUniform,
        Capability::GroupNonUniformVote,
        Capability::GroupNonUniformArithmetic,
        Capability::GroupNonUniformBallot,
        Capability::GroupNonUniformShuffle,
        Capability::GroupNonUniformShuffleRelative,
        Capability::GroupNonUniformQuad,
    ]);
    if lang_version == VERSIONS[0] {
        capabilities.extend([
            Capability::DotProductInputAll,
            Capability::DotProductInput4x8Bit,
            Capability::DotProductInput4x8BitPacked,
            Capability::DotProduct,
        ]);
    }
    let options = spv::Options {
        lang_version,
        // With names, which wgpu leaves out of release builds: they tell the loops' bounds from other variables.
        flags: WriterFlags::LABEL_VARYINGS | WriterFlags::FORCE_POINT_SIZE | WriterFlags::DEBUG,
        fake_missing_bindings: false,
        capabilities: Some(capabilities.into_iter().collect()),
        // The stricter of the two kinds of driver: one that does not check buffers' bounds itself.
        bounds_check_policies: BoundsCheckPolicies {
            index: BoundsCheckPolicy::Restrict,
            buffer: BoundsCheckPolicy::Restrict,
            image_load: BoundsCheckPolicy::Restrict,
            binding_array: BoundsCheckPolicy::Unchecked,
        },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::Polyfill,
        force_loop_bounding: true,
        binding_map: bindings(module),
        ..spv::Options::default()
    };
    let pipeline = spv::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: entry.to_owned() };
    let words = spv::write_vec(module, info, &options, Some(&pipeline)).map_err(|error| error.to_string())?;
    read_words(&words, entry)
}

fn bindings(module: &Module) -> spv::BindingMap {
    let own = rules::bindings(module).into_iter().map(|binding| {
        let to = spv::BindingInfo {
            descriptor_set: binding.group,
            binding: binding.number,
            binding_array_size: None,
        };
        (ResourceBinding { group: binding.group, binding: binding.number }, to)
    });
    own.collect()
}

/// Goes through a module's instructions, each of which begins with its length and its number.
fn read_words(words: &[u32], entry: &str) -> Result<Seen, String> {
    let mut seen = Seen { entries: 0, guards: 0, instruction: false };
    let mut loops = 0;
    let mut rest = words.get(5..).ok_or("no header")?;
    while let Some(&first) = rest.first() {
        let (length, operation) = ((first >> 16) as usize, first & 0xffff);
        let (instruction, after) = rest.split_at_checked(length.max(1)).ok_or("an instruction is cut off")?;
        match operation {
            OP_NAME if is_text(&instruction[2..], "loop_bound") => seen.guards += 1,
            OP_ENTRY_POINT if is_text(&instruction[3..], entry) => seen.entries += 1,
            OP_LOOP_MERGE => loops += 1,
            OP_SIGNED_DOT => seen.instruction = true,
            _ => {}
        }
        rest = after;
    }
    if loops == seen.guards { Ok(seen) } else { Err(format!("{loops} loops, {seen:?}")) }
}

/// Whether words begin with a text and the zero that ends it.
fn is_text(words: &[u32], text: &str) -> bool {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.strip_prefix(text.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
}

#[cfg(test)]
mod tests {
    use naga::valid::{Capabilities, ValidationFlags, Validator};

    use super::*;

    fn seen(text: &str) -> [Seen; 5] {
        let module = naga::front::wgsl::parse_str(text).expect("WGSL");
        let info =
            Validator::new(ValidationFlags::all(), Capabilities::all()).validate(&module).expect("valid");
        let layout = metal::layout(&module);
        [
            metal_text(&module, &info, "main", &layout),
            direct_text(&module, &info, "main", &layout, MODELS[0]),
            direct_text(&module, &info, "main", &layout, MODELS[1]),
            vulkan_words(&module, &info, "main", VERSIONS[0]),
            vulkan_words(&module, &info, "main", VERSIONS[1]),
        ]
        .map(|seen| seen.expect("translated"))
    }

    #[test]
    fn entries_loops_and_products_are_seen() {
        let head = "@group(0) @binding(0) var<storage, read_write> x: array<u32>;";
        let text = |body: &str| {
            format!(
                "{head} @compute @workgroup_size(64) fn main(@builtin(local_invocation_index) i: u32) {{ {body} }}"
            )
        };
        let nested = "for (var k = 0u; k < x[0]; k++) { loop { x[i] += k; if x[k] > i { break; } } }";
        assert_eq!(seen(&text(nested)).map(|seen| (seen.guards, seen.instruction)), [(2, false); 5]);
        let product = "x[i] = u32(dot4I8Packed(x[i], x[0]));";
        let found = seen(&text(product)).map(|seen| (seen.guards, seen.instruction));
        assert_eq!(found, [(0, false), (0, true), (0, false), (0, true), (0, false)]);
        // naga calls it otherwise in Metal's language, which has no function of this name.
        assert_eq!(seen(&text("x[i] = i;")).map(|seen| seen.entries), [0, 1, 1, 1, 1]);
    }
}
