//! How each layer's rows are coded: one codec for all layers that are alike.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::Projection;
use super::super::planes::{Codec, PlanesOptions, Sketch};
use super::options::{CacheOptions, Coding, SketchOptions};
use crate::cache::LayerShape;
use crate::error::{Error, Result};
use crate::tensor::Shape;

/// The codecs of a cache, and which of them each layer has.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Coders {
    pub(crate) all: Vec<Codec>,
    of: Vec<usize>,
}

impl Coders {
    /// Makes what these layers need; `matrices`, `[n, n]` by `n`, take the place of drawn rotations.
    pub(crate) fn new(
        layers: &[LayerShape],
        options: &CacheOptions,
        matrices: &BTreeMap<usize, Vec<f32>>,
    ) -> Result<Self> {
        let (mut all, mut of): (Vec<Codec>, _) = (Vec::new(), Vec::with_capacity(layers.len()));
        for (index, layer) in layers.iter().enumerate() {
            let rope = options.layer_rope(index);
            let fits =
                |codec: &Codec| [codec.key_dim(), codec.value_dim()] == layer.dims() && codec.rope() == rope;
            let codec = match all.iter().position(fits) {
                Some(codec) => codec,
                None => {
                    all.push(codec(layer, options, index, matrices)?);
                    all.len() - 1
                }
            };
            of.push(codec);
        }
        let coders = Self { all, of };
        coders.check_tables(layers, options)?;
        Ok(coders)
    }

    /// The codec of a layer.
    pub(crate) fn get(&self, layer: usize) -> Result<&Codec> {
        let missing = || Error::range("layer", format!("below {}", self.of.len()), layer);
        self.index(layer).and_then(|index| self.all.get(index)).ok_or_else(missing)
    }

    /// Which codec a layer has.
    pub(crate) fn index(&self, layer: usize) -> Option<usize> {
        self.of.get(layer).copied()
    }

    /// Checks that calibrated tables are one set for each layer's keys.
    fn check_tables(&self, layers: &[LayerShape], options: &CacheOptions) -> Result<()> {
        let Some(tables) = &options.tables else { return Ok(()) };
        for (tables, layer) in tables.iter().zip(layers) {
            tables.check(Shape { batch: 1, heads: layer.kv_heads, tokens: 0, dim: layer.key_dim })?;
        }
        Ok(())
    }
}

/// Bits of one token's coded key and value of one head: words, scalars and its share of a block mean.
pub(crate) fn row_bits(codec: &Codec) -> f64 {
    codec.key_bits() * codec.key_dim() as f64 + codec.value_bits() * codec.value_dim() as f64
}

fn codec(
    layer: &LayerShape,
    options: &CacheOptions,
    index: usize,
    matrices: &BTreeMap<usize, Vec<f32>>,
) -> Result<Codec> {
    let rope = options.layer_rope(index).cloned();
    match options.coding {
        Coding::Planes(planes) => {
            // The cache itself keeps sinks and recent rows raw; whatever it codes, it codes whole.
            let planes = PlanesOptions { sinks: 0, recent: 0, ..planes };
            Codec::with_matrices(planes, layer.key_dim, layer.value_dim, rope, matrices)
        }
        Coding::Sketch(sketch) => {
            let projection = Arc::new(projection(layer, options, sketch)?);
            let sketched = Sketch { projection, scale: sketch.scale };
            Codec::sketched(sketched, sketch.centring, layer.value_dim, rope)
        }
    }
}

/// The projection that the options have, or one that is drawn.
fn projection(layer: &LayerShape, options: &CacheOptions, sketch: SketchOptions) -> Result<Projection> {
    match &options.projection {
        Some(projection) if projection.head_dim() == layer.key_dim => Ok(projection.clone()),
        Some(projection) => {
            let want = format!("for keys of {} channels", layer.key_dim);
            Err(Error::shape("projection", want, projection.head_dim()))
        }
        None => {
            let bits = sketch.sketch_dim(layer.key_dim)?;
            Projection::new(sketch.projection, layer.key_dim, bits, sketch.seed)
        }
    }
}
