//! A folded capture to be kept.

use std::rc::Rc;

use js_sys::Uint8Array;
use kvfold::qjl::cache::Coding;
use kvfold::store::{FoldOptions, Store};
use wasm_bindgen::JsValue;

use crate::js;
use crate::options::Options;
use crate::session::Inner;
use crate::task::Task;

pub(crate) async fn fold(inner: Rc<Inner>, options: Options, task: Task) -> Result<JsValue, JsValue> {
    let capture = inner.capture()?;
    let how = match options.method.as_deref() {
        None | Some("planes") => FoldOptions::Coded(options.code()),
        Some("qjl") => {
            let keys = capture.keys(0).map_err(js::error)?.shape();
            let other = |layer: usize| capture.keys(layer).is_ok_and(|other| other.shape().dim != keys.dim);
            if options.sketch_dim.is_some() && (1..capture.layers.len()).any(other) {
                let message = "sketch_dim: layers have keys of several dimensions, and one number of bits is not for all";
                return Err(js::fault("range", message));
            }
            FoldOptions::Coded(Coding::Sketch(options.sketch(keys.dim)))
        }
        Some("minicache") => {
            let (merge, start_frac) = options.merge();
            FoldOptions::MiniCache { merge, start_frac }
        }
        Some(other) => {
            let message = format!("method: wanted planes, qjl or minicache, had {other}");
            return Err(js::fault("range", &message));
        }
    };
    task.step(0, 3).await?;
    let store = Store::fold(&capture, &how).map_err(js::error)?;
    task.step(1, 3).await?;
    let report = js::record(&store.report(Some(&capture)).map_err(js::error)?)?;
    task.step(2, 3).await?;
    let bytes = store.to_bytes().map_err(js::error)?;
    task.step(3, 3).await?;
    Ok(js::object([("bytes", Uint8Array::from(bytes.as_slice()).into()), ("report", report)]))
}
