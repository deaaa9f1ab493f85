//! Figures of a layer under QJL and the baselines, from what twins or kernels found.

use super::types::{Baselines, KeyFigures, LayerFigures, LayerShape, QjlFigures};
use crate::attention::{self, AttendOptions};
use crate::capture::{Capture, Layer};
use crate::error::Result;
use crate::metrics::{self, Correlation, RelativeError};
use crate::qjl::{QuantizedValues, cpu::dequantize_values};
use crate::tensor::{DType, Shape, Tensor, TensorView};

/// What an engine found of a layer's sketch on the captured queries.
pub(super) struct LayerSketch {
    /// Estimated scores, `[batch, query_heads, queries, tokens]`.
    pub(super) scores: Vec<f32>,
    /// Attention output, `[batch, query_heads, queries, value_dim]`.
    pub(super) output: Vec<f32>,
    /// The values that attention read.
    pub(super) values: QuantizedValues,
}

/// How a layer's captured queries attend.
pub(super) struct Queries<'a> {
    pub(super) queries: &'a Tensor,
    pub(super) keys: &'a Tensor,
    /// Of each sequence, the position after its last query: what lies further on no query sees.
    pub(super) lengths: Vec<u32>,
    pub(super) options: AttendOptions<'static>,
    /// Of each sequence, the queries that stand on tokens and not on padding.
    real: Vec<usize>,
}

impl<'a> Queries<'a> {
    /// The queries of a layer; `None` where there is nothing to attend.
    pub(super) fn of(capture: &'a Capture, index: usize, keys: &'a Tensor) -> Option<Self> {
        let queries = capture.layers.get(index)?.queries.as_ref()?;
        if queries.shape().elements() == 0 || keys.shape().elements() == 0 {
            return None;
        }
        let sequences = (0..capture.batch()).map(|sequence| {
            let positions = capture.query_positions(index, sequence)?;
            let real = capture.length(sequence).saturating_sub(positions.start).min(positions.len());
            Some((u32::try_from(positions.end).ok()?, real))
        });
        let (lengths, real) = sequences.collect::<Option<Vec<_>>>()?.into_iter().unzip();
        let mut options = AttendOptions::default().causal(true);
        options.scale = capture.info.attn_scale;
        options.window = capture.info.sliding_window.get(index).copied().flatten();
        Some(Self { queries, keys, lengths, options, real })
    }

    /// Every captured query, as `(batch, head, query)`, with its row among all, if it stands on a token and is finite.
    pub(super) fn rows(&self) -> impl Iterator<Item = (usize, (usize, usize, usize))> {
        let view = self.queries.view();
        let real = |&(_, (b, h, i)): &(usize, (usize, usize, usize))| {
            self.real.get(b).is_some_and(|&real| i < real) && is_finite(&view, b, h, i)
        };
        let rows: Vec<_> = self.queries.shape().iter_rows().enumerate().filter(real).collect();
        rows.into_iter()
    }

    /// Exact attention over these keys and values.
    pub(super) fn attend(&self, keys: &TensorView<'_>, values: &TensorView<'_>) -> Result<Vec<f32>> {
        attention::exact(&self.queries.view(), keys, values, Some(&self.lengths), &self.options)
    }

    /// Correlation of scores over every key that a query sees.
    fn correlation(&self, exact: &[f32], estimated: &[f32], seen: &[bool]) -> Option<f64> {
        let mut all = Correlation::default();
        let shape = self.queries.shape();
        let keys = self.keys.shape();
        let group = attention::heads_ratio(shape.heads, keys.heads).ok()?;
        for (row, (b, h, i)) in self.rows() {
            let length = *self.lengths.get(b)? as usize;
            let visible = self.options.visible(length, shape.tokens, i);
            let scores = row * keys.tokens + visible.start..row * keys.tokens + visible.end;
            let first = keys.row(b, h / group, 0);
            let seen = seen.get(first + visible.start..first + visible.end)?;
            let pairs = exact.get(scores.clone())?.iter().zip(estimated.get(scores)?);
            pairs.zip(seen).filter(|(_, seen)| **seen).for_each(|((x, y), _)| all.add(*x, *y));
        }
        all.value()
    }

    /// Relative error of an attention output.
    fn error(&self, exact: &[f32], output: &[f32], value_dim: usize) -> Option<f64> {
        let mut error = RelativeError::default();
        for (row, _) in self.rows() {
            let numbers = row * value_dim..(row + 1) * value_dim;
            error.add(exact.get(numbers.clone())?, output.get(numbers)?);
        }
        error.value()
    }
}

fn is_finite(view: &TensorView<'_>, batch: usize, head: usize, token: usize) -> bool {
    let mut row = vec![0.0; view.shape().dim];
    view.read_row(batch, head, token, &mut row);
    row.iter().all(|x| x.is_finite())
}

/// Keys after one of the baselines, as f32.
fn coded(keys: &TensorView<'_>, code: fn(&mut [f32])) -> Result<Tensor> {
    let mut numbers = keys.to_f32();
    numbers.chunks_mut(keys.shape().dim.max(1)).for_each(code);
    Tensor::from_f32(&numbers, DType::F32, keys.shape())
}

