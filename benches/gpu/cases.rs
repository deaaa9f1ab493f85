//! What is timed.

use std::cell::RefCell;
use std::rc::Rc;

use kvfold::attention::{AttendOptions, Precision};
use kvfold::cache::{LayerShape, Step};
use kvfold::capture::RopeLayout;
use kvfold::minicache::{self, Layer, MergeOptions};
use kvfold::qjl::cache::{CacheOptions, Coding, QjlCache};
use kvfold::qjl::planes::{self, Balance, Centring, Codec, PlanesOptions, Tables};
use kvfold::rope::{Positions, Rope};
use kvfold::{DType, Gpu, KvView, Result, Shape, wgpu};

use crate::Options;
use crate::timing::Timer;

/// Bytes that the inputs of a case take together at the least: more than any last-level cache.
const ROTATING_BYTES: usize = 256 << 20;

/// Bytes of random numbers that tensors are filled with again and again.
const PATTERN_BYTES: usize = 1 << 20;

/// Records the call of this number.
type Record = Box<dyn Fn(usize, &mut wgpu::CommandEncoder) -> Result<()>>;

/// One figure.
pub(crate) struct Case {
    /// Bytes that a call must read and write.
    pub(crate) bytes: usize,
    /// Calls of a submit at the most, where each makes large buffers.
    pub(crate) most: usize,
    pub(crate) record: Record,
}

type Make = Box<dyn Fn(&Gpu, &Timer) -> Result<Case>>;

/// Query heads, KV heads and head_dim.
#[derive(Clone, Copy)]
struct Heads(usize, usize, usize);

impl std::fmt::Display for Heads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "h={}/{} d={}", self.0, self.1, self.2)
    }
}

/// The cases by their names.
pub(crate) struct Cases;

impl Cases {
    pub(crate) fn all(options: &Options) -> Vec<(String, Make)> {
        let usual = Heads(32, 8, 128);
        let lengths: &[usize] =
            if options.quick { &[4096, 131_072] } else { &[1024, 4096, 16_384, 65_536, 131_072] };
        let others = [Heads(8, 8, 128), Heads(14, 2, 64), Heads(9, 3, 64), Heads(8, 4, 256)];
        let places: Vec<(usize, Heads)> =
            lengths.iter().map(|&n| (n, usual)).chain(others.map(|heads| (16_384, heads))).collect();
        let precision = if options.exact { Precision::Exact } else { Precision::Auto };
        let mut all: Vec<(String, Make)> = Vec::new();
        for &(n, heads) in &places {
            all.push((
                format!("attend exact f16 n={n} {heads}"),
                Box::new(move |gpu, _| exact(gpu, n, heads)),
            ));
        }
        for preset in [
            "balanced",
            "balanced uncentred",
            "near-lossless",
            "near-lossless uncentred",
            "compact",
            "extreme",
            "qjl m=256",
        ] {
            for &(n, heads) in &places {
                let make = move |gpu: &Gpu, _: &Timer| attend(gpu, preset, n, heads, precision);
                all.push((format!("attend {preset} n={n} {heads}"), Box::new(make)));
            }
        }
        for name in ["merge", "restore", "attend"] {
            all.push((
                format!("minicache {name} n=65536 {usual}"),
                Box::new(move |gpu, _| fold(gpu, name, 65_536, usual)),
            ));
        }
        for planes in 1..=4 {
            all.push((
                format!("encode keys {planes} planes n=16384 {usual}"),
                Box::new(move |gpu, _| encode(gpu, planes, 16_384, usual)),
            ));
        }
        all
    }
}

/// A tensor of numbers between -1 and 1, the same pattern again and again.
fn tensor(gpu: &Gpu, shape: Shape) -> Result<KvView> {
    let mut state = 1u64;
    let pattern: Vec<u8> = (0..PATTERN_BYTES / 2)
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            half::f16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0).to_le_bytes()
        })
        .collect();
    let pattern = gpu.upload("pattern", &pattern)?;
    let bytes = shape.bytes(DType::F16) as u64;
    let buffer = gpu.storage("tensor", bytes.next_multiple_of(4))?;
    gpu.submit(|encoder| {
        for start in (0..bytes).step_by(PATTERN_BYTES) {
            let size = (bytes - start).min(PATTERN_BYTES as u64).next_multiple_of(4);
            encoder.copy_buffer_to_buffer(&pattern, 0, &buffer, start, size);
        }
        Ok(())
    })?;
    Ok(KvView::new(&buffer, DType::F16, shape))
}

fn kv(heads: Heads, tokens: usize) -> Shape {
    Shape { batch: 1, heads: heads.1, tokens, dim: heads.2 }
}

fn queries(gpu: &Gpu, heads: Heads) -> Result<[KvView; 2]> {
    let shape = Shape { batch: 1, heads: heads.0, tokens: 1, dim: heads.2 };
    Ok([tensor(gpu, shape)?, tensor(gpu, shape)?])
}

fn copies(bytes: usize) -> usize {
    ROTATING_BYTES.div_ceil(bytes.max(1)).clamp(1, 64)
}

fn exact(gpu: &Gpu, n: usize, heads: Heads) -> Result<Case> {
    let shape = kv(heads, n);
    let bytes = 2 * shape.bytes(DType::F16);
    let sets: Vec<[KvView; 2]> =
        (0..copies(bytes)).map(|_| Ok([tensor(gpu, shape)?, tensor(gpu, shape)?])).collect::<Result<_>>()?;
    let ([queries, output], ops) = (queries(gpu, heads)?, kvfold::attention::gpu::Ops::new(gpu));
    let record: Record = Box::new(move |call, encoder| {
        let [keys, values] = &sets[call % sets.len()];
        ops.encode_exact(encoder, &queries, keys, values, None, &AttendOptions::default(), &output)
    });
    Ok(Case { bytes, most: 400, record })
}

