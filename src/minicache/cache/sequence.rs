//! One sequence: the raw tail of every layer, and the folded runs of every group.

use std::fmt::Debug;
use std::sync::Arc;

use super::verdict::Verdict;
use crate::cache::tail::Tail;
#[cfg(feature = "gpu")]
use crate::error::{Error, Result};

/// What a backend keeps rows in.
pub(crate) trait Backing: Debug {
    /// Raw keys and values of one layer.
    type Block: Debug;
    /// Folded keys, or values, of one group.
    type Fold: Debug;
    /// A frozen verdict of a rule that looks at a whole prefill.
    type Cut: Debug;
}

/// Folded tokens of one group. Runs never change: a run that grows is replaced.
#[derive(Debug)]
pub(crate) struct Run<S: Backing> {
    /// Its first token.
    pub(crate) start: usize,
    /// Tokens of it that are alive; a trim may leave fewer than are stored.
    pub(crate) tokens: usize,
    /// Whether more may be joined to it.
    pub(crate) open: bool,
    /// Keys and values.
    pub(crate) folds: [Arc<S::Fold>; 2],
    /// Of keys and of values.
    pub(crate) verdicts: [Arc<Verdict>; 2],
}

impl<S: Backing> Clone for Run<S> {
    fn clone(&self) -> Self {
        let (folds, verdicts) = (self.folds.clone(), self.verdicts.clone());
        Self { start: self.start, tokens: self.tokens, open: self.open, folds, verdicts }
    }
}

impl<S: Backing> Run<S> {
    pub(crate) fn end(&self) -> usize {
        self.start + self.tokens
    }
}

/// Where rows of one layer stand.
pub(crate) enum Held<'a, S: Backing> {
    /// In a block, from this row on.
    Raw(&'a Arc<S::Block>, usize),
    /// In a folded run, as this member of the group.
    Folded(&'a Run<S>, usize),
}

/// What one group of layers holds of a sequence.
#[derive(Debug)]
pub(crate) struct GroupState<S: Backing> {
    /// Folded tokens, in order.
    pub(crate) runs: Vec<Run<S>>,
    /// Tokens folded or on their way to be.
    pub(crate) planned: usize,
    /// Frozen verdicts for keys and values.
    pub(crate) cuts: Option<[Arc<S::Cut>; 2]>,
}

impl<S: Backing> Clone for GroupState<S> {
    fn clone(&self) -> Self {
        Self { runs: self.runs.clone(), planned: self.planned, cuts: self.cuts.clone() }
    }
}

impl<S: Backing> Default for GroupState<S> {
    fn default() -> Self {
        Self { runs: Vec::new(), planned: 0, cuts: None }
    }
}

impl<S: Backing> GroupState<S> {
    /// Tokens that are folded.
    pub(crate) fn folded(&self) -> usize {
        self.runs.last().map_or(0, Run::end)
    }

    /// First token of the run that will hold token `at`, when runs take at most `most` tokens.
    fn run_start(&self, at: usize, most: usize) -> usize {
        let base = self.runs.last().map_or(0, |run| if run.open { run.start } else { run.end() });
        base + (at - base) / most * most
    }

    /// One past the last token that the run with token `at` may hold.
    pub(crate) fn run_limit(&self, at: usize, most: usize) -> usize {
        self.run_start(at, most) + most
    }

    /// The run that tokens from `start` on are joined to.
    pub(crate) fn joins(&self, start: usize, most: usize) -> Option<&Run<S>> {
        self.runs.last().filter(|run| run.open && run.end() == start && run.tokens < most)
    }

    /// Gives up everything from `token` on.
    fn truncate(&mut self, token: usize) {
        self.runs.retain(|run| run.start < token);
        if let Some(run) = self.runs.last_mut().filter(|run| run.end() > token) {
            run.tokens = token - run.start;
            run.open = false;
        }
        if self.planned > token {
            self.planned = self.folded();
        }
    }
}

/// What was decided of rows that are stored as they were given back ([`Mode::Compat`](crate::minicache::Mode::Compat)).
#[derive(Clone, Debug)]
pub(crate) struct Decided {
    pub(crate) start: usize,
    pub(crate) tokens: usize,
    /// Of keys and of values.
    pub(crate) verdicts: [Arc<Verdict>; 2],
}

/// One sequence.
#[derive(Debug)]
pub(crate) struct Sequence<S: Backing> {
    /// Of every layer.
    pub(crate) tails: Vec<Tail<S::Block>>,
    /// Of every group.
    pub(crate) groups: Vec<GroupState<S>>,
    /// Of every layer; only Compat has any.
    pub(crate) decided: Vec<Vec<Decided>>,
    /// Tokens of its prefill, once that has ended.
    pub(crate) prefill: Option<usize>,
    /// Tokens that were reserved, counted from the start.
    pub(crate) reserved: usize,
}

impl<S: Backing> Clone for Sequence<S> {
    fn clone(&self) -> Self {
        let (tails, groups, decided) = (self.tails.clone(), self.groups.clone(), self.decided.clone());
        Self { tails, groups, decided, prefill: self.prefill, reserved: self.reserved }
    }
}

impl<S: Backing> Sequence<S> {
    pub(crate) fn new(layers: usize, groups: usize) -> Self {
        Self {
            tails: (0..layers).map(|_| Tail::default()).collect(),
            groups: (0..groups).map(|_| GroupState::default()).collect(),
            decided: vec![Vec::new(); layers],
            prefill: None,
            reserved: 0,
        }
    }

    /// Tokens that every layer holds.
    pub(crate) fn len(&self) -> usize {
        self.tails.iter().map(Tail::end).min().unwrap_or(0)
    }

    /// Gives up everything from `token` on.
    pub(crate) fn truncate(&mut self, token: usize) {
        for group in &mut self.groups {
            group.truncate(token);
        }
        for decided in &mut self.decided {
            decided.retain(|part| part.start < token);
            if let Some(part) = decided.last_mut() {
                part.tokens = part.tokens.min(token - part.start);
            }
        }
        for tail in &mut self.tails {
            tail.truncate(token, self.reserved.saturating_sub(token));
        }
    }

    /// This sequence with its rows kept elsewhere.
    #[cfg(feature = "gpu")]
    pub(crate) fn carried<T: Backing>(
        &self,
        block: &impl Fn(&Arc<S::Block>) -> Result<Arc<T::Block>>,
        fold: &impl Fn(&Arc<S::Fold>) -> Result<Arc<T::Fold>>,
        cut: &impl Fn(&Arc<S::Cut>) -> Result<Arc<T::Cut>>,
    ) -> Result<Sequence<T>> {
        let run = |run: &Run<S>| {
            let [keys, values] = &run.folds;
            let (folds, verdicts) = ([fold(keys)?, fold(values)?], run.verdicts.clone());
            Ok(Run { start: run.start, tokens: run.tokens, open: run.open, folds, verdicts })
        };
        let group = |group: &GroupState<S>| {
            let cuts = group.cuts.as_ref().map(|[keys, values]| Ok::<_, Error>([cut(keys)?, cut(values)?]));
            let runs = group.runs.iter().map(run).collect::<Result<_>>()?;
            // What is on its way does not go along.
            Ok(GroupState { runs, planned: group.folded(), cuts: cuts.transpose()? })
        };
        Ok(Sequence {
            tails: self.tails.iter().map(|tail| tail.carried(block)).collect::<Result<_>>()?,
            groups: self.groups.iter().map(group).collect::<Result<_>>()?,
            decided: self.decided.clone(),
            prefill: self.prefill,
            reserved: self.reserved,
        })
    }
}
