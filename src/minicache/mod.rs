//! MiniCache: neighbouring layers' keys or values folded onto one direction per token, with a magnitude per layer
//! (arXiv 2405.14366).
//!
//! K and V are folded separately, each row by itself. [`cpu::merge`] and [`cpu::restore`] are the operations on host
//! tensors; `gpu::Ops` records the same on a device; [`mod@reference`] judges both in f64.

mod cache;
mod config;
pub mod cpu;
mod cpu_cache;
mod cut;
mod folded;
#[cfg(feature = "gpu")]
pub mod gpu;
#[cfg(feature = "gpu")]
mod gpu_cache;
mod join;
mod plan;
pub mod reference;
mod slerp;

pub use cache::{CacheOptions, CacheReport, LayerReport, OriginalAccounting};
pub use config::{Cause, Counts, DirectionPlanes, MergeOptions, Mode, Retention};
pub use cpu::Row;
pub use cpu_cache::CpuMiniCache;
pub use cut::{Cut, order_key};
pub use folded::{Folded, Layer, Layout, MAX_GROUP, PAGE, Page, Sections, Totals};
#[cfg(feature = "gpu")]
pub use gpu_cache::MiniCache;
pub use plan::{LayerRole, MeasuredPair, MeasuredPlan, Role, pair_layers_depth, pair_layers_measured};