/// The values that 8-bit codes stand for; a marked row is NaN again, so that attention masks it again.
pub(super) fn decoded(values: &QuantizedValues) -> Result<Tensor> {
    let mut numbers = dequantize_values(values)?;
    let rows = numbers.chunks_mut(values.shape.dim.max(1)).zip(&values.scale);
    rows.filter(|(_, scale)| !scale.is_finite()).for_each(|(row, _)| row.fill(f32::NAN));
    Tensor::from_f32(&numbers, DType::F32, values.shape)
}

/// Fills in what is measured on the queries.
pub(super) fn measure(
    queries: &Queries<'_>,
    values: &Tensor,
    sketch: &LayerSketch,
    into: &mut LayerFigures,
) -> Result<()> {
    let keys = queries.keys.view();
    let value_dim = values.shape().dim;
    let seen: Vec<bool> = keys.shape().iter_rows().map(|(b, h, t)| is_finite(&keys, b, h, t)).collect();
    let scores = attention::exact_scores(&queries.queries.view(), &keys)?;
    let output = queries.attend(&keys, &values.view())?;
    let fill = |figures: &mut KeyFigures, estimated: &[f32], attended: &[f32]| {
        figures.score_correlation = queries.correlation(&scores, estimated, &seen);
        figures.output_relative_error = queries.error(&output, attended, value_dim);
    };
    fill(&mut into.qjl.figures, &sketch.scores, &sketch.output);
    let values = decoded(&sketch.values)?;
    let Baselines { int8, int4 } = &mut into.baselines;
    for (code, figures) in [(metrics::int8_row as fn(&mut [f32]), int8), (metrics::int4_row, int4)] {
        let keys = coded(&keys, code)?;
        let estimated = attention::exact_scores(&queries.queries.view(), &keys.view())?;
        fill(figures, &estimated, &queries.attend(&keys.view(), &values.view())?);
    }
    Ok(())
}

/// What needs no queries: sizes and bits. `tokens` are those of all sequences, padding left out.
pub(super) fn sizes(
    index: usize,
    layer: &Layer,
    keys: &Tensor,
    sketch_dim: usize,
    tokens: usize,
) -> LayerFigures {
    let (key_shape, value_shape) = (keys.shape(), layer.values.shape());
    let rows = (tokens * key_shape.heads) as u64;
    let raw = |shape: Shape, dtype: DType| rows * (shape.dim * dtype.size()) as u64;
    let bits =
        |bits: f64| KeyFigures { key_bits_per_channel: (rows > 0).then_some(bits), ..KeyFigures::default() };
    let key_row = row_bytes(sketch_dim.div_ceil(32));
    let sketch_bits = (8 * key_row) as f64 / key_shape.dim as f64;
    LayerFigures {
        layer: index,
        shape: LayerShape {
            kv_heads: key_shape.heads,
            query_heads: layer.query_heads(),
            key_dim: key_shape.dim,
            value_dim: value_shape.dim,
            tokens: layer.tokens(),
        },
        bytes: raw(key_shape, keys.dtype()) + raw(value_shape, layer.values.dtype()),
        qjl: QjlFigures {
            figures: bits(sketch_bits),
            sketch_dim,
            key_bytes: rows * key_row,
            value_bytes: rows * row_bytes(value_shape.dim.div_ceil(4)),
        },
        baselines: Baselines {
            int8: bits(metrics::int8_bits(key_shape.dim)),
            int4: bits(metrics::int4_bits(key_shape.dim)),
        },
    }
}

/// Bytes of a coded row: its words and one f16.
pub(super) const fn row_bytes(words: usize) -> u64 {
    4 * words as u64 + 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qjl::{KeyScale, Projection, ProjectionKind, cpu};

    #[test]
    fn bytes_of_codes_are_those_that_exist() {
        let shape = Shape::new(2, 3, 5, 70).unwrap();
        let numbers = vec![1.0; shape.elements()];
        let keys = Tensor::from_f32(&numbers, DType::F16, shape).unwrap();
        let layer = Layer::new(keys.clone(), keys.clone());
        let figures = sizes(0, &layer, &keys, 90, 10);
        let projection = Projection::new(ProjectionKind::Gaussian, 70, 90, 1).unwrap();
        let sketch = cpu::quantize(&keys.view(), &projection, KeyScale::Norm).unwrap();
        assert_eq!(figures.qjl.key_bytes, sketch.bytes() as u64);
        assert_eq!(figures.qjl.value_bytes, cpu::quantize_values(&keys.view()).unwrap().bytes() as u64);
        assert_eq!(figures.bytes, 2 * keys.bytes().len() as u64);
        assert_eq!(figures.qjl.figures.key_bits_per_channel, Some(112.0 / 70.0));
        assert_eq!(sizes(0, &layer, &keys, 90, 0).qjl.figures.key_bits_per_channel, None);
    }
}
