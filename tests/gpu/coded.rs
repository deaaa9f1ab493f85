//! Pairs whose directions are in codes, against their twins.

use kvfold::attention::AttendOptions;
use kvfold::cache::{LayerShape, Step};
use kvfold::minicache::gpu::Ops;
use kvfold::minicache::{
    CacheOptions, CpuMiniCache, DirectionPlanes, Folded, Layer, MergeOptions, MiniCache, Retention, cpu,
    pair_layers_depth,
};
use kvfold::{Capture, DType, Gpu, KvView, Result, Shape, Tensor};

use crate::Test;
use crate::caches::similar_layers;
use crate::minicache::{folded_of, merge_on, restore_on};
use crate::rows::{download, pair, upload};

pub(crate) const TESTS: &[Test] = &[
    ("coded_pairs_equal_their_twin", pairs),
    ("coded_pairs_attend_as_their_twin", attention),
    ("coded_minicaches_equal_the_hosts_of_the_same_file", file),
    ("coded_layers_of_a_real_model", real),
];

fn options(bits: u8) -> MergeOptions {
    MergeOptions::default().planes(DirectionPlanes::default().bits(bits))
}

/// All but the codes must be the twin's; a number within rounding of a bound may fall on either side of it, and another step may
/// then fit its row best.
fn compare(kernel: &Folded, twin: &Folded, context: &str) {
    assert_eq!((kernel.totals, &kernel.pages), (twin.totals, &twin.pages), "{context}");
    assert_eq!(kernel.side, twin.side, "{context}");
    let width = twin.layout.slot_words();
    let rows = kernel.slots.chunks(width).zip(twin.slots.chunks(width));
    let same: Vec<bool> = rows.map(|(a, b)| a == b).collect();
    let differing = same.iter().filter(|same| !**same).count();
    assert!(differing * 50 <= same.len() + 50, "{context}: {differing} of {} rows differ", same.len());
    let half =
        |words: &[u32], i: usize| half::f16::from_bits((words[i / 2] >> (16 * (i % 2))) as u16).to_f32();
    for (slot, _) in same.iter().enumerate().filter(|(_, same)| **same) {
        for at in slot * twin.layout.layers..(slot + 1) * twin.layout.layers {
            let (a, b) = (half(&kernel.magnitudes, at), half(&twin.magnitudes, at));
            // Length, scalar and product, an ulp each.
            assert!((a - b).abs() <= 3e-3 * b, "{context}: {a} {b}");
        }
    }
}

/// Rows of the device's own store, restored by device and twin: a level taken back, and the product, an ulp each.
fn compare_rows(kernel: &Tensor, twin: &Tensor, context: &str) {
    let dim = twin.shape().dim;
    let ulp = if twin.dtype() == DType::Bf16 { 2f32.powi(-7) } else { 2f32.powi(-10) };
    let (kernel, twin) = (kernel.view().to_f32(), twin.view().to_f32());
    for (a, b) in kernel.chunks(dim).zip(twin.chunks(dim)) {
        let length = b.iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f32>().sqrt();
        for (x, y) in a.iter().zip(b) {
            let same = x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
            assert!(same || (x - y).abs() <= 2.0 * ulp * y.abs() + 1e-5 * length, "{x} {y}, {context}");
        }
    }
}

fn pairs(gpu: &Gpu) -> Result<()> {
    for (seed, dim) in (0u8..).zip([1, 7, 64, 80, 511, 512]) {
        let (dtype, bits) = (DType::ALL[usize::from(seed) % 3], 1 + seed % 5);
        let both = pair(seed, Shape::new(2, 2, 43, dim)?, dtype);
        let views = [upload(gpu, &both[0]), upload(gpu, &both[1])];
        let context = format!("dim {dim}, {bits} bits, {dtype}");
        let buffers = merge_on(gpu, &views, &options(bits))?;
        let kernel = folded_of(gpu, &buffers)?;
        let twin = cpu::merge(&both[0].view(), &both[1].view(), &options(bits))?;
        compare(&kernel, &twin, &context);
        assert_eq!((buffers.bytes(), twin.totals.bytes(&twin.layout)), (twin.bytes(), twin.bytes()));
        for which in [Layer::Lower, Layer::Upper] {
            let restored = restore_on(gpu, &buffers, which)?;
            compare_rows(&restored, &cpu::restore(&kernel, which)?, &context);
        }
    }
    for shape in [Shape::new(1, 2, 0, 64)?, Shape::new(0, 2, 5, 64)?] {
        let both = pair(0, shape, DType::F16);
        let views = [upload(gpu, &both[0]), upload(gpu, &both[1])];
        let empty = merge_on(gpu, &views, &options(3))?;
        assert_eq!(empty.bytes(), 0);
        assert_eq!(restore_on(gpu, &empty, Layer::Upper)?.shape(), shape);
    }
    // Nothing to code: every page stays raw.
    let both = pair(1, Shape::new(1, 1, 40, 16)?, DType::F16);
    let views = [upload(gpu, &both[0]), upload(gpu, &both[1])];
    let apart = options(3).raw_page_share(0.0).retention(Retention::Cosine(1.0));
    let buffers = merge_on(gpu, &views, &apart)?;
    assert_eq!(buffers.totals.slots, 0);
    assert_eq!(
        restore_on(gpu, &buffers, Layer::Upper)?.view().row_bytes(0, 0, 0),
        both[1].view().row_bytes(0, 0, 0)
    );
    Ok(())
}

