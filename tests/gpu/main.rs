//! The GPU suite. Every test runs on several devices of one adapter, so that each variant of a kernel is run: all that the
//! adapter can do, without subgroups, and a device made with exactly WebGPU's default limits and no feature.
//! tests/device/mod.rs says which adapter.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics is a test that fails"
)]

mod attention;
mod cache;
mod coded;
mod device;
mod fold;
mod golden;
mod groups;
mod learnt;
mod minicache;
mod planes;
mod planes_report;
mod qjl;
mod qjl_cache;
mod qjl_promises;
mod random;
mod report;
mod rows;
mod selftest;

#[path = "../cache_model/mod.rs"]
#[allow(unreachable_pub, reason = "shared with suites that are crates of their own")]
mod cache_model;
#[path = "../cache_model/settings.rs"]
#[allow(unreachable_pub, reason = "shared with suites that are crates of their own")]
mod settings;

#[path = "../device/mod.rs"]
#[allow(unreachable_pub, reason = "shared with suites that are crates of their own")]
mod environment;
#[path = "../figures/mod.rs"]
#[allow(unreachable_pub, reason = "shared with suites that are crates of their own")]
mod figures;

#[path = "../caches/mod.rs"]
#[allow(unreachable_pub, reason = "shared with suites that are crates of their own")]
mod caches;
#[path = "../folded/mod.rs"]
#[allow(unreachable_pub, reason = "shared with suites that are crates of their own")]
mod folded;
#[path = "../random/mod.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "shared with suites that are crates of their own and use all of it"
)]
mod numbers;

use std::env;
use std::process::ExitCode;

use kvfold::Gpu;
use libtest_mimic::Arguments;

/// A test by name; it fails by panicking or by an error.
pub(crate) type Test = (&'static str, fn(&Gpu) -> kvfold::Result<()>);

/// A way of making the device.
struct Profile {
    name: &'static str,
    subgroups: bool,
    /// The device is made by the test, as a host would, with nothing optional.
    bare: bool,
}

const PROFILES: [Profile; 3] = [
    Profile { name: "full", subgroups: true, bare: false },
    Profile { name: "no_subgroups", subgroups: false, bare: false },
    Profile { name: "bare", subgroups: false, bare: true },
];

fn open(profile: &Profile) -> kvfold::Result<Gpu> {
    let gpu = Gpu::request_blocking(environment::request(profile.subgroups))?;
    if profile.bare { device::bare(&gpu) } else { Ok(gpu) }
}

fn tests() -> Vec<Test> {
    [
        device::TESTS,
        attention::TESTS,
        minicache::TESTS,
        coded::TESTS,
        cache::TESTS,
        groups::TESTS,
        learnt::TESTS,
        qjl::TESTS,
        planes::TESTS,
        qjl_cache::TESTS,
        qjl_promises::TESTS,
        fold::TESTS,
        planes_report::TESTS,
        report::TESTS,
        golden::TESTS,
        random::TESTS,
        selftest::TESTS,
    ]
    .concat()
}

/// What `KVFOLD_SUBGROUPS` is set to, so that a run meant for one driver cannot pass on another.
const SUBGROUPS: &str = "KVFOLD_SUBGROUPS";

fn subgroups_are_as_named(gpu: &Gpu) -> kvfold::Result<()> {
    let named: u32 = env::var(SUBGROUPS).unwrap().parse().unwrap();
    assert_eq!(gpu.caps().subgroups, Some((named, named)));
    Ok(())
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Devices share one adapter; software adapters already use every core.
    arguments.test_threads.get_or_insert(1);
    let mut trials = Vec::new();
    for profile in &PROFILES {
        let gpu = environment::open(|| open(profile));
        // "NVIDIA-H200" or "llvmpipe": the name without what the driver adds in brackets.
        let name = |gpu: &Gpu| gpu.caps().adapter.split(" (").next().unwrap_or_default().replace(' ', "-");
        let adapter = gpu.as_ref().map_or_else(|_| "none".to_owned(), |gpu| name(gpu));
        if let Ok(gpu) = &gpu {
            // tests/run records it.
            eprintln!("adapter: {}, {}", gpu.caps().adapter, gpu.caps().driver);
        }
        for (name, test) in tests() {
            let label = format!("{adapter}/{}/{name}", profile.name);
            trials.push(environment::trial(label, &gpu, test));
        }
        if profile.subgroups && env::var_os(SUBGROUPS).is_some() {
            let label = format!("{adapter}/{}/subgroups_are_as_named", profile.name);
            trials.push(environment::trial(label, &gpu, subgroups_are_as_named));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
