//! What methods would take of a model's cache, from its sizes alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::cost::{Cost, Tokens};
use super::rivals;
use super::types::{MethodFigures, PlanesRequest};
use crate::error::{Error, Result};
use crate::qjl::cache::{Coding, codec};
use crate::qjl::planes::Tables;
use crate::qjl::{Projection, ProjectionKind};
use crate::tensor::Shape;

/// Most channels of a head that any kernel takes.
const MAX_HEAD_DIM: usize = 512;
/// More than any model has, and few enough that no size overflows.
const MOST: usize = 1 << 24;

/// The sizes of a model's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Layers.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Channels of a key, and of a value.
    pub head_dim: usize,
    /// Tokens of context, of one sequence.
    pub tokens: usize,
}

/// What each of the request's codes, then `qjl` with a Gaussian projection of `head_dim` bits, `int8`, `int4`, `kivi4`
/// and `kivi2` would take of a model's cache. Arithmetic on sizes: nothing is measured and every error is `None`.
/// Means before RoPE are taken to be possible, so they cost nothing per token.
///
/// # Errors
/// [`Error::Range`] for sizes or options out of range.
pub fn estimate(model: &ModelShape, request: &PlanesRequest) -> Result<Vec<MethodFigures>> {
    let ModelShape { layers, kv_heads, head_dim, tokens } = *model;
    let sizes = [
        ("layers", layers, MOST),
        ("KV heads", kv_heads, MOST),
        ("head dimension", head_dim, MAX_HEAD_DIM),
        ("tokens", tokens, u32::MAX as usize),
    ];
    for (what, have, most) in sizes {
        if !(1..=most).contains(&have) {
            return Err(Error::range(what, format!("1 to {most}"), have));
        }
    }
    let shape = Shape { batch: 1, heads: kv_heads, tokens: 1, dim: head_dim };
    let count = Tokens::new(std::iter::once(tokens), request.sinks, request.recent);
    let whole = |mut figures: MethodFigures, table_bytes: u64, rotation_bytes: u64| {
        let all = layers as u64;
        figures.code_bytes *= all;
        figures.raw_bytes *= all;
        figures.f16_bytes *= all;
        figures.table_bytes = table_bytes * all;
        figures.rotation_bytes = rotation_bytes;
        figures.close();
        figures
    };
    let mut found = Vec::new();
    for asked in request.asked() {
        // Of a projection its size alone: drawing one takes seconds.
        let blank = match asked.coding {
            Coding::Sketch(options) => {
                let bits = options.sketch_dim(head_dim)?;
                Some(Arc::new(Projection::from_matrix(&vec![0.0; bits * head_dim], head_dim, bits)?))
            }
            _ => None,
        };
        let codec = codec(&asked.coding, [head_dim; 2], None, &BTreeMap::new(), blank.as_ref())?;
        let figures = count.figures(asked.name(), Cost::of(&codec), shape, shape);
        let tables = Tables::identity(kv_heads, head_dim).bytes() as u64;
        let tables = if codec.keeps_tables() { tables } else { 0 };
        found.push(whole(figures, tables, codec.bytes() as u64));
    }
    for (index, (name, cost)) in rivals::costs(head_dim, shape, shape).into_iter().enumerate() {
        let projection = if index == 0 {
            Projection::new(ProjectionKind::Gaussian, head_dim, head_dim, 0)?.bytes() as u64
        } else {
            0
        };
        found.push(whole(count.figures(name, cost, shape, shape), 0, projection));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qjl::planes::Preset;

    #[test]
    fn a_model_by_hand() {
        let model = ModelShape { layers: 2, kv_heads: 3, head_dim: 64, tokens: 168 };
        let request = PlanesRequest::default().presets(vec![Preset::Balanced.into()]);
        let found = estimate(&model, &request).unwrap();
        let names: Vec<&str> = found.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["balanced", "qjl", "int8", "int4", "kivi4", "kivi2"]);
        // 100 tokens coded at 3.25 bits a channel, 68 raw in f16.
        assert_eq!(found[0].code_bytes, 2 * 3 * 100 * 2 * 64 * 13 / 32);
        assert_eq!(found[0].raw_bytes, 2 * 3 * 68 * 2 * 128);
        assert_eq!(found[0].f16_bytes, 2 * 3 * 168 * 2 * 128);
        assert!(found.iter().all(|f| f.errors.weights_kl.is_none() && f.ratio.is_some()));
    }

    #[test]
    fn sizes_out_of_range_are_named() {
        let model = ModelShape { layers: 2, kv_heads: 3, head_dim: 513, tokens: 168 };
        let error = estimate(&model, &PlanesRequest::default()).unwrap_err().to_string();
        assert_eq!(error, "head dimension: wanted 1 to 512, had 513");
        let model = ModelShape { layers: 0, head_dim: 64, ..model };
        assert!(estimate(&model, &PlanesRequest::default()).unwrap_err().to_string().starts_with("layers"));
    }
}