/// Two layers of which some rows point the same way but for a tenth, others anywhere, and some are not finite, by where they are.
fn mixed(seed: u64, shape: Shape, dtype: DType, shift: usize) -> [Tensor; 2] {
    let lower = similar_layers(seed, 1, shape, 0.5).remove(0).view().to_f32();
    let mut upper = similar_layers(seed + 100, 1, shape, 0.5).remove(0).view().to_f32();
    for (row, (x, y)) in upper.chunks_mut(shape.dim).zip(lower.chunks(shape.dim)).enumerate() {
        match (row + shift) % 5 {
            0..=2 => x.iter_mut().zip(y).for_each(|(x, y)| *x = 1.5 * (y + 0.1 * *x)),
            3 if row % 7 == 0 => x[shape.dim / 2] = f32::NAN,
            _ => {}
        }
    }
    [lower, upper].map(|numbers| Tensor::from_f32(&numbers, dtype, shape).unwrap())
}

/// Whether a row of the store is coded.
fn is_coded(folded: &Folded, (b, h, t): (usize, usize, usize)) -> bool {
    let page = folded.pages[folded.layout.page(b, h, t)];
    !page.is_raw() && page.retained >> (t % 32) & 1 == 0
}

/// Over the device's own store, in which keys and values stay raw in different rows.
fn attention(gpu: &Gpu) -> Result<()> {
    let ops = Ops::new(gpu);
    let dims: [&[[usize; 2]]; 3] = [&[[24, 9], [512, 80]], &[[64, 64]], &[[5, 128]]];
    for ((seed, dtype), dims) in (0u8..).zip(DType::ALL).zip(dims) {
        for &[key_dim, value_dim] in dims {
            let options = options(3 + seed);
            let shapes = [Shape::new(2, 2, 75, key_dim)?, Shape::new(2, 2, 75, value_dim)?];
            let mut folds = Vec::new();
            for (part, shape) in shapes.into_iter().enumerate() {
                let both = mixed(u64::from(seed) + 7, shape, dtype, part);
                folds.push(merge_on(gpu, &both.each_ref().map(|rows| upload(gpu, rows)), &options)?);
            }
            let [keys, values] = [folded_of(gpu, &folds[0])?, folded_of(gpu, &folds[1])?];
            let kinds = shapes[0].iter_rows().map(|row| [is_coded(&keys, row), is_coded(&values, row)]);
            let kinds: Vec<[bool; 2]> = kinds.collect();
            for kind in [[true, true], [true, false], [false, true], [false, false]] {
                let rows = kinds.iter().filter(|of| **of == kind).count();
                assert!(rows > 20, "{rows} rows of keys and values coded {kind:?}");
            }
            let shape = Shape::new(2, 6, 3, key_dim)?;
            let mut queries = similar_layers(9, 1, shape, 0.5).remove(0).view().to_f32();
            queries[7 * key_dim] = f32::INFINITY;
            let queries = Tensor::from_f32(&queries, DType::ALL[(usize::from(seed) + 1) % 3], shape)?;
            let shape = Shape::new(2, 6, 3, value_dim)?;
            let output =
                KvView::new(&gpu.storage("output", (shape.elements() * 4) as u64)?, DType::F32, shape);
            let views = upload(gpu, &queries);
            for (attend, lengths) in [
                (AttendOptions::default().causal(true), Some(&[75, 33][..])),
                (AttendOptions::default().window(20), None),
            ] {
                for which in [Layer::Lower, Layer::Upper] {
                    gpu.submit(|encoder| {
                        let (keys, values) = (&folds[0], &folds[1]);
                        ops.encode_attend(encoder, &views, keys, values, which, lengths, &attend, &output)
                    })?;
                    let have = download(gpu, &output).view().to_f32();
                    let want = cpu::attend(&queries.view(), &keys, &values, which, lengths, &attend)?;
                    close(&have, &want, value_dim, &format!("{key_dim} {value_dim} {dtype} {which:?}"));
                }
            }
        }
    }
    Ok(())
}

