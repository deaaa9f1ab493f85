//! Coded blocks on the host.

#![allow(clippy::indexing_slicing, reason = "blocks are made of the shapes that their rows are put at")]

use half::f16;

use super::super::super::Counts;
use super::super::super::planes::{Codec, PlaneCodes, Tables, cpu as planes};
use crate::cache::LayerShape;
use crate::error::Result;
use crate::rope::Positions;
use crate::tensor::{Shape, TensorView, checked_bytes};

/// Coded keys and values of one sequence and layer, `[1, kv_heads, capacity, dim]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HostCodes {
    pub(crate) keys: PlaneCodes,
    pub(crate) values: PlaneCodes,
}

impl HostCodes {
    /// A block of zeros.
    pub(crate) fn new(codec: &Codec, layer: &LayerShape, capacity: usize) -> Result<Self> {
        checked_bytes("coded rows", &[layer.kv_heads, capacity, layer.key_dim.max(layer.value_dim)], 4)?;
        let [keys, values] =
            layer.dims().map(|dim| Shape { batch: 1, heads: layer.kv_heads, tokens: capacity, dim });
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
        Ok(Self { keys, values: room(values, codec.values()) })
    }

    /// Codes rows, `[1, kv_heads, tokens, dim]` of whole pages, or as many rows as there are.
    pub(crate) fn encode(
        codec: &Codec,
        [keys, values]: [&TensorView<'_>; 2],
        positions: &[u32],
        tables: &Tables,
    ) -> Result<Self> {
        Ok(Self {
            keys: planes::encode_keys(codec, keys, Positions::Explicit(positions), tables)?,
            values: planes::encode_values(codec, values)?,
        })
    }

    /// Says where the first tokens stand.
    pub(crate) fn place(&mut self, positions: &[u32]) {
        self.keys.positions.iter_mut().zip(positions).for_each(|(to, &from)| *to = from);
    }

    /// What was odd among the rows.
    pub(crate) fn status(&self) -> [Counts; 2] {
        [self.keys.status, self.values.status]
    }

    /// Puts the rows of `page`, coded alike, at token `at`.
    pub(crate) fn put(&mut self, page: &Self, at: usize) {
        let positions = &mut self.keys.positions[at..at + page.keys.shape.tokens];
        positions.copy_from_slice(&page.keys.positions);
        put_codes(&mut self.keys, &page.keys, at);
        put_codes(&mut self.values, &page.values, at);
    }

    /// Bytes of words, scalars and means.
    pub(crate) fn bytes(&self) -> u64 {
        (self.keys.bytes() + self.values.bytes()) as u64
    }
}

fn put_codes(to: &mut PlaneCodes, from: &PlaneCodes, at: usize) {
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