fn rope(heads: Heads) -> Result<Rope> {
    Rope::from_theta(heads.2, heads.2, 1e4, RopeLayout::HalfSplit)
}

/// The options of a name, everything coded that a cache may code.
fn options(name: &str, heads: Heads) -> Result<CacheOptions> {
    let mut options = match name.split(' ').next().unwrap_or(name) {
        "qjl" => CacheOptions::named("qjl-orth")?,
        preset => CacheOptions::named(preset)?.rope(rope(heads)?),
    };
    match &mut options.coding {
        Coding::Planes(planes) if name.ends_with("uncentred") => {
            (planes.centring, planes.balance) = (Centring::None, Balance::None);
        }
        Coding::Sketch(sketch) => *sketch = sketch.rate(256.0 / heads.2 as f64),
        Coding::Planes(_) => {}
        _ => {}
    }
    Ok(options)
}

/// A decode step's attention over a cache of `n` coded tokens, 4 sinks and 64 recent ones.
fn attend(gpu: &Gpu, name: &str, n: usize, heads: Heads, precision: Precision) -> Result<Case> {
    let layer = LayerShape::new(heads.1, heads.2, DType::F16);
    let (shape, chosen) = (kv(heads, n + 68), options(name, heads)?);
    let bits = match &chosen.coding {
        Coding::Planes(planes) => {
            let codec = Codec::new(*planes, heads.2, heads.2, Some(rope(heads)?))?;
            codec.key_bits() + codec.value_bits()
        }
        _ => (256 + 16) as f64 / heads.2 as f64 + 8.0 + 16.0 / heads.2 as f64,
    };
    let bytes = (bits * (heads.1 * n * heads.2) as f64 / 8.0) as usize;
    let layers = copies(bytes);
    let mut cache = QjlCache::new(gpu, &vec![layer; layers], 1, chosen)?;
    let [keys, values] = [tensor(gpu, shape)?, tensor(gpu, shape)?];
    for index in 0..layers {
        gpu.submit(|encoder| cache.append(encoder, index, &Step::new(&keys, &values)))?;
        gpu.submit(|encoder| cache.commit(encoder))?;
        gpu.wait_blocking()?;
    }
    gpu.submit(|encoder| cache.settle(encoder))?;
    let [queries, output] = queries(gpu, heads)?;
    let options = AttendOptions::default().causal(true).precision(precision);
    let record: Record =
        Box::new(move |call, encoder| cache.attend(encoder, call % layers, &queries, &output, &options));
    Ok(Case { bytes, most: 400, record })
}

/// MiniCache on a pair of equal layers, all of whose rows merge.
fn fold(gpu: &Gpu, name: &str, n: usize, heads: Heads) -> Result<Case> {
    let (shape, ops) = (kv(heads, n), minicache::gpu::Ops::new(gpu));
    let merge = MergeOptions::default();
    let size = shape.bytes(DType::F16);
    let [lower, upper] = [tensor(gpu, shape)?, tensor(gpu, shape)?];
    let mut decision = gpu.submit(|encoder| ops.encode_decide(encoder, &lower, &upper, &merge))?;
    gpu.block_on(decision.totals())?;
    if name == "merge" {
        let record: Record = Box::new(move |_, encoder| ops.encode_merge(encoder, &decision).map(drop));
        return Ok(Case { bytes: 3 * size, most: 12, record });
    }
    let folded = gpu.submit(|encoder| ops.encode_merge(encoder, &decision))?;
    if name == "restore" {
        let output = tensor(gpu, shape)?;
        let record: Record =
            Box::new(move |_, encoder| ops.encode_restore(encoder, &folded, Layer::Upper, &output));
        return Ok(Case { bytes: 2 * size, most: 400, record });
    }
    let other = gpu.submit(|encoder| ops.encode_merge(encoder, &decision))?;
    let [queries, output] = queries(gpu, heads)?;
    let record: Record = Box::new(move |_, encoder| {
        let options = AttendOptions::default();
        ops.encode_attend(encoder, &queries, &folded, &other, Layer::Upper, None, &options, &output)
    });
    Ok(Case { bytes: 2 * size, most: 400, record })
}

/// The coding of keys in so many planes, uncentred.
fn encode(gpu: &Gpu, planes: u8, n: usize, heads: Heads) -> Result<Case> {
    let (shape, ops) = (kv(heads, n), planes::gpu::Ops::new(gpu));
    let chosen = PlanesOptions::default().key_planes(planes).centring(Centring::None).balance(Balance::None);
    let codec = ops.upload_codec(&Codec::new(chosen, heads.2, heads.2, None)?)?;
    let tables = ops.upload_tables(&codec, &Tables::identity(heads.1, heads.2))?;
    let positions = ops.upload_positions(&codec, Positions::Start(&[0]), 1, n)?;
    let bytes = shape.bytes(DType::F16) + shape.rows() * (heads.2 * usize::from(planes) / 8 + 2);
    let sets: Vec<KvView> = (0..copies(bytes)).map(|_| tensor(gpu, shape)).collect::<Result<_>>()?;
    let held = Rc::new(RefCell::new(None));
    let record: Record = Box::new(move |call, encoder| {
        let codes = ops.encode_key_codes(encoder, &sets[call % sets.len()], &codec, &tables, &positions)?;
        held.replace(Some(codes));
        Ok(())
    });
    Ok(Case { bytes, most: 100, record })
}
