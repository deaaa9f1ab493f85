//! From and to JavaScript.

use js_sys::{JSON, Object, Reflect};
use serde::Serialize;
use serde::de::DeserializeOwned;
use wasm_bindgen::prelude::*;

/// A property that is there.
pub(crate) fn get(of: &JsValue, name: &str) -> Option<JsValue> {
    let value = Reflect::get(of, &JsValue::from(name)).ok()?;
    (!value.is_undefined() && !value.is_null()).then_some(value)
}

/// A property that is a number.
pub(crate) fn number(of: &JsValue, name: &str) -> Option<f64> {
    get(of, name)?.as_f64()
}

/// A property that is a text with something in it.
pub(crate) fn text(of: &JsValue, name: &str) -> Option<String> {
    get(of, name)?.as_string().filter(|text| !text.is_empty())
}

/// Sets a property of an object of our own, which cannot fail.
pub(crate) fn set(of: &JsValue, name: &str, value: &JsValue) {
    let _ = Reflect::set(of, &JsValue::from(name), value);
}

/// An object with these properties.
pub(crate) fn object<const N: usize>(entries: [(&str, JsValue); N]) -> JsValue {
    let object = Object::new();
    entries.iter().for_each(|(name, value)| set(&object, name, value));
    object.into()
}

/// A record as an object.
pub(crate) fn record(record: &impl Serialize) -> Result<JsValue, JsValue> {
    let text = serde_json::to_string(record).map_err(|cause| fault("internal", &cause.to_string()))?;
    JSON::parse(&text)
}

/// An object as a record; nothing is the default record.
pub(crate) fn parse<T: DeserializeOwned + Default>(value: &JsValue) -> Result<T, JsValue> {
    if value.is_undefined() || value.is_null() {
        return Ok(T::default());
    }
    let text = JSON::stringify(value).map_err(|_| fault("options", "options: wanted a plain object"))?;
    let text = text.as_string().unwrap_or_default();
    serde_json::from_str(&text).map_err(|cause| {
        let cause = cause.to_string();
        fault("options", &format!("options: {}", cause.split(" at line").next().unwrap_or(&cause)))
    })
}

/// An `Error` with a code.
pub(crate) fn fault(code: &str, message: &str) -> JsValue {
    let error = js_sys::Error::new(message);
    error.set_name("KvfoldError");
    set(&error, "code", &JsValue::from(code));
    error.into()
}

/// A library's error as an `Error`.
#[allow(clippy::needless_pass_by_value, reason = "it is what map_err hands over")]
pub(crate) fn error(error: kvfold::Error) -> JsValue {
    fault(error.code(), &error.to_string())
}
