//! Exact attention on the device against the f64 reference.

use kvfold::attention::gpu::Ops;
use kvfold::attention::{AttendOptions, exact};
use kvfold::cache::{LayerShape, Step};
use kvfold::qjl::cache::{CacheOptions, CpuQjlCache, QjlCache};
use kvfold::qjl::reference;
use kvfold::{DType, Error, Gpu, KvView, Shape, Strides, Tensor};

use crate::Test;
use crate::qjl::{Case, relative_l2};
use crate::rows::{download, upload};

pub(crate) const TESTS: &[Test] = &[
    ("exact_attention_equals_the_reference", every_shape),
    ("exact_attention_takes_every_mask", masks),
    ("exact_attention_reads_strided_rows", strided),
    ("exact_attention_masks_rows_that_are_not_finite", not_finite),
    ("exact_attention_masks_scores_beyond_f32", beyond_f32),
    ("exact_attention_refuses_types_that_differ", refused),
    ("scores_of_raw_keys_equal_the_hosts", scores),
];

fn attend(
    gpu: &Gpu,
    [queries, keys, values]: [&KvView; 3],
    lengths: Option<&[u32]>,
    options: &AttendOptions,
) -> kvfold::Result<Vec<f32>> {
    let shape = Shape { dim: values.shape().dim, ..queries.shape() };
    let output =
        KvView::new(&gpu.storage("output", shape.bytes(DType::F32).max(4) as u64)?, DType::F32, shape);
    gpu.submit(|encoder| {
        Ops::new(gpu).encode_exact(encoder, queries, keys, values, lengths, options, &output)
    })?;
    Ok(download(gpu, &output).view().to_f32())
}

fn check(
    gpu: &Gpu,
    [queries, keys, values]: [&Tensor; 3],
    lengths: Option<&[u32]>,
    options: &AttendOptions,
) -> kvfold::Result<()> {
    let views = [upload(gpu, queries), upload(gpu, keys), upload(gpu, values)];
    let have = attend(gpu, [&views[0], &views[1], &views[2]], lengths, options)?;
    let want = reference::exact(&queries.view(), &keys.view(), &values.view(), lengths, options)?;
    // As for folded attention: f32 sums, and exp allowed 3 + 2|x| ulp.
    let error = relative_l2(&have, &want);
    assert!(error < 1e-5, "{error} for {} {} {options:?}", queries.shape(), keys.shape());
    let twin = exact(&queries.view(), &keys.view(), &values.view(), lengths, options)?;
    assert!(relative_l2(&twin, &want) < 1e-5);
    Ok(())
}

pub(crate) fn retyped(tensor: &Tensor, dtype: DType) -> Tensor {
    Tensor::from_f32(&tensor.view().to_f32(), dtype, tensor.shape()).unwrap()
}

fn every_shape(gpu: &Gpu) -> kvfold::Result<()> {
    let dims = [(64, 64), (192, 128), (80, 80), (1, 511), (511, 3), (512, 512)];
    for (seed, ((key_dim, value_dim), group)) in (0..).zip(dims.into_iter().zip([1, 3, 5, 7, 8, 2])) {
        let case = Case::new(seed, [2, 2, 150], [key_dim, value_dim], group, 2);
        let stored = DType::ALL[usize::from(seed) % 3];
        let query = DType::ALL[usize::from(seed / 2) % 3];
        let queries = retyped(&case.queries, query);
        let (keys, values) = (retyped(&case.keys, stored), retyped(&case.values, stored));
        check(gpu, [&queries, &keys, &values], None, &AttendOptions::default())?;
    }
    Ok(())
}

fn masks(gpu: &Gpu) -> kvfold::Result<()> {
    let case = Case::new(5, [3, 1, 777], [80, 80], 7, 3);
    let plain = AttendOptions::default();
    for lengths in [None, Some([0, 1, 777].as_slice())] {
        let sinks = [-3.0, 0.0, 1.5, 40.0, -90.0, 2.0, 0.5];
        for options in [
            plain.causal(true),
            plain.window(130),
            plain.soft_cap(5.0).scale(0.3),
            plain.causal(true).sink_logits(&sinks),
        ] {
            check(gpu, [&case.queries, &case.keys, &case.values], lengths, &options)?;
        }
    }
    Ok(())
}

