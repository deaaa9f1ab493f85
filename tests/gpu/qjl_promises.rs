//! What the cache on the device promises beside equalling the simplest one: bytes, chunks, and what the original did.

use kvfold::cache::LayerShape;
use kvfold::capture::RopeLayout;
use kvfold::qjl::cache::{CacheOptions, QjlCache};
use kvfold::qjl::planes::Preset;
use kvfold::rope::Rope;
use kvfold::{DType, Gpu, Tensor};

use crate::Test;
use crate::cache_model::original;
use crate::cache_model::walk::{Batch, Subject};
use crate::numbers::Random;
use crate::qjl_cache::{Device, batch};

pub(crate) const TESTS: &[Test] = &[
    ("balanced_holds_on_a_device_what_it_claims", balanced),
    ("qjl_cache_takes_chunks_as_the_whole", chunks),
    ("qjl_cache_evicts_as_the_original", |gpu| original::evicts(&|layer, options| one(gpu, layer, options))),
    ("qjl_cache_scores_above_f16", |gpu| original::overflows(&|layer, options| one(gpu, layer, options))),
];

fn one(gpu: &Gpu, layer: LayerShape, options: CacheOptions) -> kvfold::Result<Device<'_>> {
    Ok(Device { gpu, cache: QjlCache::new(gpu, &[layer], 1, options)? })
}

fn rope() -> kvfold::Result<Rope> {
    Rope::from_theta(64, 64, 10_000.0, RopeLayout::HalfSplit)
}

/// Bytes and number of the buffers that the device has allocated under the cache's names, where its allocator tells.
fn held(gpu: &Gpu) -> kvfold::Result<Option<[u64; 2]>> {
    const NAMES: [&str; 9] = [
        "raw keys",
        "raw values",
        "plane codes",
        "tables",
        "angles",
        "rotations",
        "status",
        "positions",
        "query energies",
    ];
    gpu.wait_blocking()?;
    let Some(report) = gpu.device().generate_allocator_report() else { return Ok(None) };
    let ours = report.allocations.iter().filter(|one| NAMES.iter().any(|name| one.name.contains(name)));
    Ok(Some(ours.fold([0, 0], |[bytes, count], one| [bytes + one.size, count + 1])))
}

/// SmolLM2's heads over 2,048 tokens; rotations and angles are for all layers, of which it has 30. `bytes` are those of the
/// cache's buffers.
fn balanced(gpu: &Gpu) -> kvfold::Result<()> {
    let before = held(gpu)?;
    let layers = vec![LayerShape::new(3, 64, DType::F16); 6];
    let mut device =
        Device { gpu, cache: QjlCache::new(gpu, &layers, 1, CacheOptions::default().rope(rope()?))? };
    let mut random = Random(1);
    for (index, &layer) in layers.iter().enumerate() {
        device.append(index, &batch(&mut random, layer, [1, 2048]))?;
    }
    let raw = 2048 * 3 * 64 * 2 * 2 * layers.len() as u64;
    assert_eq!(device.cache.raw_bytes(), raw);
    device.commit(false)?;
    assert!(device.cache.bytes() * 3 < raw, "after commit: {} of {raw}", device.cache.bytes());
    device.commit(true)?;
    let (bytes, payload) = (device.cache.bytes(), device.cache.payload_bytes());
    assert!(payload * 43 <= raw * 10, "{payload} of {raw}");
    assert!(bytes * 4 <= raw, "{bytes} of {raw}");
    if let (Some([bytes_before, buffers_before]), Some([bytes_after, buffers_after])) = (before, held(gpu)?) {
        let (live, buffers) = (bytes_after - bytes_before, buffers_after - buffers_before);
        // The allocator rounds every buffer up to its alignment.
        assert!(live >= bytes && live < bytes + 4096 * buffers, "{live} in {buffers} buffers, of {bytes}");
    }
    Ok(())
}

/// Tokens of a batch of one sequence, from `first` on.
fn cut(whole: &Batch, first: usize, count: usize) -> Batch {
    let part = |tensor: &Tensor| {
        let shape = tensor.shape();
        let rows = (0..shape.heads).flat_map(|h| (first..first + count).map(move |t| (h, t)));
        let bytes = rows.flat_map(|(h, t)| tensor.view().row_bytes(0, h, t).to_vec()).collect();
        Tensor::new(bytes, tensor.dtype(), kvfold::Shape { tokens: count, ..shape }).unwrap()
    };
    Batch {
        keys: part(&whole.keys),
        values: part(&whole.values),
        queries: whole.queries.as_ref().map(part),
        counts: vec![count as u32],
        starts: None,
    }
}

/// What is stored is the same whether tokens came at once or a few at a time.
fn chunks(gpu: &Gpu) -> kvfold::Result<()> {
    let layer = LayerShape::new(2, 64, DType::F16);
    let whole = batch(&mut Random(2), layer, [1, 300]);
    for options in [CacheOptions::default().rope(rope()?), Preset::Compact.into(), CacheOptions::qjl_orth()] {
        let mut saved = Vec::new();
        for chunks in [vec![300], vec![1, 3, 128, 100, 68], vec![20; 15]] {
            let mut device = one(gpu, layer, options.clone())?;
            let mut first = 0;
            for count in chunks {
                device.append(0, &cut(&whole, first, count))?;
                device.commit(false)?;
                first += count;
            }
            device.commit(true)?;
            saved.push(device.cache.save_blocking()?);
        }
        assert!(saved.windows(2).all(|pair| pair[0] == pair[1]), "{options:?}");
    }
    Ok(())
}
