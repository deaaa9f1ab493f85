//! MiniCache on the CPU: the f32 twin against the f64 reference over random pairs and options, what a fold must keep
//! whatever it is given, its error in closed form, and real keys and values.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that panics fails"
)]

mod coded;
mod error;
mod options;
#[path = "../random/mod.rs"]
mod random;
mod real;
mod rows;
mod rules;
mod store;
mod twin;
