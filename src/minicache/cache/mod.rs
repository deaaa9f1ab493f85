//! MiniCache as a cache: what its CPU and GPU forms share. The ledger knows roles, lengths and which store holds which tokens;
//! it computes nothing and names no device.

mod file;
mod host;
mod ledger;
mod lives;
mod report;
mod sequence;
mod verdict;

pub use report::{CacheReport, LayerReport, OriginalAccounting};

pub(crate) use host::Host;
pub(crate) use ledger::{FoldRange, Ledger};
#[cfg(feature = "gpu")]
pub(crate) use sequence::Backing;
pub(crate) use sequence::{Decided, Held, Sequence};
#[cfg(feature = "gpu")]
pub(crate) use verdict::CAUSE_WORDS;
pub(crate) use verdict::Verdict;

use serde::{Deserialize, Serialize};

use super::config::{MergeOptions, Retention};
use crate::error::Result;

/// Options of a MiniCache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct CacheOptions {
    /// How rows are merged; [`first_position`](MergeOptions::first_position) is not looked at.
    pub merge: MergeOptions,
    /// The newest tokens of a sequence that stay raw, beside the 0 to 31 that do not fill a page. 0 by default; an engine that
    /// takes tokens back (speculative decoding) keeps as many as it may take back, since a folded page that is cut short
    /// keeps its size.
    pub recent: usize,
    /// Whether `append` may not allocate: it then says [`Error::Capacity`](crate::Error::Capacity) where nothing was reserved.
    pub fixed: bool,
}

impl CacheOptions {
    /// Sets [`merge`](Self::merge).
    #[must_use]
    pub fn merge(mut self, merge: MergeOptions) -> Self {
        self.merge = merge;
        self
    }

    /// Sets [`recent`](Self::recent).
    #[must_use]
    pub fn recent(mut self, recent: usize) -> Self {
        self.recent = recent;
        self
    }

    /// Sets [`fixed`](Self::fixed).
    #[must_use]
    pub fn fixed(mut self, fixed: bool) -> Self {
        self.fixed = fixed;
        self
    }

    /// Checks every number against its range.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) naming the option.
    pub fn validate(&self) -> Result<()> {
        self.merge.validate()
    }

    /// The options of a call whose first token is `first`.
    pub(crate) fn merge_at(&self, first: usize) -> MergeOptions {
        self.merge.clone().first_position(u32::try_from(first).unwrap_or(u32::MAX))
    }

    /// Whether the rule looks at a whole prefill, so that nothing is folded before `end_prefill`.
    pub(crate) fn waits_for_prefill(&self) -> bool {
        matches!(self.merge.retention, Retention::Range(_) | Retention::Fraction(_))
    }
}
