//! Reports from kernels equal reports from twins, figure by figure.

use kvfold::capture::{Capture, CaptureInfo, Layer};
use kvfold::minicache::{MergeOptions, Mode, Retention, cpu};
use kvfold::qjl::{KeyScale, ProjectionKind};
use kvfold::report::{Engine, Report, ReportOptions, report_blocking, report_or_cpu_blocking};
use kvfold::{DType, Error, Gpu, Shape, Tensor, wgpu};

use crate::figures::agree;
use crate::rows::{Numbers, pair};
use crate::{Test, device};

pub(crate) const TESTS: &[Test] = &[
    ("reports_on_the_sample_equal_the_twins", sample),
    ("reports_on_every_mode_and_type_equal_the_twins", every_mode),
    ("reports_count_no_padding", ragged),
    ("reports_slice_queries_that_one_binding_cannot_hold", sliced),
    ("the_cpu_takes_over_from_a_device_that_is_too_small", fallback),
    ("reports_say_where_they_were_made", described),
    ("reports_can_be_cancelled", cancelled),
];

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
    capture.info.sliding_window.drain(..26);
    capture.info.rope_theta.as_mut().unwrap().drain(..26);
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
    ask(&mut layers, dtype, Shape::new(batch, 6, 5, key_dim).unwrap());
    Capture::new(layers, CaptureInfo::default()).unwrap()
}

/// Gives every layer queries.
fn ask(layers: &mut [Layer], dtype: DType, shape: Shape) {
    let mut numbers = Numbers::new(23);
    for layer in layers {
        layer.queries = Some(Tensor::from_f32(&numbers.row(shape.elements()), dtype, shape).unwrap());
    }
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

/// A device whose buffers and bindings have at most so many bytes.
fn small(gpu: &Gpu, bytes: u64) -> kvfold::Result<Gpu> {
    let (max_buffer_size, max_storage_buffer_binding_size) = (bytes, bytes);
    device::limited(
        gpu,
        wgpu::Limits { max_buffer_size, max_storage_buffer_binding_size, ..Default::default() },
    )
}

/// 64 queries of 2 sequences and 6 heads: scores of 2 * 6 * 64 * 70 * 4 = 215,040 bytes beside keys of 35,840.
fn many_queries() -> Capture {
    let mut capture = made(DType::F16, 2, [64, 64]);
    ask(&mut capture.layers, DType::F16, Shape::new(2, 6, 64, 64).unwrap());
    capture.info.lengths = Some(vec![70, 51]);
    capture.info.query_positions = Some(3..67);
    capture.info.sliding_window = vec![Some(20), None];
    capture
}

fn sliced(gpu: &Gpu) -> kvfold::Result<()> {
    let options = ReportOptions::default().start_frac(0.0);
    // Five slices; the twins take all queries at once.
    let report = compare(&small(gpu, 48 << 10)?, &many_queries(), &options)?;
    assert!(report.layers.iter().all(|layer| layer.qjl.figures.score_correlation.is_some()));
    Ok(())
}

fn fallback(gpu: &Gpu) -> kvfold::Result<()> {
    let (capture, options) = (many_queries(), ReportOptions::default());
    let engine = Engine::Gpu(small(gpu, 35_836)?);
    let error = measure(&capture, &options, &engine).unwrap_err();
    assert!(matches!(error, Error::Limit { need: 35_840, have: 35_836, .. }), "{error}");
    let mut report = report_or_cpu_blocking(&capture, &options, &engine, &mut |_| true)?;
    assert_eq!((report.backend.as_str(), &report.adapter), ("cpu", &None));
    assert_eq!(report.fallback.take(), Some(error.to_string()));
    assert_eq!(report, measure(&capture, &options, &Engine::Cpu)?);
    // What the capture or the caller is to blame for stays an error.
    let cancelled = report_or_cpu_blocking(&capture, &options, &engine, &mut |_| false).unwrap_err();
    assert!(matches!(cancelled, Error::Cancelled { .. }), "{cancelled}");
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
