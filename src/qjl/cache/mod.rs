//! QJL and sign planes as a cache of growing sequences.

mod bytes;
mod coders;
mod cpu_cache;
mod display;
#[cfg(feature = "gpu")]
mod gpu_cache;
mod head;
mod ledger;
mod options;
mod track;

pub use cpu_cache::CpuQjlCache;
#[cfg(feature = "gpu")]
pub use gpu_cache::{CacheReadBack, QjlCache, StatusReadBack};
pub use options::{CacheOptions, Coding, PAGE, SketchOptions};
