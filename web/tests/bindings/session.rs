//! What a session does with a capture, and what it says of what it cannot do.

use js_sys::Uint8Array;
use kvfold::store::Store;
use kvfold_web::{Session, estimate, memory_use};
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use wasm_bindgen_test::{wasm_bindgen_test, wasm_bindgen_test_configure};

use crate::js::{HEADS, TOKENS, call, capture, code, file, get, number, object, text};

wasm_bindgen_test_configure!(run_in_browser);

#[wasm_bindgen]
extern "C" {
    type AbortController;
    #[wasm_bindgen(constructor)]
    fn new() -> AbortController;
    #[wasm_bindgen(method)]
    fn abort(this: &AbortController);
    #[wasm_bindgen(method, getter)]
    fn signal(this: &AbortController) -> JsValue;
}

/// Rows of two planned pairs' keys and values that merge: all but the 4 sinks.
const MERGED: usize = 2 * HEADS * (TOKENS - 4);

async fn session(backend: &str) -> JsValue {
    JsFuture::from(Session::create(object(&format!(r#"{{"backend":"{backend}"}}"#)))).await.unwrap()
}

async fn loaded(backend: &str) -> JsValue {
    let session = session(backend).await;
    let info = call(&session, "load", &[file(&capture())]).await.unwrap();
    assert_eq!(number(&info, "layers.length"), 4.0);
    assert_eq!(number(&info, "tokens"), TOKENS as f64);
    assert_eq!(text(&info, "layers.0.dtype"), "f16");
    session
}

#[wasm_bindgen_test]
async fn a_capture_is_measured_on_the_cpu() {
    let session = loaded("cpu").await;
    assert_eq!(text(&session, "adapter.backend"), "cpu");
    assert_eq!(text(&session, "adapter.cause"), "asked");
    let merge = call(&session, "merge", &[object(r#"{"rows":true,"start_frac":0.5}"#)]).await.unwrap();
    assert_eq!(number(&merge, "totals.minicache.merged"), MERGED as f64);
    assert_eq!(number(&merge, "rows.length"), 3.0);
    assert_eq!(number(&merge, "rows.0.keys.retained.length"), (HEADS * TOKENS) as f64);
    let probe = call(&session, "probe", &[]).await.unwrap();
    // Rows of one direction, in f16 whose roundings are 2^-11: the cosine differs from 1 by their squares.
    assert!((number(&probe, "1.values.cosines.9") - 1.0).abs() < 1e-5);
    let head = call(&session, "attend", &[object(r#"{"layer":1,"head":3}"#)]).await.unwrap();
    assert_eq!(number(&head, "exact_weights.length"), (8 * TOKENS) as f64);
    let sketch =
        call(&session, "sketch", &[object(r#"{"presets":["balanced"],"layers":[2]}"#)]).await.unwrap();
    assert_eq!(number(&sketch, "layers.0.layer"), 2.0);
    assert_eq!(text(&sketch, "planes.presets.0.name"), "balanced");
}

#[wasm_bindgen_test]
async fn webgpu_finds_what_the_cpu_finds() {
    let session = loaded("webgpu").await;
    assert_eq!(text(&session, "adapter.backend"), "webgpu");
    let merge = call(&session, "merge", &[]).await.unwrap();
    assert_eq!(number(&merge, "totals.minicache.merged"), MERGED as f64);
    let variants = call(&session, "variants", &[]).await.unwrap();
    assert!(number(&variants, "length") > 0.0, "kernels ran");
}

#[wasm_bindgen_test]
async fn a_fold_is_a_store_of_the_library() {
    let session = loaded("cpu").await;
    for method in ["planes", "qjl", "minicache"] {
        let fold = call(&session, "fold", &[object(&format!(r#"{{"method":"{method}"}}"#))]).await.unwrap();
        let bytes = get(&fold, "bytes").unchecked_into::<Uint8Array>().to_vec();
        let restored = Store::from_bytes(&bytes).unwrap().unfold().unwrap();
        assert_eq!(restored.tokens(), TOKENS);
        assert_eq!(restored.layers.len(), 4);
        assert!(number(&fold, "report.ratio") > 0.9, "{method}");
    }
}

#[wasm_bindgen_test]
async fn errors_have_codes() {
    let empty = session("cpu").await;
    assert_eq!(code(&empty, "merge", &[]).await, "no_capture");
    assert_eq!(code(&empty, "load", &[JsValue::from("a text")]).await, "source");
    assert_eq!(code(&empty, "load", &[Uint8Array::new_with_length(9).into()]).await, "safetensors");
    let session = loaded("cpu").await;
    for (method, options, want) in [
        ("merge", r#"{"threshold":2}"#, "range"),
        ("merge", r#"{"treshold":0.5}"#, "options"),
        ("attend", r#"{"layer":9}"#, "range"),
        ("attend", r#"{"layer":0,"method":"extreme"}"#, "range"),
        ("fold", r#"{"method":"zip"}"#, "range"),
        ("selftest", "{}", "no_adapter"),
    ] {
        assert_eq!(code(&session, method, &[object(options)]).await, want, "{method} {options}");
    }
    let error = estimate(&object(r#"{"layers":1}"#), &JsValue::UNDEFINED).unwrap_err();
    assert_eq!(text(&error, "code"), "options");
}

#[wasm_bindgen_test]
async fn an_aborted_signal_cancels() {
    let session = loaded("cpu").await;
    let controller = AbortController::new();
    controller.abort();
    let options = object("{}");
    js_sys::Reflect::set(&options, &JsValue::from("signal"), &controller.signal()).unwrap();
    assert_eq!(code(&session, "report", &[options]).await, "cancelled");
}

#[wasm_bindgen_test]
async fn free_gives_memory_back() {
    let live = || number(&memory_use(), "live");
    let bytes = file(&capture());
    // The first session leaves what lives as long as the module does.
    let mut before = f64::NAN;
    for _ in 0..2 {
        before = live();
        let session = session("cpu").await;
        call(&session, "load", std::slice::from_ref(&bytes)).await.unwrap();
        assert!(live() > before + 10_000.0, "the capture is in memory");
        call(&session, "free", &[]).await.unwrap();
    }
    assert!(live() <= before + 1024.0, "{before} bytes were live, now {}", live());
}
