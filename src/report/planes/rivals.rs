//! What sign planes are compared with, at its own bits and with the same tokens raw.

use super::cost::{Cost, Tokens};
use super::judge::{Estimate, Judge};
use super::types::{MethodFigures, PlanesRequest};
use crate::attention;
use crate::error::Result;
use crate::metrics::{INT4_GROUP, asymmetric, int4_bits, int8_bits, int8_row};
use crate::report::layer::{decoded, row_bytes};
use crate::report::planes::LayerSketch;
use crate::report::work::At;
use crate::tensor::{DType, Shape, Tensor};

/// Tokens that share the scale and zero of a key's channel.
const TOKEN_GROUP: usize = 32;

/// What `qjl`, `int8`, `int4`, `kivi4` and `kivi2` store.
pub(super) fn costs(sketch_dim: usize, keys: Shape, values: Shape) -> [(&'static str, Cost); 5] {
    let grouped = |bits: u8, dim| int4_bits(dim) - 4.0 + f64::from(bits);
    let row_bits = |words: usize, dim: usize| (8 * row_bytes(words)) as f64 / dim as f64;
    let cost = |key, value, shared| Cost { key, value, shared };
    let kivi = |bits: u8| cost(f64::from(bits), grouped(bits, values.dim), Some((TOKEN_GROUP, 32.0)));
    let int8_values = row_bits(values.dim.div_ceil(4), values.dim);
    [
        ("qjl", cost(row_bits(sketch_dim.div_ceil(32), keys.dim), int8_values, None)),
        ("int8", cost(int8_bits(keys.dim), int8_values, None)),
        ("int4", cost(int4_bits(keys.dim), int4_bits(values.dim), None)),
        ("kivi4", kivi(4)),
        ("kivi2", kivi(2)),
    ]
}

/// The rivals on a layer.
pub(super) fn figures(
    at: At<'_>,
    sketch_dim: usize,
    tokens: &Tokens,
    request: &PlanesRequest,
    judged: Option<(&Judge<'_>, &LayerSketch)>,
) -> Result<Vec<MethodFigures>> {
    let (keys, values) = (at.keys.shape(), at.layer.values.shape());
    let costs = costs(sketch_dim, keys, values);
    let mut all = Vec::with_capacity(costs.len());
    for (name, cost) in costs {
        let mut figures = tokens.figures(name, cost, keys, values);
        figures.close();
        if let Some((judge, sketch)) = judged {
            let (scores, values) = estimate(name, at, request.sinks as usize, judge, sketch)?;
            let estimate = Estimate { scores: &scores, values: &values, output: None };
            figures.errors = judge.errors(&estimate, request.recent);
            figures.errors_without_recent = judge.errors(&estimate, 0);
        }
        all.push(figures);
    }
    Ok(all)
}

/// Scores of every token and values as a rival has them.
fn estimate(
    name: &str,
    at: At<'_>,
    sinks: usize,
    judge: &Judge<'_>,
    sketch: &LayerSketch,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let values =
        |bits| rows(&at.layer.values, |row| row.chunks_mut(INT4_GROUP).for_each(|g| asymmetric(g, bits)));
    let keys = match name {
        "int8" => rows(at.keys, int8_row),
        "int4" => rows(at.keys, |row| row.chunks_mut(INT4_GROUP).for_each(|g| asymmetric(g, 4))),
        "kivi4" => by_channel(at.keys, sinks, 4),
        "kivi2" => by_channel(at.keys, sinks, 2),
        _ => return Ok((sketch.scores.clone(), decoded(&sketch.values)?.view().to_f32())),
    };
    let keys = Tensor::from_f32(&keys, DType::F32, at.keys.shape())?;
    let scores = attention::exact_scores(&judge.asked(), &keys.view())?;
    let values = match name {
        "int8" => decoded(&sketch.values)?.view().to_f32(),
        "kivi2" => values(2),
        _ => values(4),
    };
    Ok((scores, values))
}

/// Every row after a code.
fn rows(tensor: &Tensor, code: impl FnMut(&mut [f32])) -> Vec<f32> {
    let mut numbers = tensor.view().to_f32();
    numbers.chunks_mut(tensor.shape().dim.max(1)).for_each(code);
    numbers
}

/// Keys in codes per channel, groups of tokens from the first that is no sink (KIVI, section 3).
fn by_channel(keys: &Tensor, sinks: usize, bits: u8) -> Vec<f32> {
    let shape = keys.shape();
    let mut numbers = keys.view().to_f32();
    let mut group = Vec::with_capacity(TOKEN_GROUP);
    for head in numbers.chunks_mut((shape.tokens * shape.dim).max(1)) {
        let coded = head.get_mut(sinks * shape.dim..).unwrap_or_default();
        for tokens in coded.chunks_mut((TOKEN_GROUP * shape.dim).max(1)) {
            for channel in 0..shape.dim {
                group.clear();
                group.extend(tokens.iter().skip(channel).step_by(shape.dim));
                asymmetric(&mut group, bits);
                let column = tokens.iter_mut().skip(channel).step_by(shape.dim);
                column.zip(&group).for_each(|(x, code)| *x = *code);
            }
        }
    }
    numbers
}
