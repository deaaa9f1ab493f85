//! QJL and sign planes as a cache of growing sequences.

mod bytes;
mod coders;
mod cpu_cache;
mod ledger;
mod options;
mod track;

pub use cpu_cache::CpuQjlCache;
pub use options::{CacheOptions, Coding, PAGE, SketchOptions};
