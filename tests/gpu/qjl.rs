//! QJL's kernels against their twins, the f64 reference and the original's vectors.

use half::f16;
use kvfold::attention::{AttendOptions, Precision};
use kvfold::qjl::gpu::{Ops, ProjectionBuffer, QuantizedValueBuffers, SketchedKeyBuffers};
use kvfold::qjl::{KeyScale, Projection, ProjectionKind, QuantizedValues, SketchedKeys, cpu, reference};
use kvfold::{DType, Error, Gpu, KvView, Shape, Strides, Tensor};

use crate::Test;
use crate::rows::{Numbers, download, pair, upload};

pub(crate) const TESTS: &[Test] = &[
    ("quantize_equals_its_twin", quantize),
    ("quantize_values_equals_its_twin", quantize_values),
    ("scores_equal_the_reference_on_the_stored_codes", scores),
    ("attend_equals_the_reference_on_the_stored_codes", attend),
    ("attend_takes_every_mask_and_length", masks),
    ("attend_takes_long_sketches_and_caches", long),
    ("attend_writes_strided_outputs_of_every_type", outputs),
    ("rows_that_are_not_finite_never_spread", not_finite),
    ("empty_caches_attend_to_zeros", empty),
    ("sizes_that_do_not_fit_are_refused", refused),
];

/// Keys, values and queries, with odd rows among the keys and values where wanted.
pub(crate) struct Case {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    pub(crate) queries: Tensor,
}

impl Case {
    /// `[batch, kv_heads, tokens]` keys of `dims[0]` and values of `dims[1]`, queries of `group` heads for each.
    pub(crate) fn new(
        seed: u8,
        [batch, kv_heads, tokens]: [usize; 3],
        dims: [usize; 2],
        group: usize,
        queries: usize,
    ) -> Self {
        let mut numbers = Numbers::new(seed);
        let mut tensor = |heads, tokens, dim, spread: f32| {
            let shape = Shape::new(batch, heads, tokens, dim).unwrap();
            let numbers: Vec<f32> = (0..shape.elements()).map(|_| spread * numbers.next()).collect();
            Tensor::from_f32(&numbers, DType::F16, shape).unwrap()
        };
        Self {
            keys: tensor(kv_heads, tokens, dims[0], 1.5),
            values: tensor(kv_heads, tokens, dims[1], 3.0),
            queries: tensor(kv_heads * group, queries, dims[0], 2.0),
        }
    }

    /// A case of 64 channels in which some rows of each tensor hold a number that is not finite.
    pub(crate) fn not_finite() -> Self {
        let case = Self::new(9, [1, 2, 200], [64, 64], 2, 2);
        let broken = |tensor: &Tensor, rows: &[usize], value: f32| {
            let mut numbers = tensor.view().to_f32();
            rows.iter().for_each(|row| numbers[row * 64 + 5] = value);
            Tensor::from_f32(&numbers, DType::F16, tensor.shape()).unwrap()
        };
        Self {
            keys: broken(&case.keys, &[0, 17, 250], f32::NAN),
            values: broken(&case.values, &[3, 17, 399], f32::INFINITY),
            queries: broken(&case.queries, &[2], f32::NEG_INFINITY),
        }
    }
}

/// Keys and values folded on the device, with the projection.
pub(crate) struct Folded {
    ops: Ops,
    projection: ProjectionBuffer,
    pub(crate) keys: SketchedKeyBuffers,
    pub(crate) values: QuantizedValueBuffers,
}

impl Folded {
    pub(crate) fn new(
        gpu: &Gpu,
        case: &Case,
        projection: &Projection,
        scale: KeyScale,
    ) -> kvfold::Result<Self> {
        Self::of(gpu, &[upload(gpu, &case.keys), upload(gpu, &case.values)], projection, scale)
    }

    /// These keys and values.
    pub(crate) fn of(
        gpu: &Gpu,
        [keys, values]: &[KvView; 2],
        projection: &Projection,
        scale: KeyScale,
    ) -> kvfold::Result<Self> {
        let ops = Ops::new(gpu);
        let buffer = ops.upload_projection(projection)?;
        let (keys, values) = gpu.submit(|encoder| {
            let keys = ops.encode_quantize(encoder, keys, &buffer, scale)?;
            Ok((keys, ops.encode_quantize_values(encoder, values)?))
        })?;
        Ok(Self { ops, projection: buffer, keys, values })
    }

