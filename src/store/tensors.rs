//! The tensors of a store, or of a saved cache, by name, and a reader that accounts for every one.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use half::f16;
use safetensors::Dtype;

use crate::container::{Stored, from_file_dtype};
use crate::digest::Fnv;
use crate::error::{Error, Result};
use crate::tensor::{DType, Shape, Tensor, checked_bytes};

/// A tensor as it stands in the file.
#[derive(Clone, Debug, PartialEq)]
struct Held {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Tensors by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tensors(BTreeMap<String, Held>);

impl Tensors {
    /// Adds a tensor of little-endian bytes.
    pub(crate) fn put(&mut self, name: String, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) {
        self.0.insert(name, Held { dtype, shape: shape.to_vec(), bytes });
    }

    /// Takes what a file holds.
    pub(crate) fn add(&mut self, stored: Stored<'_>) {
        let Stored { name, dtype, shape, bytes } = stored;
        self.0.insert(name, Held { dtype, shape, bytes: bytes.into_owned() });
    }

    /// Bytes of the tensors whose names satisfy `which`.
    pub(crate) fn bytes(&self, which: impl Fn(&str) -> bool) -> usize {
        self.0.iter().filter(|(name, _)| which(name)).map(|(_, held)| held.bytes.len()).sum()
    }

    /// All tensors in the order of their names.
    pub(crate) fn stored(&self) -> impl Iterator<Item = Stored<'_>> {
        self.0.iter().map(|(name, held)| Stored {
            name: name.clone(),
            dtype: held.dtype,
            shape: held.shape.clone(),
            bytes: Cow::Borrowed(&held.bytes),
        })
    }

    pub(crate) fn reader(&self) -> Reader<'_> {
        Reader { tensors: self, unread: self.0.keys().map(String::as_str).collect() }
    }
}

/// Reads tensors of wanted types and shapes, and knows which were not wanted.
pub(crate) struct Reader<'a> {
    tensors: &'a Tensors,
    unread: BTreeSet<&'a str>,
}

impl<'a> Reader<'a> {
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.0.contains_key(name)
    }

    fn held(&mut self, name: &str) -> Option<&'a Held> {
        self.unread.remove(name);
        self.tensors.0.get(name)
    }

    /// The bytes of a tensor of exactly this type and shape.
    pub(crate) fn read(&mut self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&'a [u8]> {
        let Some(held) = self.held(name) else {
            let have = format!("{} others", self.tensors.0.len());
            return Err(Error::MissingTensor { tensor: name.to_owned(), have });
        };
        if held.dtype != dtype {
            return Err(Error::DType {
                what: name.to_owned(),
                want: dtype.to_string(),
                have: held.dtype.to_string(),
            });
        }
        if held.shape != shape {
            return Err(Error::shape(name, format_args!("{shape:?}"), format_args!("{:?}", held.shape)));
        }
        Ok(&held.bytes)
    }

    /// Unsigned 32-bit numbers.
    pub(crate) fn words(&mut self, name: &str, shape: &[usize]) -> Result<Vec<u32>> {
        let bytes = self.read(name, Dtype::U32, shape)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect())
    }

    /// Unsigned 32-bit numbers, as many as there are.
    pub(crate) fn whole(&mut self, name: &str) -> Result<Vec<u32>> {
        let words = self.tensors.0.get(name).map_or(0, |held| held.bytes.len() / 4);
        self.words(name, &[words])
    }

    /// Half-precision numbers.
    pub(crate) fn halves(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f16>> {
        let bytes = self.read(name, Dtype::F16, shape)?;
        Ok(bytes.as_chunks::<2>().0.iter().map(|&half| f16::from_le_bytes(half)).collect())
    }

    /// Single-precision numbers.
    pub(crate) fn singles(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let bytes = self.read(name, Dtype::F32, shape)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|&single| f32::from_le_bytes(single)).collect())
    }

    /// Unsigned 16-bit numbers.
    pub(crate) fn shorts(&mut self, name: &str, shape: &[usize]) -> Result<Vec<u16>> {
        let bytes = self.read(name, Dtype::U16, shape)?;
        Ok(bytes.as_chunks::<2>().0.iter().map(|&short| u16::from_le_bytes(short)).collect())
    }

    /// A tensor `[batch, heads, tokens, dim]` of any of the library's element types; `None` where there is none.
    pub(crate) fn tensor(&mut self, name: &str) -> Result<Option<Tensor>> {
        let Some(held) = self.held(name) else { return Ok(None) };
        let Some(dtype) = from_file_dtype(held.dtype) else {
            let (want, have) = ("F16, BF16 or F32".to_owned(), held.dtype.to_string());
            return Err(Error::DType { what: name.to_owned(), want, have });
        };
        let &[batch, heads, tokens, dim] = held.shape.as_slice() else {
            let have = format!("{:?}", held.shape);
            return Err(Error::shape(name, "[batch, heads, tokens, head_dim]", have));
        };
        checked_bytes(name, &held.shape, DType::F32.size())?;
        Tensor::new(held.bytes.clone(), dtype, Shape::new(batch, heads, tokens, dim)?).map(Some)
    }

    /// Refuses tensors that nothing asked for.
    pub(crate) fn finish(self) -> Result<()> {
        match self.unread.first() {
            None => Ok(()),
            Some(&name) => Err(Error::UnknownTensor {
                tensor: name.to_owned(),
                want: format!("{} others here", self.tensors.0.len() - self.unread.len()),
            }),
        }
    }
}

/// Little-endian bytes of words.
pub(crate) fn word_bytes(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Little-endian bytes of half-precision numbers.
pub(crate) fn half_bytes<'a>(halves: impl IntoIterator<Item = &'a f16>) -> Vec<u8> {
    halves.into_iter().flat_map(|half| half.to_le_bytes()).collect()
}

/// An entry of the metadata that must be there.
pub(crate) fn required(entry: Option<String>, key: &str, want: &str) -> Result<String> {
    let missing =
        || Error::Metadata { key: key.to_owned(), want: want.to_owned(), have: "no such entry".to_owned() };
    entry.ok_or_else(missing)
}

/// Refuses a file that is none of these, or a newer one.
pub(crate) fn check_version(
    entries: &BTreeMap<String, String>,
    key: &str,
    what: &str,
    newest: u32,
) -> Result<()> {
    let want = format!("a {what} of version 1 to {newest}");
    let text = required(entries.get(key).cloned(), key, &want)?;
    if text.parse::<u32>().is_ok_and(|version| (1..=newest).contains(&version)) {
        return Ok(());
    }
    Err(Error::Metadata { key: key.to_owned(), want, have: text })
}

/// 64-bit FNV-1a over all metadata but the digest and over all tensors, in the order of their names: of an entry its key
/// and text, of a tensor its name, type, shape and bytes; ahead of each text, shape and run of bytes its length.
pub(crate) fn digest(entries: &BTreeMap<String, String>, tensors: &Tensors) -> String {
    let mut hash = Fnv::new();
    let mut add = |bytes: &[u8]| {
        hash.add(&(bytes.len() as u64).to_le_bytes());
        hash.add(bytes);
    };
    for (key, text) in entries {
        add(key.as_bytes());
        add(text.as_bytes());
    }
    for Stored { name, dtype, shape, bytes } in tensors.stored() {
        add(name.as_bytes());
        add(dtype.to_string().as_bytes());
        let shape: Vec<u8> = shape.iter().flat_map(|&size| (size as u64).to_le_bytes()).collect();
        add(&shape);
        let bytes: Cow<'_, [u8]> = bytes;
        add(&bytes);
    }
    format!("{:016x}", hash.value())
}
