//! kvfold for browsers: bindings only, no algorithm.
//!
//! [`Session`] holds a device (WebGPU, or the CPU twins) and a capture, and measures, folds and times it. Its records are
//! those of `docs/report.schema.json`, spelled as there; `web/types/kvfold.d.ts` declares them all. Every method that
//! computes returns a promise at once, lets go of the event loop between two layers, tells `onProgress`, and ends when
//! its `signal` is aborted. An error is an `Error` whose `code` is that of [`kvfold::Error::code`].

mod adapter;
mod attend;
mod fold;
mod js;
mod load;
mod measure;
mod memory;
mod options;
mod room;
mod session;
mod task;

pub use memory::memory_use;
pub use room::estimate;
pub use session::Session;

use wasm_bindgen::prelude::*;

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = include_str!("../types/kvfold.d.ts");

/// The version of kvfold.
#[wasm_bindgen]
#[must_use]
pub fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}
