//! Reading a capture.

use js_sys::{ArrayBuffer, Promise, Uint8Array};
use kvfold::Capture;
use serde::Serialize;
use wasm_bindgen::JsCast;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

use crate::js;
use crate::task::Task;

/// Bytes of a file that are read at a time.
const PIECE: usize = 4 << 20;

/// The bytes of a `File`, `Blob`, `ArrayBuffer` or `Uint8Array`.
pub(crate) async fn bytes(source: &JsValue, task: &Task) -> Result<Vec<u8>, JsValue> {
    if let Some(blob) = source.dyn_ref::<web_sys::Blob>() {
        return pieces(blob, task).await;
    }
    if let Some(array) = source.dyn_ref::<Uint8Array>() {
        return Ok(array.to_vec());
    }
    if let Some(buffer) = source.dyn_ref::<ArrayBuffer>() {
        return Ok(Uint8Array::new(buffer).to_vec());
    }
    Err(js::fault("source", "source: wanted a File, Blob, ArrayBuffer or Uint8Array, had something else"))
}

async fn pieces(blob: &web_sys::Blob, task: &Task) -> Result<Vec<u8>, JsValue> {
    let total = blob.size();
    let mut bytes = vec![0; total as usize];
    let mut loaded = 0;
    for piece in bytes.chunks_mut(PIECE) {
        let end = loaded + piece.len();
        let part = blob.slice_with_f64_and_f64(loaded as f64, end as f64)?;
        let promise: Promise = part.array_buffer().unchecked_into();
        let array = Uint8Array::new(&JsFuture::from(promise).await?);
        if array.length() as usize != piece.len() {
            return Err(js::fault("io", "the file changed while it was read"));
        }
        array.copy_to(piece);
        loaded = end;
        task.tell([("loaded", loaded as f64), ("total", total)]);
        task.check(loaded, total as usize)?;
    }
    Ok(bytes)
}

/// The record `CaptureInfo`.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    model: Option<String>,
    layers: Vec<LayerSummary>,
    batch: usize,
    tokens: usize,
    lengths: Vec<usize>,
    bytes: usize,
    file_bytes: usize,
    rope_known: bool,
    has_keys: bool,
    token_ids: bool,
}

#[derive(Debug, Serialize)]
struct LayerSummary {
    kv_heads: usize,
    query_heads: Option<usize>,
    key_dim: usize,
    value_dim: usize,
    dtype: String,
    /// Of the first sequence, half-open.
    query_positions: Option<[usize; 2]>,
}

impl Summary {
    pub(crate) fn of(capture: &Capture, file_bytes: usize) -> Self {
        let layer = |(index, layer): (usize, &kvfold::capture::Layer)| LayerSummary {
            kv_heads: layer.kv_heads(),
            query_heads: layer.query_heads(),
            key_dim: layer.key_dim(),
            value_dim: layer.value_dim(),
            dtype: layer.values.dtype().to_string(),
            query_positions: capture.query_positions(index, 0).map(|range| [range.start, range.end]),
        };
        Self {
            model: capture.info.model.clone(),
            layers: capture.layers.iter().enumerate().map(layer).collect(),
            batch: capture.batch(),
            tokens: capture.tokens(),
            lengths: (0..capture.batch()).map(|sequence| capture.length(sequence)).collect(),
            bytes: capture.bytes(),
            file_bytes,
            rope_known: capture.inv_freq(0).is_some(),
            has_keys: (0..capture.layers.len()).all(|layer| capture.keys(layer).is_ok()),
            token_ids: capture.info.token_ids.is_some(),
        }
    }
}
