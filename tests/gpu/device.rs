//! The device layer: hosts' devices, refusals, views that cannot be bound.

use kvfold::gpu::{ReadBack, Request};
use kvfold::minicache::{MergeOptions, gpu::Ops};
use kvfold::{DType, Error, Gpu, KvView, Shape, Strides, wgpu};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    ("a_read_back_returns_what_was_uploaded", read_back),
    ("read_backs_of_several_threads_all_come", several_threads),
    ("a_read_back_that_was_not_submitted_is_an_error", not_submitted),
    ("a_read_back_whose_encoder_was_dropped_is_an_error", dropped),
    ("a_read_back_of_half_a_word_is_refused", half_word),
    ("what_a_device_refuses_at_submit_is_an_error", destroyed_buffer),
    ("a_lost_device_is_an_error", lost),
    ("views_that_cannot_be_bound_say_why", refused_views),
    ("an_unknown_adapter_is_refused_by_name", unknown_adapter),
    ("a_buffer_beyond_the_limit_is_a_limit", too_large),
];

/// A device of the same adapter as a host might make it: WebGPU's default limits, no feature.
pub(crate) fn bare(gpu: &Gpu) -> kvfold::Result<Gpu> {
    limited(gpu, wgpu::Limits::default())
}

/// The same with other limits.
pub(crate) fn limited(gpu: &Gpu, limits: wgpu::Limits) -> kvfold::Result<Gpu> {
    let name = gpu.caps().adapter.clone();
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let adapter = adapters.into_iter().find(|adapter| adapter.get_info().name == name).unwrap();
    let binding = limits.max_storage_buffer_binding_size;
    let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).unwrap();
    assert!(device.features().is_empty());
    assert_eq!(device.limits().max_storage_buffer_binding_size, binding);
    Gpu::from_wgpu(device, queue)
}

fn read_back(gpu: &Gpu) -> kvfold::Result<()> {
    let buffer = gpu.upload("bytes", &[1, 2, 3, 4, 5])?;
    let bytes = gpu.submit(|encoder| ReadBack::schedule(gpu, encoder, &buffer))?.wait_blocking()?;
    assert_eq!(bytes, [1, 2, 3, 4, 5, 0, 0, 0]);
    Ok(())
}

/// Of threads that wait for one device, one may be told of the others' bytes.
fn several_threads(gpu: &Gpu) -> kvfold::Result<()> {
    let reads = |first: u8| {
        for last in 0..200 {
            let bytes = [first, 0, 0, last];
            let buffer = gpu.upload("bytes", &bytes)?;
            let read = gpu.submit(|encoder| ReadBack::schedule(gpu, encoder, &buffer))?.wait_blocking()?;
            assert_eq!(read, bytes);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|first| scope.spawn(move || reads(first))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })
}

fn not_submitted(gpu: &Gpu) -> kvfold::Result<()> {
    let buffer = gpu.upload("bytes", &[1, 2, 3, 4])?;
    let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let error = ReadBack::schedule(gpu, &mut encoder, &buffer)?.wait_blocking().unwrap_err();
    assert!(error.to_string().contains("not submitted"), "{error}");
    Ok(())
}

fn dropped(gpu: &Gpu) -> kvfold::Result<()> {
    let buffer = gpu.upload("bytes", &[1, 2, 3, 4])?;
    let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let read_back = ReadBack::schedule(gpu, &mut encoder, &buffer)?;
    drop(encoder);
    let error = gpu.block_on(read_back).unwrap_err();
    assert!(error.to_string().contains("not submitted"), "{error}");
    Ok(())
}

fn half_word(gpu: &Gpu) -> kvfold::Result<()> {
    let buffer = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 6,
        usage: wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    });
    let error = gpu.submit(|encoder| ReadBack::schedule(gpu, encoder, &buffer)).unwrap_err();
    assert_eq!(error.to_string(), "read-back: wanted whole 32-bit words, had 6 bytes");
    Ok(())
}

fn destroyed_buffer(gpu: &Gpu) -> kvfold::Result<()> {
    let buffer = gpu.upload("bytes", &[1, 2, 3, 4])?;
    buffer.destroy();
    let error = gpu.submit(|encoder| ReadBack::schedule(gpu, encoder, &buffer)).unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error}");
    Ok(())
}

fn lost(gpu: &Gpu) -> kvfold::Result<()> {
    // A device of its own: the suite goes on with this one.
    let own = Gpu::request_blocking(Request::default().name(gpu.caps().adapter.clone()))?;
    let buffer = own.upload("bytes", &[1, 2, 3, 4])?;
    own.device().destroy();
    // The loss is reported when the device is next polled, or already was.
    let _ = own.wait_blocking();
    let errors = [
        own.storage("after", 16).map(|_| ()).unwrap_err(),
        own.submit(|encoder| ReadBack::schedule(&own, encoder, &buffer)).map(|_| ()).unwrap_err(),
        own.wait_blocking().unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::DeviceLost { .. }), "{error:?}");
    }
    Ok(())
}

fn refused_views(gpu: &Gpu) -> kvfold::Result<()> {
    let shape = Shape::new(1, 2, 3, 64)?;
    let good = KvView::new(&gpu.storage("good", 768)?, DType::F16, shape);
    let plain = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 768,
        usage: wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let ops = Ops::new(gpu);
    let error = |upper: &KvView| {
        gpu.submit(|encoder| ops.encode_similarity(encoder, &good, upper, &MergeOptions::default()))
            .unwrap_err()
    };
    let short = error(&good.clone().at(1));
    assert!(matches!(short, Error::TooShort { need: 770, have: 768, .. }), "{short}");
    let far = error(&good.clone().strides(Strides { batch: 0, heads: usize::MAX / 8, tokens: 64 }));
    assert!(matches!(far, Error::Overflow { .. }), "{far}");
    let usage = error(&KvView::new(&plain, DType::F16, shape));
    assert!(matches!(usage, Error::Usage { .. }), "{usage}");
    let other = error(&KvView::new(good.buffer(), DType::Bf16, shape));
    assert_eq!(other.to_string(), "upper layer: wanted element type f16, had bf16");
    Ok(())
}

fn unknown_adapter(_: &Gpu) -> kvfold::Result<()> {
    let error = Gpu::request_blocking(Request::default().name("no such adapter")).unwrap_err();
    assert!(matches!(error, Error::NoAdapter { .. }), "{error}");
    assert!(error.to_string().contains("no such adapter"), "{error}");
    Ok(())
}

fn too_large(gpu: &Gpu) -> kvfold::Result<()> {
    let have = gpu.caps().max_buffer_size;
    let error = gpu.storage("huge", have + 4).unwrap_err();
    assert!(matches!(error, Error::Limit { need, .. } if need == have + 4), "{error}");
    Ok(())
}
