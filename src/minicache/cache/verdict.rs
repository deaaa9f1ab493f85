//! What was decided of each row of a folded run, on the host: half a byte a row, so that reports follow every trim.

use super::super::config::{Cause, Counts};
use super::super::folded::{Layout, PAGE};

/// Bits of one row's cause.
const BITS: usize = 4;
/// Words of one page.
pub(crate) const CAUSE_WORDS: usize = PAGE * BITS / 32;

/// The first cause that keeps each row raw, 0 for merged rows: four bits a row, `[batch, heads, pages, 4]` words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    words: Vec<u32>,
}

impl Verdict {
    /// From the words that `retain` writes, or a file holds.
    pub(crate) fn from_words(words: Vec<u32>) -> Self {
        Self { words }
    }

    /// From the causes of all rows.
    pub(crate) fn pack(causes: &[Option<Cause>], layout: &Layout) -> Self {
        let heads = causes.chunks(layout.shape.tokens.max(1));
        let eights = heads.flat_map(|head| head.chunks(PAGE)).flat_map(|page| {
            (0..CAUSE_WORDS).map(move |word| {
                let rows = page.iter().skip(word * 8).take(8).enumerate();
                rows.fold(0, |bits, (i, cause)| bits | Cause::code(*cause) << (BITS * i))
            })
        });
        Self { words: eights.collect() }
    }

    /// This and then `after`'s, of as many heads each.
    pub(crate) fn join(&self, after: &Self, heads: usize) -> Self {
        let chunk = |verdict: &Self| (verdict.words.len() / heads.max(1)).max(1);
        let pairs = self.words.chunks(chunk(self)).zip(after.words.chunks(chunk(after)));
        Self { words: pairs.flat_map(|(a, b)| [a, b].concat()).collect() }
    }

    /// How many of the first `tokens` of every head were merged, and kept raw by cause.
    pub(crate) fn count(&self, heads: usize, tokens: usize) -> Counts {
        let mut counts = Counts::default();
        for head in self.words.chunks((self.words.len() / heads.max(1)).max(1)) {
            let codes = head.iter().flat_map(|word| (0..8).map(move |i| word >> (BITS * i) & 15));
            codes.take(tokens).for_each(|code| counts.add(Cause::from_code(code)));
        }
        counts
    }

    /// Whether there are causes for at least so many tokens of every head.
    pub(crate) fn holds(&self, heads: usize, tokens: usize) -> bool {
        let head = heads * CAUSE_WORDS;
        self.words.len().is_multiple_of(head) && self.words.len() / head * PAGE >= tokens
    }

    /// Rows that a cause keeps raw.
    pub(crate) fn retained(&self, heads: usize) -> usize {
        self.count(heads, usize::MAX).retained() as usize
    }

    /// The words.
    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::minicache::Mode;
    use crate::{DType, Shape};

    #[test]
    fn counts_follow_a_trim_row_by_row() {
        let shape = Shape::new(1, 2, 64, 4).unwrap();
        let layout = Layout::new((shape, DType::F16), (shape, DType::F16), Mode::Shared).unwrap();
        let causes: Vec<_> =
            (0..128).map(|i| [None, Some(Cause::Rule), Some(Cause::Range)][i % 64 % 3]).collect();
        let verdict = Verdict::pack(&causes, &layout);
        assert_eq!(verdict.count(2, 64), Counts { merged: 44, rule: 42, range: 42, ..Counts::default() });
        assert_eq!(verdict.count(2, 34), Counts { merged: 24, rule: 22, range: 22, ..Counts::default() });
        let joined = verdict.join(&verdict, 2);
        assert_eq!(joined.count(2, 128), Counts { merged: 88, rule: 84, range: 84, ..Counts::default() });
        assert_eq!(joined.count(2, 64), verdict.count(2, 64));
    }
}
