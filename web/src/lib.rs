//! kvfold for browsers: bindings only, no algorithm.
//!
//! `report(bytes)` measures a capture and resolves to the JSON text of `docs/report.schema.json`. It runs on WebGPU where the
//! page has it and the capture fits, and on the CPU twins elsewhere; the report's `backend` says which, `fallback` why.

use kvfold::gpu::Request;
use kvfold::report::{Engine, ReportOptions, report_or_cpu};
use kvfold::{Capture, Gpu};
use wasm_bindgen::prelude::*;

/// Measures a capture (a safetensors file as bytes) with the default options.
///
/// # Errors
/// An `Error` whose message names what was wanted and what was had.
#[wasm_bindgen]
pub async fn report(capture: Vec<u8>) -> Result<String, JsError> {
    let capture = Capture::from_bytes(&capture)?;
    let (engine, fallback) = match Gpu::request(Request::default()).await {
        Ok(gpu) => (Engine::Gpu(gpu), None),
        Err(cause) => (Engine::Cpu, Some(cause.to_string())),
    };
    let mut report = report_or_cpu(&capture, &ReportOptions::default(), &engine, &mut |_| true).await?;
    report.fallback = report.fallback.or(fallback);
    Ok(serde_json::to_string(&report)?)
}
