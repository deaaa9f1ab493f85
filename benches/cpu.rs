//! How long the CPU twins take: `cargo bench --bench cpu`, on one core.
//!
//! Rows are normal numbers. Throughput is that of the bytes read: what the twin's own store takes, or the f16 rows that go in.

#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark that cannot run says so")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvfold::attention::{self, AttendOptions};
use kvfold::minicache::{self, Layer, MergeOptions, Retention};
use kvfold::qjl::planes::{self, Calibration, Centring, Codec, Preset, Stored, Tables};
use kvfold::qjl::{self, KeyScale, Projection, ProjectionKind};
use kvfold::rope::Positions;
use kvfold::{DType, Shape, Tensor};

const DIM: usize = 128;
const TOKENS: usize = 16_384;

/// Numbers of about a normal distribution's spread, the same at every run.
fn rows(seed: u32, heads: usize, tokens: usize) -> Tensor {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    let shape = Shape::new(1, heads, tokens, DIM).unwrap();
    let numbers: Vec<f32> =
        (0..shape.elements()).map(|_| (0..4).map(|_| next()).sum::<f32>() - 2.0).collect();
    Tensor::from_f32(&numbers, DType::F16, shape).unwrap()
}

/// One query on one head.
fn attend(c: &mut Criterion) {
    let (keys, values, query) = (rows(1, 1, TOKENS), rows(2, 1, TOKENS), rows(3, 1, 1));
    let (keys, values, query) = (keys.view(), values.view(), query.view());
    let options = AttendOptions::default();
    let mut group = c.benchmark_group(format!("attend one head, n = {TOKENS}, d = {DIM}"));

    group.throughput(Throughput::Bytes((TOKENS * 2 * 2 * DIM) as u64));
    group.bench_function("exact f16", |b| {
        b.iter(|| attention::exact(black_box(&query), &keys, &values, None, &options).unwrap());
    });

    let projection = Projection::new(ProjectionKind::Gaussian, DIM, DIM, 42).unwrap();
    let sketched = qjl::cpu::quantize(&keys, &projection, KeyScale::Norm).unwrap();
    let coded = qjl::cpu::quantize_values(&values).unwrap();
    group.throughput(Throughput::Bytes((sketched.bytes() + coded.bytes()) as u64));
    group.bench_function("qjl, m = 128", |b| {
        b.iter(|| {
            qjl::cpu::attend(
                black_box(&query),
                &sketched,
                &coded,
                &projection,
                KeyScale::Norm,
                None,
                &options,
            )
            .unwrap()
        });
    });

    for preset in Preset::ALL {
        let code = preset.options().centring(Centring::None).sinks(0).recent(0);
        let codec = Codec::new(code, DIM, DIM, None).unwrap();
        let positions = Positions::Start(&[0]);
        let tables = Tables::calibrate(&Calibration::new(&keys, positions).tokens(0..128), &code).unwrap();
        let key_codes = planes::cpu::encode_keys(&codec, &keys, positions, &tables).unwrap();
        let value_codes = planes::cpu::encode_values(&codec, &values).unwrap();
        group.throughput(Throughput::Bytes((key_codes.bytes() + value_codes.bytes()) as u64));
        let stored = Stored {
            keys: &keys,
            key_codes: &key_codes,
            values: &values,
            value_codes: &value_codes,
            tables: &tables,
        };
        group.bench_function(preset.name(), |b| {
            b.iter(|| planes::cpu::attend(&codec, black_box(&query), &stored, None, &options).unwrap());
        });
    }
    group.finish();
}

/// Rows into codes.
fn encode(c: &mut Criterion) {
    let tokens = 4096;
    let keys = rows(4, 1, tokens);
    let keys = keys.view();
    let mut group = c.benchmark_group(format!("encode keys of one head, n = {tokens}, d = {DIM}"));
    group.throughput(Throughput::Bytes((tokens * 2 * DIM) as u64));
    for kind in [ProjectionKind::Gaussian, ProjectionKind::Hadamard] {
        let projection = Projection::new(kind, DIM, DIM, 42).unwrap();
        group.bench_function(format!("qjl, {kind}, m = 128"), |b| {
            b.iter(|| qjl::cpu::quantize(black_box(&keys), &projection, KeyScale::Norm).unwrap());
        });
    }
    let codec = Codec::new(Preset::Balanced.options().centring(Centring::None), DIM, DIM, None).unwrap();
    let tables = Tables::identity(1, DIM);
    group.bench_function("balanced", |b| {
        b.iter(|| {
            planes::cpu::encode_keys(&codec, black_box(&keys), Positions::Start(&[0]), &tables).unwrap()
        });
    });
    group.finish();
}

/// Two layers onto one direction, and back.
fn fold(c: &mut Criterion) {
    let (lower, upper) = (rows(5, 8, 4096), rows(6, 8, 4096));
    let options = MergeOptions::default().retention(Retention::Never);
    let mut group = c.benchmark_group("minicache [1, 8, 4096, 128]");
    group.throughput(Throughput::Bytes((lower.bytes().len() + upper.bytes().len()) as u64));
    let (lower, upper) = (lower.view(), upper.view());
    group.bench_function("merge", |b| {
        b.iter(|| minicache::cpu::merge(black_box(&lower), &upper, &options).unwrap());
    });
    let folded = minicache::cpu::merge(&lower, &upper, &options).unwrap();
    group.bench_function("restore both", |b| {
        b.iter(|| {
            [Layer::Lower, Layer::Upper]
                .map(|which| minicache::cpu::restore(black_box(&folded), which).unwrap())
        });
    });
    group.finish();
}

criterion_group! {
    name = twins;
    config = Criterion::default().sample_size(10);
    targets = attend, encode, fold
}
criterion_main!(twins);
