//! The engine room: the self-test and timings. And what methods would take of a model that nobody captured.

use std::rc::Rc;

use kvfold::report::ModelShape;
use kvfold::selftest;
use wasm_bindgen::prelude::*;

use crate::js;
use crate::options::Options;
use crate::session::Inner;
use crate::task::{Task, now};

pub(crate) async fn selftest(inner: Rc<Inner>, _: Options, task: Task) -> Result<JsValue, JsValue> {
    let Some(gpu) = inner.gpu() else {
        let reason = inner.adapter.reason.clone().unwrap_or_default();
        let message = format!("the self-test compares a GPU with the CPU, and there is none: {reason}");
        return Err(js::fault("no_adapter", &message));
    };
    let capture = inner.capture().ok();
    match selftest::selftest(gpu, capture.as_deref(), &mut |done, of| task.goes_on(done, of)).await {
        Ok(checks) => {
            let checks = checks.iter().map(|check| {
                let record = js::record(check)?;
                js::set(&record, "passed", &JsValue::from(check.passed()));
                Ok(record)
            });
            Ok(checks.collect::<Result<js_sys::Array, JsValue>>()?.into())
        }
        Err(error) => Err(inner.fault(error).await),
    }
}

pub(crate) async fn timings(inner: Rc<Inner>, _: Options, task: Task) -> Result<JsValue, JsValue> {
    let capture = inner.capture().ok();
    let progress = &mut |done, of| task.goes_on(done, of);
    match selftest::timings(inner.gpu(), capture.as_deref(), &now, progress).await {
        Ok(timings) => js::record(&timings),
        Err(error) => Err(inner.fault(error).await),
    }
}

/// What the presets, a custom code and their rivals would take of a model's cache: sizes alone.
///
/// # Errors
/// `range` naming the size that is out of range, `options`.
#[wasm_bindgen(unchecked_return_type = "MethodFigures[]")]
pub fn estimate(
    #[wasm_bindgen(unchecked_param_type = "ModelShape")] model: &JsValue,
    #[wasm_bindgen(unchecked_optional_param_type = "Options")] options: &JsValue,
) -> Result<JsValue, JsValue> {
    let text = js_sys::JSON::stringify(model).ok().and_then(|text| text.as_string()).unwrap_or_default();
    let model: ModelShape =
        serde_json::from_str(&text).map_err(|cause| js::fault("options", &format!("model: {cause}")))?;
    let options: Options = js::parse(options)?;
    let request = options.planes(options.merge().0.sinks);
    js::record(&kvfold::report::estimate(&model, &request).map_err(js::error)?)
}
