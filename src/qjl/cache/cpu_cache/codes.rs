//! Coded blocks on the host.

#![allow(clippy::indexing_slicing, reason = "blocks are made of the shapes that their rows are put at")]

use half::f16;

use super::super::super::planes::{PlaneCodes, Tables, cpu as planes};
use super::super::super::{Counts, QuantizedValues, SketchedKeys, cpu as sketch};
use super::super::coders::Coder;
use crate::cache::LayerShape;
use crate::error::Result;
use crate::rope::Positions;
use crate::tensor::{Shape, TensorView, checked_bytes};

/// Coded keys and values of one sequence and layer, `[1, kv_heads, capacity, dim]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum HostCodes {
    Planes { keys: PlaneCodes, values: PlaneCodes },
    Sketch { keys: SketchedKeys, values: QuantizedValues },
}

impl HostCodes {
    /// A block of zeros.
    pub(crate) fn new(coder: &Coder, layer: &LayerShape, capacity: usize) -> Result<Self> {
        checked_bytes("coded rows", &[layer.kv_heads, capacity, layer.key_dim.max(layer.value_dim)], 4)?;
        let shape = |dim| Shape { batch: 1, heads: layer.kv_heads, tokens: capacity, dim };
        let [keys, values] = layer.dims().map(shape);
        Ok(match coder {
            Coder::Planes(codec) => {
                let room = |shape: Shape, layout| {
                    let mut codes = PlaneCodes::new(shape, layout);
                    for (segment, stored) in codes.layout.segments().iter().zip(&mut codes.segments) {
                        stored.words = vec![0; shape.rows() * segment.words()];
                        stored.nu = vec![f16::ZERO; if segment.planes > 0 { shape.rows() } else { 0 }];
                    }
                    codes
                };
                let mut keys = room(keys, codec.keys());
                keys.positions = vec![0; capacity];
                if let Some(block) = codec.block() {
                    keys.means = vec![f16::ZERO; layer.kv_heads * capacity.div_ceil(block) * layer.key_dim];
                }
                Self::Planes { keys, values: room(values, codec.values()) }
            }
            Coder::Sketch { projection, .. } => {
                let sketch_dim = projection.sketch_dim();
                let mut coded = SketchedKeys {
                    shape: keys,
                    sketch_dim,
                    words: Vec::new(),
                    scale: vec![f16::ZERO; keys.rows()],
                    status: Counts::default(),
                };
                coded.words = vec![0; keys.rows() * coded.words_per_row()];
                let mut coded_values = QuantizedValues {
                    shape: values,
                    words: Vec::new(),
                    scale: vec![f16::ZERO; values.rows()],
                    status: Counts::default(),
                };
                coded_values.words = vec![0; values.rows() * coded_values.words_per_row()];
                Self::Sketch { keys: coded, values: coded_values }
            }
        })
    }

    /// Codes rows, `[1, kv_heads, tokens, dim]` of whole pages, or as many rows as there are.
    pub(crate) fn encode(
        coder: &Coder,
        [keys, values]: [&TensorView<'_>; 2],
        positions: &[u32],
        tables: &Tables,
    ) -> Result<Self> {
        Ok(match coder {
            Coder::Planes(codec) => Self::Planes {
                keys: planes::encode_keys(codec, keys, Positions::Explicit(positions), tables)?,
                values: planes::encode_values(codec, values)?,
            },
            Coder::Sketch { projection, scale } => Self::Sketch {
                keys: sketch::quantize(keys, projection, *scale)?,
                values: sketch::quantize_values(values)?,
            },
        })
    }

    /// Says where the first tokens stand.
    pub(crate) fn place(&mut self, positions: &[u32]) {
        if let Self::Planes { keys, .. } = self {
            keys.positions.iter_mut().zip(positions).for_each(|(to, &from)| *to = from);
        }
    }

    /// What was odd among the rows.
    pub(crate) fn status(&self) -> [Counts; 2] {
        match self {
            Self::Planes { keys, values } => [keys.status, values.status],
            Self::Sketch { keys, values } => [keys.status, values.status],
        }
    }

    /// Puts the rows of `page`, coded alike, at token `at`.
    pub(crate) fn put(&mut self, page: &Self, at: usize) {
        match (self, page) {
            (Self::Planes { keys, values }, Self::Planes { keys: new_keys, values: new_values }) => {
                keys.positions[at..at + new_keys.shape.tokens].copy_from_slice(&new_keys.positions);
                put_planes(keys, new_keys, at);
                put_planes(values, new_values, at);
            }
            (Self::Sketch { keys, values }, Self::Sketch { keys: new_keys, values: new_values }) => {
                let [key_words, value_words] = [keys.words_per_row(), values.words_per_row()];
                put(&mut keys.words, &new_keys.words, keys.shape, new_keys.shape.tokens, key_words, at);
                put(&mut keys.scale, &new_keys.scale, keys.shape, new_keys.shape.tokens, 1, at);
                let tokens = new_values.shape.tokens;
                put(&mut values.words, &new_values.words, values.shape, tokens, value_words, at);
                put(&mut values.scale, &new_values.scale, values.shape, tokens, 1, at);
            }
            // A cache has one coder a layer.
            _ => {}
        }
    }

    /// Bytes of words, scalars and means.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Planes { keys, values } => (keys.bytes() + values.bytes()) as u64,
            Self::Sketch { keys, values } => (keys.bytes() + values.bytes()) as u64,
        }
    }
}

fn put_planes(to: &mut PlaneCodes, from: &PlaneCodes, at: usize) {
    let (shape, tokens) = (to.shape, from.shape.tokens);
    for ((segment, to), from) in to.layout.segments().iter().zip(&mut to.segments).zip(&from.segments) {
        put(&mut to.words, &from.words, shape, tokens, segment.words(), at);
        put(&mut to.nu, &from.nu, shape, tokens, usize::from(segment.planes > 0), at);
    }
    // Means stand every so many tokens; rows are put at whole blocks.
    let blocks = from.means.len() / (shape.heads * shape.dim).max(1);
    if blocks > 0 {
        let all = to.means.len() / (shape.heads * shape.dim);
        let block = shape.tokens.div_ceil(all);
        put(&mut to.means, &from.means, Shape { tokens: all, ..shape }, blocks, shape.dim, at / block);
    }
}

/// Copies `tokens` rows of every head to row `at`.
fn put<T: Copy>(to: &mut [T], from: &[T], shape: Shape, tokens: usize, width: usize, at: usize) {
    for head in 0..shape.heads {
        let start = (head * shape.tokens + at) * width;
        let rows = &from[head * tokens * width..(head + 1) * tokens * width];
        to[start..start + rows.len()].copy_from_slice(rows);
    }
}
