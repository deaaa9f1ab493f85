//! From a file to a checked [`Capture`].

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;

use super::{Capture, Layer, Part, check, metadata, names};
use crate::container::{self, Stored};
use crate::error::{Error, Result};
use crate::tensor::{DType, Shape, Tensor, checked_bytes, decode};

/// The tensor of token ids.
pub(super) const TOKENS: &str = "tokens";

/// How strictly a capture is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadOptions {
    /// Whether NaN and infinities are let through. Off by default: in a capture they mostly mean a fault in the
    /// capturing. The kernels mask such rows.
    pub allow_non_finite: bool,
}

impl ReadOptions {
    /// Sets whether NaN and infinities are let through.
    #[must_use]
    pub const fn allow_non_finite(mut self, allow: bool) -> Self {
        self.allow_non_finite = allow;
        self
    }
}

impl Capture {
    /// Reads a capture from the bytes of a file.
    ///
    /// # Errors
    /// * [`Error::Safetensors`]: not safetensors, or its header contradicts itself;
    /// * [`Error::TooShort`]: cut short, naming the header or the first tensor that is not whole;
    /// * [`Error::UnknownTensor`], [`Error::MissingTensor`]: a name that the format lacks, or lacks in the file;
    /// * [`Error::DType`]: neither f16, bf16 nor f32 (i32 for `tokens`);
    /// * [`Error::NonFinite`]: the first NaN or infinity of a tensor;
    /// * [`Error::Shape`], [`Error::Overflow`]: shapes that disagree, or are too large for the address space;
    /// * [`Error::Metadata`]: an entry that cannot be read, or contradicts the tensors or the version.
    pub fn from_bytes(file: &[u8]) -> Result<Self> {
        Self::from_bytes_with(file, ReadOptions::default())
    }

    /// [`Capture::from_bytes`] with options.
    ///
    /// # Errors
    /// As [`Capture::from_bytes`].
    pub fn from_bytes_with(file: &[u8], options: ReadOptions) -> Result<Self> {
        let file = container::read(file)?;
        metadata::check_version(&file.metadata)?;
        let mut token_ids = None;
        let mut found: BTreeMap<usize, Parts> = BTreeMap::new();
        for stored in file.tensors {
            if stored.name == TOKENS {
                token_ids = Some(stored);
            } else if let Some((index, part)) = Part::parse(&stored.name) {
                *found.entry(index).or_default().slot(part) = Some(tensor(&stored, options)?);
            } else {
                let [key, pre, value, query] = Part::ALL.map(Part::suffix);
                let want = format!("layer.{{i}}.{key}, .{pre}, .{value}, .{query} and {TOKENS}");
                return Err(Error::UnknownTensor { tensor: stored.name, want });
            }
        }
        let layers = assemble(found)?;
        check::tensors(&layers)?;
        let mut info = metadata::parse(
            file.metadata,
            layers.first().map_or(0, |layer| layer.values.shape().batch),
            layers.len(),
        )?;
        info.token_ids = token_ids.map(|stored| ids(&stored, &layers)).transpose()?;
        let capture = Self { layers, info };
        check::info(&capture)?;
        Ok(capture)
    }

    /// Reads a capture file.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path, else as [`Capture::from_bytes`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, ReadOptions::default())
    }

    /// [`Capture::open`] with options.
    ///
    /// # Errors
    /// As [`Capture::open`].
    pub fn open_with(path: impl AsRef<Path>, options: ReadOptions) -> Result<Self> {
        let path = path.as_ref();
        let file =
            std::fs::read(path).map_err(|cause| Error::Io { path: path.display().to_string(), cause })?;
        Self::from_bytes_with(&file, options)
    }
}

/// The tensors found of one layer.
#[derive(Default)]
struct Parts {
    key: Option<Tensor>,
    key_pre: Option<Tensor>,
    value: Option<Tensor>,
    query: Option<Tensor>,
}

impl Parts {
    fn slot(&mut self, part: Part) -> &mut Option<Tensor> {
        match part {
            Part::Key => &mut self.key,
            Part::KeyPre => &mut self.key_pre,
            Part::Value => &mut self.value,
            Part::Query => &mut self.query,
        }
    }
}

