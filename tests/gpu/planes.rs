//! Sign planes' kernels against their twins and the f64 reference of the stored codes.

use kvfold::attention::{AttendOptions, Precision};
use kvfold::capture::RopeLayout;
use kvfold::qjl::planes::gpu::{CodecBuffer, Ops, PlaneBuffer, PositionBuffer, Stored, TableBuffer};
use kvfold::qjl::planes::{
    Calibration, Centring, Codec, PlaneCodes, PlanesOptions, Preset, Segment, Tables, cpu, reference,
};
use kvfold::qjl::{KeyScale, Projection, ProjectionKind, reference as sketch};
use kvfold::rope::{Positions, Rope};
use kvfold::{DType, Error, Gpu, KvView, Shape, Tensor};

use crate::Test;
use crate::qjl::{Case, Folded, relative_l2};
use crate::rows::{download, scatter, upload};

pub(crate) const TESTS: &[Test] = &[
    ("planes_codes_equal_their_twin", codes),
    ("planes_codes_do_not_depend_on_where_rows_start", places),
    ("planes_count_and_mask_odd_rows", odd_rows),
    ("planes_scores_equal_the_reference_on_the_stored_codes", scores),
    ("planes_attend_equals_the_reference_on_the_stored_codes", attend),
    ("planes_attend_takes_every_mask_and_length", masks),
    ("codes_of_4096_tokens_attend_near_the_reference_at_every_spread", spreads),
    ("planes_refuse_what_does_not_fit", refused),
];

/// A case coded on the device.
struct Coded {
    ops: Ops,
    codec: CodecBuffer,
    host_tables: Tables,
    tables: TableBuffer,
    positions: PositionBuffer,
    keys: PlaneBuffer,
    values: PlaneBuffer,
}

fn rope(dim: usize, rotary: usize, layout: RopeLayout) -> Option<Rope> {
    (rotary > 0).then(|| Rope::from_theta(dim, rotary, 10_000.0, layout).unwrap())
}

/// Starts that are not 0 and differ by sequence.
fn starts(batch: usize) -> Vec<u32> {
    (0..batch as u32).map(|b| 70 * b + 5).collect()
}

impl Coded {
    fn new(gpu: &Gpu, case: &Case, options: PlanesOptions, rope: Option<Rope>) -> kvfold::Result<Self> {
        let shape = case.keys.shape();
        let codec = Codec::new(options, shape.dim, case.values.shape().dim, rope)?;
        let starts = starts(shape.batch);
        let (keys, queries) = (case.keys.view(), case.queries.view());
        let mut from = Calibration::new(&keys, Positions::Start(&starts)).queries(&queries);
        if let Some(rope) = codec.rope() {
            from = from.rope(rope);
        }
        let host_tables = if shape.tokens > options.sinks as usize {
            Tables::calibrate(&from, &options)?
        } else {
            Tables::identity(shape.heads, shape.dim)
        };
        let ops = Ops::new(gpu);
        let codec = ops.upload_codec(&codec)?;
        let tables = ops.upload_tables(&codec, &host_tables)?;
        let positions = ops.upload_positions(&codec, Positions::Start(&starts), shape.batch, shape.tokens)?;
        let (keys, values) = gpu.submit(|encoder| {
            let keys =
                ops.encode_key_codes(encoder, &upload(gpu, &case.keys), &codec, &tables, &positions)?;
            Ok((keys, ops.encode_value_codes(encoder, &upload(gpu, &case.values), &codec)?))
        })?;
        Ok(Self { ops, codec, host_tables, tables, positions, keys, values })
    }

    fn codes(&self, gpu: &Gpu) -> kvfold::Result<[PlaneCodes; 2]> {
        let (keys, values) = gpu.submit(|encoder| {
            Ok((self.keys.read_back(gpu, encoder)?, self.values.read_back(gpu, encoder)?))
        })?;
        Ok([gpu.block_on(self.keys.parse(keys))?, gpu.block_on(self.values.parse(values))?])
    }

