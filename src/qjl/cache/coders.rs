//! How each layer's rows are coded: one codec for all layers that are alike.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::Projection;
use super::super::planes::{Codec, Sketch};
use super::options::{CacheOptions, Coding};
use super::sketch::SketchOptions;
use crate::cache::LayerShape;
use crate::error::{Error, Result};
use crate::rope::Rope;
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
        let given = options.projection.clone().map(Arc::new);
        for (index, layer) in layers.iter().enumerate() {
            let rope = options.layer_rope(index);
            let fits =
                |codec: &Codec| [codec.key_dim(), codec.value_dim()] == layer.dims() && codec.rope() == rope;
            let codec = match all.iter().position(fits) {
                Some(codec) => codec,
                None => {
                    // The cache itself keeps sinks and recent rows raw; whatever it codes, it codes whole.
                    let coding = options.coding.keeping(0, 0);
                    all.push(codec(&coding, layer.dims(), rope.cloned(), matrices, given.as_ref())?);
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

/// The codec of a coding for heads of these dimensions. `matrices`, `[n, n]` by `n`, and `projection` take the place of drawn
/// ones.
pub(crate) fn codec(
    coding: &Coding,
    [key_dim, value_dim]: [usize; 2],
    rope: Option<Rope>,
    matrices: &BTreeMap<usize, Vec<f32>>,
    projection: Option<&Arc<Projection>>,
) -> Result<Codec> {
    match coding {
        Coding::Planes(planes) => Codec::with_matrices(*planes, key_dim, value_dim, rope, matrices),
        Coding::Sketch(options) => {
            let projection = projection_for(key_dim, projection, options)?;
            let sketch = Sketch { projection, scale: options.scale };
            let codec = Codec::sketched(sketch, options.centring, value_dim, rope)?;
            Ok(codec.keeping(options.sinks, options.recent))
        }
    }
}

/// The projection that is given, or one that is drawn.
fn projection_for(
    key_dim: usize,
    given: Option<&Arc<Projection>>,
    options: &SketchOptions,
) -> Result<Arc<Projection>> {
    match given {
        Some(projection) if projection.head_dim() == key_dim => Ok(Arc::clone(projection)),
        Some(projection) => {
            let want = format!("for keys of {key_dim} channels");
            Err(Error::shape("projection", want, projection.head_dim()))
        }
        None => {
            let bits = options.sketch_dim(key_dim)?;
            Projection::new(options.projection, key_dim, bits, options.seed).map(Arc::new)
        }
    }
}
