//! The kernels against the original's vectors (tests/golden/README.md). The CPU suites account for every row in which kvfold
//! answers otherwise on purpose; here those rows are the ones with a cause other than the rule.

use half::f16;
use kvfold::attention::AttendOptions;
use kvfold::minicache::{Layer, MergeOptions, Mode, Retention, Role, gpu::Rows, pair_layers_depth};
use kvfold::qjl::gpu::{QuantizedValueBuffers, SketchedKeyBuffers};
use kvfold::qjl::{KeyScale, Projection, QuantizedValues};
use kvfold::{DType, Gpu, Shape, Tensor};

use crate::Test;
use crate::minicache::{folded_of, merge_on, restore_on};
use crate::qjl::{Case, Folded, relative_l2, ulps};
use crate::rows::upload;

#[path = "../golden/mod.rs"]
#[allow(unreachable_pub, reason = "the reader is shared with suites that are crates of their own")]
pub(crate) mod reader;
pub(crate) use reader::Golden;
use reader::{STACK_STEPS, codes_of, long_keys, original_f16_codes, packed_bytes, stack_rows, values_of};

pub(crate) const TESTS: &[Test] = &[
    ("similarity_and_merge_agree_with_the_original", minicache),
    ("every_shape_agrees_with_the_original", shapes),
    ("stacks_of_layers_agree_with_the_original", stacks),
    ("sketches_and_attention_agree_with_the_original", qjl),
    ("eviction_length_and_large_scores_agree_with_the_original", special),
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

/// Options that decide as the original does: no sinks, and no page stays raw as a whole.
fn original(mode: Mode, t: f32, threshold: f32) -> MergeOptions {
    MergeOptions::default()
        .mode(mode)
        .slerp_t(t)
        .retention(Retention::Cosine(threshold))
        .sinks(0)
        .raw_page_share(1.0)
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
    let options = original(Mode::Compat, t, threshold);
    let views = [upload(gpu, &pair[0]), upload(gpu, &pair[1])];
    let buffers = merge_on(gpu, &views, &options)?;
    let folded = folded_of(gpu, &buffers)?;
    let upper = restore_on(gpu, &buffers, Layer::Upper)?.view().to_f32();
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
        // 2e-4 of the norm and an output's f16 ulp, 2^-24 below f16's normal range; near the opposite the original's own f32
        // cancels (1e-3), subnormal outputs keep few bits (2e-2).
        let share = match kind {
            "antiparallel_near" => 1e-3,
            "tiny" => 2e-2,
            _ => 2e-4,
        };
        for (have, e) in upper[row * dim..(row + 1) * dim].iter().zip(&shared[row * dim..]) {
            let want = f16::from_f32(magnitudes[row] * e).to_f32();
            let bf16 = if pair[0].dtype() == DType::Bf16 { 2f32.powi(-8) * want.abs() } else { 0.0 };
            let subnormal = if pair[0].dtype() == DType::F16 { 2f32.powi(-24) } else { 0.0 };
            let tolerance = share * magnitudes[row] + 2f32.powi(-10) * want.abs() + subnormal + bf16;
            assert!((have - want).abs() <= tolerance, "{context} row {row}: {have} {want}");
        }
    }
    Ok(compared)
}

/// The named pair of f16 tensors; fewer than four sizes are led by ones.
fn read_pair(golden: &Golden, names: [String; 2]) -> [Tensor; 2] {
    names.map(|name| {
        let sizes = golden.file().tensor(&name).unwrap().shape().to_vec();
        let sizes = [vec![1; 4 - sizes.len()], sizes].concat();
        let shape = Shape::new(sizes[0], sizes[1], sizes[2], sizes[3]).unwrap();
        Tensor::from_f32(&golden.f32(&name), DType::F16, shape).unwrap()
    })
}

/// A pair folded on the device: which rows stay raw, and both layers restored.
struct Merged {
    retained: Vec<bool>,
    restored: [Tensor; 2],
}

