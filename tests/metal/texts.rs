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

/// A label without its numbers: a selection of modules.
fn selection(label: &str) -> String {
    let is_number = |text: &str| text.chars().all(|c| c.is_ascii_hexdigit());
    let part = |part: &'_ str| match part.rsplit_once('_') {
        Some((name, value)) if is_number(value) => format!("-{name}"),
        // Of many constants a label has a hash.
        None if part.len() == 16 && is_number(part) => String::new(),
        _ => format!("-{part}"),
    };
    label.split('-').map(part).collect()
}

/// Translates and writes every text. Where it is there clang reads one of each selection of modules, since others only differ in
/// numbers; where `all` is wanted, every one.
pub(crate) fn every_variant(all: bool, clang: bool) -> Result<(), String> {
    let folder = FOLDER.join("texts");
    fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let mut refused = Vec::new();
    let mut seen = HashSet::new();
    for variant in Variant::every().iter().filter(|variant| is_for_apple(&variant.label())) {
        let (label, source) = (variant.label(), variant.source(Target::Native));
        let module = naga::front::wgsl::parse_str(&source).map_err(|error| error.emit_to_string(&source))?;
        let layout = layout(&module);
        let metal = translate(&source, variant.entry_point(), &layout, ShaderRuntimeChecks::checked())?;
        fs::write(folder.join(format!("{label}.metal")), &metal.text).map_err(|error| error.to_string())?;
        if !zeroing_lane_is_an_argument(&metal) {
            refused.push(format!("{label}: threadgroup memory is zeroed by a lane that is no argument"));
        }
        let is_read = clang && (seen.insert(selection(&label)) || all);
        if is_read && let Err(error) = check(&metal) {
            refused.push(format!("{label}: {error}"));
        }
    }
    if refused.is_empty() { Ok(()) } else { Err(refused.join("\n")) }
}
