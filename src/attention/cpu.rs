//! Exact attention on the CPU in f32: the twin of `shaders/attention/exact.wgsl`.

use super::{AttendOptions, Geometry, Rows, attend_rows, score_rows};
use crate::error::Result;
use crate::tensor::TensorView;

/// Exact attention over raw rows in f32: what every folded cache is compared with.
///
/// `queries` `[batch, query_heads, queries, key_dim]`, `keys` `[batch, kv_heads, tokens, key_dim]`, `values`
/// `[batch, kv_heads, tokens, value_dim]`, `lengths` one per sequence (default: all tokens). Returns
/// `[batch, query_heads, queries, value_dim]`. How many rows were masked: [`non_finite_rows`].
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::HeadRatio`](crate::Error::HeadRatio) or [`Error::Range`](crate::Error::Range) when shapes, lengths or options do not fit.
pub fn exact(
    queries: &TensorView<'_>,
    keys: &TensorView<'_>,
    values: &TensorView<'_>,
    lengths: Option<&[u32]>,
    options: &AttendOptions<'_>,
) -> Result<Vec<f32>> {
    let g = Geometry::of(queries.shape(), keys.shape())?;
    g.check_values(values.shape())?;
    attend_rows(g, queries, keys, values, lengths, options)
}

/// Exact scores `q . k`, neither scaled nor masked: `[batch, query_heads, queries, tokens]`. A row that holds a
/// non-finite number scores 0.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) or [`Error::HeadRatio`](crate::Error::HeadRatio) when the shapes do not fit.
pub fn exact_scores(queries: &TensorView<'_>, keys: &TensorView<'_>) -> Result<Vec<f32>> {
    score_rows(Geometry::of(queries.shape(), keys.shape())?, queries, keys)
}

/// Rows that hold a non-finite number.
#[must_use]
pub fn non_finite_rows(rows: &TensorView<'_>) -> usize {
    let mut row = vec![0.0; rows.shape().dim];
    rows.shape().iter_rows().filter(|&(b, h, t)| rows.read(b, h, t, &mut row).is_none()).count()
}
