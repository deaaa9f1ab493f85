//! Sign planes in a report: the kernels' figures against the twins'.

use kvfold::Capture;
use kvfold::report::{
    AttentionErrors, Engine, MethodFigures, PlanesFigures, PlanesRequest, ReportOptions, report_blocking,
};
use kvfold::{DType, Gpu, Tensor};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[("planes_report_equals_the_twins", sample)];

/// What reports of two engines may differ by, in figures.
const FIGURE: f64 = 1e-3;

fn measure(capture: &Capture, engine: &Engine) -> kvfold::Result<PlanesFigures> {
    let options = ReportOptions::default().planes(PlanesRequest::default());
    Ok(report_blocking(capture, &options, engine, &mut |_| true)?.planes.unwrap())
}

fn sample(gpu: &Gpu) -> kvfold::Result<()> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/web/samples/smollm2_prose_s128.safetensors");
    let mut known = Capture::open(path)?;
    known.layers.truncate(2);
    if let Some(theta) = &mut known.info.rope_theta {
        theta.truncate(2);
    }
    known.info.sliding_window.truncate(2);
    let mut unknown = known.clone();
    (unknown.info.rope_theta, unknown.info.inv_freq, unknown.info.rope_layout) = (None, None, None);
    // Keys and values of two types.
    let mut mixed = known.clone();
    for layer in &mut mixed.layers {
        let values = layer.values.view().to_f32();
        layer.values = Tensor::from_f32(&values, DType::F32, layer.values.shape())?;
    }
    for capture in [known, unknown, mixed] {
        let twin = measure(&capture, &Engine::Cpu)?;
        let kernel = measure(&capture, &Engine::Gpu(gpu.clone()))?;
        assert_eq!((twin.centring, twin.coded_tokens), (kernel.centring, kernel.coded_tokens));
        same(&twin.presets, &kernel.presets);
        same(&twin.rivals, &kernel.rivals);
        assert_eq!(twin.layers.len(), 2);
        for (twin, kernel) in twin.layers.iter().zip(&kernel.layers) {
            same(&twin.presets, &kernel.presets);
            same(&twin.rivals, &kernel.rivals);
        }
    }
    Ok(())
}

fn same(twin: &[MethodFigures], kernel: &[MethodFigures]) {
    assert_eq!(twin.len(), kernel.len());
    for (twin, kernel) in twin.iter().zip(kernel) {
        let name = &twin.name;
        for (twin, kernel) in
            [(twin.errors, kernel.errors), (twin.errors_without_recent, kernel.errors_without_recent)]
        {
            let numbers = |e: AttentionErrors| {
                [e.output_relative_error, e.weights_kl, e.top1_agreement].map(Option::unwrap)
            };
            for (a, b) in numbers(twin).into_iter().zip(numbers(kernel)) {
                assert!((a - b).abs() <= FIGURE * a.abs().max(1.0), "{name}: {a} {b}");
            }
        }
        let sizes = |m: &MethodFigures| MethodFigures {
            errors: AttentionErrors::default(),
            errors_without_recent: AttentionErrors::default(),
            ..m.clone()
        };
        assert_eq!(sizes(twin), sizes(kernel));
    }
}
