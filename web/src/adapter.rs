//! What computes, and why.

use js_sys::{Function, Promise};
use kvfold::gpu::{Caps, Request};
use kvfold::{Error, Gpu};
use serde::Serialize;
use wasm_bindgen::JsCast;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

use crate::js;
use crate::options::Backend;

/// The record `Adapter`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Adapter {
    pub(crate) backend: &'static str,
    pub(crate) name: Option<String>,
    pub(crate) software: bool,
    /// Why it is not WebGPU, in a word that stays the same and in a sentence.
    pub(crate) cause: Option<&'static str>,
    pub(crate) reason: Option<String>,
    pub(crate) caps: Option<Caps>,
}

impl Adapter {
    fn cpu(cause: &'static str, reason: impl Into<String>) -> Self {
        let (cause, reason) = (Some(cause), Some(reason.into()));
        Self { backend: "cpu", name: None, software: true, cause, reason, caps: None }
    }
}

/// A device, or none and the reason.
pub(crate) async fn choose(backend: Backend) -> Result<(Adapter, Option<Gpu>), JsValue> {
    if backend == Backend::Cpu {
        return Ok((Adapter::cpu("asked", "the CPU was asked for"), None));
    }
    let found = match offered().await {
        Ok(offered) if offered.software && backend == Backend::Auto => {
            let reason = format!("no GPU but {}, which is software and slower", offered.name);
            Err(Adapter::cpu("software", reason))
        }
        Ok(offered) => Gpu::request(Request::default())
            .await
            .map(|gpu| (offered, gpu))
            .map_err(|error| Adapter::cpu("device", error.to_string())),
        Err(adapter) => Err(adapter),
    };
    match found {
        Ok((offered, gpu)) => {
            let mut caps = gpu.caps().clone();
            caps.adapter.clone_from(&offered.name);
            caps.software = offered.software;
            let adapter = Adapter {
                backend: "webgpu",
                name: Some(offered.name),
                software: offered.software,
                cause: None,
                reason: None,
                caps: Some(caps),
            };
            Ok((adapter, Some(gpu)))
        }
        Err(adapter) if backend == Backend::Auto => Ok((adapter, None)),
        Err(adapter) => {
            let have = adapter.reason.unwrap_or_default();
            Err(js::error(Error::NoAdapter { want: "webgpu".to_owned(), have }))
        }
    }
}

/// An adapter as the browser describes it.
struct Offered {
    name: String,
    software: bool,
}

/// The browser's adapter. wgpu passes on its description alone, which most browsers leave empty.
async fn offered() -> Result<Offered, Adapter> {
    let global = js_sys::global();
    let gpu = js::get(&global, "navigator").and_then(|navigator| js::get(&navigator, "gpu"));
    let Some(gpu) = gpu else {
        let secure = js::get(&global, "isSecureContext").is_some_and(|secure| secure.is_truthy());
        return Err(if secure {
            Adapter::cpu("missing", "this browser has no WebGPU")
        } else {
            Adapter::cpu("insecure", "the page is not in a secure context (https or localhost)")
        });
    };
    let none = || Adapter::cpu("no_adapter", "the browser has WebGPU and offers no adapter");
    let request = js::get(&gpu, "requestAdapter").and_then(|f| f.dyn_into::<Function>().ok());
    let promise = request.and_then(|f| f.call0(&gpu).ok()?.dyn_into::<Promise>().ok()).ok_or_else(none)?;
    let adapter = JsFuture::from(promise).await.map_err(|_| none())?;
    let info = js::get(&adapter, "info").ok_or_else(none)?;
    let [vendor, architecture, device, description] =
        ["vendor", "architecture", "device", "description"].map(|name| js::text(&info, name));
    let short = [vendor, architecture, device].into_iter().flatten().collect::<Vec<_>>().join(" ");
    let name = description.or((!short.is_empty()).then_some(short)).unwrap_or_else(|| "GPU".to_owned());
    let fallback = js::get(&info, "isFallbackAdapter").is_some_and(|fallback| fallback.is_truthy());
    let lower = name.to_lowercase();
    let software = fallback
        || ["swiftshader", "llvmpipe", "lavapipe", "basic render"].iter().any(|known| lower.contains(known));
    Ok(Offered { name, software })
}