fn merged(gpu: &Gpu, pair: &[Tensor; 2], mode: Mode) -> kvfold::Result<Merged> {
    let views = [upload(gpu, &pair[0]), upload(gpu, &pair[1])];
    let buffers = merge_on(gpu, &views, &original(mode, 0.5, 0.9))?;
    let folded = folded_of(gpu, &buffers)?;
    let (shape, per_head) = (pair[0].shape(), folded.layout.pages_per_head());
    let retained = |(row, (_, _, t)): (usize, (usize, usize, usize))| {
        folded.pages[row / shape.tokens * per_head + t / 32].retained >> (t % 32) & 1 == 1
    };
    let restored = [restore_on(gpu, &buffers, Layer::Lower)?, restore_on(gpu, &buffers, Layer::Upper)?];
    Ok(Merged { retained: shape.iter_rows().enumerate().map(retained).collect(), restored })
}

/// Direction, magnitude and product are rounded to f16, on each side at most an ulp of the number each; small channels of a
/// direction may be flushed, which costs the magnitude times f16's smallest normal number.
fn check_row(have: &[f32], want: &[f32], context: &str) {
    let magnitude = want.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
    for (have, want) in have.iter().zip(want) {
        let tolerance = 4.0 * 2f32.powi(-10) * want.abs() + magnitude * 2f32.powi(-14);
        assert!((have - want).abs() <= tolerance, "{context}: {have}, the original {want}");
    }
}