    /// The codes as they stand on the device.
    pub(crate) fn codes(&self, gpu: &Gpu) -> kvfold::Result<(SketchedKeys, QuantizedValues)> {
        let keys = gpu.submit(|encoder| self.keys.read_back(gpu, encoder))?;
        let values = gpu.submit(|encoder| self.values.read_back(gpu, encoder))?;
        Ok((gpu.block_on(self.keys.parse(keys))?, gpu.block_on(self.values.parse(values))?))
    }

    pub(crate) fn attend_into(
        &self,
        gpu: &Gpu,
        queries: &Tensor,
        lengths: Option<&[u32]>,
        options: &AttendOptions,
        output: &KvView,
    ) -> kvfold::Result<()> {
        gpu.submit(|encoder| {
            let queries = upload(gpu, queries);
            let Self { ops, projection, keys, values } = self;
            let exact = options.precision == Precision::Auto;
            let options = if exact { &options.precision(Precision::Exact) } else { options };
            ops.encode_attend(encoder, &queries, keys, values, projection, lengths, options, output)
        })
    }

    pub(crate) fn attend(
        &self,
        gpu: &Gpu,
        queries: &Tensor,
        lengths: Option<&[u32]>,
        options: &AttendOptions,
    ) -> kvfold::Result<Vec<f32>> {
        let shape = Shape { dim: self.values.shape().dim, ..queries.shape() };
        let buffer = gpu.storage("output", shape.bytes(DType::F32).max(4) as u64)?;
        let output = KvView::new(&buffer, DType::F32, shape);
        self.attend_into(gpu, queries, lengths, options, &output)?;
        Ok(download(gpu, &output).view().to_f32())
    }
}

pub(crate) fn relative_l2(have: &[f32], want: &[f64]) -> f64 {
    assert_eq!(have.len(), want.len());
    let error: f64 = have.iter().zip(want).map(|(h, w)| (f64::from(*h) - w).powi(2)).sum();
    let norm: f64 = want.iter().map(|w| w * w).sum();
    if norm == 0.0 { error.sqrt() } else { (error / norm).sqrt() }
}

fn projection(kind: ProjectionKind, head_dim: usize, sketch_dim: usize) -> Projection {
    Projection::new(kind, head_dim, sketch_dim, 7).unwrap()
}

/// Every kind of projection at dimensions that fill no word, one word, several blocks and part of a block.
fn projections() -> Vec<Projection> {
    let mut all = Vec::new();
    for (head_dim, sketch_dim) in [(1, 3), (8, 20), (64, 64), (80, 200), (128, 320), (511, 40), (512, 513)] {
        all.push(projection(ProjectionKind::Gaussian, head_dim, sketch_dim));
        if head_dim.is_power_of_two() {
            all.push(projection(ProjectionKind::Hadamard, head_dim, sketch_dim));
        }
    }
    all.push(projection(ProjectionKind::Orthogonal, 96, 192));
    all
}

pub(crate) fn ulps(a: f16, b: f16) -> i32 {
    (i32::from(a.to_bits()) - i32::from(b.to_bits())).abs()
}

/// Bits may differ only where `S k` is zero to rounding: sums of `D` products in another order.
fn check_bits(kernel: &SketchedKeys, twin: &SketchedKeys, projection: &Projection, keys: &Tensor) {
    let per_row = twin.words_per_row();
    let mut row = vec![0.0; keys.shape().dim];
    for (index, (b, h, t)) in keys.shape().iter_rows().enumerate() {
        let words = |sketch: &SketchedKeys| sketch.words[index * per_row..(index + 1) * per_row].to_vec();
        let differing = words(kernel).iter().zip(words(twin)).map(|(a, b)| a ^ b).collect::<Vec<_>>();
        if differing.iter().all(|bits| *bits == 0) {
            continue;
        }
        keys.view().read_row(b, h, t, &mut row);
        let wide: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let exact = reference::project(projection, &wide);
        let norm = wide.iter().map(|x| x * x).sum::<f64>().sqrt();
        for (j, y) in exact.iter().enumerate() {
            let differs = differing[j / 32] >> (j % 32) & 1 == 1;
            // A row of S has norm sqrt(D) or so, and D roundings of 2^-24 each.
            let dim = row.len() as f64;
            assert!(!differs || y.abs() <= 4.0 * dim * norm * 2f64.powi(-24), "row {index} bit {j}: {y}");
        }
    }
}

