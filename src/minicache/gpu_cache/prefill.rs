//! The end of a prefill: rules that look at all of its rows decide once, on the device.

use std::sync::Arc;

use super::super::folded::Layout;
use super::super::gpu::{ROW_BYTES, Rows};
use super::MiniCache;
use super::folds::stack;
use crate::cache::tail::Tail;
use crate::error::Result;
use crate::gpu::block::RawBlock;
use crate::gpu::{Gpu, KvView, Recording};
use crate::tensor::Shape;

impl MiniCache {
    /// Records the end of a sequence's prefill: rules that look at all of its rows ([`Range`](crate::minicache::Retention::Range),
    /// [`Fraction`](crate::minicache::Retention::Fraction)) decide here, once, and nothing is folded before. Other rules do not
    /// need it.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence, or its prefill has ended before;
    /// [`Error::Limit`](crate::Error::Limit), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn end_prefill(&mut self, encoder: &mut wgpu::CommandEncoder, sequence: usize) -> Result<()> {
        let tokens = self.ledger.prefill_tokens(sequence)?;
        let waiting = self.ledger.options.waits_for_prefill();
        let (mut measures, mut rules) = (Recording::new(&self.gpu), Recording::new(&self.gpu));
        let mut gathers = Vec::new();
        let mut all = Vec::new();
        for group in self.ledger.groups.iter().filter(|_| waiting) {
            let mut cut = |part: usize| {
                let gather = self.measure(&mut measures, sequence, &group.layers, part, tokens)?;
                let cuts = self.ops.threshold(&mut rules, &gather.rows, &self.ledger.options.merge)?;
                Ok::<_, crate::Error>((gather, Arc::new(cuts)))
            };
            let ((keys, key_cut), (values, value_cut)) = (cut(0)?, cut(1)?);
            gathers.extend([keys, values]);
            all.push(Some([key_cut, value_cut]));
        }
        measures.record(encoder);
        gathers.iter().for_each(|gather| gather.record(encoder));
        rules.record(encoder);
        self.ledger.freeze(sequence, tokens, all)
    }

    /// Measures the rows of a sequence block by block.
    fn measure(
        &self,
        recording: &mut Recording<'_>,
        sequence: usize,
        layers: &[usize],
        part: usize,
        tokens: usize,
    ) -> Result<Gather> {
        let shape = self.ledger.shape(layers.first().copied().unwrap_or_default())?;
        let dim = shape.dims().get(part).copied().unwrap_or(shape.key_dim);
        let whole = Shape::new(1, shape.kv_heads, tokens, dim)?;
        let options = &self.ledger.options.merge;
        let layout = Layout::group(whole, shape.dtype, options.mode, layers.len())?;
        let mut gather = Gather::new(&self.gpu, layout)?;
        let state = self.ledger.sequence(sequence)?;
        let tails: Vec<&Tail<RawBlock>> = layers.iter().filter_map(|&layer| state.tails.get(layer)).collect();
        let mut start = 0;
        while start < tokens {
            let pieces: Vec<_> =
                tails.iter().filter_map(|tail| tail.pieces_of(start, tokens).next()).collect();
            // Blocks of layers that take the same rows begin and end together; the shortest would do as well.
            let Some(count) = pieces.iter().map(|piece| piece.tokens).min() else { break };
            let views = pieces.iter().filter_map(|p| p.rows.views(p.at, count).into_iter().nth(part));
            let views: Vec<KvView> = views.collect();
            let rows = match views.as_slice() {
                [lower, upper] => {
                    let [first, second] = [lower, upper].map(|view| (view.shape(), view.dtype()));
                    let layout = Layout::new(first, second, options.mode)?;
                    self.ops.similarity(recording, &layout, lower, upper, options)?
                }
                _ => {
                    let stacked = stack(recording, &self.gpu, &views)?;
                    self.ops.group_similarity(recording, &stacked, options)?.0
                }
            };
            gather.parts.push((rows, start, count));
            start += count;
        }
        Ok(gather)
    }
}

/// Measured rows of many blocks, to be copied into one buffer `[heads, tokens]`.
struct Gather {
    rows: Rows,
    /// Rows of a block, its first token, and its tokens.
    parts: Vec<(Rows, usize, usize)>,
}

impl Gather {
    fn new(gpu: &Gpu, layout: Layout) -> Result<Self> {
        let buffer = gpu.storage("rows", layout.shape.rows() as u64 * ROW_BYTES)?;
        Ok(Self { rows: Rows::new(gpu, layout, buffer), parts: Vec::new() })
    }

    fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        let shape = self.rows.layout().shape;
        for (rows, start, count) in &self.parts {
            for head in 0..shape.heads {
                let at = (head * shape.tokens + start) as u64 * ROW_BYTES;
                let from = (head * count) as u64 * ROW_BYTES;
                let bytes = *count as u64 * ROW_BYTES;
                encoder.copy_buffer_to_buffer(rows.buffer(), from, self.rows.buffer(), at, bytes);
            }
        }
    }
}
