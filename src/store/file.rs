//! Stores in files: versioned, under a digest, refused with the cause.

use std::path::Path;

use super::head::{FOLD, Head};
use super::tensors::{Tensors, check_version, digest, required};
use super::{Store, VERSION};
use crate::capture::{CaptureInfo, metadata};
use crate::container;
use crate::error::{Error, Result};

/// The metadata key of the version.
pub(crate) const STORE: &str = "kvfold.store";
/// The metadata key of the digest.
pub(crate) const DIGEST: &str = "kvfold.digest";

/// Refuses a capture whose own metadata uses a key of the store.
pub(super) fn check_free(info: &CaptureInfo) -> Result<()> {
    match [STORE, FOLD, DIGEST].into_iter().find_map(|key| info.extra.get_key_value(key)) {
        None => Ok(()),
        Some((key, text)) => {
            let want = "no such entry in a capture, since it is a store's".to_owned();
            Err(Error::Metadata { key: key.clone(), want, have: text.clone() })
        }
    }
}

impl Store {
    /// The bytes of a store file of version [`VERSION`]. Equal stores give equal bytes.
    ///
    /// # Errors
    /// [`Error::Safetensors`] when the metadata exceeds what safetensors allows (100 MB).
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut entries = metadata::render(&self.info);
        entries.remove(metadata::CAPTURE);
        entries.insert(STORE.to_owned(), VERSION.to_string());
        entries.insert(FOLD.to_owned(), self.head.render());
        let digest = digest(&entries, &self.tensors);
        entries.insert(DIGEST.to_owned(), digest);
        container::write(&entries, self.tensors.stored().collect())
    }

    /// Reads a store from the bytes of a file and checks all of it. What it allocates is a small multiple of the file.
    ///
    /// # Errors
    /// * [`Error::Safetensors`]: not safetensors, or its header contradicts itself;
    /// * [`Error::TooShort`]: cut short, naming the header or the first tensor that is not whole;
    /// * [`Error::Metadata`]: not a store, a newer one, or an entry that cannot be read or contradicts the tensors;
    /// * [`Error::Digest`]: the contents are not those that were written;
    /// * [`Error::MissingTensor`], [`Error::UnknownTensor`]: a tensor that the folding needs, or one that it does not;
    /// * [`Error::DType`], [`Error::Shape`], [`Error::Range`], [`Error::NonFinite`]: a tensor, option or table of
    ///   another type, size or range than the folding has.
    pub fn from_bytes(file: &[u8]) -> Result<Self> {
        let file = container::read(file)?;
        let mut entries = file.metadata;
        check_version(&entries, STORE, "store", VERSION)?;
        let mut tensors = Tensors::default();
        file.tensors.into_iter().for_each(|stored| tensors.add(stored));
        let want = required(entries.remove(DIGEST), DIGEST, "the digest of the contents")?;
        let have = digest(&entries, &tensors);
        if want != have {
            return Err(Error::Digest { what: "store".to_owned(), want, have });
        }
        entries.remove(STORE);
        let head = Head::parse(&required(entries.remove(FOLD), FOLD, "the JSON object of a store")?)?;
        let info = metadata::parse(entries, head.batch, head.layers.len())?;
        metadata::check_sequences(&info, head.batch, head.tokens)?;
        let key_dim = head.layers.iter().map(|layer| layer.key_dim).min().unwrap_or(0);
        metadata::check_rope(&info, key_dim)?;
        metadata::check_layers(&info, head.layers.len())?;
        let store = Self { head, info, tensors };
        store.check_growth()?;
        let mut reader = store.tensors.reader();
        store.walk(&mut reader, None)?;
        store.kept(&mut reader)?;
        reader.finish()?;
        Ok(store)
    }

    /// Reads a store file.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path, else as [`Store::from_bytes`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file =
            std::fs::read(path).map_err(|cause| Error::Io { path: path.display().to_string(), cause })?;
        Self::from_bytes(&file)
    }

    /// Writes a store file; one that stands there is replaced.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path, else as [`Store::to_bytes`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        std::fs::write(path, self.to_bytes()?)
            .map_err(|cause| Error::Io { path: path.display().to_string(), cause })
    }
}
