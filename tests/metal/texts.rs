//! The Metal text of every variant that an Apple GPU can take, left in `target/metal/texts/` for Apple's own compiler.

use std::collections::HashSet;
use std::fs;

use kvfold::gpu::{Target, Variant};
use kvfold::wgpu::ShaderRuntimeChecks;

use crate::compile::{FOLDER, check};
use crate::translate::{Metal, layout, translate};

/// Apple's simdgroups have 32 lanes.
fn is_for_apple(label: &str) -> bool {
    label.rsplit_once("-subgroups_").is_none_or(|(_, size)| size == "32")
}

/// The lane that zeroes threadgroup memory must be an argument: naga has named it otherwise (shaders/common/invocation.wgsl).
fn zeroing_lane_is_an_argument(metal: &Metal) -> bool {
    let (_, function) = metal.text.split_once(&format!("kernel void {}(", metal.entry)).unwrap_or_default();
    let (arguments, body) = function.split_once(") {\n").unwrap_or_default();
    let first = body.lines().next().unwrap_or_default().trim();
    let lane = first.strip_prefix("if (").and_then(|rest| rest.strip_suffix(" == 0u) {"));
    lane.is_none_or(|lane| arguments.contains(&format!("uint {lane} [[thread_index_in_threadgroup]]")))
}

/// Translates and writes every text, which clang reads as well; unless `all`, one text for each selection of modules, since
/// other dimensions only change numbers, and without clang.
pub(crate) fn every_variant(all: bool) -> Result<(), String> {
    let folder = FOLDER.join("texts");
    fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let mut refused = Vec::new();
    let mut seen = HashSet::new();
    let mut is_new = |label: &str| seen.insert(label.replace(|c: char| c.is_ascii_digit(), ""));
    for variant in Variant::every().iter().filter(|variant| is_for_apple(&variant.label())) {
        if !is_new(&variant.label()) && !all {
            continue;
        }
        let (label, source) = (variant.label(), variant.source(Target::Native));
        let module = naga::front::wgsl::parse_str(&source).map_err(|error| error.emit_to_string(&source))?;
        let layout = layout(&module);
        let metal = translate(&source, variant.entry_point(), &layout, ShaderRuntimeChecks::checked())?;
        fs::write(folder.join(format!("{label}.metal")), &metal.text).map_err(|error| error.to_string())?;
        if !zeroing_lane_is_an_argument(&metal) {
            refused.push(format!("{label}: threadgroup memory is zeroed by a lane that is no argument"));
        }
        if all && let Err(error) = check(&metal) {
            refused.push(format!("{label}: {error}"));
        }
    }
    if refused.is_empty() { Ok(()) } else { Err(refused.join("\n")) }
}
