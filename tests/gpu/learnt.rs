//! What a cache of sign planes learns of its first tokens, against the host's cache, which learns it in f64.

use half::f16;
use kvfold::cache::{LayerShape, Step};
use kvfold::capture::RopeLayout;
use kvfold::qjl::cache::{CacheOptions, Coding, CpuQjlCache, QjlCache};
use kvfold::qjl::planes::{Balance, CALIBRATION_TOKENS, Centring, PlanesOptions};
use kvfold::rope::{Positions, Rope};
use kvfold::{DType, Gpu, Result, Shape, Tensor};
use safetensors::SafeTensors;

use crate::Test;
use crate::numbers::Random;
use crate::rows::upload;

pub(crate) const TESTS: &[Test] = &[("tables_and_energies_equal_the_hosts", learns)];

/// Query heads that share a KV head.
const GROUP: usize = 3;

/// A layer, what codes it, and its RoPE.
type Case = (LayerShape, PlanesOptions, Option<Rope>);

fn cases() -> [Case; 3] {
    // With so many recent tokens none are coded.
    let planes = PlanesOptions::default().recent(CALIBRATION_TOKENS as u32);
    let rope = |dim, rotary, layout| Rope::from_theta(dim, rotary, 10_000.0, layout).ok();
    [
        (LayerShape::new(2, 80, DType::F16), planes.split(3, 1), rope(80, 64, RopeLayout::HalfSplit)),
        (
            LayerShape::new(2, 48, DType::F32),
            planes.balance(Balance::Full),
            rope(48, 48, RopeLayout::Interleaved),
        ),
        // More channels than a workgroup has invocations.
        (LayerShape::new(2, 144, DType::Bf16), planes.split(3, 0).centring(Centring::None), None),
    ]
}

/// Rows whose channels, of one `kind` alike, spread over three decades, in f32 over six, around a mean; two channels are always 0,
/// and some rows hold an infinite number.
fn rows(random: &mut Random, kind: u64, shape: Shape, dtype: DType) -> Tensor {
    let base: f64 = if dtype == DType::F32 { 1000.0 } else { 30.0 };
    let mut channels = Random(kind);
    let mut spread: Vec<f64> = (0..shape.dim).map(|_| base.powf(2.0 * channels.uniform() - 1.0)).collect();
    (spread[shape.dim - 4], spread[shape.dim - 1]) = (0.0, 0.0);
    let mean = channels.normals(shape.dim);
    let number = |i: usize| spread[i % shape.dim] * (mean[i % shape.dim] + random.normal());
    let mut numbers: Vec<f32> = (0..shape.elements()).map(number).map(|x| x as f32).collect();
    numbers.chunks_mut(shape.dim).skip(7).step_by(10).for_each(|row| row[shape.dim / 2] = f32::INFINITY);
    Tensor::from_f32(&numbers, dtype, shape).unwrap()
}

/// Numbers of a saved cache, as many bytes each; none where it has no such tensor.
fn saved<const N: usize>(file: &SafeTensors<'_>, name: &str) -> Vec<[u8; N]> {
    file.tensor(name).map_or_else(|_| Vec::new(), |tensor| tensor.data().as_chunks::<N>().0.to_vec())
}

/// Raises each channel's largest number to that of these keys, and both of a RoPE pair to the larger.
fn raise(largest: &mut [f32], keys: &Tensor, rope: Option<&Rope>) {
    for row in keys.view().to_f32().chunks(largest.len()) {
        largest
            .iter_mut()
            .zip(row)
            .filter(|(_, x)| x.is_finite())
            .for_each(|(most, x)| *most = most.max(x.abs()));
    }
    for (a, b) in rope.into_iter().flat_map(Rope::pairs) {
        let most = largest[a].max(largest[b]);
        (largest[a], largest[b]) = (most, most);
    }
}

