//! The ledger of a MiniCache: roles, lengths, which store holds which tokens, and what may come next.

use std::sync::Arc;

use super::super::config::Mode;
use super::super::folded::{Layout, PAGE, check_arc};
use super::super::plan::{LayerRole, Role};
use super::sequence::{Backing, GroupState, Held, Run, Sequence};
use super::{CacheOptions, Verdict};
use crate::cache::tail::{MakeBlock, Tail, Write};
use crate::cache::{LayerShape, RowsView, Segment, Step};
use crate::error::{Error, Result};
use crate::tensor::Shape;

/// Layers that are folded together, lowest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) layers: Vec<usize>,
    /// The most tokens of one run.
    pub(crate) run_tokens: usize,
}

/// Tokens that can be folded in one go: in one block of every member, and in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FoldRange {
    pub(crate) sequence: usize,
    pub(crate) group: usize,
    pub(crate) start: usize,
    pub(crate) tokens: usize,
}

#[cfg(feature = "gpu")]
impl FoldRange {
    /// One past its last token.
    pub(crate) fn end(&self) -> usize {
        self.start + self.tokens
    }
}

/// A layer of every sequence after an append: its new tails, and where the step's rows go.
pub(crate) struct Extended<S: Backing> {
    pub(crate) tails: Vec<Tail<S::Block>>,
    /// Sequence and place of every write.
    pub(crate) writes: Vec<(usize, Write<S::Block>)>,
}

/// Everything about a cache but what its rows hold.
#[derive(Debug)]
pub(crate) struct Ledger<S: Backing> {
    pub(crate) layers: Vec<LayerShape>,
    pub(crate) plan: Vec<LayerRole>,
    pub(crate) groups: Vec<Group>,
    pub(crate) options: CacheOptions,
    pub(crate) sequences: Vec<Sequence<S>>,
}

impl<S: Backing> Ledger<S> {
    /// A ledger of no sequence. `run_tokens` says how many tokens one run of a group of so many such
    /// layers may hold.
    pub(crate) fn new(
        layers: Vec<LayerShape>,
        plan: Vec<LayerRole>,
        options: CacheOptions,
        run_tokens: impl Fn(&LayerShape, usize) -> Result<usize>,
    ) -> Result<Self> {
        options.validate()?;
        if plan.len() != layers.len() {
            return Err(Error::shape("pairing plan", format_args!("{} layers", layers.len()), plan.len()));
        }
        layers.iter().try_for_each(LayerShape::check)?;
        let mut groups: Vec<Group> = Vec::new();
        for (layer, role) in plan.iter().enumerate() {
            if role.role == Role::Primary {
                groups.push(Group { layers: vec![layer], run_tokens: 0 });
                continue;
            }
            let joined = layer.checked_sub(1).and_then(|below| plan.get(below)).map(|below| below.group);
            let Some(group) = groups.last_mut().filter(|_| joined == Some(role.group)) else {
                let have =
                    format!("layer {layer} merged into group {}, which is not its neighbour's", role.group);
                return Err(Error::shape("pairing plan", "groups of neighbouring layers", have));
            };
            group.layers.push(layer);
        }
        groups.retain(|group| group.layers.len() > 1);
        for group in &mut groups {
            check_arc(&options.merge, group.layers.len())?;
            let Some(shape) = group.layers.first().and_then(|&layer| layers.get(layer)) else { continue };
            group.run_tokens = run_tokens(shape, group.layers.len())?;
            let page = Shape::new(1, shape.kv_heads, PAGE, shape.key_dim.max(shape.value_dim))?;
            let mode = options.merge.mode;
            let members = if mode == Mode::Compat { 2 } else { group.layers.len() };
            Layout::group(page, shape.dtype, mode, members)?;
        }
        let ledger = Self { layers, plan, groups, options, sequences: Vec::new() };
        ledger.check_groups()?;
        Ok(ledger)
    }

    /// Checks that the members of every group have one shape.
    fn check_groups(&self) -> Result<()> {
        for group in &self.groups {
            let mut shapes = group.layers.iter().filter_map(|&layer| Some((layer, self.layers.get(layer)?)));
            let Some((first, shape)) = shapes.next() else { continue };
            if let Some((layer, other)) = shapes.find(|(_, other)| *other != shape) {
                let want = format!("{shape:?} as layer {first}, with which it is folded");
                return Err(Error::shape(format!("layer {layer}"), want, format_args!("{other:?}")));
            }
        }
        Ok(())
    }

    /// The group of a layer and its place in it; `None` for a layer that stands alone.
    pub(crate) fn member(&self, layer: usize) -> Option<(usize, usize)> {
        self.groups.iter().enumerate().find_map(|(index, group)| {
            Some((index, group.layers.iter().position(|&member| member == layer)?))
        })
    }

