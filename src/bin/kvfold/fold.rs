//! `kvfold fold` and `kvfold unfold`.

mod arguments;
mod text;

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::Path;

use kvfold::store::{Store, StoreReport};
use kvfold::{Capture, Error, Result};
use serde::Serialize;

pub(crate) use arguments::{FoldArguments, UnfoldArguments};

use crate::report::SAMPLE;
use crate::text::json;

/// What `--json` prints: the store's figures, and those of the two files.
#[derive(Debug, Serialize)]
struct Output {
    #[serde(flatten)]
    report: StoreReport,
    /// Bytes of the store's file.
    store_bytes: u64,
    /// Of these, the header: names, shapes and metadata.
    header_bytes: u64,
    /// Bytes of the capture's file, where `unfold` wrote one.
    #[serde(skip_serializing_if = "Option::is_none")]
    capture_bytes: Option<u64>,
}

impl Output {
    fn new(report: StoreReport, store_bytes: usize, capture_bytes: Option<usize>) -> Self {
        let store_bytes = store_bytes as u64;
        let header_bytes = store_bytes - report.bytes_after - report.kept_bytes;
        Self { report, store_bytes, header_bytes, capture_bytes: capture_bytes.map(|bytes| bytes as u64) }
    }
}

/// Folds a capture into a store and gives what is to be printed.
pub(crate) fn fold(arguments: &FoldArguments) -> Result<String> {
    let options = arguments.options();
    let capture = match arguments.input() {
        Some(path) => Capture::open(path)?,
        None => Capture::from_bytes(SAMPLE)?,
    };
    let store = Store::fold(&capture, &options)?;
    let bytes = store.to_bytes()?;
    let output = Output::new(store.report(Some(&capture))?, bytes.len(), None);
    write(&arguments.target.output, &bytes, arguments.target.force)?;
    if arguments.target.json {
        return Ok(json(&output));
    }
    Ok(text::folded(&output, &options, &store.options(), &arguments.target.output))
}

/// Restores a capture from a store and gives what is to be printed.
pub(crate) fn unfold(arguments: &UnfoldArguments) -> Result<String> {
    let path = &arguments.file;
    let file = std::fs::read(path).map_err(|cause| Error::Io { path: path.display().to_string(), cause })?;
    let store = Store::from_bytes(&file)?;
    let bytes = store.unfold()?.to_bytes()?;
    let output = Output::new(store.report(None)?, file.len(), Some(bytes.len()));
    write(&arguments.target.output, &bytes, arguments.target.force)?;
    if arguments.target.json {
        return Ok(json(&output));
    }
    Ok(text::unfolded(&output, &arguments.target.output))
}

/// Writes a file; one that stands there is kept unless `force`.
fn write(path: &Path, bytes: &[u8], force: bool) -> Result<()> {
    let failed = |cause: std::io::Error| {
        let cause = match cause.kind() {
            ErrorKind::AlreadyExists => {
                std::io::Error::new(ErrorKind::AlreadyExists, "stands there already (--force replaces it)")
            }
            _ => cause,
        };
        Error::Io { path: path.display().to_string(), cause }
    };
    let mut options = OpenOptions::new();
    options.write(true).truncate(force).create(force).create_new(!force);
    let mut file = options.open(path).map_err(failed)?;
    file.write_all(bytes).and_then(|()| file.flush()).map_err(failed)
}
