//! Which device tests run on, and what becomes of them without one.
//!
//! `KVFOLD_GPU=required|optional|off` (optional where unset): `required` fails without an adapter, `off` and a missing
//! adapter show the tests as ignored. `KVFOLD_ADAPTER` picks an adapter by part of its name. `KVFOLD_NO_SUBGROUPS`
//! keeps the feature from every device.

use std::sync::Arc;

use kvfold::Gpu;
use kvfold::gpu::Request;
use libtest_mimic::{Failed, Trial};

/// A device, or why there is none.
pub type Found = Result<Arc<Gpu>, String>;

fn mode() -> String {
    std::env::var("KVFOLD_GPU").unwrap_or_else(|_| "optional".to_owned())
}

/// The device that the environment asks for, with subgroups where it allows them.
pub fn request(subgroups: bool) -> Request {
    let allowed = |variable: &str| std::env::var_os(variable).is_none_or(|value| value.is_empty());
    let request = Request::default().subgroups(subgroups && allowed("KVFOLD_NO_SUBGROUPS"));
    match std::env::var("KVFOLD_ADAPTER") {
        Ok(name) => request.name(name),
        Err(_) => request,
    }
}

/// Opens a device unless tests of devices are off.
pub fn open(make: impl FnOnce() -> kvfold::Result<Gpu>) -> Found {
    if mode() == "off" {
        return Err("KVFOLD_GPU=off".to_owned());
    }
    make().map(Arc::new).map_err(|error| error.to_string())
}

/// A test on a device; it fails by panicking or by an error. Without a device it fails where one is required, and is
/// ignored elsewhere.
pub fn trial(label: String, gpu: &Found, test: fn(&Gpu) -> kvfold::Result<()>) -> Trial {
    match gpu {
        Ok(gpu) => {
            let gpu = Arc::clone(gpu);
            Trial::test(label, move || test(&gpu).map_err(|error| Failed::from(error.to_string())))
        }
        Err(cause) if mode() == "required" => {
            let cause = cause.clone();
            Trial::test(label, move || Err(Failed::from(cause)))
        }
        Err(_) => Trial::test(label, || Ok(())).with_ignored_flag(true),
    }
}
