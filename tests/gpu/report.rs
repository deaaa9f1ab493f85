//! Reports from kernels equal reports from twins, figure by figure.

use kvfold::capture::{Capture, CaptureInfo, Layer};
use kvfold::minicache::{MergeOptions, Mode, Retention, cpu};
use kvfold::qjl::{KeyScale, ProjectionKind};
use kvfold::report::{Engine, Report, ReportOptions, report_blocking};
use kvfold::{DType, Error, Gpu, Shape, Tensor};
use serde_json::Value;

use crate::Test;
use crate::rows::{Numbers, pair};

pub(crate) const TESTS: &[Test] = &[
    ("reports_on_the_sample_equal_the_twins", sample),
    ("reports_on_every_mode_and_type_equal_the_twins", every_mode),
    ("reports_count_no_padding", ragged),
    ("reports_say_where_they_were_made", described),
    ("reports_can_be_cancelled", cancelled),
];

/// How far figures of two engines may be apart, relative to the larger of 1 and the figure.
const FIGURE: f64 = 1e-3;
/// A cosine this near the threshold may fall on either side of it.
const COSINE: f32 = 1e-5;

fn measure(capture: &Capture, options: &ReportOptions, engine: &Engine) -> kvfold::Result<Report> {
    report_blocking(capture, options, engine, &mut |_| true)
}

/// Makes both reports and compares them.
fn compare(gpu: &Gpu, capture: &Capture, options: &ReportOptions) -> kvfold::Result<Report> {
    if matches!(options.merge.retention, Retention::Cosine(_)) {
        let near = near_threshold(capture, options)?;
        assert_eq!(near, 0, "rows so near the threshold make counts ambiguous: choose other rows");
    }
    let twin = measure(capture, options, &Engine::Cpu)?;
    let mut kernel = measure(capture, options, &Engine::Gpu(gpu.clone()))?;
    let measured = kernel.clone();
    (kernel.backend, kernel.adapter) = (twin.backend.clone(), twin.adapter.clone());
    kernel.software = twin.software;
    let json = |report: &Report| serde_json::to_value(report).unwrap();
    agree(&json(&twin), &json(&kernel), "report");
    Ok(measured)
}

/// Counts, texts and nulls must be equal, figures close.
fn agree(twin: &Value, kernel: &Value, at: &str) {
    match (twin, kernel) {
        (Value::Object(a), Value::Object(b)) => {
            assert!(a.keys().eq(b.keys()), "{at}");
            a.iter().for_each(|(key, value)| agree(value, &b[key], &format!("{at}.{key}")));
        }
        (Value::Array(a), Value::Array(b)) => {
            assert_eq!(a.len(), b.len(), "{at}");
            (0..).zip(a.iter().zip(b)).for_each(|(i, (a, b)): (usize, _)| agree(a, b, &format!("{at}.{i}")));
        }
        (Value::Number(a), Value::Number(b)) if a.is_f64() && b.is_f64() => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() <= FIGURE * a.abs().max(1.0), "{at}: {a} {b}");
        }
        _ => assert_eq!(twin, kernel, "{at}"),
    }
}

fn near_threshold(capture: &Capture, options: &ReportOptions) -> kvfold::Result<usize> {
    let mut near = 0;
    for index in 1..capture.layers.len() {
        let keys = [capture.keys(index - 1)?, capture.keys(index)?];
        let values = [&capture.layers[index - 1].values, &capture.layers[index].values];
        for [lower, upper] in [keys, values] {
            let rows = cpu::similarity(&lower.view(), &upper.view(), &options.merge)?;
            near += rows.iter().filter(|row| (row.cosine - options.threshold()).abs() < COSINE).count();
        }
    }
    Ok(near)
}

fn sample(gpu: &Gpu) -> kvfold::Result<()> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/web/samples/smollm2_prose_s128.safetensors");
    let mut capture = Capture::open(path)?;
    // The last layers, whose pairs include the one row that is an attention sink and the most opposite ones.
    capture.layers.drain(..26);
    capture.info = CaptureInfo::default();
    let report = compare(gpu, &capture, &ReportOptions::default())?;
    let pair = report.pairs[0].folded().unwrap();
    assert_eq!((pair.keys.above_threshold, pair.values.above_threshold), (1, 0));
    assert!(report.verdict.unwrap().starts_with("nothing to merge"));
    Ok(())
}

