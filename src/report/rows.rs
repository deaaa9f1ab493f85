//! What became of every row of a pair.

use super::pair::{SpanFold, merged_rows};
use super::span::Span;
use crate::minicache::Row;
use crate::tensor::Shape;

/// The rows of a pair's keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct PairRows {
    /// Index of the layer nearer the input.
    pub lower: usize,
    /// Index of the layer above it.
    pub upper: usize,
    /// The keys.
    pub keys: RowFigures,
    /// The values.
    pub values: RowFigures,
}

/// The rows of one tensor, `[batch, heads, tokens]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RowFigures {
    /// `[batch, heads, tokens]` of a layer; `dim` is the channels of a row.
    pub shape: Shape,
    /// The cosine of the two layers' rows; NaN in padding.
    pub cosines: Vec<f32>,
    /// Whether the row is kept raw, for any cause; padding is not. Empty where nothing was folded.
    pub retained: Vec<bool>,
}

impl RowFigures {
    /// Of rows that were measured and not folded.
    pub(super) fn measured(shape: Shape, rows: &[Vec<Row>], spans: &[Span]) -> Self {
        let mut figures = Self { shape, cosines: vec![f32::NAN; shape.rows()], retained: Vec::new() };
        for (rows, span) in rows.iter().zip(spans) {
            let cosines = rows.iter().map(|row| row.cosine);
            span.scatter(shape, cosines, &mut figures.cosines);
        }
        figures
    }

    /// Of rows that were folded.
    pub(super) fn folded(shape: Shape, folds: &[SpanFold], spans: &[Span]) -> Self {
        let (mut cosines, mut retained) = (vec![f32::NAN; shape.rows()], vec![false; shape.rows()]);
        for (fold, span) in folds.iter().zip(spans) {
            span.scatter(shape, fold.rows.iter().map(|row| row.cosine), &mut cosines);
            span.scatter(shape, merged_rows(fold).into_iter().map(|merged| !merged), &mut retained);
        }
        Self { shape, cosines, retained }
    }
}
