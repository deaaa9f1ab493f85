//! Captures made for a test, in files that vanish with it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvfold::capture::{Capture, CaptureInfo, Layer};
use kvfold::{DType, Shape, Tensor};
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};

/// A file that is removed when dropped.
pub(crate) struct File(PathBuf);

impl File {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("cli-{}-{}.safetensors", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    pub(crate) fn of(capture: &Capture) -> Self {
        Self::new(&capture.to_bytes().unwrap())
    }
}

impl AsRef<OsStr> for File {
    fn as_ref(&self) -> &OsStr {
        self.0.as_os_str()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // A file that cannot be removed lies in the build folder, where it does no harm.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Sizes of a layer under construction.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) query_heads: usize,
    pub(crate) tokens: usize,
    pub(crate) queries: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { batch: 1, heads: 2, query_heads: 4, tokens: 40, queries: 8, key_dim: 32, value_dim: 32 }
    }
}

/// Random numbers in [-1, 1).
fn tensor(numbers: &mut TestRng, dtype: DType, shape: Shape) -> Tensor {
    let mut next = || (numbers.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0;
    let all: Vec<f32> = (0..shape.elements()).map(|_| next()).collect();
    Tensor::from_f32(&all, dtype, shape).unwrap()
}

/// A layer of random numbers; each seed gives its own.
pub(crate) fn layer(seed: u8, dtype: DType, sizes: Sizes) -> Layer {
    let mut numbers = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let Sizes { batch, heads, query_heads, tokens, queries, key_dim, value_dim } = sizes;
    let mut make =
        |heads, tokens, dim| tensor(&mut numbers, dtype, Shape::new(batch, heads, tokens, dim).unwrap());
    let mut layer = Layer::new(make(heads, tokens, key_dim), make(heads, tokens, value_dim));
    layer.queries = Some(make(query_heads, queries, key_dim)).filter(|_| queries > 0);
    layer
}

pub(crate) fn capture(layers: Vec<Layer>) -> Capture {
    Capture::new(layers, CaptureInfo::default()).unwrap()
}