    pub(crate) fn shape(&self, layer: usize) -> Result<LayerShape> {
        let want = || format!("less than {}", self.layers.len());
        self.layers.get(layer).copied().ok_or_else(|| Error::range("layer", want(), layer))
    }

    pub(crate) fn sequence(&self, sequence: usize) -> Result<&Sequence<S>> {
        let want = || format!("less than {}", self.sequences.len());
        self.sequences.get(sequence).ok_or_else(|| Error::range("sequence", want(), sequence))
    }

    pub(crate) fn sequence_mut(&mut self, sequence: usize) -> Result<&mut Sequence<S>> {
        self.sequence(sequence)?;
        let missing = || Error::range("sequence", "one of the cache", sequence);
        self.sequences.get_mut(sequence).ok_or_else(missing)
    }

    /// Tokens of a layer in every sequence.
    pub(crate) fn lengths(&self, layer: usize) -> Vec<usize> {
        self.sequences.iter().map(|sequence| sequence.tails.get(layer).map_or(0, Tail::end)).collect()
    }

    /// Where a step's rows go, with what is allocated for them; the ledger is not changed.
    pub(crate) fn extend<V: RowsView>(
        &self,
        layer: usize,
        step: &Step<'_, V>,
        make: &mut impl MakeBlock<S::Block>,
    ) -> Result<Extended<S>> {
        let counts = step.check(&self.shape(layer)?, self.sequences.len())?;
        for (index, (sequence, &count)) in self.sequences.iter().zip(&counts).enumerate() {
            self.check_order(layer, index, sequence, count)?;
            let have = sequence.tails.get(layer).map_or(0, Tail::room);
            if self.options.fixed && count > have {
                let what = format!("layer {layer}, sequence {index}");
                return Err(Error::Capacity { what, need: count, have });
            }
        }
        let mut extended = Extended { tails: Vec::new(), writes: Vec::new() };
        for (index, (sequence, count)) in self.sequences.iter().zip(counts).enumerate() {
            let Some(tail) = sequence.tails.get(layer) else { continue };
            let (tail, writes) = tail.extended(count, make)?;
            extended.tails.push(tail);
            extended.writes.extend(writes.into_iter().map(|write| (index, write)));
        }
        Ok(extended)
    }

    /// Checks that a layer's rows come after those of the group's lower layers, and as many.
    fn check_order(&self, layer: usize, index: usize, sequence: &Sequence<S>, count: usize) -> Result<()> {
        let Some((group, member)) = self.member(layer).filter(|_| count > 0) else { return Ok(()) };
        let end = |layer: usize| sequence.tails.get(layer).map_or(0, Tail::end);
        let layers = self.groups.get(group).map_or(&[][..], |group| &group.layers);
        let (lowest, highest) = (layers.first().copied().unwrap_or(layer), layers.last().copied());
        let refuse = |want: String, have: String| {
            Err(Error::Order { what: format!("layer {layer}, sequence {index}"), want, have })
        };
        let (mine, lower) = (end(layer), end(lowest));
        if member == 0 {
            let upper = highest.map_or(mine, end);
            let late = layers.iter().find(|&&other| end(other) < mine).or(highest.as_ref()).copied();
            return if upper == mine {
                Ok(())
            } else {
                let late = late.unwrap_or(layer);
                refuse(
                    format!("the {} tokens of layer {late} first", mine - end(late)),
                    format!("{count} more"),
                )
            };
        }
        let below = layers.get(member - 1).copied().unwrap_or(lowest);
        if end(below) <= mine {
            return refuse(format!("the tokens of layer {below} first"), format!("{count} tokens"));
        }
        if mine + count != lower {
            return refuse(format!("{} tokens, as layer {lowest} took", lower - mine), format!("{count}"));
        }
        Ok(())
    }

    /// Takes the tails of an append.
    pub(crate) fn take(&mut self, layer: usize, tails: Vec<Tail<S::Block>>) {
        for (sequence, tail) in self.sequences.iter_mut().zip(tails) {
            if let Some(place) = sequence.tails.get_mut(layer) {
                *place = tail;
            }
        }
    }

