//! QJL and sign planes as a cache of growing sequences.

mod bytes;
mod coders;
mod cpu_cache;
#[cfg(feature = "gpu")]
mod gpu_cache;
mod head;
mod ledger;
mod options;
mod track;

pub use cpu_cache::CpuQjlCache;
#[cfg(feature = "gpu")]
pub use gpu_cache::{QjlCache, StatusReadBack};
pub use options::{CacheOptions, Coding, PAGE, SketchOptions};
