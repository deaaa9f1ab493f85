//! QJL and sign planes as a cache of growing sequences, for one layer or many: on the device `QjlCache` (feature `gpu`), on
//! the host [`CpuQjlCache`], with the same calls.
//!
//! Rows enter raw. Of each sequence and layer the first few (*sinks*) and the last few (*recent*) stay so; those between are
//! coded at the end of a step, in whole pages of [`PAGE`] tokens, so that up to 31 more wait raw. [`CpuQjlCache::settle`]
//! codes these too. A step's own rows are always attended raw.
//!
//! Sign planes with a mean before RoPE, a balance, or split keys learn [tables](crate::qjl::planes::Tables) from the first
//! 128 tokens of a sequence less the sinks, and from the queries that came with them ([`Step::queries`]); until then, all
//! rows stay raw. Tables of a calibration ([`CacheOptions::tables`]) do without.
//!
//! Tokens of a sequence are numbered from its first on, whether they are still held or not; positions in RoPE's sense are
//! data ([`Step::positions`]) and stay with their tokens. With a [`capacity`](CacheOptions::capacity) the oldest tokens leave
//! at the end of a step. Sequences are the indices of the batch: they can be added, removed, cleared, trimmed, forked and
//! gathered; copies share blocks until one writes.
//!
//! ```
//! use kvfold::attention::AttendOptions;
//! use kvfold::cache::{LayerShape, Step};
//! use kvfold::capture::RopeLayout;
//! use kvfold::qjl::cache::{CacheOptions, CpuQjlCache};
//! use kvfold::rope::Rope;
//! use kvfold::{DType, Shape, Tensor};
//!
//! # fn main() -> kvfold::Result<()> {
//! let layer = LayerShape::new(2, 64, DType::F16); // KV heads, head_dim
//! let rope = Rope::from_theta(64, 64, 1e4, RopeLayout::HalfSplit)?;
//! let mut cache = CpuQjlCache::new(&[layer], 1, CacheOptions::named("balanced")?.rope(rope))?;
//!
//! let prompt = Shape::new(1, 2, 300, 64)?; // [sequences, kv_heads, tokens, head_dim]
//! let rows = Tensor::from_f32(&vec![0.5; prompt.elements()], DType::F16, prompt)?;
//! let queries = Shape { heads: 8, ..prompt }; // 4 query heads for each KV head
//! let queries = Tensor::from_f32(&vec![0.1; queries.elements()], DType::F16, queries)?;
//! let (rows, queries) = (rows.view(), queries.view());
//! cache.append(0, &Step::new(&rows, &rows).queries(&queries))?;
//! let out = cache.attend(0, &queries, &AttendOptions::default().causal(true))?;
//! assert_eq!(out.len(), 8 * 300 * 64);
//! cache.commit()?;
//! assert!(cache.payload_bytes() < cache.raw_bytes() / 2);
//!
//! let file = cache.save()?;
//! assert_eq!(CpuQjlCache::load(&file)?.len(0)?, 300);
//! # Ok(())
//! # }
//! ```
//!
//! [`Step::queries`]: crate::cache::Step::queries
//! [`Step::positions`]: crate::cache::Step::positions

mod bytes;
mod coders;
mod cpu_cache;
mod display;
#[cfg(feature = "gpu")]
mod gpu_cache;
mod head;
mod ledger;
mod named;
mod options;
mod runs;
mod sketch;
mod track;

pub use bytes::OriginalAccounting;
pub(crate) use coders::codec;
pub use cpu_cache::CpuQjlCache;
#[cfg(feature = "gpu")]
pub use gpu_cache::{CacheReadBack, QjlCache, StatusReadBack};
pub(crate) use head::SavedRope;
pub use named::NamedCoding;
pub use options::{CacheOptions, Coding, PAGE};
pub use sketch::SketchOptions;
