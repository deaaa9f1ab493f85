//! The GPU suite on a device whose kernels are their Metal text: naga translates them as wgpu's Metal backend does, clang
//! compiles that text against a stand-in for Metal's library (`stand_in/`), and it runs on the CPU, every invocation a
//! fiber, in several orders, simdgroups lagging behind each other. No Apple compiler and no Apple GPU is involved: what
//! passes here has not run on Apple hardware, and says nothing of address spaces, registers or speed.
//!
//! `KVFOLD_METAL=required|optional|off|all` (optional where unset, required where `CI=true`): without a clang++ of version 19
//! or later, `required` fails and `optional` shows the tests as ignored. Without `all` a selection runs, in which every kernel
//! is, and of the fast-math build what meets numbers that are not finite; `all` runs every test in more orders, with race
//! checking, sanitizers and fast math, and compiles every variant. `KVFOLD_CLANG` names another compiler.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics is a test that fails"
)]

mod compile;
mod device;
mod mutants;
mod texts;
mod translate;

#[path = "../custom/mod.rs"]
mod custom;
#[path = "../custom/suite.rs"]
mod suite;

use std::process::ExitCode;

use compile::{Build, CLANG};
use device::Settings;
use libtest_mimic::{Arguments, Failed, Trial};
use suite::*;

/// An Apple GPU as wgpu shows it: simdgroups of 32.
const APPLE: Settings = Settings { subgroups: true, build: Build::Plain, orders: 3 };
/// A device that a host made without optional features.
const BARE: Settings = Settings { subgroups: false, ..APPLE };

/// What runs on the Apple device unless all is wanted: every kernel in its main variants.
const MAIN: &[&str] = &[
    "a_folded_pair_attends_as_its_rows",
    "attend_writes_strided_outputs_of_every_type",
    "coded_minicaches_equal_the_hosts_of_the_same_file",
    "coded_pairs_attend_as_their_twin",
    "empty_caches_attend_to_zeros",
    "empty_pairs_are_folded",
    "exact_attention_equals_the_reference",
    "exact_attention_masks_rows_that_are_not_finite",
    "exact_attention_reads_strided_rows",
    "groups_of_layers_fold_as_their_twins",
    "merge_equals_its_twin_in_every_mode_and_type",
    "merge_equals_its_twin_under_every_rule",
    "one_buffer_may_hold_both_layers",
    "planes_count_and_mask_odd_rows",
    "planes_scores_equal_the_reference_on_the_stored_codes",
    "quantize_equals_its_twin",
    "quantize_values_equals_its_twin",
    "restore_writes_strided_outputs_and_leaves_gaps",
    "rows_that_are_not_finite_never_spread",
    "scores_equal_the_reference_on_the_stored_codes",
    "scores_of_raw_keys_equal_the_hosts",
    "similarity_equals_its_twin",
    "tables_and_energies_equal_the_hosts",
];

/// What runs on the bare device then: every kernel whose text differs there. Most mutants are bare, too.
const BARE_ONLY: &[&str] = &[
    "coded_minicaches_equal_the_hosts_of_the_same_file",
    "exact_attention_masks_rows_that_are_not_finite",
    "groups_of_layers_fold_as_their_twins",
    "merge_equals_its_twin_under_every_rule",
    "planes_count_and_mask_odd_rows",
    "quantize_values_equals_its_twin",
    "rows_that_are_not_finite_never_spread",
    "similarity_equals_its_twin",
    "sketches_and_attention_agree_with_the_original",
    "tables_and_energies_equal_the_hosts",
];

/// What runs with fast math then: every kernel that meets a number that is not finite.
const NOT_FINITE: &[&str] = &[
    "coded_pairs_attend_as_their_twin",
    "exact_attention_masks_rows_that_are_not_finite",
    "exact_attention_masks_scores_beyond_f32",
    "groups_of_layers_fold_as_their_twins",
    "merge_equals_its_twin_in_every_mode_and_type",
    "planes_count_and_mask_odd_rows",
    "quantize_equals_its_twin",
    "quantize_values_equals_its_twin",
    "rows_that_are_not_finite_never_spread",
    "scores_of_raw_keys_equal_the_hosts",
    "similarity_equals_its_twin",
    "tables_and_energies_equal_the_hosts",
];

/// Tests of many large dispatches, which only the plain build runs.
const LONG: &[&str] = &[
    "attend_takes_every_mask_and_length",
    "attend_takes_long_sketches_and_caches",
    "exact_attention_takes_every_mask",
    "planes_attend_takes_every_mask_and_length",
    "random_caches_attend_as_the_reference",
    "random_pairs_fold_as_their_twins",
    "similarity_and_merge_agree_with_the_original",
    "the_self_test_passes_on_every_check",
];

/// Devices by name, and the tests that run there.
fn devices(all: bool) -> Vec<(String, Settings, Vec<Test>)> {
    let fast_math = Settings { build: Build::FastMath, orders: 1, ..APPLE };
    if !all {
        return vec![
            ("apple".to_owned(), APPLE, named(MAIN)),
            ("bare".to_owned(), BARE, named(BARE_ONLY)),
            ("apple_fastmath".to_owned(), fast_math, named(NOT_FINITE)),
        ];
    }
    let short: Vec<Test> = tests().into_iter().filter(|(test, _)| !LONG.contains(test)).collect();
    let mut devices = Vec::new();
    for (name, settings) in [("apple", APPLE), ("bare", BARE)] {
        devices.push((name.to_owned(), Settings { orders: 2 * settings.orders, ..settings }, tests()));
        for build in [Build::FastMath, Build::Race, Build::Sanitized] {
            let name = format!("{name}_{build:?}").to_lowercase();
            devices.push((name, Settings { build, orders: 1, ..settings }, short.clone()));
        }
    }
    devices
}

fn trials(all: bool) -> Vec<Trial> {
    let failed = |error: &dyn ToString| Failed::from(error.to_string());
    let mut trials = Vec::new();
    for (device, settings, tests) in devices(all) {
        for (name, test) in tests {
            trials.push(Trial::test(format!("{device}/{name}"), move || {
                test(&custom::open(settings, None)?).map_err(|error| failed(&error))
            }));
        }
    }
    for mutant in mutants::MUTANTS {
        let settings = Settings { build: mutant.build, ..BARE };
        trials.push(Trial::test(format!("mutant/{}", mutant.name), move || {
            let gpu = custom::open(settings, Some(mutant.mutation))?;
            mutant.mutation.is_noticed(mutant.test, &gpu, mutant.says).map_err(|error| failed(&error))
        }));
    }
    trials
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let ci = std::env::var("CI").is_ok_and(|value| value == "true");
    let unset = if ci { "required" } else { "optional" };
    let mode = std::env::var("KVFOLD_METAL").unwrap_or_else(|_| unset.to_owned());
    let all = mode == "all";
    let mut trials = trials(all);
    let missing = match &*CLANG {
        _ if mode == "off" => Some("KVFOLD_METAL=off".to_owned()),
        Err(why) => Some(why.clone()),
        Ok(_) => None,
    };
    if let Some(why) = &missing {
        eprintln!("the Metal text cannot be run: {why}");
        if all || mode == "required" {
            return ExitCode::FAILURE;
        }
        trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
    }
    // Without a compiler naga alone.
    let clang = missing.is_none();
    trials.push(Trial::test("every_kernel_has_a_metal_text", move || {
        texts::every_variant(all, clang).map_err(Failed::from)
    }));
    let conclusion = libtest_mimic::run(&arguments, trials);
    if clang && !custom::ran::every_kernel(&arguments, "as Metal's text", |_| true) {
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}