fn strided(gpu: &Gpu) -> kvfold::Result<()> {
    // Token-major [tokens, heads, dim] with a gap after each head, at odd offsets.
    let case = Case::new(3, [1, 3, 40], [48, 48], 2, 1);
    let pitch = 51;
    let scatter = |tensor: &Tensor| {
        let mut bytes = vec![0xff; (1 + 40 * 3 * pitch) * 2];
        for (_, h, t) in tensor.shape().iter_rows() {
            let start = (1 + (t * 3 + h) * pitch) * 2;
            bytes[start..start + 96].copy_from_slice(tensor.view().row_bytes(0, h, t));
        }
        let buffer = gpu.upload("arena", &bytes).unwrap();
        let strides = Strides { batch: 0, heads: pitch, tokens: 3 * pitch };
        KvView::new(&buffer, DType::F16, tensor.shape()).at(1).strides(strides)
    };
    let have = attend(
        gpu,
        [&upload(gpu, &case.queries), &scatter(&case.keys), &scatter(&case.values)],
        None,
        &AttendOptions::default(),
    )?;
    let (queries, keys, values) = (case.queries.view(), case.keys.view(), case.values.view());
    let want = reference::exact(&queries, &keys, &values, None, &AttendOptions::default())?;
    assert!(relative_l2(&have, &want) < 1e-5);
    Ok(())
}

fn not_finite(gpu: &Gpu) -> kvfold::Result<()> {
    let case = Case::not_finite();
    check(gpu, [&case.queries, &case.keys, &case.values], None, &AttendOptions::default())
}

/// A key that is finite and whose score is infinite or no number is not seen, as if it were not finite itself.
fn beyond_f32(gpu: &Gpu) -> kvfold::Result<()> {
    let case = Case::new(4, [1, 1, 70], [64, 64], 1, 3);
    let queries = Tensor::from_f32(&[2.0; 3 * 64], DType::F32, case.queries.shape())?;
    let values = retyped(&case.values, DType::F32);
    let keys = |large: f32| {
        let mut numbers = case.keys.view().to_f32();
        numbers[7 * 64..8 * 64].fill(large);
        numbers[30 * 64..31 * 64].iter_mut().step_by(2).for_each(|x| *x = large);
        numbers[30 * 64 + 1..31 * 64].iter_mut().step_by(2).for_each(|x| *x = -large);
        Tensor::from_f32(&numbers, DType::F32, case.keys.shape())
    };
    let (large, broken) = (keys(3e38)?, keys(f32::NAN)?);
    let options = AttendOptions::default();
    let [q, k, v] = [&queries, &large, &values].map(|tensor| upload(gpu, tensor));
    let have = attend(gpu, [&q, &k, &v], None, &options)?;
    let want = reference::exact(&queries.view(), &broken.view(), &values.view(), None, &options)?;
    assert!(relative_l2(&have, &want) < 1e-5);
    assert!(
        relative_l2(&exact(&queries.view(), &large.view(), &values.view(), None, &options)?, &want) < 1e-5
    );
    Ok(())
}

fn refused(gpu: &Gpu) -> kvfold::Result<()> {
    let case = Case::new(1, [1, 1, 4], [8, 8], 1, 1);
    let views = [upload(gpu, &case.queries), upload(gpu, &case.keys)];
    let values = upload(gpu, &retyped(&case.values, DType::F32));
    let error = attend(gpu, [&views[0], &views[1], &values], None, &AttendOptions::default()).unwrap_err();
    assert!(matches!(error, Error::DType { .. }), "{error}");
    Ok(())
}

/// Scores of rows that are not coded, which only a cache asks for.
fn scores(gpu: &Gpu) -> kvfold::Result<()> {
    for case in [Case::not_finite(), Case::new(6, [2, 1, 70], [33, 8], 3, 5)] {
        let (keys, values) = (case.keys.shape(), case.values.shape());
        let layer = LayerShape::new(keys.heads, keys.dim, DType::F16).value_dim(values.dim);
        let mut host = CpuQjlCache::new(&[layer], keys.batch, CacheOptions::qjl())?;
        let mut cache = QjlCache::new(gpu, &[layer], keys.batch, CacheOptions::qjl())?;
        let counts: Vec<u32> = (0..keys.batch).map(|b| (keys.tokens - 30 * b) as u32).collect();
        host.append(0, &Step::new(&case.keys.view(), &case.values.view()).counts(&counts))?;
        let [keys, values, queries] = [&case.keys, &case.values, &case.queries].map(|rows| upload(gpu, rows));
        let shape = Shape { dim: keys.shape().tokens, ..queries.shape() };
        let output = KvView::new(&gpu.storage("scores", shape.bytes(DType::F32) as u64)?, DType::F32, shape);
        gpu.submit(|encoder| {
            cache.append(encoder, 0, &Step::new(&keys, &values).counts(&counts))?;
            cache.scores(encoder, 0, &queries, &output)
        })?;
        let want: Vec<f64> = host.scores(0, &case.queries.view())?.into_iter().map(f64::from).collect();
        // f32 sums of some dozens of products.
        let error = relative_l2(&download(gpu, &output).view().to_f32(), &want);
        assert!(error < 1e-6 && want.iter().any(|score| *score != 0.0), "{error}");
    }
    Ok(())
}