    /// Where every token of a layer stands, sequence by sequence, in order.
    pub(crate) fn segments<'a>(&'a self, layer: usize) -> Vec<(Segment, Held<'a, S>)> {
        let member = self.member(layer);
        let mut segments = Vec::new();
        for (index, sequence) in self.sequences.iter().enumerate() {
            let segment = |start, tokens| Segment { sequence: index, start, tokens };
            if let Some((group, member)) = member.and_then(|(g, m)| Some((sequence.groups.get(g)?, m))) {
                let held = |run: &'a Run<S>| (segment(run.start, run.tokens), Held::Folded(run, member));
                segments.extend(group.runs.iter().map(held));
            }
            let Some(tail) = sequence.tails.get(layer) else { continue };
            let held = tail.pieces().map(|p| (segment(p.start, p.tokens), Held::Raw(p.rows, p.at)));
            segments.extend(held);
        }
        segments
    }

    /// What can be folded now, and is not on its way.
    pub(crate) fn ranges(&self) -> Vec<FoldRange> {
        let sequences = self.sequences.iter().enumerate();
        let all = sequences.flat_map(|(s, sequence)| (0..self.groups.len()).map(move |g| (s, sequence, g)));
        all.flat_map(|(s, sequence, g)| self.ranges_of(s, sequence, g)).collect()
    }

    fn ranges_of(&self, index: usize, sequence: &Sequence<S>, group: usize) -> Vec<FoldRange> {
        let (Some(members), Some(state)) = (self.groups.get(group), sequence.groups.get(group)) else {
            return Vec::new();
        };
        let tails = || members.layers.iter().filter_map(|&layer| sequence.tails.get(layer));
        let end = tails().map(Tail::end).min().unwrap_or(0).saturating_sub(self.options.recent);
        let waits = self.options.waits_for_prefill() && state.cuts.is_none();
        if waits || self.options.merge.mode == Mode::Compat {
            return Vec::new();
        }
        let mut ranges = Vec::new();
        let mut start = state.planned;
        let end = start + end.saturating_sub(start) / PAGE * PAGE;
        while start < end {
            let blocks = tails().filter_map(|tail| tail.pieces_of(start, end).next());
            let shortest = blocks.map(|piece| piece.start + piece.tokens).min().unwrap_or(start);
            let stop = shortest.min(state.run_limit(start, members.run_tokens)).min(end);
            // Blocks and runs begin and end with whole pages, so that a range does.
            if stop <= start {
                break;
            }
            ranges.push(FoldRange { sequence: index, group, start, tokens: stop - start });
            start = stop;
        }
        ranges
    }

    /// The block of each member that holds a range, and the range's first row there.
    pub(crate) fn blocks(&self, range: &FoldRange) -> Vec<(&Arc<S::Block>, usize)> {
        let (Some(sequence), Some(group)) =
            (self.sequences.get(range.sequence), self.groups.get(range.group))
        else {
            return Vec::new();
        };
        let piece = |&layer: &usize| {
            let tail = sequence.tails.get(layer)?;
            let piece = tail.pieces_of(range.start, range.start + range.tokens).next()?;
            Some((piece.rows, piece.at))
        };
        group.layers.iter().filter_map(piece).collect()
    }

    /// The state of a range's group.
    pub(crate) fn state(&self, range: &FoldRange) -> Option<&GroupState<S>> {
        self.sequences.get(range.sequence)?.groups.get(range.group)
    }

    /// Notes that a range is on its way to be folded.
    #[cfg(feature = "gpu")]
    pub(crate) fn plan_fold(&mut self, range: &FoldRange) {
        if let Some(state) = self.state_mut(range) {
            state.planned = state.planned.max(range.end());
        }
    }

    /// Puts a folded range in the place of its raw rows: `folds` hold the run it was joined to as well.
    pub(crate) fn fold(&mut self, range: &FoldRange, folds: [Arc<S::Fold>; 2], verdicts: [Verdict; 2]) {
        let Some(group) = self.groups.get(range.group).cloned() else { return };
        let heads = group.layers.first().and_then(|&layer| self.layers.get(layer)).map_or(1, |l| l.kv_heads);
        let Some(sequence) = self.sequences.get_mut(range.sequence) else { return };
        let Some(state) = sequence.groups.get_mut(range.group) else { return };
        let joined = state.joins(range.start, group.run_tokens).is_some();
        let before = if joined { state.runs.pop() } else { None };
        let [keys, values] = verdicts;
        let run = match before {
            Some(run) => {
                let [old_keys, old_values] = &run.verdicts;
                let verdicts = [old_keys.join(&keys, heads), old_values.join(&values, heads)].map(Arc::new);
                Run { tokens: run.tokens + range.tokens, folds, verdicts, ..run }
            }
            None => {
                let verdicts = [keys, values].map(Arc::new);
                Run { start: range.start, tokens: range.tokens, open: true, folds, verdicts }
            }
        };
        let end = run.end();
        state.runs.push(run);
        state.planned = state.planned.max(end);
        for &layer in &group.layers {
            if let Some(tail) = sequence.tails.get_mut(layer) {
                tail.fold_up_to(end);
            }
        }
    }

    #[cfg(feature = "gpu")]
    fn state_mut(&mut self, range: &FoldRange) -> Option<&mut GroupState<S>> {
        self.sequences.get_mut(range.sequence)?.groups.get_mut(range.group)
    }
}
