//! `kvfold doctor`.

use crate::arguments::DoctorArguments;

#[cfg(not(feature = "gpu"))]
pub(crate) fn run(_: &DoctorArguments) -> kvfold::Result<crate::Outcome> {
    Err(kvfold::Error::NoAdapter {
        want: "any".to_owned(),
        have: "a kvfold built without GPU support".to_owned(),
    })
}

#[cfg(feature = "gpu")]
pub(crate) use device::run;

#[cfg(feature = "gpu")]
mod device {
    use std::fmt::Write;

    use kvfold::gpu::{Caps, Request};
    use kvfold::selftest::{Check, selftest};
    use kvfold::{Capture, Gpu, Result};
    use serde::Serialize;

    use super::DoctorArguments;
    use crate::Outcome;
    use crate::text::{ERROR, STRONG, json, plain};
    use kvfold::report::counted;

    /// What one device of the adapter gave.
    #[derive(Serialize)]
    struct Device {
        subgroups: bool,
        checks: Vec<Check>,
    }

    #[derive(Serialize)]
    struct Examination {
        version: &'static str,
        os: &'static str,
        arch: &'static str,
        adapter: Caps,
        devices: Vec<Device>,
        passed: usize,
        failed: usize,
    }

    /// Every kernel against its twin, on the device as it is and without subgroups.
    pub(crate) fn run(arguments: &DoctorArguments) -> Result<Outcome> {
        let request = |subgroups: bool| {
            let mut request = Request::default().subgroups(subgroups);
            request.name.clone_from(&arguments.adapter);
            Gpu::request_blocking(request)
        };
        let capture = Capture::from_bytes(crate::report::SAMPLE)?;
        let full = request(true)?;
        let adapter = full.caps().clone();
        let mut kinds = vec![full];
        if adapter.subgroups.is_some() {
            kinds.push(request(false)?);
        }
        let mut devices = Vec::new();
        for gpu in kinds {
            let checks = gpu.block_on(selftest(&gpu, Some(&capture), &mut |_, _| true))?;
            devices.push(Device { subgroups: gpu.caps().subgroups.is_some(), checks });
        }
        let all = devices.iter().flat_map(|device| &device.checks);
        let (passed, failed): (Vec<&Check>, Vec<&Check>) = all.partition(|check| check.passed());
        let (passed, failed) = (passed.len(), failed.len());
        let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
        let version = env!("CARGO_PKG_VERSION");
        let examination = Examination { version, os, arch, adapter, devices, passed, failed };
        let text = if arguments.json { json(&examination) } else { described(&examination) };
        Ok(Outcome { text, failed: failed > 0 })
    }

    fn described(examination: &Examination) -> String {
        let Examination { version, os, arch, adapter, devices, passed, failed } = examination;
        let software = if adapter.software { ", software" } else { "" };
        let mut out = format!(
            "{STRONG}kvfold {version}{STRONG:#} on {os} {arch}: {} ({}{software}), {}\n",
            plain(&adapter.adapter),
            adapter.backend,
            plain(&adapter.driver),
        );
        for device in devices {
            let _ = writeln!(out, "\n{} subgroups", if device.subgroups { "with" } else { "without" });
            for check in &device.checks {
                let _ = writeln!(out, "{}", line(check));
            }
        }
        let _ = writeln!(out, "\n{} passed, {failed} failed", counted(*passed as u64, "check"));
        out
    }

    fn line(check: &Check) -> String {
        let verdict = if check.passed() { "ok".to_owned() } else { format!("{ERROR}FAILED{ERROR:#}") };
        let figure = match (&check.failure, check.apart) {
            (Some(failure), _) => plain(failure),
            (None, Some(apart)) => format!("{apart:.1e} apart, at most {:.1e}", check.bound),
            (None, None) => "no figure".to_owned(),
        };
        format!("  {:<34} {:<8} {verdict:<7} {figure}", check.kernel, check.rows)
    }
}