    fn attend(
        &self,
        gpu: &Gpu,
        case: &Case,
        lengths: Option<&[u32]>,
        options: &AttendOptions,
    ) -> kvfold::Result<Vec<f32>> {
        let shape = Shape { dim: case.values.shape().dim, ..case.queries.shape() };
        let output =
            KvView::new(&gpu.storage("output", shape.bytes(DType::F32).max(4) as u64)?, DType::F32, shape);
        let (keys, values) = (upload(gpu, &case.keys), upload(gpu, &case.values));
        let stored = Stored {
            keys: &keys,
            key_codes: &self.keys,
            values: &values,
            value_codes: &self.values,
            tables: &self.tables,
            positions: &self.positions,
        };
        gpu.submit(|encoder| {
            let queries = upload(gpu, &case.queries);
            self.ops.encode_attend(encoder, &queries, &stored, &self.codec, lengths, options, &output)
        })?;
        Ok(download(gpu, &output).view().to_f32())
    }
}

/// Options and shapes that reach every path: presets, centring, widths that are powers of two and not, partial RoPE.
fn settings() -> Vec<(PlanesOptions, [usize; 2], Option<Rope>)> {
    let half = RopeLayout::HalfSplit;
    let preset = |preset: Preset| preset.options();
    let plain = PlanesOptions::default();
    vec![
        (preset(Preset::NearLossless), [64, 64], rope(64, 64, half.clone())),
        (preset(Preset::Balanced), [128, 128], rope(128, 128, half.clone())),
        (preset(Preset::Compact), [64, 80], rope(64, 64, RopeLayout::Interleaved)),
        (preset(Preset::Extreme), [80, 64], rope(80, 80, half.clone())),
        (plain.key_planes(5).value_planes(1), [48, 33], rope(48, 24, half.clone())),
        (plain.split(1, 5).value_planes(5), [96, 96], rope(96, 64, half.clone())),
        (plain.centring(Centring::BlockMean(24)), [33, 16], None),
        (plain.centring(Centring::None).rounds(1), [256, 1], None),
        (plain.split(4, 2).rounds(3), [512, 511], rope(512, 512, half)),
        (plain, [1, 1], None),
    ]
}

fn codes(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, (options, dims, rope)) in (0..).zip(settings()) {
        let case = Case::new(seed, [2, 2, 75], dims, 2, 2);
        let coded = Coded::new(gpu, &case, options, rope)?;
        let [keys, values] = coded.codes(gpu)?;
        let starts = starts(2);
        let positions = Positions::Start(&starts);
        let codec = coded.codec.codec();
        let twin = [
            cpu::encode_keys(codec, &case.keys.view(), positions, &coded.host_tables)?,
            cpu::encode_values(codec, &case.values.view())?,
        ];
        assert_eq!(keys.positions, twin[0].positions);
        for (kernel, twin) in [&keys, &values].into_iter().zip(&twin) {
            let context = format!("{options:?} {}", kernel.shape);
            assert_eq!(kernel.status, twin.status, "{context}");
            // In one channel every step fits alike, and rounding chooses; the numbers decoded are compared below.
            if kernel.shape.dim > 1 {
                compare_codes(kernel, twin, &context);
            }
        }
        // Tiles hold 32 tokens and groups 32 channels; a mean's numbers stand two to a word.
        let shape = twin[0].shape;
        let tiles = shape.batch * shape.heads * shape.tokens.next_multiple_of(32);
        let bits =
            |segment: &Segment| usize::from(segment.planes) * segment.channels.next_multiple_of(32) + 16;
        let coded_bits: usize = codec.keys().segments().iter().filter(|s| s.planes > 0).map(bits).sum();
        let means = twin[0].means.len() / shape.dim * shape.dim.next_multiple_of(2);
        let bytes = (tiles * coded_bits / 8 + 2 * means).next_multiple_of(16);
        assert_eq!(coded.keys.bytes(), bytes as u64, "{options:?}");
        let decoded = cpu::decode_keys(codec, &keys, &coded.host_tables)?;
        let wide: Vec<f64> =
            cpu::decode_keys(codec, &twin[0], &coded.host_tables)?.into_iter().map(f64::from).collect();
        // A code at a cell's border moves by one step; few do, and the row's length stays.
        assert!(relative_l2(&decoded, &wide) < 0.02, "{options:?}");
    }
    Ok(())
}

