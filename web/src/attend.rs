//! Attention, exact and estimated.

use std::rc::Rc;

use js_sys::Float32Array;
use kvfold::report::{Measurement, Method};
use wasm_bindgen::JsValue;

use crate::js;
use crate::options::Options;
use crate::session::Inner;
use crate::task::Task;

pub(crate) async fn attend(inner: Rc<Inner>, options: Options, task: Task) -> Result<JsValue, JsValue> {
    let (capture, asked) = (inner.capture()?, options.report());
    let method = match options.method.as_deref() {
        None | Some("qjl") => Method::Qjl,
        Some("custom") => Method::Custom,
        Some(preset) => Method::Preset(preset.parse().map_err(js::error)?),
    };
    let mut measurement = Measurement::new(&capture, &asked, &inner.engine).map_err(js::error)?;
    let found = match measurement.attention(options.layer, options.sequence, options.head, method).await {
        Ok(found) => found,
        Err(error) => return Err(inner.fault(error).await),
    };
    task.check(1, 1)?;
    let floats = |numbers: &[f32]| JsValue::from(Float32Array::from(numbers));
    Ok(js::object([
        ("queries", JsValue::from(found.queries as u32)),
        ("tokens", JsValue::from(found.tokens as u32)),
        ("first_query", JsValue::from(found.first_query as u32)),
        ("exact_scores", floats(&found.exact_scores)),
        ("estimated_scores", floats(&found.estimated_scores)),
        ("exact_weights", floats(&found.exact_weights)),
        ("estimated_weights", floats(&found.estimated_weights)),
    ]))
}
