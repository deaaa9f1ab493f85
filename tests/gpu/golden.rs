//! The kernels against the original's vectors (tests/golden/README.md). The CPU suites account for every row in which kvfold
//! answers otherwise on purpose; here those rows are the ones with a cause other than the rule.

use half::f16;
use kvfold::attention::AttendOptions;
use kvfold::minicache::{MergeOptions, Mode, Retention, gpu::Rows};
use kvfold::qjl::gpu::QuantizedValueBuffers;
use kvfold::qjl::{KeyScale, Projection};
use kvfold::{DType, Gpu, Shape, Tensor};

use crate::Test;
use crate::minicache::{folded_of, merge_on, restore_on};
use crate::qjl::{Case, Folded, relative_l2};
use crate::rows::upload;

#[path = "../golden/mod.rs"]
#[allow(unreachable_pub, reason = "the reader is shared with suites that are crates of their own")]
mod reader;
use reader::{Golden, values_of};

pub(crate) const TESTS: &[Test] = &[
    ("similarity_and_merge_agree_with_the_original", minicache),
    ("sketches_and_attention_agree_with_the_original", qjl),
];

const FILES: [(&str, DType); 7] = [
    ("minicache_f16_D64", DType::F16),
    ("minicache_f16_D80", DType::F16),
    ("minicache_f16_D128", DType::F16),
    ("minicache_bf16_D64", DType::Bf16),
    ("minicache_bf16_D80", DType::Bf16),
    ("minicache_f32_D96", DType::F32),
    ("minicache_f32_D256", DType::F32),
];

fn minicache(gpu: &Gpu) -> kvfold::Result<()> {
    let mut compared = 0;
    for (name, dtype) in FILES {
        let golden = Golden::open(name);
        let names: Vec<String> = golden.file().names().into_iter().map(str::to_owned).collect();
        for kind in names.iter().filter_map(|name| name.strip_suffix("/x_primary")) {
            let sizes = golden.file().tensor(&format!("{kind}/x_primary")).unwrap().shape().to_vec();
            let shape = Shape::new(sizes[0], sizes[1], sizes[2], sizes[3])?;
            let tensor = |name: &str| Tensor::from_f32(&golden.f32(&format!("{kind}/{name}")), dtype, shape);
            let pair = [tensor("x_primary")?, tensor("x_merge")?];
            for (t, threshold) in [(0.5, 0.9), (0.3, -1.0), (0.6, 0.5)] {
                let context = format!("{name} {kind} t {t} threshold {threshold}");
                compared += check_pair(gpu, &golden, kind, &pair, (t, threshold), &context)?;
            }
        }
    }
    // Of 11 kinds of 8 rows in 7 files at 3 settings, those that the original and kvfold both merge.
    assert!(compared > 700, "{compared} rows were compared");
    Ok(())
}

/// Compares one pair; returns the number of merged rows compared.
fn check_pair(
    gpu: &Gpu,
    golden: &Golden,
    kind: &str,
    pair: &[Tensor; 2],
    (t, threshold): (f32, f32),
    context: &str,
) -> kvfold::Result<usize> {
    let options = MergeOptions::default()
        .mode(Mode::Compat)
        .slerp_t(t)
        .retention(Retention::Cosine(threshold))
        .sinks(0)
        .raw_page_share(1.0);
    let views = [upload(gpu, &pair[0]), upload(gpu, &pair[1])];
    let buffers = merge_on(gpu, &views, &options)?;
    let folded = folded_of(gpu, &buffers)?;
    let upper = restore_on(gpu, &buffers, kvfold::minicache::Layer::Upper)?.view().to_f32();
    let rows = gpu
        .submit(|encoder| {
            let ops = kvfold::minicache::gpu::Ops::new(gpu);
            ops.encode_similarity(encoder, &views[0], &views[1], &options)?.read_back(encoder)
        })?
        .wait_blocking()?;
    let (cosines, shared) = (golden.f32(&format!("{kind}/cos")), golden.f32(&format!("{kind}/shared_t{t}")));
    let masks = golden.u8(&format!("{kind}/retained_thr{threshold}"));
    let magnitudes = golden.f32(&format!("{kind}/mag_merge"));
    let dim = pair[0].shape().dim;
    let mut compared = 0;
    for (row, found) in Rows::parse(&rows).iter().enumerate() {
        assert!(
            (found.cosine - cosines[row]).abs() <= 2e-6,
            "{context} row {row}: {} {}",
            found.cosine,
            cosines[row]
        );
        assert!((found.upper - magnitudes[row]).abs() <= 2e-6 * magnitudes[row], "{context} row {row}");
        let (head, token) = (row / pair[0].shape().tokens, row % pair[0].shape().tokens);
        let retained = folded.pages[head].retained >> token & 1 == 1;
        let near = (cosines[row] - threshold).abs() <= 1e-6;
        assert!(near || found.fault.is_some() || retained == (masks[row] == 1), "{context} row {row}");
        if retained || kind == "antiparallel_near" && masks[row] == 1 {
            continue;
        }
        compared += 1;
        // 2e-4 of the norm and an output's f16 ulp; near the opposite the original's own f32 cancels (1e-3), subnormal
        // outputs keep few bits (2e-2).
        let share = match kind {
            "antiparallel_near" => 1e-3,
            "tiny" => 2e-2,
            _ => 2e-4,
        };
        for (have, e) in upper[row * dim..(row + 1) * dim].iter().zip(&shared[row * dim..]) {
            let want = f16::from_f32(magnitudes[row] * e).to_f32();
            let bf16 = if pair[0].dtype() == DType::Bf16 { 2f32.powi(-8) * want.abs() } else { 0.0 };
            let tolerance = share * magnitudes[row] + 2f32.powi(-10) * want.abs() + bf16;
            assert!((have - want).abs() <= tolerance, "{context} row {row}: {have} {want}");
        }
    }
    Ok(compared)
}

