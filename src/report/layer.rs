//! Figures of a layer under QJL and the baselines, from what twins or kernels found.

use super::queries::{Queries, Slice, is_finite};
use super::types::{Baselines, KeyFigures, LayerFigures, LayerShape, QjlFigures};
use super::work::Sketch;
use crate::attention;
use crate::capture::Layer;
use crate::error::Result;
use crate::metrics::{self, Correlation, RelativeError};
use crate::qjl::{QuantizedValues, cpu::dequantize_values};
use crate::tensor::{DType, Shape, Tensor, TensorView};

/// What some store makes of a slice of queries.
pub(super) struct Attended {
    /// Scores, `[batch, query_heads, queries, tokens]`.
    pub(super) scores: Vec<f32>,
    /// Attention output, `[batch, query_heads, queries, value_dim]`.
    pub(super) output: Vec<f32>,
}

impl Attended {
    /// Exact attention over these keys and values.
    pub(super) fn exact(slice: &Slice<'_>, keys: &TensorView<'_>, values: &TensorView<'_>) -> Result<Self> {
        let queries = slice.queries.view();
        Ok(Self {
            scores: attention::exact_scores(&queries, keys)?,
            output: attention::exact(&queries, keys, values, Some(&slice.lengths), &slice.options)?,
        })
    }
}

/// The fidelity of one store over all slices.
#[derive(Default)]
struct Fidelity {
    scores: Correlation,
    output: RelativeError,
}

impl Fidelity {
    /// Adds the scores of every finite key that a query sees, and every output. `finite` has one entry for each key row.
    fn add(&mut self, slice: &Slice<'_>, exact: &Attended, found: &Attended, finite: &[bool]) {
        let rows = slice.queries.shape().rows();
        for (row, first, tokens) in slice.rows() {
            let part = |numbers| row_of(numbers, rows, row);
            let [x, y] = [exact, found].map(|all| part(&all.scores).get(tokens.clone()).unwrap_or_default());
            let seen = finite.get(first + tokens.start..first + tokens.end).unwrap_or_default();
            let pairs = x.iter().zip(y).zip(seen).filter(|(_, seen)| **seen);
            pairs.for_each(|((x, y), _)| self.scores.add(*x, *y));
            self.output.add(part(&exact.output), part(&found.output));
        }
    }

    fn fill(&self, figures: &mut KeyFigures) {
        figures.score_correlation = self.scores.value();
        figures.output_relative_error = self.output.value();
    }
}

/// One of `rows` rows of equal length.
fn row_of(numbers: &[f32], rows: usize, row: usize) -> &[f32] {
    let width = numbers.len() / rows.max(1);
    numbers.get(row * width..(row + 1) * width).unwrap_or_default()
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

/// Fills in what is measured on the queries, no tensor over them being larger than `slice_bytes`.
pub(super) async fn measure(
    queries: &Queries<'_>,
    values: &Tensor,
    sketch: &Sketch<'_>,
    slice_bytes: u64,
    into: &mut LayerFigures,
) -> Result<()> {
    let (keys, raw) = (queries.keys.view(), values.view());
    let finite: Vec<bool> = keys.shape().iter_rows().map(|(b, h, t)| is_finite(&keys, b, h, t)).collect();
    let baselines = [coded(&keys, metrics::int8_row)?, coded(&keys, metrics::int4_row)?];
    let values = decoded(sketch.values())?;
    // Scores, queries made ready (shaders/planes/sketch.wgsl), four of them together, and outputs with two sums and padding.
    let groups = into.qjl.sketch_dim.div_ceil(32);
    let ready = ((32 + 8 + 2) * groups + 5) * queries.group.next_multiple_of(4) / queries.group.max(1);
    let width = keys.shape().tokens.max(ready).max(raw.shape().dim + 5);
    let [mut qjl, mut int8, mut int4] = [(); 3].map(|()| Fidelity::default());
    for slice in queries.slices(width, slice_bytes) {
        let slice = slice?;
        let exact = Attended::exact(&slice, &keys, &raw)?;
        qjl.add(&slice, &exact, &sketch.attend(&slice).await?, &finite);
        for (keys, fidelity) in baselines.iter().zip([&mut int8, &mut int4]) {
            fidelity.add(&slice, &exact, &Attended::exact(&slice, &keys.view(), &values.view())?, &finite);
        }
    }
    let Baselines { int8: eight, int4: four } = &mut into.baselines;
    qjl.fill(&mut into.qjl.figures);
    int8.fill(eight);
    int4.fill(four);
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