/// Layers in order, without gaps. Indices are the file's and may be anything: nothing is sized by them.
fn assemble(found: BTreeMap<usize, Parts>) -> Result<Vec<Layer>> {
    let mut layers = Vec::with_capacity(found.len());
    for (wanted, (index, mut parts)) in found.into_iter().enumerate() {
        if index != wanted {
            let before = wanted.checked_sub(1).map(|before| format!(" after layer {before}"));
            let have = format!("layer {index}{}", before.unwrap_or_default());
            return Err(Error::MissingTensor { tensor: Part::Value.name(wanted), have });
        }
        let Some(values) = parts.value.take() else {
            let there = Part::ALL.into_iter().filter(|&part| parts.slot(part).is_some());
            let have = names(there.map(|part| part.name(index)).collect::<Vec<_>>().into_iter());
            return Err(Error::MissingTensor { tensor: Part::Value.name(index), have });
        };
        let Parts { key, key_pre, query, .. } = parts;
        layers.push(Layer { keys: key, values, queries: query, keys_pre_rope: key_pre });
    }
    Ok(layers)
}

fn tensor(stored: &Stored<'_>, options: ReadOptions) -> Result<Tensor> {
    let Some(dtype) = container::from_file_dtype(stored.dtype) else {
        return Err(wrong_dtype(stored, "F16, BF16 or F32"));
    };
    let &[batch, heads, tokens, dim] = stored.shape.as_slice() else {
        return Err(Error::shape(
            &stored.name,
            "[batch, heads, tokens, head_dim]",
            format_args!("{:?}", stored.shape),
        ));
    };
    if !options.allow_non_finite
        && let Some((index, value)) = first_non_finite(&stored.bytes, dtype)
    {
        return Err(Error::NonFinite { what: stored.name.clone(), index, value });
    }
    checked_bytes(&stored.name, &stored.shape, DType::F32.size())?; // what `Shape::new` checks, with the name
    Tensor::new(stored.bytes.to_vec(), dtype, Shape::new(batch, heads, tokens, dim)?)
}

fn wrong_dtype(stored: &Stored<'_>, want: &str) -> Error {
    Error::DType { what: stored.name.clone(), want: want.to_owned(), have: stored.dtype.to_string() }
}

/// The first NaN or infinity: an exponent of all ones.
fn first_non_finite(bytes: &[u8], dtype: DType) -> Option<(usize, f32)> {
    let halves = |ones: u16| {
        bytes.as_chunks::<2>().0.iter().position(|&bytes| u16::from_le_bytes(bytes) & ones == ones)
    };
    let index = match dtype {
        DType::F16 => halves(f16::INFINITY.to_bits()),
        DType::Bf16 => halves(bf16::INFINITY.to_bits()),
        DType::F32 => {
            bytes.as_chunks::<4>().0.iter().position(|&bytes| !f32::from_le_bytes(bytes).is_finite())
        }
    }?;
    let mut value = [0.0];
    decode(bytes.get(index * dtype.size()..)?, dtype, &mut value);
    Some((index, value[0]))
}

/// Token ids, `[batch, tokens]` or, for one sequence, `[tokens]`.
fn ids(stored: &Stored<'_>, layers: &[Layer]) -> Result<Vec<i32>> {
    if stored.dtype != Dtype::I32 {
        return Err(wrong_dtype(stored, "I32"));
    }
    if let Some(layer) = layers.first() {
        let (batch, tokens) = (layer.values.shape().batch, layer.tokens());
        let fits = match *stored.shape.as_slice() {
            [n] => batch == 1 && n == tokens,
            [b, n] => b == batch && n == tokens,
            _ => false,
        };
        if !fits {
            return Err(Error::shape(
                TOKENS,
                format_args!("[{batch}, {tokens}]"),
                format_args!("{:?}", stored.shape),
            ));
        }
    }
    Ok(stored.bytes.as_chunks::<4>().0.iter().map(|&id| i32::from_le_bytes(id)).collect())
}
