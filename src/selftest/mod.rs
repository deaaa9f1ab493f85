//! Every kernel on this machine's device against its twin on the CPU: what `kvfold doctor` prints, so that the first person
//! on an adapter nobody has tried needs one command to tell what works there.
//!
//! Each check runs on rows of a real capture and on made-up rows of every odd kind: zero, tiny, huge, opposite, not finite, in
//! an odd head dimension. A figure is compared on the device's own codes wherever rounding may choose another code.

mod checks;
mod rows;
mod timing;

use serde::Serialize;

pub use timing::{Timing, timings};

use crate::capture::Capture;
use crate::error::Result;
use crate::gpu::Gpu;

/// One kernel on one kind of rows.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Check {
    /// The kernel, as its file in `shaders/` is named, and what it was made for.
    pub kernel: String,
    /// The rows.
    pub rows: &'static str,
    /// How far device and twin were apart, in the unit of `bound`; `None` where the check could not run.
    pub apart: Option<f64>,
    /// How far they may be.
    pub bound: f64,
    /// Why the check could not run, or what was unequal.
    pub failure: Option<String>,
}

impl Check {
    /// Whether device and twin agree.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.failure.is_none() && self.apart.is_some_and(|apart| apart <= self.bound)
    }
}

/// Runs every check; `progress` is called with the number done and the number there are, and ends the run by answering false.
///
/// # Errors
/// [`Error::Cancelled`](crate::Error::Cancelled) when `progress` says so. What a device refuses is a failed check.
pub async fn selftest(
    gpu: &Gpu,
    capture: Option<&Capture>,
    progress: &mut dyn FnMut(usize, usize) -> bool,
) -> Result<Vec<Check>> {
    let sets = rows::sets(capture)?;
    let of = sets.len() * checks::ALL.len();
    let mut results = Vec::new();
    for (i, set) in sets.iter().enumerate() {
        for (j, check) in checks::ALL.iter().enumerate() {
            let done = i * checks::ALL.len() + j;
            if !progress(done, of) {
                return Err(crate::Error::Cancelled { done, of });
            }
            results.extend(checks::run(*check, gpu, set).await);
        }
    }
    Ok(results)
}