/// Compares a sequence's energies, or its tables once it has them, made of keys whose channels are so large; returns which there
/// were.
fn compare([have, want]: [&SafeTensors<'_>; 2], sequence: usize, split: bool, largest: &[f32]) -> [bool; 2] {
    let name = |what: &str| format!("sequence.{sequence}.layer.0.{what}");
    let both = [have, want].map(|file| saved(file, &name("energy")));
    let [energies, twins] = both.map(|all| all.into_iter().map(f64::from_le_bytes).collect::<Vec<_>>());
    assert_eq!(energies.len(), twins.len());
    for (x, y) in energies.iter().zip(&twins) {
        // Sums of so many squares in f32, one after another.
        let rounding = (CALIBRATION_TOKENS * GROUP) as f64 * 2f64.powi(-24);
        assert!((x - y).abs() <= rounding * y, "energy {x} {y}");
    }
    // Nothing reads the order of codes that are not split.
    if split {
        let [order, twins] = [have, want].map(|file| saved::<2>(file, &name("order")));
        assert_eq!(order, twins, "order");
    }
    let [means, twins] = [have, want].map(|file| saved(file, &name("mu")));
    for ((x, y), most) in means.into_iter().zip(twins).zip(largest.iter().cycle()) {
        let [x, y] = [x, y].map(|bytes| f16::from_le_bytes(bytes).to_f32());
        // An ulp, and the rounding of a sum of 128 numbers.
        assert!((x - y).abs() <= 2f32.powi(-10) * y.abs() + 1e-5 * most, "mean {x} {y}");
    }
    let [balances, twins] = [have, want].map(|file| saved(file, &name("sigma")));
    for (x, y) in balances.iter().zip(&twins) {
        let [x, y] = [x, y].map(|&bytes| f32::from_le_bytes(bytes));
        // Two sums of squares, of 2^-24 a term, and the logarithms of both: of their sum a fourth at the most.
        assert!((x / y - 1.0).abs() <= 1e-5, "balance {x} {y}");
    }
    [!energies.is_empty(), !balances.is_empty()]
}

fn learns(gpu: &Gpu) -> Result<()> {
    for (seed, (layer, planes, rope)) in (0..).zip(cases()) {
        let options = CacheOptions::new(Coding::Planes(planes)).ropes(vec![rope.clone()]);
        let mut random = Random(seed);
        let mut host = CpuQjlCache::new(&[layer], 2, options.clone())?;
        let mut device = QjlCache::new(gpu, &[layer], 2, options)?;
        let mut largest = vec![0f32; layer.key_dim];
        let shape = |heads, tokens| Shape::new(2, heads, tokens, layer.key_dim);
        // Positions do not go on from one step to the next, and the second sequence gets no tables.
        for (tokens, counts, starts, learnt) in [
            (60, [60, 50], [5, 70], [[true, false], [true, false]]),
            (70, [70, 40], [900, 3000], [[false, true], [true, false]]),
        ] {
            let keys = rows(&mut random, 1, shape(2, tokens)?, layer.dtype);
            let queries = rows(&mut random, 2, shape(2 * GROUP, tokens)?, layer.dtype);
            let (k, q) = (keys.view(), queries.view());
            let mut step = Step::new(&k, &k).counts(&counts);
            (step.queries, step.positions) = (Some(&q), Some(Positions::Start(&starts)));
            host.append(0, &step)?;
            host.commit()?;
            let (k, q) = (upload(gpu, &keys), upload(gpu, &queries));
            let mut step = Step::new(&k, &k).counts(&counts);
            (step.queries, step.positions) = (Some(&q), Some(Positions::Start(&starts)));
            gpu.submit(|encoder| {
                device.append(encoder, 0, &step)?;
                device.commit(encoder)
            })?;
            let files = [gpu.block_on(device.save())?, host.save()?];
            let [have, want] = files.each_ref().map(|file| SafeTensors::deserialize(file).unwrap());
            raise(&mut largest, &keys, rope.as_ref());
            for (sequence, learnt) in learnt.into_iter().enumerate() {
                let had = compare([&have, &want], sequence, planes.planes_lo.is_some(), &largest);
                assert_eq!(had, learnt, "sequence {sequence} of case {seed}, {tokens} tokens");
            }
        }
    }
    Ok(())
}
