//! What happens to whole sequences: they come, are cut, copied and go, and with them every store and counter.

use std::sync::Arc;

use super::ledger::Ledger;
use super::sequence::{Backing, Sequence};
use crate::cache::tail::Tail;
use crate::error::{Error, Result};

impl<S: Backing> Ledger<S> {
    /// Adds an empty sequence and says its index.
    pub(crate) fn add_sequence(&mut self) -> usize {
        self.sequences.push(Sequence::new(self.layers.len(), self.groups.len()));
        self.sequences.len() - 1
    }

    /// Takes the tails of a reservation.
    pub(crate) fn reserve(&mut self, sequence: usize, tails: Vec<Tail<S::Block>>) -> Result<()> {
        let state = self.sequence_mut(sequence)?;
        state.reserved = tails.iter().map(|tail| tail.end() + tail.room()).min().unwrap_or(0);
        state.tails = tails;
        Ok(())
    }

    /// Whether [`trim`](Self::trim) can be.
    pub(crate) fn check_trim(&self, sequence: usize, tokens: usize) -> Result<()> {
        let have = self.sequence(sequence)?.len();
        if tokens <= have {
            return Ok(());
        }
        Err(Error::range("tokens to trim to", format!("at most {have}"), tokens))
    }

    /// Gives up the tokens of a sequence from `tokens` on.
    pub(crate) fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        self.check_trim(sequence, tokens)?;
        self.sequence_mut(sequence)?.truncate(tokens);
        Ok(())
    }

    /// Empties a sequence; also what its prefill froze.
    pub(crate) fn clear(&mut self, sequence: usize) -> Result<()> {
        let (layers, groups) = (self.layers.len(), self.groups.len());
        *self.sequence_mut(sequence)? = Sequence::new(layers, groups);
        Ok(())
    }

    /// Adds a copy of a sequence; what is on its way to be folded stays the first's.
    pub(crate) fn fork(&mut self, sequence: usize) -> Result<usize> {
        let mut fork = self.sequence(sequence)?.clone();
        fork.groups.iter_mut().for_each(|group| group.planned = group.folded());
        self.sequences.push(fork);
        Ok(self.sequences.len() - 1)
    }

    /// Tokens of a prefill that is to end.
    pub(crate) fn prefill_tokens(&self, sequence: usize) -> Result<usize> {
        let state = self.sequence(sequence)?;
        match state.prefill {
            Some(ended) => {
                Err(Error::range("ends of a prefill", "one", format!("another, after {ended} tokens")))
            }
            None => Ok(state.len()),
        }
    }

    /// Ends a prefill of so many tokens, with its verdicts for keys and values of every group.
    pub(crate) fn freeze(
        &mut self,
        sequence: usize,
        tokens: usize,
        cuts: Vec<Option<[Arc<S::Cut>; 2]>>,
    ) -> Result<()> {
        let state = self.sequence_mut(sequence)?;
        state.prefill = Some(tokens);
        for (group, cuts) in state.groups.iter_mut().zip(cuts) {
            group.cuts = cuts;
        }
        Ok(())
    }

    /// The sequences become those at `indices`, which may repeat.
    pub(crate) fn gather(&mut self, indices: &[u32]) -> Result<()> {
        let mut seen = vec![false; self.sequences.len()];
        let mut gathered = Vec::with_capacity(indices.len());
        for &index in indices {
            let mut sequence = self.sequence(index as usize)?.clone();
            if let Some(seen) = seen.get_mut(index as usize) {
                if *seen {
                    // What is on its way belongs to the first.
                    sequence.groups.iter_mut().for_each(|group| group.planned = group.folded());
                }
                *seen = true;
            }
            gathered.push(sequence);
        }
        self.sequences = gathered;
        Ok(())
    }

    /// What this ledger knows, with rows kept elsewhere: `to` is a ledger of the same layers, plan and options.
    #[cfg(feature = "gpu")]
    pub(crate) fn carried_to<T: Backing>(
        &self,
        mut to: Ledger<T>,
        block: impl Fn(&Arc<S::Block>) -> Result<Arc<T::Block>>,
        fold: impl Fn(&Arc<S::Fold>) -> Result<Arc<T::Fold>>,
        cut: impl Fn(&Arc<S::Cut>) -> Result<Arc<T::Cut>>,
    ) -> Result<Ledger<T>> {
        for sequence in &self.sequences {
            to.sequences.push(sequence.carried(&block, &fold, &cut)?);
        }
        Ok(to)
    }

    /// Every frozen verdict once.
    #[cfg(feature = "gpu")]
    pub(crate) fn cuts(&self) -> Vec<&Arc<S::Cut>> {
        let groups = self.sequences.iter().flat_map(|sequence| &sequence.groups);
        unique(groups.flat_map(|group| group.cuts.iter().flatten()))
    }

    /// Every block and fold once, however many sequences share it.
    pub(crate) fn unique(&self) -> Unique<'_, S> {
        let tails = self.sequences.iter().flat_map(|sequence| &sequence.tails);
        let blocks = tails.flat_map(|tail| tail.blocks().iter().map(|block| &block.rows));
        let groups = self.sequences.iter().flat_map(|sequence| &sequence.groups);
        let folds = groups.flat_map(|group| group.runs.iter().flat_map(|run| &run.folds));
        (unique(blocks), unique(folds))
    }
}

/// Blocks and folds.
type Unique<'a, S> = (Vec<&'a Arc<<S as Backing>::Block>>, Vec<&'a Arc<<S as Backing>::Fold>>);

fn unique<'a, T>(all: impl Iterator<Item = &'a Arc<T>>) -> Vec<&'a Arc<T>> {
    let mut seen = std::collections::HashSet::new();
    all.filter(|one| seen.insert(Arc::as_ptr(one))).collect()
}
