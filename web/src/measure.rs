//! The calls that measure.

use std::rc::Rc;

use js_sys::{Array, Float32Array, Uint8Array};
use kvfold::report::{
    CaptureShape, LayerFigures, Measurement, OptionsEcho, Pair, PairRows, PlanesFigures, QjlTotals, Report,
    RowFigures, Totals,
};
use kvfold::{Capture, Error};
use serde::Serialize;
use wasm_bindgen::JsValue;

use crate::js;
use crate::options::Options;
use crate::session::Inner;
use crate::task::Task;

type Result<T, E = JsValue> = std::result::Result<T, E>;

/// What `merge` found, beside the rows.
#[derive(Serialize)]
struct Merged<'a> {
    options: &'a OptionsEcho,
    shape: CaptureShape,
    pairs: &'a [Pair],
    totals: &'a Totals,
    verdict: &'a Option<String>,
}

/// What `sketch` found.
#[derive(Serialize)]
struct Sketched<'a> {
    options: &'a OptionsEcho,
    layers: &'a [LayerFigures],
    planes: &'a Option<PlanesFigures>,
    qjl: QjlTotals,
}

pub(crate) async fn probe(inner: Rc<Inner>, options: Options, task: Task) -> Result<JsValue> {
    let (capture, options) = (inner.capture()?, options.report());
    let mut measurement = Measurement::new(&capture, &options, &inner.engine).map_err(js::error)?;
    let (found, of) = (Array::new(), capture.layers.len().saturating_sub(1));
    task.step(0, of).await?;
    for upper in 1..=of {
        match measurement.cosines(upper).await {
            Ok(Some(rows)) => found.push(&pair_rows(&rows)),
            Ok(None) => found.push(&skipped(upper)),
            Err(error) => return Err(inner.fault(error).await),
        };
        task.step(upper, of).await?;
    }
    Ok(found.into())
}

pub(crate) async fn merge(inner: Rc<Inner>, options: Options, task: Task) -> Result<JsValue> {
    let (capture, asked) = (inner.capture()?, options.report());
    let mut measurement = Measurement::new(&capture, &asked, &inner.engine).map_err(js::error)?;
    let (rows, of) = (Array::new(), capture.layers.len().saturating_sub(1));
    let mut pairs = Vec::with_capacity(of);
    task.step(0, of).await?;
    for upper in 1..=of {
        let (pair, found) = match measurement.pair_with_rows(upper).await {
            Ok(found) => found,
            Err(error) => return Err(inner.fault(error).await),
        };
        if options.rows {
            rows.push(&found.as_ref().map_or_else(|| skipped(upper), pair_rows));
        }
        pairs.push(pair);
        task.step(upper, of).await?;
    }
    let layers = sizes(&measurement, &capture).map_err(js::error)?;
    let report = measurement.finish(pairs, layers);
    let Report { options: echo, shape, pairs, totals, verdict, .. } = &report;
    let merged = js::record(&Merged { options: echo, shape: *shape, pairs, totals, verdict })?;
    if options.rows {
        js::set(&merged, "rows", &rows);
    }
    Ok(merged)
}

pub(crate) async fn sketch(inner: Rc<Inner>, options: Options, task: Task) -> Result<JsValue> {
    let (capture, asked) = (inner.capture()?, options.report());
    let mut measurement = Measurement::new(&capture, &asked, &inner.engine).map_err(js::error)?;
    let wanted = options.layers.unwrap_or_else(|| (0..capture.layers.len()).collect());
    let mut layers = Vec::with_capacity(wanted.len());
    task.step(0, wanted.len()).await?;
    for (done, layer) in (1..).zip(&wanted) {
        match measurement.layer(*layer).await {
            Ok(figures) => layers.push(figures),
            Err(error) => return Err(inner.fault(error).await),
        }
        task.step(done, wanted.len()).await?;
    }
    let report = measurement.finish(Vec::new(), layers);
    let Report { options: echo, layers, planes, totals, .. } = &report;
    js::record(&Sketched { options: echo, layers, planes, qjl: totals.qjl })
}

pub(crate) async fn report(inner: Rc<Inner>, options: Options, task: Task) -> Result<JsValue> {
    let (capture, asked) = (inner.capture()?, options.report());
    let mut measurement = Measurement::new(&capture, &asked, &inner.engine).map_err(js::error)?;
    let count = capture.layers.len();
    let of = 2 * count - 1;
    let (mut pairs, mut layers) = (Vec::with_capacity(count), Vec::with_capacity(count));
    task.step(0, of).await?;
    for index in 0..count {
        let measured: kvfold::Result<()> = async {
            if index > 0 {
                pairs.push(measurement.pair(index).await?);
            }
            layers.push(measurement.layer(index).await?);
            Ok(())
        }
        .await;
        if let Err(error) = measured {
            return Err(inner.fault(error).await);
        }
        task.step(2 * index + 1, of).await?;
    }
    let mut report = measurement.finish(pairs, layers);
    report.adapter.clone_from(&inner.adapter.name);
    report.software = inner.adapter.software;
    report.fallback = inner.adapter.reason.clone().filter(|_| inner.adapter.cause != Some("asked"));
    js::record(&report)
}

fn sizes(measurement: &Measurement<'_>, capture: &Capture) -> std::result::Result<Vec<LayerFigures>, Error> {
    (0..capture.layers.len()).map(|layer| measurement.sizes(layer)).collect()
}

fn skipped(upper: usize) -> JsValue {
    js::object([
        ("lower", JsValue::from((upper - 1) as u32)),
        ("upper", JsValue::from(upper as u32)),
        ("keys", JsValue::NULL),
        ("values", JsValue::NULL),
    ])
}

fn pair_rows(rows: &PairRows) -> JsValue {
    js::object([
        ("lower", JsValue::from(rows.lower as u32)),
        ("upper", JsValue::from(rows.upper as u32)),
        ("keys", row_figures(&rows.keys)),
        ("values", row_figures(&rows.values)),
    ])
}

fn row_figures(rows: &RowFigures) -> JsValue {
    let retained: Vec<u8> = rows.retained.iter().map(|&retained| u8::from(retained)).collect();
    js::object([
        ("batch", JsValue::from(rows.shape.batch as u32)),
        ("heads", JsValue::from(rows.shape.heads as u32)),
        ("tokens", JsValue::from(rows.shape.tokens as u32)),
        ("cosines", Float32Array::from(rows.cosines.as_slice()).into()),
        ("retained", Uint8Array::from(retained.as_slice()).into()),
    ])
}