fn quantize(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, projection) in (0..).zip(projections()) {
        let dtype = DType::ALL[usize::from(seed) % 3];
        let rounded = usize::from(seed) + usize::from(projection.kind() == ProjectionKind::Hadamard);
        let scale = KeyScale::ALL[rounded % 3];
        // An odd number of rows, so that the last scale stands alone in its word.
        let [keys, _] = pair(seed, Shape::new(1, 3, 35, projection.head_dim())?, dtype);
        let [_, odd] = pair(seed, keys.shape(), dtype);
        for keys in [keys, odd] {
            check_keys(gpu, &keys, &upload(gpu, &keys), &projection, scale)?;
        }
    }
    Ok(())
}

/// Sketches keys from a view of them and compares with the twin's.
pub(crate) fn check_keys(
    gpu: &Gpu,
    keys: &Tensor,
    view: &KvView,
    projection: &Projection,
    scale: KeyScale,
) -> kvfold::Result<()> {
    let twin = cpu::quantize(&keys.view(), projection, scale)?;
    let ops = Ops::new(gpu);
    let buffer = ops.upload_projection(projection)?;
    assert_eq!(buffer.bytes(), projection.bytes() as u64);
    let folded = gpu.submit(|encoder| ops.encode_quantize(encoder, view, &buffer, scale))?;
    let read_back = gpu.submit(|encoder| folded.read_back(gpu, encoder))?;
    let kernel = gpu.block_on(folded.parse(read_back))?;
    assert_eq!(kernel.status, twin.status);
    let rows = keys.shape().batch * keys.shape().heads * keys.shape().tokens.next_multiple_of(32);
    assert_eq!(folded.bytes(), (rows * (4 * twin.words_per_row() + 2)) as u64, "whole tiles of 32 tokens");
    for (row, (a, b)) in kernel.scale.iter().zip(&twin.scale).enumerate() {
        assert!(ulps(*a, *b) <= 1, "{:?} {scale:?} row {row}: {a} {b}", projection.kind());
    }
    check_bits(&kernel, &twin, projection, keys);
    Ok(())
}

fn quantize_values(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, dim) in (0..).zip([1, 2, 3, 64, 80, 127, 192, 512]) {
        for dtype in DType::ALL {
            let [_, values] = pair(seed, Shape::new(1, 3, 37, dim)?, dtype);
            check_values(gpu, &values, &upload(gpu, &values))?;
        }
    }
    Ok(())
}

/// Codes values from a view of them and compares with the twin's.
pub(crate) fn check_values(gpu: &Gpu, values: &Tensor, view: &KvView) -> kvfold::Result<()> {
    let context = format!("{} {}", values.shape(), values.dtype());
    let twin = cpu::quantize_values(&values.view())?;
    let folded = gpu.submit(|encoder| Ops::new(gpu).encode_quantize_values(encoder, view))?;
    let read_back = gpu.submit(|encoder| folded.read_back(gpu, encoder))?;
    let kernel = gpu.block_on(folded.parse(read_back))?;
    assert_eq!(kernel.status, twin.status, "{context}");
    let codes = kernel.words.iter().zip(&twin.words);
    let per_row = twin.words_per_row();
    for (word, (a, b)) in codes.enumerate() {
        let row = word / per_row;
        assert!(ulps(kernel.scale[row], twin.scale[row]) <= 1, "{context} row {row}");
        // The quotient may be off by 2.5 ulp in WGSL, which moves a code that lies on a border; a scale that differs by
        // one ulp moves at most as many.
        for (x, y) in a.to_le_bytes().into_iter().zip(b.to_le_bytes()) {
            let difference = i32::from(x.cast_signed()) - i32::from(y.cast_signed());
            assert!(difference.abs() <= 1, "{context} row {row}: {x} {y}");
        }
    }
    Ok(())
}