fn qjl(gpu: &Gpu) -> kvfold::Result<()> {
    for (name, dim) in [("qjl_d64", 64), ("qjl_d80", 80), ("qjl_d128", 128)] {
        let golden = Golden::open(name);
        let names: Vec<String> = golden.file().names().into_iter().map(str::to_owned).collect();
        for prefix in names.iter().filter_map(|name| name.strip_suffix("/keys")) {
            let (m, dtype) = prefix[1..].split_once('/').unwrap();
            let dtype = DType::ALL.into_iter().find(|d| d.to_string() == dtype).unwrap();
            check_sketch(gpu, &golden, prefix, [dim, m.parse().unwrap()], dtype)?;
        }
    }
    Ok(())
}

fn check_sketch(
    gpu: &Gpu,
    golden: &Golden,
    prefix: &str,
    [dim, m]: [usize; 2],
    dtype: DType,
) -> kvfold::Result<()> {
    let rows = |name: &str| {
        let numbers = golden.f32(&format!("{prefix}/{name}"));
        Tensor::from_f32(&numbers, dtype, Shape::new(1, 1, numbers.len() / dim, dim).unwrap()).unwrap()
    };
    let case = Case { keys: rows("keys"), values: rows("values"), queries: rows("queries") };
    let projection = Projection::from_matrix(&golden.f32(&format!("m{m}/S")), dim, m)?;
    let mut folded = Folded::new(gpu, &case, &projection, KeyScale::Norm)?;
    let (keys, _) = folded.codes(gpu)?;
    let bytes = keys.words.chunks(keys.words_per_row());
    let bytes: Vec<u8> = bytes.flat_map(|row| row.iter().flat_map(|w| w.to_le_bytes()).take(m / 8)).collect();
    assert_eq!(bytes, golden.u8(&format!("{prefix}/derived_packed_lsb")), "{prefix}");
    for (have, want) in keys.scale.iter().zip(golden.f32(&format!("{prefix}/norm"))) {
        let ulps = i32::from(have.to_bits()) - i32::from(f16::from_f32(want).to_bits());
        assert!(ulps.abs() <= 1, "{prefix}: norm {have} {want}");
    }
    let want: Vec<f64> = golden
        .bytes(&format!("{prefix}/attend_n17_f64"), safetensors::Dtype::F64)
        .into_iter()
        .map(f64::from_le_bytes)
        .collect();
    // On the original's own codes only f32 arithmetic is left. Each query alone, as the original attends.
    let codes =
        values_of(&golden.i8(&format!("{prefix}/v_int8")), &golden.f32(&format!("{prefix}/v_scale")), dim);
    folded.values = QuantizedValueBuffers::upload(gpu, &codes)?;
    for (query, want) in case.queries.view().to_f32().chunks(dim).zip(want.chunks(dim)) {
        let query = Tensor::from_f32(query, dtype, Shape::new(1, 1, 1, dim)?)?;
        let have = folded.attend(gpu, &query, None, &AttendOptions::default())?;
        let error = relative_l2(&have, want);
        assert!(error <= 1e-5, "{prefix}: {error}");
    }
    Ok(())
}
