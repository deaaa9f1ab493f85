//! The checks: a kernel, its twin, and how far they may be apart.

use super::Check;
use super::rows::Set;
use crate::attention::{self, AttendOptions, Precision};
use crate::error::Result;
use crate::gpu::{Gpu, KvView, ReadBack};
use crate::metrics::RelativeError;
use crate::minicache::{self, DirectionPlanes, Layer, MergeOptions, Mode, Retention};
use crate::qjl::planes::{self, Calibration, Codec, Preset, Tables};
use crate::qjl::{self, KeyScale, Projection, ProjectionKind};
use crate::rope::{Positions, Rope};
use crate::tensor::{DType, Shape, Tensor};

/// What is tried on each set of rows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trial {
    Similarity,
    Merge(Mode),
    CodedPair,
    Exact,
    Qjl(ProjectionKind),
    Planes(Preset),
}

/// All trials.
pub(super) const ALL: [Trial; 12] = [
    Trial::Similarity,
    Trial::Merge(Mode::Shared),
    Trial::Merge(Mode::Anchor),
    Trial::Merge(Mode::Compat),
    Trial::CodedPair,
    Trial::Exact,
    Trial::Qjl(ProjectionKind::Gaussian),
    Trial::Qjl(ProjectionKind::Hadamard),
    Trial::Planes(Preset::NearLossless),
    Trial::Planes(Preset::Balanced),
    Trial::Planes(Preset::Compact),
    Trial::Planes(Preset::Extreme),
];

/// Attention in f32 against f32: sums in another order, and exp allowed 3 + 2|x| ulp.
const ATTENTION: f64 = 2e-5;

/// Attention with queries and weights in 8 bits, all rows taken together: the bound of [`Precision::Fast`].
const FAST: f64 = 3e-2;

/// What a trial found: the kernel, how far it was apart, how far it may be.
type Found = (String, f64, f64);

/// Runs one trial; what cannot run is a failed check.
pub(super) async fn run(trial: Trial, gpu: &Gpu, set: &Set) -> Vec<Check> {
    let found = match trial {
        Trial::Similarity => similarity(gpu, set).await,
        Trial::Merge(mode) => merge(gpu, set, mode).await,
        Trial::CodedPair => coded_pair(gpu, set).await,
        Trial::Exact => exact(gpu, set).await,
        // Hadamard needs a power of two.
        Trial::Qjl(ProjectionKind::Hadamard) if !set.lower.shape().dim.is_power_of_two() => {
            return Vec::new();
        }
        Trial::Qjl(kind) => sketch(gpu, set, kind).await,
        Trial::Planes(preset) => coded(gpu, set, preset).await,
    };
    let check = |(kernel, apart, bound): Found| Check {
        kernel,
        rows: set.name,
        apart: Some(apart),
        bound,
        failure: None,
    };
    match found {
        Ok(found) => found.into_iter().map(check).collect(),
        Err(error) => vec![Check {
            kernel: format!("{trial:?}").to_lowercase(),
            rows: set.name,
            apart: None,
            bound: 0.0,
            failure: Some(error.to_string()),
        }],
    }
}

fn upload(gpu: &Gpu, tensor: &Tensor) -> Result<KvView> {
    Ok(KvView::new(&gpu.upload("self-test", tensor.bytes())?, tensor.dtype(), tensor.shape()))
}

fn room(gpu: &Gpu, dtype: DType, shape: Shape) -> Result<KvView> {
    let bytes = (shape.bytes(dtype) as u64).next_multiple_of(4).max(4);
    Ok(KvView::new(&gpu.storage("self-test", bytes)?, dtype, shape))
}

async fn download(gpu: &Gpu, view: &KvView) -> Result<Tensor> {
    let mut bytes = gpu.submit(|encoder| ReadBack::schedule(gpu, encoder, view.buffer()))?.await?;
    bytes.truncate(view.shape().bytes(view.dtype()));
    Tensor::new(bytes, view.dtype(), view.shape())
}

