//! The GPU suite on Dawn, Chrome's WebGPU, through its build for Node: Chrome's compiler, Tint, translates the kernels, those that
//! use subgroups too, and a Vulkan driver runs them. wgpu's own backend for browsers never asks for subgroups.
//!
//! `KVFOLD_DAWN=required|optional|off` (optional where unset, required where `CI=true`): without Node, Dawn or a Vulkan driver that
//! Dawn takes (Mesa's lavapipe it refuses; SwiftShader, which comes with Chromium, it takes), `required` fails and `optional` shows
//! the tests as ignored. `KVFOLD_DAWN_DRIVER=FILE` names the driver's JSON file.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics is a test that fails"
)]

mod device;
mod process;

#[path = "../custom/mod.rs"]
mod custom;
#[path = "../custom/suite.rs"]
mod suite;

use std::process::ExitCode;

use custom::mutation::{Mutation, replaced};
use device::Browser;
use libtest_mimic::{Arguments, Failed, Trial};
use process::{DAWN, Dawn};
use suite::*;

/// A page with the feature.
const SUBGROUPS: Browser = Browser { subgroups: true };
/// A page without, as wgpu makes its device.
const BARE: Browser = Browser { subgroups: false };

/// What runs with subgroups: every kernel that has variants with them, in few variants, since SwiftShader takes a second or so to
/// compile each.
const WITH: &[&str] = &[
    "coded_minicaches_equal_the_hosts_of_the_same_file",
    "groups_of_layers_fold_as_their_twins",
    "planes_count_and_mask_odd_rows",
    "planes_scores_equal_the_reference_on_the_stored_codes",
    "quantize_values_equals_its_twin",
    "rows_that_are_not_finite_never_spread",
    "similarity_equals_its_twin",
    "tables_and_energies_equal_the_hosts",
];

/// What runs without subgroups: a check of this device rather than of kernels, which the page's self-test runs that way.
const BARE_ONLY: &[&str] = &["quantize_values_equals_its_twin", "rows_that_are_not_finite_never_spread"];

/// Faults in what only kernels with subgroups have, the test that must fail, and part of what it says then.
#[rustfmt::skip]
const MUTANTS: &[(&str, Mutation, &str, &str)] = &[
    ("sums_leave_out_a_lane", replaced("similarity", "subgroupShuffleXor(sum, offset)", "subgroupShuffleXor(sum, offset ^ 1u)"), "similarity_equals_its_twin", ""),
    ("sums_count_on_larger_subgroups", replaced("similarity", "SUBGROUP_MIN: u32 = 4u", "SUBGROUP_MIN: u32 = 8u"), "similarity_equals_its_twin", ""),
    ("tint_refuses_a_text", replaced("similarity", "subgroupShuffleXor(sum, offset)", "subgroupShuffleXor(sum)"), "similarity_equals_its_twin", "no matching call"),
];

/// A lane's subgroup size, and the lane that it hears of from its neighbour.
const PROBE: &str = "enable subgroups;
@group(0) @binding(0) var<storage, read_write> said: array<vec2<u32>, 32>;
@compute @workgroup_size(32) fn probe(
    @builtin(local_invocation_index) at: u32, @builtin(subgroup_size) size: u32, @builtin(subgroup_invocation_id) lane: u32,
) { said[at] = vec2<u32>(size, subgroupShuffleXor(lane, 1u) ^ lane); }";

/// Subgroups are those that the adapter promises, SwiftShader's of four lanes, and lanes hear of each other.
fn adapter(dawn: &Dawn) -> Result<(), String> {
    let adapter = &dawn.adapter;
    assert!(adapter.features.iter().any(|feature| feature == "subgroups"), "{adapter:?}");
    let (smallest, largest) = adapter.sizes;
    assert!(smallest >= 4 && largest <= 128, "{adapter:?}: the kernels take no such subgroups");
    assert!(!adapter.name.contains("SwiftShader") || adapter.sizes == (4, 4), "{adapter:?}");
    let gpu = custom::open(SUBGROUPS, None).map_err(|error| error.to_string())?;
    assert_eq!(gpu.caps().subgroups, Some(adapter.sizes));
    assert_eq!(custom::open(BARE, None).map_err(|error| error.to_string())?.caps().subgroups, None);

    let probe = dawn.compile(true, PROBE, "probe", &[(0, "storage")])?;
    let said = dawn.run(probe, [1, 1, 1], &[&[0; 256]])?;
    let words: Vec<u32> =
        said.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
    assert_eq!(words.len(), 64);
    for pair in words.chunks_exact(2) {
        assert!(pair[0] >= smallest && pair[0] <= largest && pair[1] == 1, "{words:?}");
    }
    // A page without the feature has no such text.
    assert!(dawn.compile(false, PROBE, "probe", &[(0, "storage")]).is_err());
    Ok(())
}

fn trials() -> Vec<Trial> {
    let failed = |error: &dyn ToString| Failed::from(error.to_string());
    let mut trials = Vec::new();
    for (name, device, tests) in [("subgroups", SUBGROUPS, WITH), ("bare", BARE, BARE_ONLY)] {
        for (test, run) in named(tests) {
            trials.push(Trial::test(format!("{name}/{test}"), move || {
                run(&custom::open(device, None)?).map_err(|error| failed(&error))
            }));
        }
    }
    for &(name, mutation, test, says) in MUTANTS {
        trials.push(Trial::test(format!("mutant/{name}"), move || {
            let gpu = custom::open(SUBGROUPS, Some(mutation))?;
            mutation.is_noticed(test, &gpu, says).map_err(|error| failed(&error))
        }));
    }
    trials.push(Trial::test("the_adapter_has_the_subgroups_it_promises", || {
        DAWN.as_ref().map_err(Clone::clone).and_then(adapter).map_err(Failed::from)
    }));
    trials
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let ci = std::env::var("CI").is_ok_and(|value| value == "true");
    let unset = if ci { "required" } else { "optional" };
    let mode = std::env::var("KVFOLD_DAWN").unwrap_or_else(|_| unset.to_owned());
    let mut trials = trials();
    let missing = match mode.as_str() {
        "off" => Some("KVFOLD_DAWN=off".to_owned()),
        _ => DAWN.as_ref().err().cloned(),
    };
    if let Some(why) = &missing {
        eprintln!("kernels cannot run through Dawn: {why}");
        if mode == "required" {
            return ExitCode::FAILURE;
        }
        trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    let subgroups = |label: &str| label.contains("-subgroups_");
    if missing.is_none() && !custom::ran::every_kernel(&arguments, "with subgroups", subgroups) {
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}
