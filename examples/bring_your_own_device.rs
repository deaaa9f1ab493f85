//! kvfold in an engine that owns its wgpu device: the engine's buffers, encoder and submit, nothing of it touched.
//!
//! `cargo run --example bring_your_own_device`

use kvfold::attention::AttendOptions;
use kvfold::gpu::ReadBack;
use kvfold::qjl::{KeyScale, Projection, ProjectionKind, gpu::Ops};
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

    // Keys and values of 8 KV heads, one query for each of 32 query heads; the engine keeps them in one arena.
    let (cache, query) = (Shape::new(1, 8, 1024, 128)?, Shape::new(1, 32, 1, 128)?);
    let arena = tensor(&device, 2 * cache.elements() + query.elements());
    let keys = KvView::new(&arena, DType::F16, cache);
    let values = KvView::new(&arena, DType::F16, cache).at(cache.elements());
    let queries = KvView::new(&arena, DType::F16, query).at(2 * cache.elements());
    let output = KvView::new(&gpu.storage("output", query.bytes(DType::F32) as u64)?, DType::F32, query);

    // Everything is recorded into the engine's own encoder, and the engine submits it.
    let ops = Ops::new(&gpu);
    let projection = ops.upload_projection(&Projection::new(ProjectionKind::Orthogonal, 128, 512, 42)?)?;
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let sketch = ops.encode_quantize(&mut encoder, &keys, &projection, KeyScale::Norm)?;
    let codes = ops.encode_quantize_values(&mut encoder, &values)?;
    let options = AttendOptions::default().causal(true);
    ops.encode_attend(&mut encoder, &queries, &sketch, &codes, &projection, None, &options, &output)?;
    let read_back = ReadBack::schedule(&gpu, &mut encoder, output.buffer())?;
    queue.submit([encoder.finish()]);

    let (before, after) = (2 * cache.bytes(DType::F16) as u64, sketch.bytes() + codes.bytes());
    println!(
        "keys and values: {before} bytes raw, {after} folded, ratio {:.2}",
        before as f64 / after as f64
    );
    let bytes = read_back.wait_blocking()?;
    let first = bytes.as_chunks::<4>().0.iter().take(4).map(|&b| f32::from_le_bytes(b)).collect::<Vec<_>>();
    println!("attention output begins {first:?}");
    Ok(())
}
