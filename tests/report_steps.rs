//! A report in steps: its parts equal the whole, its rows equal the figures, and attention is attention.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics is a test that fails")]

use kvfold::capture::{Capture, CaptureInfo, Layer};
use kvfold::minicache::{MergeOptions, Retention, cpu};
use kvfold::qjl::cache::NamedCoding;
use kvfold::qjl::planes::{PlanesOptions, Preset};
use kvfold::report::{Engine, Measurement, Method, PlanesRequest, ReportOptions, report_blocking};
use kvfold::{DType, Error, Shape, Tensor};

fn wait<T>(future: impl Future<Output = T>) -> T {
    pollster::block_on(future)
}

/// Three layers of alike rows, the second sequence shorter than the first.
fn capture() -> Capture {
    let mut state = 1u32;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state) as f32 / 2f32.powi(31) - 1.0
    };
    let shape = Shape::new(2, 2, 70, 16).unwrap();
    let base: Vec<f32> = (0..shape.elements()).map(|_| next()).collect();
    let mut near = |scale: f32, shape: Shape| {
        let rows: Vec<f32> = base.iter().take(shape.elements()).map(|x| scale * x + 0.3 * next()).collect();
        Tensor::from_f32(&rows, DType::F32, shape).unwrap()
    };
    let layers = (1..4u8).map(|layer| {
        let scale = f32::from(layer);
        let mut made = Layer::new(near(scale, shape), near(scale, shape));
        made.queries = Some(near(scale, Shape::new(2, 4, 5, 16).unwrap()));
        made
    });
    let mut capture = Capture::new(layers.collect(), CaptureInfo::default()).unwrap();
    capture.info.lengths = Some(vec![70, 40]);
    capture
}

fn options() -> ReportOptions {
    let merge = MergeOptions::default().retention(Retention::Cosine(0.8));
    let planes = PlanesRequest::default()
        .presets(vec![Preset::Balanced.into(), NamedCoding::QjlOrth])
        .custom(PlanesOptions::default().key_planes(1).value_planes(2))
        .recent(8);
    ReportOptions::default().merge(merge).planes(planes)
}

#[test]
fn steps_in_any_order_are_the_report() {
    let (capture, options) = (capture(), options());
    let whole = report_blocking(&capture, &options, &Engine::Cpu, &mut |_| true).unwrap();
    let mut measurement = Measurement::new(&capture, &options, &Engine::Cpu).unwrap();
    let mut layers: Vec<_> = [2, 0, 1].map(|layer| wait(measurement.layer(layer)).unwrap()).into();
    assert_eq!(measurement.methods().unwrap().layer, 1);
    layers.sort_by_key(|layer| layer.layer);
    let mut pairs = [2, 1].map(|upper| wait(measurement.pair(upper)).unwrap());
    pairs.reverse();
    assert_eq!(measurement.finish(pairs.into(), layers), whole);
    let names: Vec<_> = whole.planes.unwrap().presets.into_iter().map(|method| method.name).collect();
    assert_eq!(names, ["balanced", "qjl-orth", "custom"]);
}

#[test]
fn sizes_are_enough_for_the_bytes_of_pairs() {
    let (capture, options) = (capture(), options());
    let whole = report_blocking(&capture, &options, &Engine::Cpu, &mut |_| true).unwrap();
    let mut measurement = Measurement::new(&capture, &options, &Engine::Cpu).unwrap();
    let pairs = [1, 2].map(|upper| wait(measurement.pair(upper)).unwrap());
    let layers = (0..3).map(|layer| measurement.sizes(layer).unwrap()).collect();
    let report = measurement.finish(pairs.into(), layers);
    assert_eq!(report.totals.minicache, whole.totals.minicache);
    assert!(report.totals.minicache.merged > 0 && report.verdict.is_none());
}

#[test]
fn rows_are_those_of_the_figures() {
    let (capture, options) = (capture(), options());
    let mut measurement = Measurement::new(&capture, &options, &Engine::Cpu).unwrap();
    let (pair, rows) = wait(measurement.pair_with_rows(1)).unwrap();
    let (figures, rows) = (pair.folded().unwrap().clone(), rows.unwrap());
    assert_eq!((rows.lower, rows.upper), (0, 1));
    let probed = wait(measurement.cosines(1)).unwrap().unwrap();
    let keys = [capture.keys(0).unwrap(), capture.keys(1).unwrap()];
    let want = cpu::similarity(&keys[0].view(), &keys[1].view(), &options.merge).unwrap();
    for (row, (b, h, t)) in rows.keys.shape.iter_rows().enumerate() {
        let padding = b == 1 && t >= 40;
        assert_eq!(rows.keys.cosines[row].is_nan(), padding, "{b} {h} {t}");
        assert_eq!(probed.keys.cosines[row].to_bits(), rows.keys.cosines[row].to_bits());
        if padding {
            assert!(!rows.keys.retained[row]);
        } else {
            assert_eq!(rows.keys.cosines[row], want[row].cosine);
        }
        if t < 4 {
            assert!(rows.keys.retained[row], "a sink");
        }
    }
    for (rows, figures) in [(&rows.keys, &figures.keys), (&rows.values, &figures.values)] {
        assert_eq!(rows.retained.iter().filter(|&&retained| retained).count() as u64, figures.retained);
        assert_eq!(rows.cosines.iter().filter(|x| !x.is_nan()).count() as u64, figures.rows);
    }
    assert!(probed.keys.retained.is_empty());
}

#[test]
fn weights_are_those_of_attention() {
    let (capture, options) = (capture(), options());
    let mut measurement = Measurement::new(&capture, &options, &Engine::Cpu).unwrap();
    let presets = [Preset::Balanced.into(), NamedCoding::QjlOrth].map(Method::Preset);
    for method in [Method::Qjl, presets[0], presets[1], Method::Custom] {
        let found = wait(measurement.attention(1, 1, 3, method)).unwrap();
        assert_eq!((found.queries, found.tokens, found.first_query), (5, 70, 35));
        for query in 0..5 {
            let row = |numbers: &[f32]| numbers[query * 70..(query + 1) * 70].to_vec();
            for weights in [row(&found.exact_weights), row(&found.estimated_weights)] {
                let seen: Vec<f32> = weights.into_iter().filter(|x| !x.is_nan()).collect();
                assert_eq!(seen.len(), 36 + query, "causal, padding left out");
                // Weights are rounded to f32 one by one: an ulp of each.
                assert!((seen.iter().sum::<f32>() - 1.0).abs() < 40.0 * f32::EPSILON);
            }
        }
        let differs =
            found.exact_scores.iter().zip(&found.estimated_scores).any(|(a, b)| (a - b).abs() > 1e-3);
        assert!(differs, "{method:?}");
    }
    let refused = [
        (wait(measurement.attention(1, 2, 0, Method::Qjl)), "sequence: wanted below 2, had 2"),
        (wait(measurement.attention(1, 0, 4, Method::Qjl)), "query head: wanted below 4, had 4"),
        (
            wait(measurement.attention(1, 0, 0, Method::Preset(Preset::Extreme.into()))),
            "method: wanted one that the options ask for, had another",
        ),
    ];
    for (found, message) in refused {
        assert_eq!(found.unwrap_err().to_string(), message);
    }
    for upper in [0, 3] {
        assert!(matches!(wait(measurement.pair(upper)), Err(Error::Range { .. })));
    }
}
