//! The safetensors container under captures and stores: reading that names what is damaged, writing that is deterministic.
//!
//! The crate's own reader is not used: of two tensors of one name it keeps the last, its sum of hostile offsets can
//! overflow, and a file cut short is reported without the tensor. Its writer puts metadata in the order of a hash map.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;

use safetensors::tensor::TensorInfo;
use safetensors::{Dtype, SafeTensorError};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde::{Serialize, de};

use crate::error::{Error, Result};
use crate::tensor::{DType, checked_bytes};

/// Bytes of the little-endian header length that a file begins with; headers are padded to a multiple of it.
const PREFIX: usize = 8;
/// The longest header that the safetensors format allows, in bytes.
const MAX_HEADER: usize = 100_000_000;
const METADATA: &str = "__metadata__";

/// A tensor in a file: borrowed from it when read, borrowed or owned when written.
#[derive(Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Cow<'a, [u8]>,
}

/// A file's metadata and its tensors in the order of their data.
#[derive(Debug)]
pub(crate) struct Container<'a> {
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) tensors: Vec<Stored<'a>>,
}

/// The library's element type for a file's, where there is one.
pub(crate) fn from_file_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::Bf16),
        Dtype::F32 => Some(DType::F32),
        _ => None,
    }
}

/// The file's element type for the library's.
pub(crate) fn to_file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
    }
}

/// Reads a whole file. Allocates no more than a small multiple of the header, whatever sizes it claims.
///
/// # Errors
/// [`Error::Safetensors`] for a header that is none, [`Error::TooShort`] naming the header or the first tensor that is
/// cut, [`Error::Overflow`], [`Error::DType`] or [`Error::Shape`] naming a tensor whose sizes contradict each other.
pub(crate) fn read(file: &[u8]) -> Result<Container<'_>> {
    let damaged = |cause| Error::Safetensors { bytes: file.len(), cause };
    let (&length, rest) =
        file.split_first_chunk::<PREFIX>().ok_or_else(|| damaged(SafeTensorError::HeaderTooSmall))?;
    let length = usize::try_from(u64::from_le_bytes(length))
        .ok()
        .filter(|&length| length <= MAX_HEADER)
        .ok_or_else(|| damaged(SafeTensorError::HeaderTooLarge))?;
    let (text, data) = rest.split_at_checked(length).ok_or_else(|| Error::TooShort {
        what: "safetensors header".to_owned(),
        need: length as u64,
        have: rest.len() as u64,
    })?;
    let text = std::str::from_utf8(text).map_err(|cause| damaged(SafeTensorError::InvalidHeader(cause)))?;
    let mut header: Header = serde_json::from_str(text)
        .map_err(|cause| damaged(SafeTensorError::InvalidHeaderDeserialization(cause)))?;
    header.tensors.sort_by_key(|(_, info)| info.data_offsets);

    let mut end = 0;
    let mut tensors = Vec::with_capacity(header.tensors.len());
    for (name, info) in header.tensors {
        if info.data_offsets.0 != end {
            return Err(damaged(SafeTensorError::InvalidOffset(name)));
        }
        end = info.data_offsets.1;
        tensors.push(slice(data, name, info)?);
    }
    if end != data.len() {
        return Err(Error::shape(
            "safetensors data",
            format_args!("{end} bytes"),
            format_args!("{} bytes", data.len()),
        ));
    }
    Ok(Container { metadata: header.metadata, tensors })
}

/// The bytes of one tensor, once its type, shape and offsets agree.
fn slice(data: &[u8], name: String, info: TensorInfo) -> Result<Stored<'_>> {
    let TensorInfo { dtype, shape, data_offsets: (start, end) } = info;
    if dtype.bitsize() % 8 != 0 {
        return Err(Error::DType {
            what: name,
            want: "elements of whole bytes".to_owned(),
            have: dtype.to_string(),
        });
    }
    let need = checked_bytes(&name, &shape, dtype.bitsize() / 8)?;
    if end.checked_sub(start) != Some(need) {
        let have = format!("data from {start} to {end}");
        return Err(Error::shape(name, format_args!("{need} bytes for {dtype} {shape:?}"), have));
    }
    let Some(bytes) = data.get(start..end) else {
        let have = data.len().saturating_sub(start) as u64;
        return Err(Error::TooShort { what: name, need: need as u64, have });
    };
    Ok(Stored { name, dtype, shape, bytes: Cow::Borrowed(bytes) })
}

