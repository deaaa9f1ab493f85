//! What can be asked of `fold` and `unfold`.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::error::ErrorKind;
use kvfold::minicache::MergeOptions;
use kvfold::qjl::cache::NamedCoding;
use kvfold::report::ReportOptions;
use kvfold::store::FoldOptions;

use crate::arguments::{MiniCacheArguments, refuse};

#[derive(Debug, Args)]
pub(crate) struct FoldArguments {
    /// A capture in safetensors (docs/capture-format.md); without it, or for -, the sample that kvfold carries
    file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) target: Target,
    /// Sign planes, near-lossless, balanced, compact or extreme, or sketches, qjl-orth or qjl; balanced where nothing else is said
    #[arg(long, value_name = "NAME", conflicts_with = "minicache")]
    preset: Option<NamedCoding>,
    /// Pairs of neighbouring layers, as the options under MiniCache say
    #[arg(long)]
    minicache: bool,
    #[command(flatten)]
    merge: MiniCacheArguments,
}

#[derive(Debug, Args)]
pub(crate) struct UnfoldArguments {
    /// A store that `kvfold fold` wrote (docs/store-format.md)
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) target: Target,
}

#[derive(Debug, Args)]
pub(crate) struct Target {
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Replace a file that stands there
    #[arg(long)]
    pub(crate) force: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

impl FoldArguments {
    /// The capture's file; `None` for the sample.
    pub(crate) fn input(&self) -> Option<&Path> {
        self.file.as_deref().filter(|path| *path != Path::new("-"))
    }

    /// The options asked for. Numbers out of range are misuse: the program ends here, with exit code 2.
    pub(crate) fn options(&self) -> FoldOptions {
        if !self.minicache {
            return self.preset.unwrap_or_default().into();
        }
        let (merge, start_frac): (MergeOptions, f64) = self.merge.options();
        let checked = ReportOptions::default().merge(merge.clone()).start_frac(start_frac);
        if let Err(error) = checked.validate() {
            refuse(ErrorKind::ValueValidation, error);
        }
        FoldOptions::MiniCache { merge, start_frac }
    }
}
