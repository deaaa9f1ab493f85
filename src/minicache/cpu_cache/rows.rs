//! A layer's rows on the host, wherever they stand.

use std::ops::Range;
use std::sync::Arc;

use super::super::cache::{Held, Host, Ledger};
use super::super::cpu::{read_bytes, read_row};
use crate::attention::Rows;
use crate::cache::{LayerShape, Segment};
use crate::error::Result;
use crate::qjl::planes::Rotation;
use crate::tensor::{Shape, Tensor, decode};

/// Keys or values of one layer, wherever they stand.
pub(super) struct LayerRows<'a> {
    shape: LayerShape,
    part: usize,
    /// Of coded directions.
    rotation: Option<Arc<Rotation>>,
    /// Of every sequence, in order of their tokens.
    sequences: Vec<Vec<(Segment, Held<'a, Host>)>>,
}

impl<'a> LayerRows<'a> {
    pub(super) fn new(ledger: &'a Ledger<Host>, layer: usize, part: usize) -> Self {
        let shape = ledger.layers.get(layer).copied();
        let shape = shape.unwrap_or(LayerShape::new(0, 0, crate::DType::F32));
        let mut sequences: Vec<Vec<_>> = ledger.sequences.iter().map(|_| Vec::new()).collect();
        let mut folded = false;
        for (segment, held) in ledger.segments(layer) {
            folded |= matches!(held, Held::Folded(..));
            if let Some(sequence) = sequences.get_mut(segment.sequence) {
                sequence.push((segment, held));
            }
        }
        let planes = ledger.options.merge.planes.filter(|_| folded);
        let dim = shape.dims().get(part).copied().unwrap_or_default();
        let rotation = planes.map(|planes| Rotation::shared(dim, planes.rounds, planes.seed));
        Self { shape, part, rotation, sequences }
    }

    /// Where a token stands, and its row there.
    fn find(&self, sequence: usize, token: usize) -> Option<(&Held<'a, Host>, usize)> {
        let segments = self.sequences.get(sequence)?;
        let after = segments.partition_point(|(segment, _)| segment.start <= token);
        let (segment, held) = segments.get(after.checked_sub(1)?)?;
        let row = token - segment.start;
        (row < segment.tokens).then_some((held, row))
    }

    fn bytes(&self, sequence: usize, head: usize, token: usize, bytes: &mut Vec<u8>) {
        match self.find(sequence, token) {
            Some((Held::Raw(block, at), row)) => {
                bytes.extend_from_slice(block.row(self.part, head, at + row));
            }
            Some((Held::Folded(run, member), row)) => {
                if let Some(fold) = run.folds.get(self.part) {
                    read_bytes(fold, (0, head, row), *member, self.rotation.as_deref(), bytes);
                }
            }
            None => bytes.resize(bytes.len() + self.width() * self.shape.dtype.size(), 0),
        }
    }

    /// Tokens of one sequence, `[1, kv_heads, tokens, dim]`.
    pub(super) fn tensor(&self, sequence: usize, tokens: Range<usize>) -> Result<Tensor> {
        let shape = Shape::new(1, self.shape.kv_heads, tokens.len(), self.width())?;
        let mut bytes = Vec::with_capacity(shape.bytes(self.shape.dtype));
        for head in 0..self.shape.kv_heads {
            tokens.clone().for_each(|token| self.bytes(sequence, head, token, &mut bytes));
        }
        Tensor::new(bytes, self.shape.dtype, shape)
    }

    /// All tokens of all sequences.
    pub(super) fn restore(&self) -> Result<Tensor> {
        let ends = self.sequences.iter().map(|s| s.last().map_or(0, |(s, _)| s.start + s.tokens));
        let tokens = ends.max().unwrap_or(0);
        let shape = Shape::new(self.sequences.len(), self.shape.kv_heads, tokens, self.width())?;
        let mut bytes = Vec::with_capacity(shape.bytes(self.shape.dtype));
        shape.iter_rows().for_each(|(b, h, t)| self.bytes(b, h, t, &mut bytes));
        Tensor::new(bytes, self.shape.dtype, shape)
    }
}

impl Rows for LayerRows<'_> {
    fn width(&self) -> usize {
        let [key_dim, value_dim] = self.shape.dims();
        if self.part == 0 { key_dim } else { value_dim }
    }

    fn read(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32> {
        match self.find(batch, token)? {
            (Held::Raw(block, at), index) => {
                decode(block.row(self.part, head, at + index), self.shape.dtype, row);
                if row.iter().all(|x| x.is_finite()) {
                    return Some(1.0);
                }
                row.fill(0.0);
                None
            }
            (Held::Folded(run, member), index) => {
                let fold = run.folds.get(self.part)?;
                read_row(fold, (0, head, index), *member, self.rotation.as_deref(), row)
            }
        }
    }
}