/// Other shapes, at the original's defaults: threshold 0.9, t 0.5.
fn shapes(gpu: &Gpu) -> kvfold::Result<()> {
    let golden = Golden::open("minicache_shapes_f16");
    for (name, retained) in [("s0", 21), ("s1", 1), ("s2", 79), ("s3", 15), ("s4", 3)] {
        let at = |part: &str| format!("{name}/{part}");
        let pair = read_pair(&golden, [at("x_primary"), at("x_merge")]);
        let dim = pair[0].shape().dim;
        let mask: Vec<bool> = golden.u8(&at("retained")).iter().map(|&m| m == 1).collect();
        assert_eq!(mask.iter().filter(|raw| **raw).count(), retained, "{name}");
        let recon = [golden.f32(&at("recon_primary")), golden.f32(&at("recon_merge"))];
        for mode in [Mode::Compat, Mode::Shared] {
            let merged = merged(gpu, &pair, mode)?;
            assert_eq!(merged.retained, mask, "{name} {mode:?}");
            for which in [0, 1] {
                let have = merged.restored[which].view().to_f32();
                if mode == Mode::Compat && which == 0 {
                    assert_eq!(have, pair[0].view().to_f32(), "{name}: the lower layer passes through");
                    continue;
                }
                for (row, (have, want)) in have.chunks(dim).zip(recon[which].chunks(dim)).enumerate() {
                    let context = format!("{name} {mode:?} layer {which} row {row}");
                    if mask[row] {
                        assert_eq!(have, want, "{context}: raw");
                    } else {
                        check_row(have, want, &context);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Whole stacks through a prefill and three steps of decoding, each step folded by itself.
fn stacks(gpu: &Gpu) -> kvfold::Result<()> {
    for (name, layers, group_size) in [("minicache_stack_g2", 6, 2), ("minicache_stack_g3", 7, 3)] {
        let golden = Golden::open(name);
        let plan = pair_layers_depth(layers, 0.5, group_size)?;
        for (layer, role) in plan.iter().enumerate().filter(|(_, layer)| layer.role == Role::Merge) {
            let primary = plan.iter().position(|other| other.group == role.group).unwrap();
            let mut retained_keys = 0;
            for (step, kv) in (0..STACK_STEPS.len()).flat_map(|step| [(step, "k"), (step, "v")]) {
                let pair = read_pair(&golden, [primary, layer].map(|l| format!("in/l{l}/s{step}/{kv}")));
                let merged = merged(gpu, &pair, Mode::Compat)?;
                let want = stack_rows(&golden, &format!("out/l{layer}/{kv}"), step);
                let have = merged.restored[1].view().to_f32();
                for (row, (have, want)) in have.chunks(64).zip(want.chunks(64)).enumerate() {
                    let context = format!("{name} layer {layer} step {step} {kv} row {row}");
                    if merged.retained[row] {
                        assert_eq!(have, want, "{context}: raw");
                    } else {
                        check_row(have, want, &context);
                    }
                }
                let retained = merged.retained.iter().filter(|raw| **raw).count();
                retained_keys += if kv == "k" { retained } else { 0 };
            }
            assert_eq!(retained_keys, 12, "{name} layer {layer}: of 16 key rows, as the original counts");
        }
    }
    Ok(())
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
    let (keys, values) = folded.codes(gpu)?;
    assert_eq!(packed_bytes(&keys), golden.u8(&format!("{prefix}/derived_packed_lsb")), "{prefix}");
    for (have, want) in keys.scale.iter().zip(golden.f32(&format!("{prefix}/norm"))) {
        assert!(ulps(*have, f16::from_f32(want)) <= 1, "{prefix}: norm {have} {want}");
    }
    let (codes, scales) = (golden.i8(&format!("{prefix}/v_int8")), golden.f32(&format!("{prefix}/v_scale")));
    check_values(&values, &codes, &scales, dtype, prefix);
    // On the original's own codes only f32 arithmetic is left.
    folded.values = QuantizedValueBuffers::upload(gpu, &values_of(&codes, &scales, dim))?;
    let have = attend_each(gpu, &folded, &case.queries)?;
    let want = golden.f64(&format!("{prefix}/attend_n17_f64"));
    for (have, want) in have.chunks(dim).zip(want.chunks(dim)) {
        let error = relative_l2(have, want);
        assert!(error <= 1e-5, "{prefix}: {error}");
    }
    Ok(())
}

/// The original rounds the scale after it chose the codes, and to bf16 for bf16 values: where the scales agree none the
/// less, codes are at most a step apart, since both lie beside one border.
fn check_values(ours: &QuantizedValues, codes: &[i8], scales: &[f32], dtype: DType, prefix: &str) {
    let dim = ours.shape.dim;
    let mut same = 0;
    for (row, (ours_of_row, theirs)) in codes_of(ours).chunks(dim).zip(codes.chunks(dim)).enumerate() {
        if ours.scale[row].to_f32() == scales[row] {
            same += 1;
            let near = ours_of_row.iter().zip(theirs).all(|(a, b)| a.abs_diff(*b) <= 1);
            assert!(near, "{prefix} value {row}: {ours_of_row:?} {theirs:?}");
        }
    }
    // Of 17 rows one is zeros and one is below the smallest scale. A quotient that WGSL may round by 2.5 ulp moves a scale
    // that lies on a border of f16, which one in a thousand does.
    let least = if dtype == DType::Bf16 { 1 } else { 14 };
    assert!(same >= least, "{prefix}: only {same} scales agree");
}

/// Each query alone, as the original attends: several at once would stand at the last positions.
fn attend_each(gpu: &Gpu, folded: &Folded, queries: &Tensor) -> kvfold::Result<Vec<f32>> {
    let dim = queries.shape().dim;
    let mut all = Vec::new();
    for query in queries.view().to_f32().chunks(dim) {
        let query = Tensor::from_f32(query, queries.dtype(), Shape::new(1, 1, 1, dim)?)?;
        all.extend(folded.attend(gpu, &query, None, &AttendOptions::default())?);
    }
    Ok(all)
}

/// A tensor of one head of f16 rows.
fn rows(numbers: &[f32], dim: usize) -> Tensor {
    let shape = Shape::new(1, 1, numbers.len() / dim, dim).unwrap();
    Tensor::from_f32(numbers, DType::F16, shape).unwrap()
}

fn special(gpu: &Gpu) -> kvfold::Result<()> {
    let golden = Golden::open("qjl_special");
    evicted(gpu, &golden)?;
    let projection = Projection::from_matrix(&golden.f32("long/S"), 128, 128)?;
    long(gpu, &golden, &projection)?;
    overflow(gpu, &golden, &projection)
}

/// The live tokens after the first three of eight were evicted.
fn evicted(gpu: &Gpu, golden: &Golden) -> kvfold::Result<()> {
    let projection = Projection::from_matrix(&golden.f32("evict/S"), 64, 64)?;
    let live = |name: &str| rows(&golden.f32(name)[3 * 64..], 64);
    let queries = rows(&golden.f32("evict/queries"), 64);
    let case = Case { keys: live("evict/keys"), values: live("evict/values"), queries };
    let mut folded = Folded::new(gpu, &case, &projection, KeyScale::Norm)?;
    let (keys, values) = folded.codes(gpu)?;
    let bit = |i: usize| keys.words[i / 32] >> (i % 32) & 1 == 1;
    let signs: Vec<bool> = golden.i8("evict/live_signs").iter().map(|&sign| sign >= 0).collect();
    assert_eq!((0..5 * 64).map(bit).collect::<Vec<_>>(), signs);
    let norms = golden.f32("evict/live_norm");
    assert!(keys.scale.iter().zip(norms).all(|(a, b)| ulps(*a, f16::from_f32(b)) <= 1));
    let (codes, scales) = (golden.i8("evict/live_v_int8"), golden.f32("evict/live_v_scale"));
    let near = codes_of(&values).iter().zip(&codes).all(|(a, b)| a.abs_diff(*b) <= 1);
    assert!(near && values.scale.iter().zip(&scales).all(|(a, b)| ulps(*a, f16::from_f32(*b)) <= 1));
    folded.values = QuantizedValueBuffers::upload(gpu, &values_of(&codes, &scales, 64))?;
    let error = relative_l2(&attend_each(gpu, &folded, &case.queries)?, &golden.f64("evict/attend_f64"));
    // Our norms are f16, 2^-11 of a score that is some units large; the original's here are f32.
    assert!(error <= 3e-3, "{error}");
    Ok(())
}

/// 2,048 tokens, over which the original's f16 softmax loses 4.6 %.
fn long(gpu: &Gpu, golden: &Golden, projection: &Projection) -> kvfold::Result<()> {
    let case = Case::new(0, [1, 1, 1], [128, 128], 1, 1);
    let mut folded = Folded::new(gpu, &case, projection, KeyScale::Norm)?;
    folded.keys = SketchedKeyBuffers::upload(gpu, &long_keys(golden), KeyScale::Norm, projection)?;
    let values = values_of(&golden.i8("long/v_int8"), &golden.f32("long/v_scale"), 128);
    folded.values = QuantizedValueBuffers::upload(gpu, &values)?;
    let have = attend_each(gpu, &folded, &rows(&golden.f32("long/queries"), 128))?;
    let error = relative_l2(&have, &golden.f64("long/attend_f64"));
    assert!(error <= 1e-5, "f32 softmax over 2,048 tokens: {error}");
    Ok(())
}

/// Scores beyond f16, of which the original makes NaN. One token takes all the weight: the output is its value.
fn overflow(gpu: &Gpu, golden: &Golden, projection: &Projection) -> kvfold::Result<()> {
    let [keys, values, queries] =
        ["keys", "values", "queries"].map(|name| rows(&golden.f32(&format!("overflow/{name}")), 128));
    let case = Case { keys, values, queries };
    let mut folded = Folded::new(gpu, &case, projection, KeyScale::Norm)?;
    let (codes, scales) = original_f16_codes(&golden.f32("overflow/values"), 128);
    let ours = codes_of(&folded.codes(gpu)?.1);
    assert!(ours.iter().zip(&codes).all(|(a, b)| a.abs_diff(*b) <= 1));
    folded.values = QuantizedValueBuffers::upload(gpu, &values_of(&codes, &scales, 128))?;
    let have = attend_each(gpu, &folded, &case.queries)?;
    let error = relative_l2(&have, &golden.f64("overflow/attend_f64"));
    assert!(error <= 1e-6, "a product and a quotient by 1: {error}");
    Ok(())
}
