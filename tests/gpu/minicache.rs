//! MiniCache's kernels against their twins.

use kvfold::minicache::gpu::{FoldedBuffers, Ops, Rows};
use kvfold::minicache::{Cause, Folded, Layer, MergeOptions, Mode, Retention, cpu};
use kvfold::{DType, Error, Gpu, KvView, Shape, Strides, Tensor};

use crate::Test;
use crate::rows::{Numbers, download, pair, scatter, upload};

pub(crate) const TESTS: &[Test] = &[
    ("similarity_equals_its_twin", similarity),
    ("merge_equals_its_twin_in_every_mode_and_type", every_mode),
    ("merge_equals_its_twin_under_every_rule", every_rule),
    ("merge_takes_every_head_dim", every_dim),
    ("merge_takes_eights_of_channels_and_any_other_rows", eights),
    ("restore_writes_strided_outputs_and_leaves_gaps", strided),
    ("restore_refuses_outputs_of_half_words", half_words),
    ("one_buffer_may_hold_both_layers", shared_buffer),
    ("empty_pairs_are_folded", empty),
];

/// Rounding of two sums of up to 512 products in other orders, relative to 1.
pub(crate) const COSINE: f32 = 2e-6;

pub(crate) fn merge_on(
    gpu: &Gpu,
    views: &[KvView; 2],
    options: &MergeOptions,
) -> kvfold::Result<FoldedBuffers> {
    let ops = Ops::new(gpu);
    let mut decision = gpu.submit(|encoder| ops.encode_decide(encoder, &views[0], &views[1], options))?;
    gpu.block_on(decision.totals())?;
    gpu.submit(|encoder| ops.encode_merge(encoder, &decision))
}

pub(crate) fn folded_of(gpu: &Gpu, folded: &FoldedBuffers) -> kvfold::Result<Folded> {
    let read_backs = gpu.submit(|encoder| folded.read_back(gpu, encoder))?;
    gpu.block_on(folded.parse(read_backs))
}

pub(crate) fn restore_on(gpu: &Gpu, folded: &FoldedBuffers, which: Layer) -> kvfold::Result<Tensor> {
    let (shape, dtype) = (folded.layout.shape, folded.layout.dtype);
    let output =
        KvView::new(&gpu.storage("output", (shape.bytes(dtype) as u64).next_multiple_of(4))?, dtype, shape);
    gpu.submit(|encoder| Ops::new(gpu).encode_restore(encoder, folded, which, &output))?;
    Ok(download(gpu, &output))
}

/// Folds a pair on device and CPU and compares decisions, bytes and restored rows.
fn compare(gpu: &Gpu, pair: &[Tensor; 2], options: &MergeOptions) -> kvfold::Result<Folded> {
    compare_views(gpu, pair, &[upload(gpu, &pair[0]), upload(gpu, &pair[1])], options)
}

/// The same with views of the pair.
pub(crate) fn compare_views(
    gpu: &Gpu,
    pair: &[Tensor; 2],
    views: &[KvView; 2],
    options: &MergeOptions,
) -> kvfold::Result<Folded> {
    let [lower, upper] = pair;
    let twin = cpu::merge(&lower.view(), &upper.view(), options)?;
    let buffers = merge_on(gpu, views, options)?;
    let kernel = folded_of(gpu, &buffers)?;
    let context = format!("{} {} {options:?}", lower.shape(), lower.dtype());
    assert_eq!(kernel.totals, twin.totals, "{context}");
    assert_eq!(kernel.pages, twin.pages, "{context}");
    assert_eq!(kernel.side, twin.side, "{context}");
    assert_eq!(buffers.bytes(), twin.bytes(), "{context}");
    assert_eq!(twin.totals.bytes(&twin.layout), twin.bytes(), "{context}");
    for which in [Layer::Lower, Layer::Upper] {
        let restored = restore_on(gpu, &buffers, which)?;
        compare_rows(&restored, &cpu::restore(&twin, which)?, &twin, &context);
        // The device's own store, restored by the twin, differs from the device's by the last rounding alone.
        compare_rows(&restored, &cpu::restore(&kernel, which)?, &twin, &context);
    }
    Ok(kernel)
}

