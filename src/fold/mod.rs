//! One cache for a whole model: every layer kept in its own way, raw, in MiniCache groups, or coded by sign planes or QJL, as a
//! [`Policy`] says; on the device `FoldedCache` (feature `gpu`), on the host [`CpuFoldedCache`], with the same calls.
//!
//! An engine appends and attends layer by layer, commits once a step, and does not know how a layer is kept: the order of a step,
//! sequences and positions are those of [`qjl::cache`](crate::qjl::cache). A layer with a sliding window is attended through
//! it and keeps no more tokens than it can still see.
//!
//! ```
//! use kvfold::attention::AttendOptions;
//! use kvfold::cache::{LayerShape, Step};
//! use kvfold::fold::{CpuFoldedCache, Model, Policy};
//! use kvfold::{DType, Shape, Tensor};
//!
//! # fn main() -> kvfold::Result<()> {
//! // Four layers of 2 KV heads and 64 channels; all but the first coded.
//! let model = Model::new(vec![LayerShape::new(2, 64, DType::F16); 4]);
//! let policy = Policy::named("balanced", 4)?.raw(0);
//! let mut cache = CpuFoldedCache::new(model, policy, 1)?;
//!
//! let prompt = Shape::new(1, 2, 300, 64)?; // [sequences, kv_heads, tokens, head_dim]
//! let rows = Tensor::from_f32(&vec![0.5; prompt.elements()], DType::F16, prompt)?;
//! for layer in 0..4 {
//!     let (rows, queries) = (rows.view(), rows.view());
//!     cache.append(layer, &Step::new(&rows, &rows).queries(&queries))?;
//!     cache.attend(layer, &queries, &AttendOptions::default().causal(true))?;
//! }
//! cache.commit()?;
//! assert!(cache.payload_bytes() < cache.raw_bytes());
//! println!("{}", cache.report());
//! # Ok(())
//! # }
//! ```

mod cpu_cache;
mod file;
#[cfg(feature = "gpu")]
mod gpu_cache;
mod ledger;
mod measured;
mod pairs;
mod policy;
mod report;
mod shared;

pub use cpu_cache::CpuFoldedCache;
#[cfg(feature = "gpu")]
pub use gpu_cache::FoldedCache;
pub use ledger::Model;
pub use measured::Budget;
pub use policy::{Fold, LayerPolicy, Policy};
pub use report::{FoldReport, FoldedLayer};
