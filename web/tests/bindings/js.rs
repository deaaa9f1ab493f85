//! The session as JavaScript has it.

use js_sys::{Array, Function, JSON, Promise, Reflect, Uint8Array};
use kvfold::capture::{CaptureInfo, Layer};
use kvfold::{Capture, DType, Shape, Tensor};
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::JsFuture;

/// A property, by its path: `totals.minicache.merged`.
pub(crate) fn get(of: &JsValue, path: &str) -> JsValue {
    path.split('.').fold(of.clone(), |value, name| Reflect::get(&value, &JsValue::from(name)).unwrap())
}

/// A number, by its path.
pub(crate) fn number(of: &JsValue, path: &str) -> f64 {
    get(of, path).as_f64().unwrap_or(f64::NAN)
}

/// A text, by its path.
pub(crate) fn text(of: &JsValue, path: &str) -> String {
    get(of, path).as_string().unwrap_or_default()
}

/// An object from JSON.
pub(crate) fn object(json: &str) -> JsValue {
    JSON::parse(json).unwrap()
}

/// Calls a method and awaits what it promises.
pub(crate) async fn call(of: &JsValue, method: &str, arguments: &[JsValue]) -> Result<JsValue, JsValue> {
    let method: Function = get(of, method).unchecked_into();
    let result = Reflect::apply(&method, of, &arguments.iter().collect::<Array>())?;
    match result.dyn_into::<Promise>() {
        Ok(promise) => JsFuture::from(promise).await,
        Err(result) => Ok(result),
    }
}

/// The code of the error that a method ends in.
pub(crate) async fn code(of: &JsValue, method: &str, arguments: &[JsValue]) -> String {
    let error = call(of, method, arguments).await.expect_err(method);
    assert!(error.is_instance_of::<js_sys::Error>(), "{method}");
    assert_eq!(text(&error, "name"), "KvfoldError", "{method}");
    text(&error, "code")
}

pub(crate) const HEADS: usize = 2;
pub(crate) const TOKENS: usize = 96;
const DIM: usize = 16;

/// Four layers whose rows point the same way, so that all but the sinks merge.
pub(crate) fn capture() -> Capture {
    let shape = |heads, tokens| Shape::new(1, heads, tokens, DIM).unwrap();
    let tensor = |shape: Shape, scale: f32, seed: u32| {
        let number =
            |i: usize| ((i as u32).wrapping_mul(2_654_435_761) ^ seed) as f32 / u32::MAX as f32 - 0.5;
        let numbers: Vec<f32> = (0..shape.elements()).map(|i| scale * number(i)).collect();
        Tensor::from_f32(&numbers, DType::F16, shape).unwrap()
    };
    let layer = |index: usize| {
        let scale = 1.0 + index as f32;
        let mut layer = Layer::new(
            tensor(shape(HEADS, TOKENS), scale, 0),
            tensor(shape(HEADS, TOKENS), scale, 0x5555_0000),
        );
        layer.queries = Some(tensor(shape(2 * HEADS, 8), 1.0, 0x3333_0000));
        layer
    };
    Capture::new((0..4).map(layer).collect(), CaptureInfo::default()).unwrap()
}

/// A capture's file.
pub(crate) fn file(capture: &Capture) -> JsValue {
    Uint8Array::from(capture.to_bytes().unwrap().as_slice()).into()
}