fn scores(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, projection) in (0..).zip(projections()) {
        let scale = [KeyScale::Norm, KeyScale::Mse, KeyScale::Unbiased][usize::from(seed) % 3];
        let case = Case::new(seed, [2, 2, 131], [projection.head_dim(), 8], 3, 2);
        let folded = Folded::new(gpu, &case, &projection, scale)?;
        let (keys, _) = folded.codes(gpu)?;
        let want = reference::scores(&case.queries.view(), &keys, &projection, scale)?;
        let shape = Shape { dim: 131, ..case.queries.shape() };
        // The output starts in the middle of a host's buffer.
        let buffer = gpu.storage("scores", (shape.elements() + 100) as u64 * 4)?;
        let output = KvView::new(&buffer, DType::F32, shape).at(70);
        gpu.submit(|encoder| {
            let queries = upload(gpu, &case.queries);
            folded.ops.encode_scores(encoder, &queries, &folded.keys, &folded.projection, &output)
        })?;
        let all =
            download(gpu, &KvView::new(&buffer, DType::F32, Shape::new(1, 1, 1, shape.elements() + 100)?));
        let have = all.view().to_f32();
        let error = relative_l2(&have[70..70 + shape.elements()], &want);
        // Sums of m terms in f32: relative error sqrt(m) 2^-24 or so of terms that partly cancel.
        assert!(error < 1e-5, "{:?} {scale:?}: {error}", projection.kind());
        assert!(have[..70].iter().chain(&have[70 + shape.elements()..]).all(|x| *x == 0.0));
    }
    Ok(())
}

/// Attention on the device against the reference on the device's own codes.
fn check_attend(
    gpu: &Gpu,
    case: &Case,
    projection: &Projection,
    lengths: Option<&[u32]>,
    options: &AttendOptions,
) -> kvfold::Result<Vec<f32>> {
    let folded = Folded::new(gpu, case, projection, KeyScale::Norm)?;
    check_folded(gpu, &folded, case, projection, KeyScale::Norm, lengths, options)
}

/// The same of keys and values that are folded already, with this scalar.
pub(crate) fn check_folded(
    gpu: &Gpu,
    folded: &Folded,
    case: &Case,
    projection: &Projection,
    scale: KeyScale,
    lengths: Option<&[u32]>,
    options: &AttendOptions,
) -> kvfold::Result<Vec<f32>> {
    let (keys, values) = folded.codes(gpu)?;
    let have = folded.attend(gpu, &case.queries, lengths, options)?;
    let queries = case.queries.view();
    let want = reference::attend(&queries, &keys, &values, projection, scale, lengths, options)?;
    let error = relative_l2(&have, &want);
    // Scores of up to about 30 in f32, with exp allowed 3 + 2|x| ulp: 63 * 2^-24 on a weight at the worst.
    let kind = projection.kind();
    assert!(error < 1e-5, "{error} for {} {kind:?} {options:?} {lengths:?}", case.keys.shape());
    Ok(have)
}

fn attend(gpu: &Gpu) -> kvfold::Result<()> {
    let options = AttendOptions::default();
    let dims = [(64, 64), (192, 128), (80, 80), (1, 511), (512, 1), (128, 128)];
    for (seed, ((key_dim, value_dim), group)) in (0..).zip(dims.into_iter().zip([1, 3, 5, 7, 8, 2])) {
        let kind = if key_dim == 80 { ProjectionKind::Orthogonal } else { ProjectionKind::Gaussian };
        let case = Case::new(seed, [2, 2, 150], [key_dim, value_dim], group, 2);
        check_attend(gpu, &case, &projection(kind, key_dim, 2 * key_dim), None, &options)?;
    }
    Ok(())
}

fn masks(gpu: &Gpu) -> kvfold::Result<()> {
    let case = Case::new(5, [3, 1, 777], [80, 80], 7, 3);
    let projection = projection(ProjectionKind::Gaussian, 80, 160);
    let plain = AttendOptions::default();
    for lengths in [None, Some([0, 1, 777].as_slice()), Some(&[3, 128, 129])] {
        for options in [
            plain,
            plain.causal(true),
            plain.window(1),
            plain.window(130).causal(true),
            plain.soft_cap(5.0),
            plain.scale(0.01).causal(true).soft_cap(0.5),
        ] {
            check_attend(gpu, &case, &projection, lengths, &options)?;
        }
    }
    Ok(())
}

fn long(gpu: &Gpu) -> kvfold::Result<()> {
    // A sketch that passes through workgroup memory in several chunks, and a cache of many splits.
    let case = Case::new(6, [1, 1, 300], [64, 64], 2, 1);
    check_attend(
        gpu,
        &case,
        &projection(ProjectionKind::Hadamard, 64, 5000),
        None,
        &AttendOptions::default(),
    )?;
    let case = Case::new(7, [1, 2, 20_000], [32, 32], 1, 1);
    let causal = AttendOptions::default().causal(true);
    check_attend(gpu, &case, &projection(ProjectionKind::Orthogonal, 32, 64), None, &causal)?;
    Ok(())
}

