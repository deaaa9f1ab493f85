//! Streams a capture through a cache on the host and prints what it holds and how far its attention is from exact.
//!
//! `cargo run --release --example stream_cache -- CAPTURE [PRESET]`

use kvfold::attention::{AttendOptions, exact};
use kvfold::cache::{LayerShape, Step};
use kvfold::qjl::cache::{CacheOptions, CpuQjlCache};
use kvfold::rope::Rope;
use kvfold::{Capture, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("a capture's path is wanted")?;
    let preset = arguments.next().unwrap_or_else(|| "balanced".to_owned());
    let capture = Capture::open(&path)?;

    let (mut layers, mut ropes) = (Vec::new(), Vec::new());
    for (index, layer) in capture.layers.iter().enumerate() {
        let keys = capture.keys(index)?;
        let shape = LayerShape::new(keys.shape().heads, keys.shape().dim, keys.dtype());
        layers.push(shape.value_dim(layer.values.shape().dim));
        ropes.push(Rope::from_capture(&capture, index)?);
    }
    let options = CacheOptions::named(&preset)?.ropes(ropes);
    let sequences = capture.keys(0)?.shape().batch;
    let mut cache = CpuQjlCache::new(&layers, sequences, options)?;
    for (index, layer) in capture.layers.iter().enumerate() {
        let (keys, values) = (capture.keys(index)?.view(), layer.values.view());
        // Tables learn from the queries of the first tokens; a capture that has the last ones alone leaves them without.
        let all = layer.queries.as_ref().filter(|queries| queries.shape().tokens == keys.shape().tokens);
        let queries = all.map(Tensor::view);
        let mut step = Step::new(&keys, &values);
        step.queries = queries.as_ref();
        cache.append(index, &step)?;
    }
    cache.settle()?;
    let raw = cache.raw_bytes();
    println!("{cache}");
    let times = |bytes: u64| format!("{bytes} bytes, 1/{:.3} of {raw}", raw as f64 / bytes as f64);
    println!("payload {}\nheld    {}", times(cache.payload_bytes()), times(cache.bytes()));

    let (mut error, mut length) = (0.0f64, 0.0f64);
    for (index, layer) in capture.layers.iter().enumerate() {
        let Some(queries) = &layer.queries else { continue };
        let options = AttendOptions::default().causal(true);
        let had = cache.attend(index, &queries.view(), &options)?;
        let (keys, values) = (capture.keys(index)?.view(), layer.values.view());
        let want = exact(&queries.view(), &keys, &values, None, &options)?;
        for (had, want) in had.iter().zip(want) {
            error += f64::from(had - want).powi(2);
            length += f64::from(want).powi(2);
        }
    }
    println!("relative error of the attention output {:.4}", (error / length).sqrt());
    Ok(())
}