/// Raw rows must agree bit for bit. A merged number may differ by one f16 ulp of the direction, one of the magnitude and one
/// of the output (2^-24 below f16's normal range), and a direction below that range may have been flushed to zero.
fn compare_rows(kernel: &Tensor, twin: &Tensor, folded: &Folded, context: &str) {
    let dim = kernel.shape().dim;
    for (row, (b, h, t)) in kernel.shape().iter_rows().enumerate() {
        let page = folded.pages[(row / kernel.shape().tokens) * folded.layout.pages_per_head() + t / 32];
        if page.retained >> (t % 32) & 1 == 1
            && (folded.layout.mode != Mode::Compat || kernel.dtype() == DType::F16)
        {
            assert_eq!(
                kernel.view().row_bytes(b, h, t),
                twin.view().row_bytes(b, h, t),
                "row {row}, {context}"
            );
            continue;
        }
        let (mut a, mut b_row) = (vec![0.0; dim], vec![0.0; dim]);
        kernel.view().read_row(b, h, t, &mut a);
        twin.view().read_row(b, h, t, &mut b_row);
        let finite = b_row.iter().filter(|x| x.is_finite());
        let magnitude = finite.map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
        let ulp = if kernel.dtype() == DType::Bf16 { 2f32.powi(-7) } else { 2f32.powi(-10) };
        let subnormal = if kernel.dtype() == DType::F16 { 2f32.powi(-24) } else { 0.0 };
        for (x, y) in a.iter().zip(&b_row) {
            // A raw number that Compat rounded to f16 keeps its kind, NaN or infinite.
            if !y.is_finite() {
                assert!(x == y || x.is_nan() && y.is_nan(), "{x} {y}, row {row}, {context}");
                continue;
            }
            let tolerance = 3.0 * ulp * y.abs() + magnitude * 2f32.powi(-14) + subnormal;
            assert!((x - y).abs() <= tolerance, "{x} {y}, row {row}, {context}");
        }
    }
}

fn similarity(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, dtype) in (0..).zip(DType::ALL) {
        for (dim, t) in [(1, 0.5), (64, 0.5), (80, 0.3), (127, 1.0), (512, 0.0)] {
            let [lower, upper] = pair(seed, Shape::new(2, 3, 37, dim)?, dtype);
            let options = MergeOptions::default().slerp_t(t);
            let twin = cpu::similarity(&lower.view(), &upper.view(), &options)?;
            let read_back = gpu.submit(|encoder| {
                let views = [upload(gpu, &lower), upload(gpu, &upper)];
                Ops::new(gpu).encode_similarity(encoder, &views[0], &views[1], &options)?.read_back(encoder)
            })?;
            let kernel = Rows::parse(&read_back.wait_blocking()?);
            assert_eq!(kernel.len(), twin.len());
            for (row, (a, b)) in kernel.iter().zip(&twin).enumerate() {
                let context = format!("row {row}, dim {dim} {dtype} t {t}: {a:?} {b:?}");
                assert_eq!(a.fault, b.fault, "{context}");
                assert!((a.cosine - b.cosine).abs() <= COSINE, "{context}");
                assert!((a.lower - b.lower).abs() <= COSINE * b.lower, "{context}");
                assert!((a.upper - b.upper).abs() <= COSINE * b.upper, "{context}");
                // Near opposite rows the weights grow without bound and so does their rounding; those rows stay raw.
                if b.fault != Some(Cause::Antiparallel) {
                    let close = |x: f32, y: f32| {
                        (x - y).abs() <= 1e-5 * (b.weight_lower.abs() + b.weight_upper.abs())
                    };
                    assert!(close(a.weight_lower, b.weight_lower), "{context}");
                    assert!(close(a.weight_upper, b.weight_upper), "{context}");
                }
            }
        }
    }
    Ok(())
}