/// Two layers of every kind of finite row, and queries.
fn made(dtype: DType, batch: usize, dims: [usize; 2]) -> Capture {
    let [key_dim, value_dim] = dims;
    let rows = |seed, dim| {
        let shape = Shape::new(batch, 2, 70, dim).unwrap();
        pair(seed, shape, dtype).map(|tensor| {
            // Captures refuse what is not finite. Beyond f16's range Compat overflows, to infinity or to the largest number
            // as the adapter has it, so that an error is null on one engine and huge on the other.
            let within = |x: &f32| if x.abs() <= 65504.0 { *x } else { 1.0 };
            let numbers: Vec<f32> = tensor.view().to_f32().iter().map(within).collect();
            Tensor::from_f32(&numbers, dtype, shape).unwrap()
        })
    };
    let [lower_keys, upper_keys] = rows(21, key_dim);
    let [lower_values, upper_values] = rows(22, value_dim);
    let mut layers = vec![Layer::new(lower_keys, lower_values), Layer::new(upper_keys, upper_values)];
    let mut numbers = Numbers::new(23);
    for layer in &mut layers {
        let shape = Shape::new(batch, 6, 5, key_dim).unwrap();
        layer.queries = Some(Tensor::from_f32(&numbers.row(shape.elements()), dtype, shape).unwrap());
    }
    Capture::new(layers, CaptureInfo::default()).unwrap()
}

fn every_mode(gpu: &Gpu) -> kvfold::Result<()> {
    let cases = [
        (
            DType::F16,
            Mode::Shared,
            Retention::Cosine(0.9),
            [64, 64],
            ProjectionKind::Hadamard,
            KeyScale::Norm,
        ),
        (DType::Bf16, Mode::Anchor, Retention::Never, [192, 128], ProjectionKind::Gaussian, KeyScale::Mse),
        (
            DType::F32,
            Mode::Compat,
            Retention::Cosine(0.5),
            [80, 33],
            ProjectionKind::Orthogonal,
            KeyScale::Unbiased,
        ),
        (
            DType::F32,
            Mode::Shared,
            Retention::Fraction(0.25),
            [31, 7],
            ProjectionKind::Gaussian,
            KeyScale::Norm,
        ),
    ];
    for (dtype, mode, retention, dims, projection, scale) in cases {
        let merge = MergeOptions::default().mode(mode).retention(retention).raw_page_share(1.0);
        let options =
            ReportOptions::default().merge(merge).start_frac(0.0).projection(projection).key_scale(scale);
        let report = compare(gpu, &made(dtype, 2, dims), &options.sketch_dim(dims[0] + 3))?;
        assert!(report.totals.minicache.merged > 0 && report.verdict.is_none(), "{dtype} {mode:?}");
        assert!(report.layers.iter().all(|layer| layer.qjl.figures.score_correlation.is_some()));
    }
    Ok(())
}

fn ragged(gpu: &Gpu) -> kvfold::Result<()> {
    let mut capture = made(DType::F16, 4, [48, 32]);
    capture.info.lengths = Some(vec![70, 0, 33, 7]);
    capture.info.query_positions = Some(28..33);
    capture.info.sliding_window = vec![None, Some(9)];
    capture.info.attn_scale = Some(0.3);
    let report = compare(gpu, &capture, &ReportOptions::default().start_frac(0.0))?;
    assert_eq!(report.pairs[0].folded().unwrap().keys.rows, 2 * (70 + 33 + 7));
    // At odd channel counts a sequence starts at half a word.
    let mut odd = made(DType::F16, 2, [35, 35]);
    odd.info.lengths = Some(vec![69, 41]);
    compare(gpu, &odd, &ReportOptions::default().start_frac(0.0))?;
    Ok(())
}

fn described(gpu: &Gpu) -> kvfold::Result<()> {
    let report =
        measure(&made(DType::F16, 1, [32, 32]), &ReportOptions::default(), &Engine::Gpu(gpu.clone()))?;
    let caps = gpu.caps();
    assert_eq!((report.backend, report.adapter), (caps.backend.clone(), Some(caps.adapter.clone())));
    assert_eq!(report.software, caps.software);
    Ok(())
}

fn cancelled(gpu: &Gpu) -> kvfold::Result<()> {
    let capture = made(DType::F16, 1, [32, 32]);
    for engine in [Engine::Cpu, Engine::Gpu(gpu.clone())] {
        let mut told = Vec::new();
        let mut progress = |step: kvfold::report::Progress| {
            told.push((step.done, step.of));
            step.done < 2
        };
        let error = report_blocking(&capture, &ReportOptions::default(), &engine, &mut progress).unwrap_err();
        assert!(matches!(error, Error::Cancelled { done: 2, of: 3 }), "{error}");
        assert_eq!(told, [(0, 3), (1, 3), (2, 3)]);
    }
    Ok(())
}
