//! Folded captures on disk: what comes back, what it takes, and files that must be refused.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics is a test that fails"
)]

mod made;
mod refusals;
mod round_trip;
