//! Random captures are read as they were written.

use kvfold::capture::{Capture, CaptureInfo, Layer, RopeLayout};
use kvfold::{DType, Shape, Tensor};
use proptest::prelude::*;

fn tensor(shape: [usize; 4], dtype: DType, seed: u64) -> Tensor {
    let shape = Shape::new(shape[0], shape[1], shape[2], shape[3]).unwrap();
    // A multiplicative hash: numbers of both signs and many sizes, all finite in every type.
    let number = |i: usize| {
        let hash = (i as u64 ^ seed.rotate_left(20)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        f32::from_bits((hash >> 32) as u32 & 0x87ff_ffff | 0x3800_0000)
    };
    let numbers: Vec<f32> = (0..shape.elements()).map(number).collect();
    Tensor::from_f32(&numbers, dtype, shape).unwrap()
}

prop_compose! {
    fn layer(batch: usize, tokens: usize, count: usize)(
        heads in 1..4usize, ratio in 1..4usize, key_dim in 1..10usize, value_dim in 1..10usize,
        dtypes in prop::array::uniform4(prop::sample::select(&DType::ALL[..])), seed: u64,
        queries: bool, held in 0..3u8,
    ) -> Layer {
        let keys = || tensor([batch, heads, tokens, key_dim], dtypes[0], seed);
        let pre = || tensor([batch, heads, tokens, key_dim], dtypes[1], !seed);
        let values = tensor([batch, heads, tokens, value_dim], dtypes[2], seed >> 1);
        let mut layer = if held == 0 { Layer::pre_rope(pre(), values) } else { Layer::new(keys(), values) };
        if held == 1 {
            layer.keys_pre_rope = Some(pre());
        }
        layer.queries = queries.then(|| tensor([batch, heads * ratio, count, key_dim], dtypes[3], seed >> 2));
        layer
    }
}

prop_compose! {
    fn sizes()(batch in 1..4usize, tokens in 0..9usize)(
        batch in Just(batch), tokens in Just(tokens), count in 0..=tokens, layers in 1..5usize,
    ) -> (usize, usize, usize, usize) {
        (batch, tokens, count, layers)
    }
}

fn capture() -> impl Strategy<Value = Capture> {
    let finite = || any::<f32>().prop_filter("finite", |n| n.is_finite() && *n != 0.0);
    sizes().prop_flat_map(move |(batch, tokens, count, layers)| {
        let texts = (prop::option::of(".{0,8}"), prop::collection::btree_map("x[a-z]{1,5}", ".{0,12}", 0..4));
        let numbers = (
            prop::option::of(finite().prop_map(f32::abs)),
            prop::option::of(prop::collection::vec(count..=tokens, batch)),
            prop::option::of(prop::collection::vec(0..1000u32, batch)),
            prop::option::of(prop::collection::vec(finite().prop_map(f32::abs), layers)),
            prop::option::of(prop::collection::vec(any::<i32>(), batch * tokens)),
        );
        let windows =
            prop_oneof![Just(Vec::new()), prop::collection::vec(prop::option::of(1..5000u32), layers)];
        let layout = prop::option::of(prop::sample::select(vec![
            RopeLayout::HalfSplit,
            RopeLayout::Interleaved,
            RopeLayout::Other("multi-axis".to_owned()),
        ]));
        let rope = (prop::collection::vec(finite(), 0..5), any::<bool>(), any::<bool>());
        let layers = prop::collection::vec(layer(batch, tokens, count), layers);
        (layers, texts, numbers, windows, layout, rope, 0..=tokens - count, any::<bool>()).prop_map(
            move |(
                layers,
                texts,
                numbers,
                windows,
                layout,
                (mut inv_freq, rotary, frequencies),
                start,
                stated,
            )| {
                let mut info = CaptureInfo::default();
                (info.model, info.extra) = texts;
                (info.attn_scale, info.lengths, info.position_start, info.rope_theta, info.token_ids) =
                    numbers;
                (info.sliding_window, info.rope_layout) = (windows, layout);
                let pairs = layers.iter().map(Layer::key_dim).min().unwrap() / 2;
                inv_freq.truncate(pairs);
                info.rotary_dim = rotary.then_some(2 * inv_freq.len());
                info.inv_freq = frequencies.then_some(inv_freq);
                let queried = layers.iter().any(|layer| layer.queries.is_some());
                info.query_positions = (queried && stated).then_some(start..start + count);
                Capture::new(layers, info).unwrap()
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn what_is_written_is_read_again(capture in capture()) {
        let file = capture.to_bytes().unwrap();
        let again = Capture::from_bytes(&file).unwrap();
        prop_assert_eq!(&again, &capture);
        prop_assert_eq!(again.to_bytes().unwrap(), file);
    }
}
