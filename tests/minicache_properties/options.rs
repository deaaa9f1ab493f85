//! Random options, shapes and pairs of layers.

use kvfold::minicache::{MergeOptions, Mode, Retention};
use kvfold::{DType, Shape, Tensor};
use proptest::prelude::*;

use crate::rows::{Kind, pair_of};

pub const MODES: [Mode; 3] = [Mode::Shared, Mode::Anchor, Mode::Compat];

#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    pub shape: Shape,
    pub dtype: DType,
    pub options: MergeOptions,
}

impl Case {
    /// Rows of every kind.
    pub fn pair(&self) -> [Tensor; 2] {
        pair_of(self.seed, self.shape, self.dtype, &Kind::ALL)
    }
}

fn retention() -> impl Strategy<Value = Retention> {
    prop_oneof![
        (-1f32..=1.0).prop_map(Retention::Cosine),
        Just(Retention::Cosine(0.9)),
        (0f32..=1.0).prop_map(Retention::Range),
        (0f32..=1.0).prop_map(Retention::Fraction),
        Just(Retention::Never),
    ]
}

fn options() -> impl Strategy<Value = MergeOptions> {
    let t = prop_oneof![prop::sample::select(vec![0.0, 0.3, 0.5, 0.6, 1.0]), 0f32..=1.0];
    let share = prop::sample::select(vec![0.0f32, 0.4, 0.9, 1.0]);
    (prop::sample::select(MODES.to_vec()), retention(), t, 0u32..6, 0u32..6, share).prop_map(
        |(mode, retention, t, sinks, first, share)| {
            let options = MergeOptions::default().mode(mode).retention(retention).slerp_t(t);
            options.sinks(sinks).first_position(first).raw_page_share(share)
        },
    )
}

/// Up to three sequences, four heads and three pages of tokens; head dimensions up to the kernels' largest.
pub fn cases() -> impl Strategy<Value = Case> {
    let dim = prop_oneof![20 => 1usize..=130, 1 => 511usize..=512];
    let shape = (1usize..=3, 1usize..=4, 0usize..=70, dim);
    let shape = shape.prop_map(|(batch, heads, tokens, dim)| Shape::new(batch, heads, tokens, dim).unwrap());
    let dtype = prop::sample::select(DType::ALL.to_vec());
    (any::<u64>(), shape, dtype, options()).prop_map(|(seed, shape, dtype, options)| Case {
        seed,
        shape,
        dtype,
        options,
    })
}
