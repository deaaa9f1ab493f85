//! The GPU suite. Every test runs on several devices of one adapter, so that each variant of a kernel is run: all that the
//! adapter can do, without f16, without subgroups, and a device made with exactly WebGPU's default limits and no feature.
//!
//! `KVFOLD_GPU=required|optional|off` (optional where unset): `required` fails without an adapter, `off` and a missing
//! adapter show the tests as ignored. `KVFOLD_ADAPTER` picks an adapter by part of its name. `KVFOLD_NO_F16` and
//! `KVFOLD_NO_SUBGROUPS` keep the features from every device.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics is a test that fails"
)]

mod attention;
mod device;
mod golden;
mod minicache;
mod planes;
mod planes_report;
mod qjl;
mod report;
mod rows;

use std::process::ExitCode;
use std::sync::Arc;

use kvfold::Gpu;
use kvfold::gpu::Request;
use libtest_mimic::{Arguments, Failed, Trial};

/// A test by name; it fails by panicking or by an error.
pub(crate) type Test = (&'static str, fn(&Gpu) -> kvfold::Result<()>);

/// A way of making the device.
struct Profile {
    name: &'static str,
    f16: bool,
    subgroups: bool,
    /// The device is made by the test, as a host would, with nothing optional.
    bare: bool,
}

const PROFILES: [Profile; 4] = [
    Profile { name: "full", f16: true, subgroups: true, bare: false },
    Profile { name: "no_f16", f16: false, subgroups: true, bare: false },
    Profile { name: "no_subgroups", f16: true, subgroups: false, bare: false },
    Profile { name: "bare", f16: false, subgroups: false, bare: true },
];

fn request(profile: &Profile) -> Request {
    let allowed = |variable: &str| std::env::var_os(variable).is_none_or(|value| value.is_empty());
    let request = Request::default()
        .f16(profile.f16 && allowed("KVFOLD_NO_F16"))
        .subgroups(profile.subgroups && allowed("KVFOLD_NO_SUBGROUPS"));
    match std::env::var("KVFOLD_ADAPTER") {
        Ok(name) => request.name(name),
        Err(_) => request,
    }
}

fn open(profile: &Profile) -> kvfold::Result<Gpu> {
    let gpu = Gpu::request_blocking(request(profile))?;
    if profile.bare { device::bare(&gpu) } else { Ok(gpu) }
}

fn tests() -> Vec<Test> {
    [
        device::TESTS,
        attention::TESTS,
        minicache::TESTS,
        qjl::TESTS,
        planes::TESTS,
        planes_report::TESTS,
        report::TESTS,
        golden::TESTS,
    ]
    .concat()
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Devices share one adapter; software adapters already use every core.
    arguments.test_threads.get_or_insert(1);
    let mode = std::env::var("KVFOLD_GPU").unwrap_or_else(|_| "optional".to_owned());
    let mut trials = Vec::new();
    for profile in &PROFILES {
        let gpu = match mode.as_str() {
            "off" => Err("KVFOLD_GPU=off".to_owned()),
            _ => open(profile).map(Arc::new).map_err(|error| error.to_string()),
        };
        let adapter =
            gpu.as_ref().map_or("none", |gpu| gpu.caps().adapter.split(' ').next().unwrap_or("unnamed"));
        for (name, test) in tests() {
            let label = format!("{adapter}/{}/{name}", profile.name);
            trials.push(match &gpu {
                Ok(gpu) => {
                    let gpu = Arc::clone(gpu);
                    Trial::test(label, move || test(&gpu).map_err(|error| Failed::from(error.to_string())))
                }
                Err(cause) if mode == "required" => {
                    let cause = cause.clone();
                    Trial::test(label, move || Err(Failed::from(cause)))
                }
                Err(_) => Trial::test(label, || Ok(())).with_ignored_flag(true),
            });
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
