//! Compat: a merged layer's new rows are rebuilt at once and stand in its raw blocks as the original gives them back.

use std::sync::Arc;

use super::super::cache::{Decided, FoldRange};
use super::folds::{Known, Verdicts};
use super::{Job, MiniCache};
use crate::cache::Step;
use crate::cache::tail::{Tail, Write};
use crate::error::Result;
use crate::gpu::block::{RawBlock, copy, room};
use crate::gpu::{KvView, ReadBackPrepared, Recording};
use crate::minicache::gpu::Decided as DecidedRows;

/// Rows that are being rebuilt, whose causes are yet to be asked for.
pub(super) struct Rebuilt {
    range: FoldRange,
    layer: usize,
    decided: [DecidedRows; 2],
    read_back: ReadBackPrepared,
}

impl Rebuilt {
    /// Records the read-back of the causes.
    pub(super) fn record(self, encoder: &mut wgpu::CommandEncoder) -> Job {
        let verdicts = Verdicts::new(self.decided, self.read_back.record(encoder));
        Job { range: self.range, rebuilt: Some(self.layer), verdicts }
    }
}

impl MiniCache {
    /// Records the rebuilding of what an append has put into a merged layer's blocks; nothing for other layers.
    pub(super) fn rebuild(
        &self,
        recording: &mut Recording<'_>,
        layer: usize,
        step: &Step<'_, KvView>,
        writes: &[(usize, Write<RawBlock>)],
    ) -> Result<Vec<Rebuilt>> {
        let Some((group, _)) = self.ledger.member(layer).filter(|&(_, member)| member > 0) else {
            return Ok(Vec::new());
        };
        let layers = self.ledger.groups.get(group).map_or(&[][..], |group| &group.layers);
        let primary = layers.first().copied().unwrap_or(layer);
        let mut all = Vec::new();
        for (index, start) in self.ledger.lengths(layer).into_iter().enumerate() {
            let mine: Vec<_> = writes.iter().filter(|(s, _)| *s == index).map(|(_, write)| write).collect();
            let tokens = mine.iter().map(|write| write.count).sum();
            let Some(lower) = self.ledger.sequence(index)?.tails.get(primary).filter(|_| tokens > 0) else {
                continue;
            };
            let range = FoldRange { sequence: index, group, start, tokens };
            let [keys, values] = [step.keys, step.values].map(|view| view.part(index, 0, tokens));
            let decided = [
                self.rebuild_part(recording, &range, 0, lower, &keys, &mine)?,
                self.rebuild_part(recording, &range, 1, lower, &values, &mine)?,
            ];
            let read_back = Verdicts::prepare(&self.gpu, &decided)?;
            all.push(Rebuilt { range, layer, decided, read_back });
        }
        Ok(all)
    }

    fn rebuild_part(
        &self,
        recording: &mut Recording<'_>,
        range: &FoldRange,
        part: usize,
        lower: &Tail<RawBlock>,
        upper: &KvView,
        writes: &[&Write<RawBlock>],
    ) -> Result<DecidedRows> {
        let options = self.ledger.options.merge_at(range.start);
        let gathered = room(&self.gpu, "lower rows", upper.shape(), upper.dtype())?;
        for piece in lower.pieces_of(range.start, range.end()) {
            let Some(from) = piece.rows.views(piece.at, piece.tokens).into_iter().nth(part) else { continue };
            copy(recording, &self.gpu, &from, &gathered.part(0, piece.start - range.start, piece.tokens))?;
        }
        let decided = self.ops.decide(recording, [&gathered, upper], &options, None)?;
        let folded = self.ops.merge(recording, &decided, decided.layout().compat_totals())?;
        let rebuilt = room(&self.gpu, "rebuilt rows", upper.shape(), upper.dtype())?;
        self.ops.restore(recording, &folded, 1, &rebuilt)?;
        for write in writes {
            let Some(to) = write.rows.views(write.at, write.count).into_iter().nth(part) else { continue };
            copy(recording, &self.gpu, &rebuilt.part(0, write.from, write.count), &to)?;
        }
        Ok(decided)
    }

    /// Takes the causes of rebuilt rows.
    pub(super) fn take_rebuilt(&mut self, range: &FoldRange, layer: usize, known: Vec<Known>) -> Result<()> {
        let verdicts: Vec<_> = known.into_iter().map(|known| Arc::new(known.verdict())).collect();
        let (sequence, Ok(verdicts)) = (self.ledger.sequence_mut(range.sequence)?, verdicts.try_into())
        else {
            return Ok(());
        };
        if let Some(decided) = sequence.decided.get_mut(layer) {
            decided.push(Decided { start: range.start, tokens: range.tokens, verdicts });
        }
        Ok(())
    }
}
