//! Files built by hand, good ones and others.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// The capture that the package carries.
pub(crate) fn sample() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("web/samples/smollm2_prose_s128.safetensors")
}

/// A tensor of a file under construction.
pub(crate) type Part = (&'static str, Dtype, Vec<usize>, Vec<u8>);

pub(crate) fn zeros(name: &'static str, shape: [usize; 4]) -> Part {
    (name, Dtype::F16, shape.to_vec(), vec![0; shape.iter().product::<usize>() * 2])
}

pub(crate) fn of(name: &'static str, dtype: Dtype, numbers: &[u8]) -> Part {
    (name, dtype, vec![1, 1, 1, numbers.len() * 8 / dtype.bitsize()], numbers.to_vec())
}

/// Two layers, three sequences of six tokens, two KV heads, four query heads, keys of eight channels and values of six.
pub(crate) fn good() -> Vec<Part> {
    vec![
        zeros("layer.0.key", [3, 2, 6, 8]),
        zeros("layer.0.value", [3, 2, 6, 6]),
        zeros("layer.0.query", [3, 4, 2, 8]),
        zeros("layer.1.key", [3, 2, 6, 8]),
        zeros("layer.1.value", [3, 2, 6, 6]),
        zeros("layer.1.query", [3, 4, 2, 8]),
    ]
}

/// `good` with one tensor replaced by, or added as, another.
pub(crate) fn with(part: Part) -> Vec<Part> {
    let mut parts = without(part.0);
    parts.push(part);
    parts
}

pub(crate) fn without(name: &str) -> Vec<Part> {
    good().into_iter().filter(|part| part.0 != name).collect()
}

/// A file as the safetensors crate writes it.
pub(crate) fn file(parts: &[Part], metadata: &[(&str, &str)]) -> Vec<u8> {
    let views = parts
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let metadata: HashMap<_, _> =
        metadata.iter().map(|(key, text)| ((*key).to_owned(), (*text).to_owned())).collect();
    safetensors::serialize(views, Some(metadata).filter(|all| !all.is_empty())).unwrap()
}

/// A file of this header, whatever it says, and this many zero bytes of data.
pub(crate) fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}