/// The largest |have - want| / |want| of a row of `dim` numbers, over the numbers that are finite in both; infinite where
/// only one of them is, or where only the wanted row is zero.
fn apart(have: &[f32], want: &[f32], dim: usize) -> f64 {
    let row = |(have, want): (&[f32], &[f32])| {
        let mut error = RelativeError::default();
        for (have, want) in have.iter().zip(want) {
            match (have.is_finite(), want.is_finite()) {
                (true, true) => error.add(&[*want], &[*have]),
                (false, false) => {}
                _ => return f64::INFINITY,
            }
        }
        let differs = have.iter().zip(want).any(|(have, want)| have != want && have.is_finite());
        error.value().unwrap_or(if differs { f64::INFINITY } else { 0.0 })
    };
    have.chunks(dim).zip(want.chunks(dim)).map(row).fold(0.0, f64::max)
}

async fn similarity(gpu: &Gpu, set: &Set) -> Result<Vec<Found>> {
    let options = MergeOptions::default();
    let (lower, upper) = (upload(gpu, &set.lower)?, upload(gpu, &set.upper)?);
    let ops = minicache::gpu::Ops::new(gpu);
    let rows =
        gpu.submit(|encoder| ops.encode_similarity(encoder, &lower, &upper, &options)?.read_back(encoder))?;
    let have = minicache::gpu::Rows::parse(&rows.await?);
    let want = minicache::cpu::similarity(&set.lower.view(), &set.upper.view(), &options)?;
    let difference = |(a, b): (&minicache::Row, &minicache::Row)| {
        if a.fault == b.fault { f64::from((a.cosine - b.cosine).abs()) } else { f64::INFINITY }
    };
    Ok(vec![("similarity".to_owned(), have.iter().zip(&want).map(difference).fold(0.0, f64::max), 2e-6)])
}

async fn merge(gpu: &Gpu, set: &Set, mode: Mode) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for (name, retention) in [
        ("cosine", Retention::Cosine(0.5)),
        ("range", Retention::Range(0.1)),
        ("fraction", Retention::Fraction(0.3)),
    ] {
        let options = MergeOptions::default().mode(mode).retention(retention);
        let (lower, upper) = (upload(gpu, &set.lower)?, upload(gpu, &set.upper)?);
        let ops = minicache::gpu::Ops::new(gpu);
        let mut decision = gpu.submit(|encoder| ops.encode_decide(encoder, &lower, &upper, &options))?;
        let totals = decision.totals().await?;
        let twin = minicache::cpu::merge(&set.lower.view(), &set.upper.view(), &options)?;
        let mut worst = 0.0f64;
        if totals == twin.totals {
            let folded = gpu.submit(|encoder| ops.encode_merge(encoder, &decision))?;
            for which in [Layer::Lower, Layer::Upper] {
                let output = room(gpu, set.lower.dtype(), set.lower.shape())?;
                gpu.submit(|encoder| ops.encode_restore(encoder, &folded, which, &output))?;
                let have = download(gpu, &output).await?.view().to_f32();
                let want = minicache::cpu::restore(&twin, which)?.view().to_f32();
                worst = worst.max(apart(&have, &want, set.lower.shape().dim));
            }
        } else {
            // A cosine within rounding of the cut may fall on either side; the two then differ by a row or so.
            let moved = totals.counts.merged.abs_diff(twin.totals.counts.merged);
            worst = f64::from(moved);
        }
        // An f16 ulp of the direction, one of the magnitude, one of the output.
        found.push((format!("merge, restore: {mode:?}, {name}").to_lowercase(), worst, 3.0 / 1024.0));
    }
    Ok(found)
}

