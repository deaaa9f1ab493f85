//! Bits and bytes of a method.

use super::types::MethodFigures;
use crate::qjl::planes::{Centring, Codec};
use crate::tensor::Shape;

/// What a method stores of coded rows.
#[derive(Clone, Copy)]
pub(super) struct Cost {
    /// Bits per channel that every key has to itself.
    pub(super) key: f64,
    /// The same of values.
    pub(super) value: f64,
    /// Tokens that share further bits per channel of keys, and those bits.
    pub(super) shared: Option<(usize, f64)>,
}

impl Cost {
    pub(super) fn of(codec: &Codec) -> Self {
        let per_channel = |bits: usize, channels: usize| bits as f64 / channels as f64;
        Self {
            key: per_channel(codec.keys().bits(), codec.key_dim()),
            value: codec.value_bits(),
            shared: match codec.options().centring {
                Centring::BlockMean(tokens) => Some((tokens as usize, 16.0)),
                _ => None,
            },
        }
    }
}

/// Tokens of every sequence, and how many of them are coded.
pub(super) struct Tokens(pub(super) Vec<(usize, usize)>);

impl Tokens {
    pub(super) fn new(lengths: impl Iterator<Item = usize>, sinks: u32, recent: u32) -> Self {
        let raw = sinks as usize + recent as usize;
        Self(lengths.map(|length| (length, length.saturating_sub(raw))).collect())
    }

    pub(super) fn all(&self) -> u64 {
        self.0.iter().map(|&(all, _)| all as u64).sum()
    }

    pub(super) fn coded(&self) -> u64 {
        self.0.iter().map(|&(_, coded)| coded as u64).sum()
    }

    /// Bits and bytes of a layer; tables are added by who has them.
    pub(super) fn figures(&self, name: &str, cost: Cost, keys: Shape, values: Shape) -> MethodFigures {
        let heads = keys.heads as f64;
        let (key_dim, value_dim) = (keys.dim as f64, values.dim as f64);
        let bits = |&(_, coded): &(usize, usize)| {
            let shared = cost.shared.map_or(0.0, |(tokens, bits)| coded.div_ceil(tokens) as f64 * bits);
            coded as f64 * (cost.key * key_dim + cost.value * value_dim) + shared * key_dim
        };
        let row = (keys.heads * (keys.dim + values.dim) * 2) as u64;
        MethodFigures {
            name: name.to_owned(),
            key_bits_per_channel: Some(
                cost.key + cost.shared.map_or(0.0, |(tokens, bits)| bits / tokens as f64),
            ),
            value_bits_per_channel: Some(cost.value),
            code_bytes: (heads * self.0.iter().map(bits).sum::<f64>() / 8.0).ceil() as u64,
            raw_bytes: (self.all() - self.coded()) * row,
            f16_bytes: self.all() * row,
            ..MethodFigures::default()
        }
    }
}