/// Writes a file. The same input gives the same bytes: metadata and header are sorted by name, data stands in the
/// order given but for wider elements before narrower ones, which leaves every tensor aligned to its element.
///
/// # Errors
/// [`Error::Safetensors`] when the header would exceed what the format allows, [`Error::Overflow`] when the file would
/// not fit the address space.
pub(crate) fn write(metadata: &BTreeMap<String, String>, mut tensors: Vec<Stored<'_>>) -> Result<Vec<u8>> {
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bitsize()));
    let overflow = || Error::Overflow {
        what: "safetensors file".to_owned(),
        sizes: format!("{} tensors", tensors.len()),
    };
    let mut end = 0usize;
    let mut infos = BTreeMap::new();
    for Stored { name, dtype, shape, bytes } in &tensors {
        let start = end;
        end = start.checked_add(bytes.len()).ok_or_else(overflow)?;
        let info = TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets: (start, end) };
        infos.insert(name.as_str(), info);
    }
    let damaged = |cause| Error::Safetensors { bytes: end, cause };
    let mut header = serde_json::to_vec(&HeaderRef { metadata, tensors: infos })
        .map_err(|cause| damaged(SafeTensorError::JsonError(cause)))?;
    header.resize(header.len().next_multiple_of(PREFIX), b' ');
    if header.len() > MAX_HEADER {
        return Err(damaged(SafeTensorError::HeaderTooLarge));
    }
    let mut file = Vec::with_capacity(end.checked_add(PREFIX + header.len()).ok_or_else(overflow)?);
    file.extend_from_slice(&(header.len() as u64).to_le_bytes());
    file.append(&mut header);
    for tensor in &tensors {
        file.extend_from_slice(&tensor.bytes);
    }
    Ok(file)
}

#[derive(Serialize)]
struct HeaderRef<'a> {
    #[serde(rename = "__metadata__")]
    metadata: &'a BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: BTreeMap<&'a str, TensorInfo>,
}

#[derive(Default)]
struct Header {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, TensorInfo)>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Entries::<Self>(PhantomData))
    }
}

/// Metadata as read: names to texts.
#[derive(Default)]
struct Texts(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Entries::<Self>(PhantomData))
    }
}

/// What a JSON object is read into, entry by entry.
trait Collect: Default {
    const WHAT: &'static str;

    fn collect<'de, A: MapAccess<'de>>(&mut self, name: String, map: &mut A) -> Result<(), A::Error>;
}

impl Collect for Header {
    const WHAT: &'static str = "a safetensors header";

    fn collect<'de, A: MapAccess<'de>>(&mut self, name: String, map: &mut A) -> Result<(), A::Error> {
        if name == METADATA {
            self.metadata = map.next_value::<Option<Texts>>()?.unwrap_or_default().0;
        } else {
            let info =
                map.next_value().map_err(|cause| A::Error::custom(format_args!("`{name}`: {cause}")))?;
            self.tensors.push((name, info));
        }
        Ok(())
    }
}

impl Collect for Texts {
    const WHAT: &'static str = "an object of strings";

    fn collect<'de, A: MapAccess<'de>>(&mut self, name: String, map: &mut A) -> Result<(), A::Error> {
        let text = map
            .next_value()
            .map_err(|cause| A::Error::custom(format_args!("{METADATA} `{name}`: {cause}")))?;
        self.0.insert(name, text);
        Ok(())
    }
}

/// Visits the entries of an object and refuses a name that stands there twice.
struct Entries<C>(PhantomData<C>);

impl<'de, C: Collect> Visitor<'de> for Entries<C> {
    type Value = C;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(C::WHAT)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<C, A::Error> {
        let mut all = C::default();
        let mut seen = BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(de::Error::custom(format_args!("`{name}` stands twice")));
            }
            all.collect(name, &mut map)?;
        }
        Ok(all)
    }
}