/// A pair whose directions are in codes, restored and attended, against the twin on the device's own store.
async fn coded_pair(gpu: &Gpu, set: &Set) -> Result<Vec<Found>> {
    // By force, so that there is something to code on any model.
    let merge = MergeOptions::default().retention(Retention::Never).planes(DirectionPlanes::default());
    let (lower, upper) = (upload(gpu, &set.lower)?, upload(gpu, &set.upper)?);
    let ops = minicache::gpu::Ops::new(gpu);
    let mut decision = gpu.submit(|encoder| ops.encode_decide(encoder, &lower, &upper, &merge))?;
    decision.totals().await?;
    let folded = gpu.submit(|encoder| ops.encode_merge(encoder, &decision))?;
    let read = gpu.submit(|encoder| folded.read_back(gpu, encoder))?;
    let host = folded.parse(read).await?;
    let twin = minicache::cpu::merge(&set.lower.view(), &set.upper.view(), &merge)?;
    let mut worst = 0.0f64;
    let mut moved = Vec::new();
    for which in [Layer::Lower, Layer::Upper] {
        let output = room(gpu, set.lower.dtype(), set.lower.shape())?;
        gpu.submit(|encoder| ops.encode_restore(encoder, &folded, which, &output))?;
        let have = download(gpu, &output).await?.view().to_f32();
        let [own, want] = [&host, &twin].map(|folded| minicache::cpu::restore(folded, which));
        let (own, want) = (own?.view().to_f32(), want?.view().to_f32());
        worst = worst.max(apart(&have, &own, set.lower.shape().dim));
        moved.push(apart(&own, &want, want.len().max(1)));
    }
    let output = room(gpu, DType::F32, set.queries.shape())?;
    let queries = upload(gpu, &set.queries)?;
    gpu.submit(|encoder| {
        let attend = causal();
        ops.encode_attend(encoder, &queries, &folded, &folded, Layer::Lower, None, &attend, &output)
    })?;
    let have = download(gpu, &output).await?.view().to_f32();
    let want = minicache::cpu::attend(&set.queries.view(), &host, &host, Layer::Lower, None, &causal())?;
    Ok(vec![
        // A number at a cell's border moves by one step, so the rows are taken together.
        ("coded pair: merge".to_owned(), moved.into_iter().fold(0.0, f64::max), 0.02),
        // An f16 ulp of a level taken back, one of the output.
        ("coded pair: restore".to_owned(), worst, 3.0 / 1024.0),
        // The twin turns keys, the kernel queries: f32 rounds scores of tens of nats in another place.
        ("coded pair: attend".to_owned(), apart(&have, &want, set.lower.shape().dim), 1e-3),
    ])
}

fn causal() -> AttendOptions<'static> {
    AttendOptions::default().causal(true).precision(Precision::Exact)
}

async fn exact(gpu: &Gpu, set: &Set) -> Result<Vec<Found>> {
    let views = [upload(gpu, &set.queries)?, upload(gpu, &set.lower)?, upload(gpu, &set.values)?];
    let [queries, keys, values] = &views;
    let output = room(gpu, DType::F32, Shape { dim: set.values.shape().dim, ..set.queries.shape() })?;
    let ops = attention::gpu::Ops::new(gpu);
    gpu.submit(|encoder| ops.encode_exact(encoder, queries, keys, values, None, &causal(), &output))?;
    let want = attention::exact(&set.queries.view(), &set.lower.view(), &set.values.view(), None, &causal())?;
    let have = download(gpu, &output).await?.view().to_f32();
    Ok(vec![("exact attention".to_owned(), apart(&have, &want, set.values.shape().dim), ATTENTION)])
}

async fn sketch(gpu: &Gpu, set: &Set, kind: ProjectionKind) -> Result<Vec<Found>> {
    let (keys, dim) = (set.lower.view(), set.lower.shape().dim);
    let projection = Projection::new(kind, dim, 2 * dim + 5, 42)?;
    let ops = qjl::gpu::Ops::new(gpu);
    let buffer = ops.upload_projection(&projection)?;
    let views = [upload(gpu, &set.queries)?, upload(gpu, &set.lower)?, upload(gpu, &set.values)?];
    let (codes, values) = gpu.submit(|encoder| {
        let codes = ops.encode_quantize(encoder, &views[1], &buffer, KeyScale::Norm)?;
        Ok((codes, ops.encode_quantize_values(encoder, &views[2])?))
    })?;
    let read = gpu.submit(|encoder| Ok((codes.read_back(gpu, encoder)?, values.read_back(gpu, encoder)?)))?;
    let (host_codes, host_values) = (codes.parse(read.0).await?, values.parse(read.1).await?);

    let twin = qjl::cpu::quantize(&keys, &projection, KeyScale::Norm)?;
    let bits = 32.0 * twin.words.len().max(1) as f64;
    let differing = host_codes.words.iter().zip(&twin.words).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>();
    let decoded = qjl::cpu::dequantize_values(&host_values)?;
    let wanted = qjl::cpu::dequantize_values(&qjl::cpu::quantize_values(&set.values.view())?)?;

    let output = room(gpu, DType::F32, Shape { dim: set.values.shape().dim, ..set.queries.shape() })?;
    gpu.submit(|encoder| {
        ops.encode_attend(encoder, &views[0], &codes, &values, &buffer, None, &causal(), &output)
    })?;
    let queries = set.queries.view();
    let want =
        qjl::cpu::attend(&queries, &host_codes, &host_values, &projection, KeyScale::Norm, None, &causal())?;
    let have = download(gpu, &output).await?.view().to_f32();
    Ok(vec![
        // Bits whose projection is zero to rounding may fall on either side: one in ten thousand.
        (format!("quantize: {kind}"), f64::from(differing) / bits, 1e-4),
        ("quantize_values".to_owned(), apart(&decoded, &wanted, set.values.shape().dim), 0.01),
        (format!("qjl attend: {kind}"), apart(&have, &want, set.values.shape().dim), ATTENTION),
    ])
}

