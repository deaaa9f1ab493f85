//! The positions of a sequence's tokens.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Positions of tokens, as runs of consecutive ones: the token that begins each, and its position.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Runs(Vec<(usize, u32)>);

impl Runs {
    /// The position of a token.
    pub(crate) fn position(&self, token: usize) -> u32 {
        let after = self.0.partition_point(|&(start, _)| start <= token);
        let run = after.checked_sub(1).and_then(|index| self.0.get(index));
        run.map_or(0, |&(start, position)| position.wrapping_add((token - start) as u32))
    }

    /// Positions of consecutive tokens.
    pub(crate) fn of(&self, tokens: Range<usize>) -> Vec<u32> {
        tokens.map(|token| self.position(token)).collect()
    }

    /// Whether the positions of these tokens follow each other.
    #[cfg(feature = "gpu")]
    pub(crate) fn are_consecutive(&self, tokens: &Range<usize>) -> bool {
        !self.0.iter().any(|&(start, _)| start > tokens.start && start < tokens.end)
    }

    /// These positions with those of tokens from `token` on.
    pub(super) fn extended(&self, token: usize, positions: &[u32]) -> Self {
        let mut runs = self.clone();
        for (token, &position) in (token..).zip(positions) {
            let next = runs.0.last().map(|&(start, first)| u64::from(first) + (token - start) as u64);
            if next != Some(u64::from(position)) {
                runs.0.push((token, position));
            }
        }
        runs
    }

    pub(super) fn truncate(&mut self, token: usize) {
        self.0.retain(|&(start, _)| start < token);
    }

    /// Checks runs of a loaded track of so many tokens.
    pub(super) fn are_of(&self, len: usize) -> bool {
        self.0.first().map_or(len == 0, |&(start, _)| start == 0)
            && self.0.is_sorted_by(|a, b| a.0 < b.0)
            && self.0.last().is_none_or(|&(start, _)| start < len)
    }
}
