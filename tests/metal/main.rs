//! The GPU suite on a device whose kernels are their Metal text: naga translates them as wgpu's Metal backend does, clang
//! compiles that text against a stand-in for Metal's library (`stand_in/`), and it runs on the CPU, every invocation a
//! fiber, in several orders, simdgroups lagging behind each other. No Apple compiler and no Apple GPU is involved: what
//! passes here has not run on Apple hardware, and says nothing of address spaces, registers or speed.
//!
//! `KVFOLD_METAL=required|optional|off|all` (optional where unset, required where `CI=true`): without a clang++ of version 19
//! or later, `required` fails and `optional` shows the tests as ignored. `all` adds long tests, more orders, race checking,
//! sanitizers, fast math and every variant's compilation. `KVFOLD_CLANG` names another compiler.

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

#[path = "../gpu/attention.rs"]
mod attention;
#[path = "../gpu/golden.rs"]
mod golden;
#[path = "../gpu/minicache.rs"]
mod minicache;
#[path = "../gpu/planes.rs"]
mod planes;
#[path = "../gpu/qjl.rs"]
mod qjl;
#[path = "../gpu/random.rs"]
mod random;
#[path = "../gpu/rows.rs"]
mod rows;
#[path = "../gpu/selftest.rs"]
mod selftest;

use std::process::ExitCode;

use compile::{Build, CLANG};
use device::Settings;
use kvfold::Gpu;
use libtest_mimic::{Arguments, Failed, Trial};

/// A test by name; it fails by panicking or by an error.
pub(crate) type Test = (&'static str, fn(&Gpu) -> kvfold::Result<()>);

/// An Apple GPU as wgpu shows it: f16 and simdgroups of 32.
const APPLE: Settings =
    Settings { f16: true, subgroups: true, build: Build::Plain, orders: 3, mutation: None };
/// A device that a host made without optional features.
const BARE: Settings = Settings { f16: false, subgroups: false, ..APPLE };

/// Every test that needs no adapter of its own.
pub(crate) fn tests() -> Vec<Test> {
    [
        attention::TESTS,
        minicache::TESTS,
        qjl::TESTS,
        planes::TESTS,
        golden::TESTS,
        random::TESTS,
        selftest::TESTS,
    ]
    .concat()
}

/// Tests of many large dispatches, which run where all is wanted.
const LONG: [&str; 8] = [
    "attend_takes_every_mask_and_length",
    "attend_takes_long_sketches_and_caches",
    "exact_attention_takes_every_mask",
    "planes_attend_takes_every_mask_and_length",
    "random_caches_attend_as_the_reference",
    "random_pairs_fold_as_their_twins",
    "similarity_and_merge_agree_with_the_original",
    "the_self_test_passes_on_every_check",
];

/// What runs on the bare device unless all is wanted: every kernel whose text differs there. The mutants are bare, too.
const SHORT: [&str; 7] = [
    "exact_attention_masks_rows_that_are_not_finite",
    "merge_equals_its_twin_under_every_rule",
    "planes_count_and_mask_odd_rows",
    "quantize_values_equals_its_twin",
    "rows_that_are_not_finite_never_spread",
    "similarity_equals_its_twin",
    "sketches_and_attention_agree_with_the_original",
];

/// Devices by name.
fn devices(all: bool) -> Vec<(String, Settings)> {
    let more = |settings: Settings| Settings { orders: 2 * settings.orders, ..settings };
    let kinds = [("apple", APPLE), ("bare", BARE)];
    let mut devices: Vec<_> = kinds.map(|(name, settings)| (name.to_owned(), settings)).into();
    if all {
        devices.iter_mut().for_each(|(_, settings)| *settings = more(*settings));
        for build in [Build::FastMath, Build::Race, Build::Sanitized] {
            devices.extend(kinds.map(|(name, settings)| {
                (format!("{name}_{build:?}").to_lowercase(), Settings { build, orders: 1, ..settings })
            }));
        }
    }
    devices
}

fn open(settings: Settings) -> kvfold::Result<Gpu> {
    let (device, queue) = device::open(settings);
    Gpu::from_wgpu(device, queue)
}

fn trials(all: bool) -> Vec<Trial> {
    let failed = |error: &dyn ToString| Failed::from(error.to_string());
    let mut trials = Vec::new();
    for (device, settings) in devices(all) {
        for (name, test) in tests() {
            let long = LONG.contains(&name);
            let wanted = match settings.build {
                Build::Plain => all || if settings.subgroups { !long } else { SHORT.contains(&name) },
                _ => !long,
            };
            if wanted {
                trials.push(Trial::test(format!("{device}/{name}"), move || {
                    test(&open(settings)?).map_err(|error| failed(&error))
                }));
            }
        }
    }
    for mutant in mutants::MUTANTS {
        let settings = Settings { mutation: Some(mutant.mutation), build: mutant.build(), ..BARE };
        trials.push(Trial::test(format!("mutant/{}", mutant.name), move || {
            mutants::check(mutant, &open(settings)?).map_err(|error| failed(&error))
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
    if let Some(why) = missing {
        eprintln!("the Metal text cannot be run: {why}");
        if all || mode == "required" {
            return ExitCode::FAILURE;
        }
        trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
    }
    // This needs no compiler: naga alone.
    trials.push(Trial::test("every_kernel_has_a_metal_text", move || {
        texts::every_variant(all && CLANG.is_ok()).map_err(Failed::from)
    }));
    libtest_mimic::run(&arguments, trials).exit_code()
}
