//! Every variant of every kernel, as the native side and as a browser gets it: valid for naga, within the rules of
//! `rules.rs`, and translated into the language of every native backend. The browsers' texts are left in `target/shaders/`
//! for `tests/tint`.

#![cfg(feature = "gpu")]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that panics is a test that fails"
)]

mod counts;
mod languages;
#[path = "../metal/translate.rs"]
#[allow(dead_code, reason = "shared with tests/metal, which runs the text")]
mod metal;
mod profiles;
mod rules;
mod table;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use std::thread;

use kvfold::gpu::{Target, Variant};
use naga::Module;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};

/// Reads and validates a module as a device would: with subgroups only where the variant may use them, and never with native f16.
fn validated(variant: &Variant) -> Result<(Module, ModuleInfo), String> {
    let text = variant.source(Target::Native);
    let module = naga::front::wgsl::parse_str(&text).map_err(|error| error.emit_to_string(&text))?;
    // WebGPU's core: `unpack2x16float` and its like.
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    if !variant.is_default() {
        capabilities |= Capabilities::SUBGROUP;
    }
    let checked = Validator::new(ValidationFlags::all(), capabilities).validate(&module);
    let info = checked.map_err(|error| error.emit_to_string(&text))?;
    Ok((module, info))
}

/// The lines of a text that a compiler minds: browsers' texts have no comments and no indentation.
fn code(text: &str) -> Vec<&str> {
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default().trim())
        .filter(|line| !line.starts_with("enable ") && !line.is_empty())
        .collect()
}

fn none(breaches: &[String]) {
    assert!(breaches.is_empty(), "{}", breaches.join("\n"));
}

/// What a variant's module says.
struct Read {
    variant: Variant,
    breaches: Vec<String>,
    untranslated: Vec<String>,
    bindings: Vec<rules::Binding>,
    needs: table::Needs,
}

impl Read {
    fn of(variant: Variant) -> Self {
        let (module, info) = match validated(&variant) {
            Err(error) => {
                let (bindings, needs) = (Vec::new(), table::Needs::default());
                return Self { variant, breaches: vec![error], untranslated: Vec::new(), bindings, needs };
            }
            Ok(read) => read,
        };
        let mut breaches = rules::breaches(&module);
        if variant.is_default() {
            breaches.extend(rules::default_breaches(&module));
        }
        let untranslated = languages::breaches(&module, &info, variant.entry_point(), !variant.is_default());
        let (bindings, needs) = (rules::bindings(&module), table::Needs::of(&variant, &module));
        Self { variant, breaches, untranslated, bindings, needs }
    }

    fn told(&self, breaches: &[String]) -> Vec<String> {
        let label = self.variant.label();
        breaches.iter().map(|breach| format!("{label}: {breach}")).collect()
    }
}

/// Every variant, read once for all tests, on all cores.
static READ: LazyLock<Vec<Read>> = LazyLock::new(|| {
    let variants = Variant::every();
    let share = variants.len().div_ceil(thread::available_parallelism().map_or(1, usize::from));
    thread::scope(|scope| {
        let read = |share: &[Variant]| share.iter().cloned().map(Read::of).collect::<Vec<_>>();
        let threads: Vec<_> = variants.chunks(share).map(|share| scope.spawn(move || read(share))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a module that can be read")).collect()
    })
});

#[test]
fn every_variant_is_valid_and_keeps_the_rules() {
    none(&READ.iter().flat_map(|read| read.told(&read.breaches)).collect::<Vec<_>>());
}

#[test]
fn every_native_backend_can_translate_every_variant() {
    none(&READ.iter().flat_map(|read| read.told(&read.untranslated)).collect::<Vec<_>>());
}

#[test]
fn the_tables_of_kernels_are_true() {
    let (profiles, refused) = profiles::of(READ.iter().map(|read| (&read.variant, &read.needs)));
    none(&refused);
    table::hold(&[&table::of(READ.iter().map(|read| (read.variant.file(), &read.needs))), &profiles]);
}

#[test]
fn bindings_do_not_depend_on_the_variant() {
    let mut kernels: BTreeMap<(&str, &str), Vec<rules::Binding>> = BTreeMap::new();
    let mut found = Vec::new();
    for Read { variant, bindings, .. } in READ.iter() {
        let seen = kernels.entry(variant.file()).or_default();
        let conflicts = rules::conflicts(seen, bindings);
        found.extend(conflicts.iter().map(|conflict| format!("{}: {conflict}", variant.label())));
        seen.extend(bindings.iter().cloned());
    }
    none(&found);
}

#[test]
fn browsers_get_what_naga_checks() {
    for variant in Variant::every() {
        let (native, web) = (variant.source(Target::Native), variant.source(Target::Web));
        assert_eq!(code(&native), code(&web), "{}", variant.label());
        assert!(!web.contains("//") && !web.contains("\n "), "{}: longer than it need be", variant.label());
    }
}

#[test]
fn texts_for_browsers_are_left_for_tint() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/shaders");
    if folder.exists() {
        fs::remove_dir_all(&folder).expect("an old folder can go");
    }
    fs::create_dir_all(&folder).expect("a writable target folder");
    let mut labels = HashSet::new();
    for variant in Variant::every() {
        let label = variant.label();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        assert!(!label.is_empty() && label.chars().all(plain), "{label:?} is no file name");
        fs::write(folder.join(format!("{label}.wgsl")), variant.source(Target::Web))
            .expect("a writable folder");
        assert!(labels.insert(label.to_lowercase()), "{label} names two variants");
    }
    assert!(!labels.is_empty());
}