/// Rows that start at 16 bytes are coded into tiles at once where they can be, any others row by row: the codes are the same.
fn places(gpu: &Gpu) -> kvfold::Result<()> {
    let plain = PlanesOptions::default().centring(Centring::None);
    let settings = [(32, 1, 3), (64, 2, 4), (128, 3, 3), (256, 4, 3), (256, 4, 4), (64, 5, 1), (128, 1, 2)];
    for (seed, (dim, planes, rounds)) in (60..).zip(settings) {
        let options = plain.key_planes(planes).value_planes(planes).rounds(rounds);
        for dtype in DType::ALL {
            let case = Case::new(seed, [2, 2, 45], [dim, dim], 1, 1);
            let rows = broken(&case.keys, &[3, 44, 45, 100], &[f32::NAN, f32::INFINITY, 0.0, f32::NAN]);
            let rows = Tensor::from_f32(&rows.view().to_f32(), dtype, rows.shape()).unwrap();
            let strides = kvfold::Strides::contiguous(rows.shape());
            let codes = |rows: KvView| -> kvfold::Result<[PlaneCodes; 2]> {
                let ops = Ops::new(gpu);
                let codec = ops.upload_codec(&Codec::new(options, dim, dim, None)?)?;
                let tables = ops.upload_tables(&codec, &Tables::identity(2, dim))?;
                let positions = ops.upload_positions(&codec, Positions::Start(&[0, 0]), 2, 45)?;
                let [keys, values] = gpu.submit(|encoder| {
                    let keys = ops.encode_key_codes(encoder, &rows, &codec, &tables, &positions)?;
                    Ok([keys, ops.encode_value_codes(encoder, &rows, &codec)?])
                })?;
                let read = |codes: &PlaneBuffer| gpu.submit(|encoder| codes.read_back(gpu, encoder));
                Ok([gpu.block_on(keys.parse(read(&keys)?))?, gpu.block_on(values.parse(read(&values)?))?])
            };
            let [at_once, one_by_one] = [0, 1].map(|offset| codes(scatter(gpu, &rows, offset, strides)));
            for (at_once, one_by_one) in at_once?.iter().zip(&one_by_one?) {
                let context = format!("{planes} planes of {dim} channels of {dtype}");
                assert_eq!(at_once.status.non_finite, 3, "{context}");
                assert_eq!(at_once.status, one_by_one.status, "{context}");
                compare_codes(at_once, one_by_one, &context);
            }
        }
    }
    Ok(())
}

/// Sums in another order move a number across a cell's border, or a row to another step, now and then.
fn compare_codes(kernel: &PlaneCodes, twin: &PlaneCodes, context: &str) {
    for (kernel, twin) in kernel.segments.iter().zip(&twin.segments) {
        assert_eq!(kernel.words.len(), twin.words.len(), "{context}");
        let differing: u32 = kernel.words.iter().zip(&twin.words).map(|(a, b)| (a ^ b).count_ones()).sum();
        let bits = 32 * twin.words.len().max(1) as u32;
        assert!(differing * 500 <= bits.max(500), "{context}: {differing} of {bits} bits differ");
        let rows = kernel.nu.iter().zip(&twin.nu).filter(|(a, b)| {
            let ulps = i32::from(a.to_bits()) - i32::from(b.to_bits());
            ulps.abs() > 2
        });
        assert!(rows.count() * 50 <= twin.nu.len(), "{context}");
    }
    for (a, b) in kernel.means.iter().zip(&twin.means) {
        // A mean that cancels keeps the rounding of its terms.
        assert!(
            (a.to_f32() - b.to_f32()).abs() <= 2f32.powi(-10) * b.to_f32().abs() + 1e-5,
            "{context}: {a} {b}"
        );
    }
    assert_eq!(kernel.means.len(), twin.means.len(), "{context}");
}

fn broken(tensor: &Tensor, rows: &[usize], numbers: &[f32]) -> Tensor {
    let dim = tensor.shape().dim;
    let mut all = tensor.view().to_f32();
    for (row, number) in rows.iter().zip(numbers) {
        if *number == 0.0 {
            all[row * dim..(row + 1) * dim].fill(0.0);
        } else {
            all[row * dim + dim / 2] = *number;
        }
    }
    Tensor::from_f32(&all, DType::F32, tensor.shape()).unwrap()
}

fn odd_rows(gpu: &Gpu) -> kvfold::Result<()> {
    let mut case = Case::new(3, [1, 2, 150], [64, 64], 2, 2);
    case.keys = broken(&case.keys, &[10, 50, 170, 200], &[f32::NAN, f32::INFINITY, 1e7, 0.0]);
    case.values = broken(&case.values, &[11, 50, 171, 201], &[f32::NAN, f32::NEG_INFINITY, 1e8, 0.0]);
    case.queries = broken(&case.queries, &[1], &[f32::NAN]);
    for options in [Preset::Balanced.options(), Preset::Compact.options()] {
        let coded = Coded::new(gpu, &case, options, rope(64, 64, RopeLayout::HalfSplit))?;
        let [keys, values] = coded.codes(gpu)?;
        assert_eq!((keys.status.non_finite, values.status.non_finite), (2, 2));
        assert_eq!((values.status.zero, values.status.overflow), (1, 1));
        check(gpu, &case, &coded, None, &AttendOptions::default())?;
    }
    Ok(())
}