/// Each query's output by itself: sums of some hundreds of products in another order, under an exponential.
fn close(have: &[f32], want: &[f32], dim: usize, context: &str) {
    let length = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
    assert!(length(want) > 0.0 && length(want).is_finite(), "{context}");
    for (query, (x, y)) in have.chunks(dim).zip(want.chunks(dim)).enumerate() {
        let apart: Vec<f32> = x.iter().zip(y).map(|(x, y)| x - y).collect();
        assert!(
            length(&apart) <= 1e-4 * length(y),
            "{} of {}, query {query}, {context}",
            length(&apart),
            length(y)
        );
    }
}

/// A layer of a cache restored by device and host.
fn compare_restored(gpu: &Gpu, cache: &MiniCache, host: &CpuMiniCache, layer: usize) -> Result<()> {
    let twins = host.restore(layer)?;
    let room = |twin: &Tensor| {
        let buffer = gpu.storage("restored rows", twin.bytes().len() as u64)?;
        Ok(KvView::new(&buffer, twin.dtype(), twin.shape()))
    };
    let [keys, values] = twins.each_ref().map(room);
    let views: [KvView; 2] = [keys?, values?];
    gpu.submit(|encoder| cache.restore(encoder, layer, [&views[0], &views[1]]))?;
    for (view, twin) in views.iter().zip(&twins) {
        compare_rows(&download(gpu, view), twin, &format!("layer {layer}"));
    }
    Ok(())
}

/// What a device has folded the host attends to alike, and restores.
fn file(gpu: &Gpu) -> Result<()> {
    let shape = LayerShape::new(2, 64, DType::F16).value_dim(80);
    let cache_options = CacheOptions::default().merge(options(4)).recent(20);
    // A layer alone, and a pair.
    let plan = pair_layers_depth(3, 0.4, 2)?;
    let mut cache = MiniCache::new(gpu, vec![shape; 3], plan, cache_options)?;
    cache.add_sequence();
    cache.add_sequence();
    let rows = |seed, dim| similar_layers(seed, 3, Shape::new(2, 2, 170, dim).unwrap(), 0.95);
    let (keys, values) = (rows(1, 64), rows(2, 80));
    for (layer, (keys, values)) in keys.iter().zip(&values).enumerate() {
        let (keys, values) = (upload(gpu, keys), upload(gpu, values));
        let step = Step::new(&keys, &values).counts(&[170, 101]);
        gpu.submit(|encoder| cache.append(encoder, layer, &step))?;
    }
    cache.settle_blocking()?;
    let report = cache.report();
    assert!(report.layers[1].folded >= 128 && report.layers[1].keys.merged > 0, "{report:?}");
    let file = cache.save_blocking()?;
    let host = CpuMiniCache::load(&file)?;
    assert_eq!(MiniCache::load(gpu, &file)?.save_blocking()?, file);
    assert_eq!(host.save()?, file);
    let queries = similar_layers(8, 1, Shape::new(2, 4, 5, 64)?, 0.5).remove(0);
    let view = upload(gpu, &queries);
    let output = Shape::new(2, 4, 5, 80)?;
    let output = KvView::new(&gpu.storage("output", (output.elements() * 4) as u64)?, DType::F32, output);
    let causal = AttendOptions::default().causal(true);
    for layer in 0..3 {
        gpu.submit(|encoder| cache.attend(encoder, layer, &view, &output, &causal))?;
        let have = download(gpu, &output).view().to_f32();
        close(&have, &host.attend(layer, &queries.view(), &causal)?, 80, &format!("layer {layer}"));
        compare_restored(gpu, &cache, &host, layer)?;
    }
    Ok(())
}

/// Deep layers of SmolLM2, merged by force: the store is a ninth of two layers in f16, and restored rows are as long as they were.
fn real(gpu: &Gpu) -> Result<()> {
    let path = format!("{}/web/samples/smollm2_prose_s128.safetensors", env!("CARGO_MANIFEST_DIR"));
    let capture = Capture::open(path)?;
    let both = [capture.keys(20)?, capture.keys(21)?];
    let options = options(3).retention(Retention::Never).sinks(0);
    let buffers = merge_on(gpu, &both.map(|rows| upload(gpu, rows)), &options)?;
    let twin = cpu::merge(&both[0].view(), &both[1].view(), &options)?;
    compare(&folded_of(gpu, &buffers)?, &twin, "real keys");
    let ratio = buffers.layout.bytes_before() as f64 / buffers.bytes() as f64;
    // Two rows of 64 channels in 16 bits, against 64 codes of 3 bits, two magnitudes, and 3 words a page of 32.
    assert!((ratio - 2048.0 / (192.0 + 32.0 + 3.0)).abs() < 1e-9, "{ratio}");
    for (which, rows) in [Layer::Lower, Layer::Upper].into_iter().zip(both) {
        let restored = restore_on(gpu, &buffers, which)?.view().to_f32();
        for (x, y) in restored.chunks(64).zip(rows.view().to_f32().chunks(64)) {
            let length = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
            assert!((length(x) / length(y) - 1.0).abs() < 0.004, "{} {}", length(x), length(y));
        }
    }
    Ok(())
}