fn every_mode(gpu: &Gpu) -> kvfold::Result<()> {
    for mode in [Mode::Shared, Mode::Anchor, Mode::Compat] {
        for dtype in DType::ALL {
            for raw_page_share in [0.3, 0.9, 1.0] {
                let options = MergeOptions::default().mode(mode).raw_page_share(raw_page_share);
                let folded = compare(gpu, &pair(3, Shape::new(2, 2, 75, 64)?, dtype), &options)?;
                assert!(folded.totals.counts.merged > 0 && folded.totals.counts.retained() > 0);
            }
        }
    }
    Ok(())
}

fn every_rule(gpu: &Gpu) -> kvfold::Result<()> {
    let rules = [
        Retention::Never,
        Retention::Cosine(0.5),
        Retention::Cosine(-1.0),
        Retention::Range(0.05),
        Retention::Range(0.8),
        Retention::Fraction(0.0),
        Retention::Fraction(0.1),
        Retention::Fraction(0.75),
        Retention::Fraction(1.0),
    ];
    for retention in rules {
        for (mode, t) in [(Mode::Shared, 0.6), (Mode::Compat, 0.5)] {
            let options = MergeOptions::default().retention(retention).mode(mode).slerp_t(t).sinks(2);
            // The odd kinds put many equal cosines among the candidates: ties must fall alike on both sides.
            compare(gpu, &ties(), &options)?;
        }
    }
    Ok(())
}

/// A pair whose cosines are exact in f32, many of them equal, so that no rounding can move a row across a cut.
fn ties() -> [Tensor; 2] {
    let shape = Shape::new(2, 3, 50, 8).unwrap();
    let mut numbers = Numbers::new(7);
    let (mut lower, mut upper) = (Vec::new(), Vec::new());
    for _ in 0..shape.rows() {
        // Unit coordinate vectors and sums of four of them: cosines are 0, 1/4, 1/2, 3/4 and 1.
        let shift = ((numbers.next() + 1.0) * 2.5) as usize;
        lower.extend((0..8).map(|i| if i < 4 { 0.5 } else { 0.0 }));
        upper.extend((0..8).map(|i| if i >= shift.min(4) && i < shift.min(4) + 4 { 0.5 } else { 0.0 }));
    }
    [lower, upper].map(|numbers| Tensor::from_f32(&numbers, DType::F16, shape).unwrap())
}

fn every_dim(gpu: &Gpu) -> kvfold::Result<()> {
    for dim in [1, 2, 3, 31, 48, 80, 96, 128, 192, 256, 511, 512] {
        let dtype = DType::ALL[dim % 3];
        compare(gpu, &pair(9, Shape::new(1, 2, 33, dim)?, dtype), &MergeOptions::default())?;
    }
    Ok(())
}

/// Rows that start at whole vec4s, without gaps and with, and rows that do not: each in every form that a store may take.
fn eights(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, dtype) in (40..).zip(DType::ALL) {
        for (mode, dim) in [(Mode::Shared, 80), (Mode::Anchor, 8), (Mode::Compat, 64), (Mode::Shared, 136)] {
            let pair = pair(seed, Shape::new(2, 2, 40, dim)?, dtype);
            let options = MergeOptions::default().mode(mode).raw_page_share(0.6);
            compare(gpu, &pair, &options)?;
            for (offset, gap) in [(8, 16), (2, 8), (8, 1)] {
                let pitch = dim + gap;
                let strides = Strides { batch: 80 * pitch, heads: pitch, tokens: 2 * pitch };
                let scattered = scatter(gpu, &pair[0], offset, strides);
                compare_views(gpu, &pair, &[scattered, upload(gpu, &pair[1])], &options)?;
            }
        }
    }
    Ok(())
}

