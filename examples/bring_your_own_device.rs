//! kvfold in an engine that owns its wgpu device: the engine's buffers, encoder and submit, nothing of it touched.
//!
//! `cargo run --example bring_your_own_device`

use kvfold::attention::AttendOptions;
use kvfold::cache::{LayerShape, Step};
use kvfold::gpu::ReadBack;
use kvfold::minicache::{CacheOptions, MiniCache, pair_layers_depth};
use kvfold::{DType, Gpu, KvView, Shape, wgpu};

/// The engine's side: a device with no optional feature at all, as any host might have made it.
async fn device() -> Result<(wgpu::Device, wgpu::Queue), Box<dyn std::error::Error>> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = instance.request_adapter(&wgpu::RequestAdapterOptions::default()).await?;
    Ok(adapter.request_device(&wgpu::DeviceDescriptor::default()).await?)
}

/// Stands in for what the model computes: `elements` f16 numbers in a buffer of the engine's.
fn tensor(device: &wgpu::Device, elements: usize) -> wgpu::Buffer {
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("engine"),
        size: elements as u64 * 2,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: true,
    });
    let halves = (0..elements).flat_map(|i| (0x3000 + (i * 37 % 3072) as u16).to_le_bytes());
    if let Ok(mut mapped) = buffer.get_mapped_range_mut(..) {
        mapped.slice(..).copy_from_slice(&halves.collect::<Vec<u8>>());
    }
    buffer.unmap();
    buffer
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (device, queue) = pollster::block_on(device())?;
    let gpu = Gpu::from_wgpu(device.clone(), queue.clone())?;
    println!("{} ({})", gpu.caps().adapter, gpu.caps().backend);

    // Four layers of 8 KV heads, the deeper half folded as a pair; one sequence.
    let (layers, shape) = (4, LayerShape::new(8, 128, DType::F16));
    let plan = pair_layers_depth(layers, 0.5, 2)?;
    let mut cache = MiniCache::new(&gpu, vec![shape; layers], plan, CacheOptions::default())?;
    cache.add_sequence();

    // A prompt of 256 tokens and three single ones. Of each step all layers go into the engine's own encoder and one submit.
    let query = Shape::new(1, 32, 1, 128)?;
    let output = KvView::new(&gpu.storage("output", query.bytes(DType::F32) as u64)?, DType::F32, query);
    for tokens in [256, 1, 1, 1] {
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let rows = Shape::new(1, 8, tokens, 128)?;
        for layer in 0..layers {
            let arena = tensor(&device, 2 * rows.elements() + query.elements());
            let keys = KvView::new(&arena, DType::F16, rows);
            let values = keys.clone().at(rows.elements());
            let queries = KvView::new(&arena, DType::F16, query).at(2 * rows.elements());
            cache.append(&mut encoder, layer, &Step::new(&keys, &values))?;
            cache.attend(&mut encoder, layer, &queries, &output, &AttendOptions::default())?;
        }
        cache.commit(&mut encoder)?;
        queue.submit([encoder.finish()]);
    }

    cache.settle_blocking()?;
    let report = cache.report();
    println!(
        "{} tokens: {} bytes raw, {} held, {} needed",
        cache.len(0)?,
        report.raw_bytes,
        report.bytes,
        report.payload_bytes
    );
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let read_back = ReadBack::schedule(&gpu, &mut encoder, output.buffer())?;
    queue.submit([encoder.finish()]);
    let bytes = read_back.wait_blocking()?;
    let first = bytes.as_chunks::<4>().0.iter().take(4).map(|&b| f32::from_le_bytes(b)).collect::<Vec<_>>();
    println!("attention output begins {first:?}");
    Ok(())
}