fn scores(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, (options, dims, rope)) in (20..).zip(settings()) {
        let case = Case::new(seed, [2, 2, 75], dims, 3, 2);
        let coded = Coded::new(gpu, &case, options, rope)?;
        let [keys, _] = coded.codes(gpu)?;
        let want = reference::scores(coded.codec.codec(), &case.queries.view(), &keys, &coded.host_tables)?;
        let shape = Shape { dim: 75, ..case.queries.shape() };
        let output = KvView::new(&gpu.storage("scores", shape.bytes(DType::F32) as u64)?, DType::F32, shape);
        gpu.submit(|encoder| {
            let queries = upload(gpu, &case.queries);
            let Coded { ops, codec, tables, positions, keys, .. } = &coded;
            ops.encode_scores(encoder, &queries, keys, codec, tables, positions, &output)
        })?;
        let error = relative_l2(&download(gpu, &output).view().to_f32(), &want);
        assert!(error < 1e-5, "{options:?} {dims:?}: {error}");
    }
    Ok(())
}

/// Attention on the device against the reference on the device's own codes: below 1e-5, the contract's bound for f32.
fn check(
    gpu: &Gpu,
    case: &Case,
    coded: &Coded,
    lengths: Option<&[u32]>,
    options: &AttendOptions,
) -> kvfold::Result<()> {
    let [key_codes, value_codes] = coded.codes(gpu)?;
    let (keys, values) = (case.keys.view(), case.values.view());
    let stored = kvfold::qjl::planes::Stored {
        keys: &keys,
        key_codes: &key_codes,
        values: &values,
        value_codes: &value_codes,
        tables: &coded.host_tables,
    };
    let codec = coded.codec.codec();
    let want = reference::attend(codec, &case.queries.view(), &stored, lengths, options)?;
    let have = coded.attend(gpu, case, lengths, &options.precision(Precision::Exact))?;
    let error = relative_l2(&have, &want);
    assert!(error < 1e-5, "{error} for {:?} {} {options:?} {lengths:?}", codec.options(), case.keys.shape());
    Ok(())
}

fn attend(gpu: &Gpu) -> kvfold::Result<()> {
    for (seed, (options, dims, rope)) in (40..).zip(settings()) {
        let case = Case::new(seed, [2, 2, 90], dims, [1, 3, 7, 8][usize::from(seed) % 4], 1);
        let coded = Coded::new(gpu, &case, options.recent(30), rope)?;
        check(gpu, &case, &coded, None, &AttendOptions::default())?;
    }
    Ok(())
}

fn masks(gpu: &Gpu) -> kvfold::Result<()> {
    let case = Case::new(5, [3, 1, 777], [80, 80], 7, 3);
    let plain = AttendOptions::default();
    let coded = Coded::new(gpu, &case, PlanesOptions::default(), rope(80, 80, RopeLayout::HalfSplit))?;
    let sinks = [-3.0, 0.0, 1.5, 40.0, -90.0, 2.0, 0.5];
    for lengths in [Some([0, 1, 777].as_slice()), Some(&[3, 66, 400])] {
        for options in [plain.causal(true).sink_logits(&sinks), plain.window(130).soft_cap(5.0).scale(0.3)] {
            check(gpu, &case, &coded, lengths, &options)?;
        }
    }
    Ok(())
}

/// Attention over 4,096 tokens against the reference on the stored codes, in f32 and with queries and weights in 8 bits, at spreads of
/// the scores that real heads have: below the contract's bounds. Gives how long the answers in 8 bits are along the right ones.
fn at_spreads(
    what: &str,
    scores: &[f64],
    want: impl Fn(&AttendOptions) -> kvfold::Result<Vec<f64>>,
    have: impl Fn(&AttendOptions) -> kvfold::Result<Vec<f32>>,
) -> kvfold::Result<Vec<f64>> {
    let mean = scores.iter().sum::<f64>() / scores.len() as f64;
    let spread = (scores.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / scores.len() as f64).sqrt();
    let mut along = Vec::new();
    for nats in [0.5, 2.0, 8.0] {
        let options = AttendOptions::default().scale((nats / spread) as f32);
        let want = want(&options)?;
        let error = relative_l2(&have(&options.precision(Precision::Exact))?, &want);
        assert!(error < 1e-5, "{error} exactly at {nats} nats, {what}");
        let fast = have(&options.precision(Precision::Fast))?;
        let error = relative_l2(&fast, &want);
        assert!(error < 3e-2, "{error} in bytes at {nats} nats, {what}");
        let product: f64 = fast.iter().zip(&want).map(|(&h, w)| f64::from(h) * w).sum();
        along.push(product / want.iter().map(|w| w * w).sum::<f64>());
    }
    Ok(along)
}

