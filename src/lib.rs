//! Smaller key/value caches on every GPU that wgpu reaches: MiniCache and QJL as WGSL kernels, each with a twin on the CPU and
//! a judge in f64.
//!
//! | where | what |
//! |---|---|
//! | [`Capture`] | keys, values and queries of a real model in a file |
//! | [`minicache`] | neighbouring layers folded onto one direction per token |
//! | [`qjl`] | keys as sign bits of a random projection, values as 8-bit codes |
//! | [`fold`] | one cache for a whole model, each layer kept in its own way |
//! | [`store`] | a folded capture in a file |
//! | [`cache`] | what the streaming caches share: layer shapes and steps |
//! | [`attention`] | options, masking, and exact attention as the baseline |
//! | `gpu` | the device: a host's own or one requested, views of its buffers, read-backs (feature `gpu`) |
//!
//! Every tensor is `[batch, heads, tokens, head_dim]`. Keys come as a model caches them, after RoPE. All arithmetic is f32; f16
//! and bf16 are storage formats. Bad input is an [`Error`] that names what was wanted and what was had; nothing panics on it.
//!
//! Recording into an encoder never waits, submits or polls, and an error means that nothing was recorded. What must wait is
//! `async`; native programs also find `*_blocking`.

#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        reason = "a test that panics is a test that fails"
    )
)]

#[cfg(feature = "align")]
pub mod align;
pub mod attention;
pub mod cache;
pub mod capture;
mod container;
mod digest;
pub mod error;
pub mod fold;
#[cfg(feature = "gpu")]
pub mod gpu;
pub mod metrics;
pub mod minicache;
mod parallel;
pub mod qjl;
pub mod report;
pub mod rope;
#[cfg(feature = "gpu")]
pub mod selftest;
pub mod store;
pub mod tensor;

pub use capture::Capture;
pub use error::{Error, Result};
pub use tensor::{DType, Shape, Strides, Tensor, TensorView};

#[cfg(feature = "gpu")]
pub use gpu::{Gpu, KvView};
#[cfg(feature = "gpu")]
pub use wgpu;

/// The README's examples, compiled with the documentation's own.
#[cfg(all(doctest, feature = "gpu"))]
#[doc = include_str!("../README.md")]
struct Readme;
