//! Smaller key/value caches on every GPU that wgpu reaches.

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

pub mod attention;
pub mod capture;
mod container;
pub mod error;
#[cfg(feature = "gpu")]
pub mod gpu;
pub mod minicache;
pub mod qjl;
pub mod rope;
pub mod tensor;

pub use capture::Capture;
pub use error::{Error, Result};
pub use tensor::{DType, Shape, Strides, Tensor, TensorView};

#[cfg(feature = "gpu")]
pub use gpu::{Gpu, KvView};
#[cfg(feature = "gpu")]
pub use wgpu;