async fn coded(gpu: &Gpu, set: &Set, preset: Preset) -> Result<Vec<Found>> {
    let (keys, shape) = (set.lower.view(), set.lower.shape());
    let options = preset.options().recent(16);
    let rope = Rope::from_theta(shape.dim, shape.dim & !1, 1e4, crate::capture::RopeLayout::HalfSplit)?;
    let codec = Codec::new(options, shape.dim, set.values.shape().dim, Some(rope.clone()))?;
    let starts = vec![0; shape.batch];
    let positions = Positions::Start(&starts);
    let from = Calibration::new(&keys, positions).rope(&rope);
    let tables = Tables::calibrate(&from, &options)?;
    let ops = planes::gpu::Ops::new(gpu);
    let (codec_buffer, views) = (
        ops.upload_codec(&codec)?,
        [upload(gpu, &set.queries)?, upload(gpu, &set.lower)?, upload(gpu, &set.values)?],
    );
    let table_buffer = ops.upload_tables(&codec_buffer, &tables)?;
    let position_buffer = ops.upload_positions(&codec_buffer, positions, shape.batch, shape.tokens)?;
    let (key_buffer, value_buffer) = gpu.submit(|encoder| {
        let keys =
            ops.encode_key_codes(encoder, &views[1], &codec_buffer, &table_buffer, &position_buffer)?;
        Ok((keys, ops.encode_value_codes(encoder, &views[2], &codec_buffer)?))
    })?;
    let read = gpu
        .submit(|encoder| Ok((key_buffer.read_back(gpu, encoder)?, value_buffer.read_back(gpu, encoder)?)))?;
    let (key_codes, value_codes) = (key_buffer.parse(read.0).await?, value_buffer.parse(read.1).await?);
    let twin = planes::cpu::encode_keys(&codec, &keys, positions, &tables)?;
    let decoded = planes::cpu::decode_keys(&codec, &key_codes, &tables)?;
    let wanted = planes::cpu::decode_keys(&codec, &twin, &tables)?;

    let output = room(gpu, DType::F32, Shape { dim: set.values.shape().dim, ..set.queries.shape() })?;
    let stored = planes::gpu::Stored {
        keys: &views[1],
        key_codes: &key_buffer,
        values: &views[2],
        value_codes: &value_buffer,
        tables: &table_buffer,
        positions: &position_buffer,
    };
    let attended = async |options: AttendOptions<'static>| {
        gpu.submit(|encoder| {
            ops.encode_attend(encoder, &views[0], &stored, &codec_buffer, None, &options, &output)
        })?;
        Ok::<_, crate::Error>(download(gpu, &output).await?.view().to_f32())
    };
    let have = attended(causal()).await?;
    let fast = attended(causal().precision(Precision::Fast)).await?;
    let values = set.values.view();
    let host = planes::Stored {
        keys: &keys,
        key_codes: &key_codes,
        values: &values,
        value_codes: &value_codes,
        tables: &tables,
    };
    let want = planes::cpu::attend(&codec, &set.queries.view(), &host, None, &causal())?;
    Ok(vec![
        // A number at a cell's border moves by one step, so the rows are taken together.
        (format!("planes encode: {preset}"), apart(&decoded, &wanted, decoded.len().max(1)), 0.02),
        (format!("planes attend: {preset}"), apart(&have, &want, set.values.shape().dim), ATTENTION),
        (format!("planes attend in bytes: {preset}"), apart(&fast, &want, fast.len().max(1)), FAST),
    ])
}