fn outputs(gpu: &Gpu) -> kvfold::Result<()> {
    let case = Case::new(8, [2, 2, 90], [64, 33], 2, 3);
    let projection = projection(ProjectionKind::Hadamard, 64, 128);
    let folded = Folded::new(gpu, &case, &projection, KeyScale::Norm)?;
    let options = AttendOptions::default();
    let plain = folded.attend(gpu, &case.queries, None, &options)?;
    let shape = Shape { dim: 33, ..case.queries.shape() };
    for dtype in DType::ALL {
        let ulp = match dtype {
            DType::F16 => 2f32.powi(-10),
            DType::Bf16 => 2f32.powi(-7),
            DType::F32 => 0.0,
        };
        // Contiguous rows of 33 halves straddle words; strided ones end in half a word.
        for strides in [Strides::contiguous(shape), Strides { batch: 12 * 36, heads: 36, tokens: 4 * 36 }] {
            let buffer = gpu.storage("output", 4096 * dtype.size() as u64)?;
            let output = KvView::new(&buffer, dtype, shape).at(2).strides(strides);
            folded.attend_into(gpu, &case.queries, None, &options, &output)?;
            let all = download(gpu, &KvView::new(&buffer, dtype, Shape::new(1, 1, 1, 4096)?)).view().to_f32();
            for ((b, h, t), want) in shape.iter_rows().zip(plain.chunks(33)) {
                let start = 2 + b * strides.batch + h * strides.heads + t * strides.tokens;
                for (have, want) in all[start..start + 33].iter().zip(want) {
                    assert!((have - want).abs() <= ulp * want.abs() + 1e-7, "{dtype} {have} {want}");
                }
            }
        }
    }
    Ok(())
}

fn not_finite(gpu: &Gpu) -> kvfold::Result<()> {
    let case = Case::not_finite();
    let projection = projection(ProjectionKind::Gaussian, 64, 64);
    let have = check_attend(gpu, &case, &projection, None, &AttendOptions::default())?;
    assert!(have.iter().all(|x| x.is_finite()));
    assert!(have[2 * 64..3 * 64].iter().all(|x| *x == 0.0), "the broken query sees nothing");
    assert!(have[..2 * 64].iter().chain(&have[3 * 64..]).filter(|x| **x == 0.0).count() < 8);
    Ok(())
}

fn empty(gpu: &Gpu) -> kvfold::Result<()> {
    let projection = projection(ProjectionKind::Gaussian, 16, 16);
    for sizes in [[1, 2, 0], [0, 2, 5]] {
        let case = Case::new(1, sizes, [16, 16], 2, 3);
        let have = check_attend(gpu, &case, &projection, None, &AttendOptions::default())?;
        assert!(have.iter().all(|x| *x == 0.0));
    }
    let no_queries = Case::new(1, [1, 2, 4], [16, 16], 2, 0);
    assert!(check_attend(gpu, &no_queries, &projection, None, &AttendOptions::default())?.is_empty());
    Ok(())
}

fn refused(gpu: &Gpu) -> kvfold::Result<()> {
    let case = Case::new(2, [1, 3, 10], [64, 64], 1, 1);
    let projection = projection(ProjectionKind::Gaussian, 64, 64);
    let folded = Folded::new(gpu, &case, &projection, KeyScale::Norm)?;
    let options = AttendOptions::default();
    let attend = |queries: &Tensor, lengths: Option<&[u32]>, options: &AttendOptions| {
        folded.attend(gpu, queries, lengths, options).unwrap_err().to_string()
    };
    let four_heads = Case::new(2, [1, 4, 1], [64, 64], 1, 1).queries;
    assert_eq!(
        attend(&four_heads, None, &options),
        "query heads: wanted a multiple of the 3 KV heads, had 4"
    );
    let narrow = Case::new(2, [1, 3, 1], [32, 64], 1, 1).queries;
    assert!(attend(&narrow, None, &options).contains("64"), "{}", attend(&narrow, None, &options));
    assert!(attend(&case.queries, Some(&[11]), &options).contains("at most 10 tokens, had 11"));
    assert!(attend(&case.queries, Some(&[1, 2]), &options).contains("lengths"));
    assert!(attend(&case.queries, None, &options.scale(f32::NAN)).contains("attention scale"));
    let ops = Ops::new(gpu);
    let wrong = gpu.submit(|encoder| {
        ops.encode_quantize(encoder, &upload(gpu, &narrow), &folded.projection, KeyScale::Norm)
    });
    assert!(matches!(wrong.unwrap_err(), Error::Shape { .. }));
    Ok(())
}
