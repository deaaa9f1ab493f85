//! From a [`Capture`] to a file.

use std::borrow::Cow;
use std::path::Path;

use safetensors::Dtype;

use super::read::TOKENS;
use super::{Capture, metadata};
use crate::container::{self, Stored};
use crate::error::{Error, Result};

impl Capture {
    /// The bytes of a capture file of version [`VERSION`](super::VERSION). Equal captures give equal bytes.
    ///
    /// NaN and infinities are written as they are; [`ReadOptions`](super::ReadOptions) says how to read them again.
    ///
    /// # Errors
    /// As [`Capture::check`]; [`Error::Safetensors`] when the metadata exceeds what safetensors allows (100 MB).
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check()?;
        let mut tensors = Vec::new();
        if let Some(ids) = &self.info.token_ids {
            let shape = if self.batch() == 1 { vec![ids.len()] } else { vec![self.batch(), self.tokens()] };
            let bytes = Cow::Owned(ids.iter().flat_map(|id| id.to_le_bytes()).collect());
            tensors.push(Stored { name: TOKENS.to_owned(), dtype: Dtype::I32, shape, bytes });
        }
        for (index, layer) in self.layers.iter().enumerate() {
            tensors.extend(layer.tensors().map(|(part, tensor)| {
                let shape = tensor.shape();
                Stored {
                    name: part.name(index),
                    dtype: container::to_file_dtype(tensor.dtype()),
                    shape: vec![shape.batch, shape.heads, shape.tokens, shape.dim],
                    bytes: Cow::Borrowed(tensor.bytes()),
                }
            }));
        }
        container::write(&metadata::render(&self.info), tensors)
    }

    /// Writes a capture file; one that stands there is replaced.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path, else as [`Capture::to_bytes`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        std::fs::write(path, self.to_bytes()?)
            .map_err(|cause| Error::Io { path: path.display().to_string(), cause })
    }
}
