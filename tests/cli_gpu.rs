//! `kvfold report` on a device, as a user runs it, against the same command on the CPU. Which device: tests/device/mod.rs.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that panics is a test that fails"
)]

mod device;
mod figures;

use std::process::{Command, ExitCode, Stdio};

use kvfold::Gpu;
use libtest_mimic::Arguments;
use serde_json::Value;

/// The report on the bundled sample, all of its layers.
fn report(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_kvfold"))
        .args(["report", "--json"])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    // Drivers write to standard error too.
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn sample(gpu: &Gpu) -> kvfold::Result<()> {
    let caps = gpu.caps();
    let mut arguments = vec!["--adapter", &caps.adapter];
    arguments.extend(caps.subgroups.is_none().then_some("--no-subgroups"));
    let mut on_device = report(&arguments);
    let on_cpu = report(&["--backend", "cpu"]);
    assert_eq!(on_device["backend"], caps.backend);
    assert_eq!(on_device["adapter"], caps.adapter);
    assert_eq!(on_device["software"], caps.software);
    assert_eq!((&on_cpu["backend"], &on_cpu["adapter"]), (&"cpu".into(), &Value::Null));
    assert_eq!((&on_cpu["model"], on_cpu["layers"].as_array().unwrap().len()), (&on_device["model"], 30));
    for name in ["backend", "adapter", "software"] {
        on_device[name].clone_from(&on_cpu[name]);
    }
    // No row of the sample has a cosine within 1e-5 of the threshold, so that every count must be equal.
    figures::agree(&on_cpu, &on_device, "report");
    Ok(())
}

fn main() -> ExitCode {
    let gpu = device::open(|| Gpu::request_blocking(device::request(true)));
    let trials = vec![device::trial("the_sample_gives_the_figures_of_the_cpu".to_owned(), &gpu, sample)];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
