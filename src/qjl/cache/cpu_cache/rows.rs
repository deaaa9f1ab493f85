//! A track's rows, raw and coded, as those that attention loops over.

#![allow(clippy::indexing_slicing, reason = "rows are as wide as the track's coder says")]

use super::super::super::planes::{Codec, Fields};
use crate::attention::Rows;
use crate::tensor::TensorView;

/// Rows of consecutive tokens.
pub(super) struct Part<'a> {
    pub(super) start: usize,
    pub(super) end: usize,
    /// The row of the first token.
    pub(super) at: usize,
    pub(super) rows: PartRows<'a>,
}

pub(super) enum PartRows<'a> {
    Raw(TensorView<'a>),
    Coded(Box<dyn Rows + 'a>),
}

/// Raw and coded rows of one sequence, in the order of their tokens. Raw numbers stand first in a row.
pub(super) struct Joined<'a> {
    pub(super) width: usize,
    pub(super) dim: usize,
    pub(super) parts: Vec<Part<'a>>,
    /// How sign planes score a key.
    pub(super) planes: Option<(&'a Codec, Fields)>,
}

impl Rows for Joined<'_> {
    fn width(&self) -> usize {
        self.width
    }

    fn read(&self, _: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32> {
        let part = self.parts.iter().find(|part| (part.start..part.end).contains(&token));
        let Some(part) = part else {
            row.fill(0.0);
            return None;
        };
        let at = part.at + token - part.start;
        match &part.rows {
            PartRows::Coded(rows) => rows.read(0, head, at, row),
            PartRows::Raw(rows) => {
                row[self.dim..].fill(0.0);
                rows.read(0, head, at, &mut row[..self.dim])
            }
        }
    }

    fn score(&self, query: &[f32], row: &[f32], weight: f32) -> f32 {
        match self.planes {
            Some((codec, fields)) => fields.score(codec, query, row),
            None => weight * crate::attention::dot(query, row),
        }
    }
}
