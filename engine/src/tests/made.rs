//! Models made up: their files, and the formulas that they are held to.

use std::path::PathBuf;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

use crate::cache::{Cache, HostCache};
use crate::gguf::Gguf;
use crate::model::Model;
use crate::presets;

/// A file's metadata, and weights by name, `[out, in]` row by row.
pub(crate) struct Made {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, [usize; 2], Vec<f32>)>,
    state: u64,
}

impl Made {
    pub(crate) fn new(architecture: &str) -> Self {
        let metadata = vec![("general.architecture".to_owned(), Value::String(architecture.to_owned()))];
        Self { metadata, tensors: Vec::new(), state: 7 }
    }

    /// Adds metadata.
    pub(crate) fn says(mut self, key: &str, value: Value) -> Self {
        self.metadata.push((key.to_owned(), value));
        self
    }

    pub(crate) fn sizes(self, sizes: &[(&str, usize)]) -> Self {
        sizes.iter().fold(self, |made, &(key, size)| made.says(key, Value::U32(size as u32)))
    }

    /// Adds random weights from `add - scale` to `add + scale`.
    pub(crate) fn put(&mut self, name: String, shape: [usize; 2], scale: f32, add: f32) {
        let numbers = (0..shape[0] * shape[1]).map(|_| {
            self.state =
                self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            scale * ((self.state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) + add
        });
        let numbers = numbers.collect();
        self.tensors.push((name, shape, numbers));
    }

    pub(crate) fn weights(&self, name: &str) -> &[f32] {
        &self.tensors.iter().find(|(held, _, _)| held == name).unwrap().2
    }

    /// Writes the file; every test has one of its own.
    fn file(&self, test: &str) -> PathBuf {
        let tensors: Vec<(&str, QTensor)> = (self.tensors.iter())
            .map(|(name, [rows, columns], numbers)| {
                let shape = if *rows == 1 { vec![*columns] } else { vec![*rows, *columns] };
                let tensor = Tensor::from_slice(numbers, shape, &Device::Cpu).unwrap();
                (name.as_str(), QTensor::quantize(&tensor, GgmlDType::F32).unwrap())
            })
            .collect();
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let path = std::env::temp_dir().join(format!("kvfold-{}-{test}.gguf", std::process::id()));
        gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &metadata, &tensors).unwrap();
        path
    }

    /// The file, open and gone from the folder.
    pub(crate) fn open(&self, test: &str) -> Gguf {
        let path = self.file(test);
        let file = Gguf::open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file
    }

    pub(crate) fn model(&self, test: &str) -> Model {
        Model::from_gguf(&mut self.open(test)).unwrap()
    }
}

pub(crate) fn times(x: &[f64], weights: &[f32]) -> Vec<f64> {
    weights.chunks(x.len()).map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
}

pub(crate) fn normed(x: &[f64], weights: &[f32], epsilon: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weights).map(|(x, &w)| x / (mean + epsilon).sqrt() * f64::from(w)).collect()
}

/// Turns a row's pairs of channels to a position.
pub(crate) fn turned(row: &mut [f64], pairs: impl Iterator<Item = [usize; 2]>, angle: impl Fn(usize) -> f64) {
    for (i, [a, b]) in pairs.enumerate() {
        let ((sin, cos), x, y) = (angle(i).sin_cos(), row[a], row[b]);
        (row[a], row[b]) = (x * cos - y * sin, x * sin + y * cos);
    }
}

pub(crate) fn stored(x: &mut f64) {
    *x = half::f16::from_f64(*x).to_f64();
}

/// Attention of one head's query over keys and values, of which it takes the channels from `first` on.
pub(crate) fn attended(
    query: &[f64],
    first: usize,
    scale: f64,
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
) -> Vec<f64> {
    let own = first..first + query.len();
    let score = |key: &Vec<f64>| {
        let dot: f64 = key[own.clone()].iter().zip(query).map(|(k, q)| k * q).sum();
        (dot * scale).exp()
    };
    let weights: Vec<f64> = keys.iter().map(score).collect();
    let sum: f64 = weights.iter().sum();
    own.clone().map(|c| weights.iter().zip(values).map(|(w, value)| w / sum * value[c]).sum()).collect()
}

pub(crate) fn cache(model: &Model, preset: &str) -> Box<dyn Cache> {
    let policy = presets::policy(preset, model.config.layers).unwrap();
    Box::new(HostCache::new(&model.config, policy).unwrap())
}

/// Logits of a text that is read in steps which end here.
pub(crate) fn logits(model: &Model, tokens: &[u32], ends: &[usize], preset: &str) -> Vec<Vec<f32>> {
    let (mut cache, mut start, mut logits) = (cache(model, preset), 0, Vec::new());
    for &end in ends {
        let hidden = model.forward(&tokens[start..end], start, cache.as_mut()).unwrap();
        logits.extend(model.logits(&hidden).unwrap().to_vec2::<f32>().unwrap());
        start = end;
    }
    logits
}

/// How far numbers are from those that they should be, as a part of these.
pub(crate) fn apart(had: impl IntoIterator<Item = f64>, want: impl IntoIterator<Item = f64>) -> f64 {
    let squares = had.into_iter().zip(want).map(|(had, want)| [(had - want).powi(2), want.powi(2)]);
    let [error, length] = squares.fold([0.0; 2], |[a, b], [c, d]| [a + c, b + d]);
    (error / length).sqrt()
}
