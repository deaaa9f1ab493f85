//! Captures and files made for a test.

use std::collections::BTreeMap;

use kvfold::capture::{Capture, CaptureInfo, Layer, RopeLayout};
use kvfold::store::{FoldOptions, Store};
use kvfold::{DType, Shape, Tensor};
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// Sizes of a made capture.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    pub(crate) dtype: DType,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) tokens: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    /// One for each sequence.
    pub(crate) lengths: Vec<usize>,
    pub(crate) rope: bool,
    pub(crate) seed: u64,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            dtype: DType::F16,
            layers: 4,
            heads: 2,
            tokens: 140,
            key_dim: 16,
            value_dim: 16,
            lengths: vec![140],
            rope: true,
            seed: 1,
        }
    }
}

impl Sizes {
    /// Layers that resemble each other, so that rows merge, with queries at the end of each sequence.
    pub(crate) fn capture(&self) -> Capture {
        let bytes: Vec<u8> = (0..32).map(|i| (self.seed >> (i % 8 * 8)) as u8).collect();
        let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut uniform = move || f64::from(rng.next_u32()) as f32 / 2f32.powi(31) - 1.0;
        let batch = self.lengths.len();
        let shape = |heads, tokens, dim| Shape::new(batch, heads, tokens, dim).unwrap();
        let (keys, values) =
            (shape(self.heads, self.tokens, self.key_dim), shape(self.heads, self.tokens, self.value_dim));
        let shared: [Vec<f32>; 2] =
            [keys, values].map(|shape| (0..shape.elements()).map(|_| uniform()).collect());
        let mut near = |shape: Shape, of: &[f32], spread: f32| {
            let numbers: Vec<f32> = of.iter().map(|x| x + spread * uniform()).collect();
            Tensor::from_f32(&numbers, self.dtype, shape).unwrap()
        };
        let queries = shape(2 * self.heads, 3, self.key_dim);
        let zeros = vec![0.0; queries.elements()];
        let shortest = self.lengths.iter().min().copied().unwrap_or(0);
        let layers = (0..self.layers).map(|index| {
            let spread = 0.1 + 0.3 * index as f32;
            let mut layer = Layer::new(near(keys, &shared[0], spread), near(values, &shared[1], spread));
            layer.queries = (shortest >= 3).then(|| near(queries, &zeros, 1.0));
            layer
        });
        let layers = layers.collect();
        let mut info = CaptureInfo::default();
        info.model = Some("made".to_owned());
        if self.lengths.iter().any(|&length| length != self.tokens) {
            info.lengths = Some(self.lengths.clone());
        }
        info.position_start = Some((0..batch as u32).collect());
        if self.rope {
            info.rope_theta = Some(vec![1e4; self.layers]);
            info.rope_layout = Some(RopeLayout::HalfSplit);
        }
        info.token_ids = Some((0..(batch * self.tokens) as i32).collect());
        Capture::new(layers, info).unwrap()
    }
}

/// A small store and its file.
pub(crate) fn file(options: &FoldOptions) -> Vec<u8> {
    let sizes =
        Sizes { layers: 2, heads: 1, tokens: 130, lengths: vec![130], key_dim: 12, ..Sizes::default() };
    Store::fold(&sizes.capture(), options).unwrap().to_bytes().unwrap()
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A file taken apart.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) tensors: BTreeMap<String, Part>,
}

impl Parts {
    pub(crate) fn of(file: &[u8]) -> Self {
        let (_, header) = SafeTensors::read_metadata(file).unwrap();
        let metadata = header.metadata().clone().unwrap().into_iter().collect();
        let tensors = SafeTensors::deserialize(file).unwrap();
        let part = |view: TensorView<'_>| Part {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        };
        Self {
            metadata,
            tensors: tensors.tensors().into_iter().map(|(name, view)| (name, part(view))).collect(),
        }
    }

    /// Puts the file together again, with the digest that its contents have.
    pub(crate) fn file(&self) -> Vec<u8> {
        let mut metadata = self.metadata.clone();
        metadata.remove("kvfold.digest");
        metadata.insert("kvfold.digest".to_owned(), self.digest(&metadata));
        self.unsigned(metadata)
    }

    /// Puts the file together with this metadata.
    pub(crate) fn unsigned(&self, metadata: BTreeMap<String, String>) -> Vec<u8> {
        let views: Vec<(&String, TensorView<'_>)> = self
            .tensors
            .iter()
            .map(|(name, part)| (name, TensorView::new(part.dtype, part.shape.clone(), &part.bytes).unwrap()))
            .collect();
        safetensors::serialize(views, Some(metadata.into_iter().collect())).unwrap()
    }

    /// FNV-1a as docs/store-format.md describes it.
    fn digest(&self, metadata: &BTreeMap<String, String>) -> String {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let mut add = |bytes: &[u8]| {
            for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        };
        for (key, text) in metadata {
            add(key.as_bytes());
            add(text.as_bytes());
        }
        for (name, part) in &self.tensors {
            add(name.as_bytes());
            add(part.dtype.to_string().as_bytes());
            let shape: Vec<u8> = part.shape.iter().flat_map(|&n| (n as u64).to_le_bytes()).collect();
            add(&shape);
            add(&part.bytes);
        }
        format!("{hash:016x}")
    }
}
