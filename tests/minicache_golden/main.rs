//! MiniCache's f64 reference and f32 twin against the original (tests/golden/README.md).
//!
//! Where kvfold answers otherwise on purpose, the rows are named, counted, and their count asserted.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that panics fails"
)]

mod cases;
#[path = "../golden/mod.rs"]
mod golden;
mod pair;
mod plan;
mod shapes;
mod stacks;