/// Of all codings no answer in bytes has a bias: errors of either sign, of a hundredth each, leave a mean of some thousandths along
/// the right answer.
fn spreads(gpu: &Gpu) -> kvfold::Result<()> {
    let presets = Preset::ALL.map(|preset| preset.options());
    let others = [
        PlanesOptions::default().key_planes(5).value_planes(5).centring(Centring::None),
        PlanesOptions::default().key_planes(2).value_planes(1).centring(Centring::BlockMean(64)),
    ];
    let dims = [64, 128, 80, 64, 48, 256];
    let mut along = Vec::new();
    for ((seed, options), dim) in (80..).zip(presets.into_iter().chain(others)).zip(dims) {
        let case = Case::new(seed, [1, 1, 4096], [dim, dim], 4, 1);
        let options = options.sinks(0).recent(0);
        let coded = Coded::new(gpu, &case, options, rope(dim, dim, RopeLayout::HalfSplit))?;
        let [key_codes, value_codes] = coded.codes(gpu)?;
        let (codec, queries) = (coded.codec.codec(), case.queries.view());
        let stored = kvfold::qjl::planes::Stored {
            keys: &case.keys.view(),
            key_codes: &key_codes,
            values: &case.values.view(),
            value_codes: &value_codes,
            tables: &coded.host_tables,
        };
        along.extend(at_spreads(
            &format!("{options:?}"),
            &reference::scores(codec, &queries, &key_codes, &coded.host_tables)?,
            |options| reference::attend(codec, &queries, &stored, None, options),
            |options| coded.attend(gpu, &case, None, options),
        )?);
    }
    // The projections of the presets `qjl` and `qjl-orth`.
    for (kind, bits) in [(ProjectionKind::Gaussian, 64), (ProjectionKind::Orthogonal, 256)] {
        let case = Case::new(90, [1, 1, 4096], [64, 64], 4, 1);
        let projection = Projection::new(kind, 64, bits, 42)?;
        let folded = Folded::new(gpu, &case, &projection, KeyScale::Norm)?;
        let ((keys, values), queries) = (folded.codes(gpu)?, case.queries.view());
        along.extend(at_spreads(
            &format!("{kind:?}"),
            &sketch::scores(&queries, &keys, &projection, KeyScale::Norm)?,
            |options| sketch::attend(&queries, &keys, &values, &projection, KeyScale::Norm, None, options),
            |options| folded.attend(gpu, &case.queries, None, options),
        )?);
    }
    let mean = along.iter().sum::<f64>() / along.len() as f64;
    assert!((mean - 1.0).abs() < 5e-3, "{mean} along the reference");
    Ok(())
}

fn refused(gpu: &Gpu) -> kvfold::Result<()> {
    let case = Case::new(2, [1, 2, 40], [64, 64], 1, 1);
    let coded = Coded::new(gpu, &case, PlanesOptions::default(), rope(64, 64, RopeLayout::HalfSplit))?;
    let narrow = Case::new(2, [1, 2, 40], [32, 32], 1, 1);
    let keys = gpu.submit(|encoder| {
        let Coded { ops, codec, tables, positions, .. } = &coded;
        ops.encode_key_codes(encoder, &upload(gpu, &narrow.keys), codec, tables, positions)
    });
    let error = keys.unwrap_err();
    assert!(matches!(error, Error::Shape { .. }) && error.to_string().contains("64"), "{error}");
    let short = Case::new(2, [1, 2, 39], [64, 64], 1, 1);
    let keys = gpu.submit(|encoder| {
        let Coded { ops, codec, tables, positions, .. } = &coded;
        ops.encode_key_codes(encoder, &upload(gpu, &short.keys), codec, tables, positions)
    });
    assert_eq!(keys.unwrap_err().to_string(), "positions: wanted [1, 39], had [1, 40]");
    Ok(())
}