fn strided(gpu: &Gpu) -> kvfold::Result<()> {
    let (f16, bf16, f32) = (DType::F16, DType::Bf16, DType::F32);
    for (dtype, dim, gap) in
        [(f16, 63, 4), (bf16, 64, 4), (f32, 5, 4), (f16, 64, 8), (bf16, 80, 8), (f32, 8, 4)]
    {
        let shape = Shape::new(2, 2, 35, dim)?;
        let pair = pair(11, shape, dtype);
        let options = MergeOptions::default();
        let folded = merge_on(gpu, &[upload(gpu, &pair[0]), upload(gpu, &pair[1])], &options)?;
        // Token-major with a gap after every row, and a start in the middle of the buffer.
        let pitch = dim.next_multiple_of(2) + gap;
        let strides = Strides { batch: 2 * 35 * pitch, heads: pitch, tokens: 2 * pitch };
        let filler = vec![0xa5u8; (8 + 2 * 2 * 35 * pitch) * dtype.size()];
        let output = KvView::new(&gpu.upload("output", &filler)?, dtype, shape).at(8).strides(strides);
        gpu.submit(|encoder| Ops::new(gpu).encode_restore(encoder, &folded, Layer::Upper, &output))?;
        let bytes = gpu
            .submit(|encoder| kvfold::gpu::ReadBack::schedule(gpu, encoder, output.buffer()))?
            .wait_blocking()?;
        let plain = restore_on(gpu, &folded, Layer::Upper)?;
        let mut written = vec![false; bytes.len()];
        for (b, h, t) in shape.iter_rows() {
            let start = (8 + b * strides.batch + h * strides.heads + t * strides.tokens) * dtype.size();
            let end = start + dim * dtype.size();
            assert_eq!(&bytes[start..end], plain.view().row_bytes(b, h, t), "{dtype} {b} {h} {t}");
            written[start..end].fill(true);
        }
        let untouched = bytes.iter().zip(&written).filter(|(_, written)| !**written);
        assert!(untouched.clone().count() > 0 && untouched.clone().all(|(byte, _)| *byte == 0xa5), "{dtype}");
    }
    Ok(())
}

fn half_words(gpu: &Gpu) -> kvfold::Result<()> {
    let shape = Shape::new(1, 1, 4, 3)?;
    let pair = pair(1, shape, DType::F16);
    let folded = merge_on(gpu, &[upload(gpu, &pair[0]), upload(gpu, &pair[1])], &MergeOptions::default())?;
    let output = KvView::new(&gpu.storage("output", 64)?, DType::F16, shape);
    for (output, have) in [
        (output.clone().at(1), "offset 1"),
        (output.strides(Strides { batch: 12, heads: 12, tokens: 5 }), "strides [12, 12, 5]"),
    ] {
        let restored =
            gpu.submit(|encoder| Ops::new(gpu).encode_restore(encoder, &folded, Layer::Lower, &output));
        let error = restored.unwrap_err();
        assert!(matches!(error, Error::Alignment { .. }) && error.to_string().contains(have), "{error}");
    }
    Ok(())
}

fn shared_buffer(gpu: &Gpu) -> kvfold::Result<()> {
    let shape = Shape::new(1, 3, 40, 80)?;
    let [lower, upper] = pair(5, shape, DType::F16);
    // Both layers in one arena, the upper one at an odd offset.
    let mut bytes = lower.bytes().to_vec();
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(upper.bytes());
    let arena = gpu.upload("arena", &bytes)?;
    let view = KvView::new(&arena, DType::F16, shape);
    let views = [view.clone(), view.at(shape.elements() + 1)];
    let folded = folded_of(gpu, &merge_on(gpu, &views, &MergeOptions::default())?)?;
    let twin = cpu::merge(&lower.view(), &upper.view(), &MergeOptions::default())?;
    assert_eq!(folded.totals, twin.totals);
    assert_eq!(folded.side, twin.side);
    Ok(())
}

fn empty(gpu: &Gpu) -> kvfold::Result<()> {
    for shape in [Shape::new(1, 2, 0, 64)?, Shape::new(0, 2, 5, 64)?, Shape::new(1, 0, 5, 64)?] {
        let folded = compare(gpu, &pair(0, shape, DType::F16), &MergeOptions::default())?;
        assert_eq!(folded.bytes(), 0);
    }
    Ok(())
}
