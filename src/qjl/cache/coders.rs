//! How each layer's rows are coded: one codec or projection for all layers that are alike.

use std::collections::BTreeMap;

use super::super::planes::{Codec, PlanesOptions};
use super::super::{KeyScale, Projection};
use super::options::{CacheOptions, Coding};
use crate::cache::LayerShape;
use crate::error::{Error, Result};
use crate::tensor::Shape;

/// How the rows of some layers are coded.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Coder {
    Planes(Codec),
    Sketch { projection: Projection, scale: KeyScale },
}

impl Coder {
    /// Whether the rows of `layer`, whose RoPE is the option's, are coded like this.
    fn fits(&self, layer: &LayerShape, options: &CacheOptions, index: usize) -> bool {
        match self {
            Self::Planes(codec) => {
                [codec.keys().channels(), codec.values().channels()] == layer.dims()
                    && codec.rope() == options.layer_rope(index)
            }
            Self::Sketch { projection, .. } => projection.head_dim() == layer.key_dim,
        }
    }

    /// Bytes of rotations or of the projection.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Planes(codec) => codec.rotations().bytes() as u64,
            Self::Sketch { projection, .. } => projection.bytes() as u64,
        }
    }

    /// Bits of one token's coded key and value of one head: words, scalars and its share of a block mean.
    pub(crate) fn row_bits(&self, layer: &LayerShape) -> f64 {
        match self {
            Self::Planes(codec) => {
                codec.key_bits() * layer.key_dim as f64 + codec.value_bits() * layer.value_dim as f64
            }
            Self::Sketch { projection, .. } => {
                let words = projection.sketch_dim().div_ceil(32) + layer.value_dim.div_ceil(4);
                (words * 32 + 2 * 16) as f64
            }
        }
    }
}

/// The coders of a cache, and which of them each layer has.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Coders {
    pub(crate) all: Vec<Coder>,
    of: Vec<usize>,
}

impl Coders {
    /// Makes what these layers need; `matrices`, `[n, n]` by `n`, take the place of drawn rotations.
    pub(crate) fn new(
        layers: &[LayerShape],
        options: &CacheOptions,
        matrices: &BTreeMap<usize, Vec<f32>>,
    ) -> Result<Self> {
        let (mut all, mut of): (Vec<Coder>, _) = (Vec::new(), Vec::with_capacity(layers.len()));
        for (index, layer) in layers.iter().enumerate() {
            let same = all.iter().position(|coder: &Coder| coder.fits(layer, options, index));
            let coder = match same {
                Some(coder) => coder,
                None => {
                    all.push(coder(layer, options, index, matrices)?);
                    all.len() - 1
                }
            };
            of.push(coder);
        }
        let coders = Self { all, of };
        coders.check_tables(layers, options)?;
        Ok(coders)
    }

    /// The coder of a layer.
    pub(crate) fn get(&self, layer: usize) -> Result<&Coder> {
        let missing = || Error::range("layer", format!("below {}", self.of.len()), layer);
        self.index(layer).and_then(|index| self.all.get(index)).ok_or_else(missing)
    }

    /// Which coder a layer has.
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

fn coder(
    layer: &LayerShape,
    options: &CacheOptions,
    index: usize,
    matrices: &BTreeMap<usize, Vec<f32>>,
) -> Result<Coder> {
    match options.coding {
        Coding::Planes(planes) => {
            // The cache itself keeps sinks and recent rows raw; whatever it codes, it codes whole.
            let planes = PlanesOptions { sinks: 0, recent: 0, ..planes };
            let rope = options.layer_rope(index).cloned();
            Codec::with_matrices(planes, layer.key_dim, layer.value_dim, rope, matrices).map(Coder::Planes)
        }
        Coding::Sketch(sketch) => {
            let projection = match &options.projection {
                Some(projection) if projection.head_dim() == layer.key_dim => projection.clone(),
                Some(projection) => {
                    let want = format!("for keys of {} channels", layer.key_dim);
                    return Err(Error::shape("projection", want, projection.head_dim()));
                }
                None => {
                    let bits = sketch.sketch_dim(layer.key_dim)?;
                    Projection::new(sketch.projection, layer.key_dim, bits, sketch.seed)?
                }
            };
            Ok(Coder::Sketch { projection, scale: sketch.scale })
        }
    }
}
