//! The session: a device and a capture.

use std::cell::RefCell;
use std::rc::Rc;

use js_sys::Promise;
use kvfold::report::Engine;
use kvfold::{Capture, Error, Gpu};
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::future_to_promise;

use crate::adapter::{Adapter, choose};
use crate::load::{self, Summary};
use crate::options::{CreateOptions, Options};
use crate::task::{Task, turn};
use crate::{attend, fold, js, measure, room};

/// A device and a capture. Methods return at once; several may run beside each other.
#[wasm_bindgen]
pub struct Session {
    inner: Rc<Inner>,
}

/// What calls at work share with the session.
pub(crate) struct Inner {
    pub(crate) adapter: Adapter,
    pub(crate) engine: Engine,
    capture: RefCell<Option<Rc<Capture>>>,
}

impl Drop for Inner {
    /// The device is the session's own: whatever JavaScript still holds of it, its memory is freed now.
    fn drop(&mut self) {
        if let Some(gpu) = self.gpu() {
            gpu.device().destroy();
        }
    }
}

impl Inner {
    pub(crate) fn gpu(&self) -> Option<&Gpu> {
        match &self.engine {
            Engine::Gpu(gpu) => Some(gpu),
            _ => None,
        }
    }

    /// The capture that was loaded.
    pub(crate) fn capture(&self) -> Result<Rc<Capture>, JsValue> {
        self.capture.borrow().clone().ok_or_else(|| js::fault("no_capture", "load a capture first"))
    }

    /// An error as JavaScript gets it. A browser tells of a lost device a little after the calls that it made fail.
    pub(crate) async fn fault(&self, error: Error) -> JsValue {
        if matches!(error, Error::Device { .. })
            && let Some(gpu) = self.gpu()
            && turn().await.is_ok()
            && let Err(lost @ Error::DeviceLost { .. }) = gpu.submit(|_| Ok(()))
        {
            return js::error(lost);
        }
        js::error(error)
    }
}

#[wasm_bindgen]
impl Session {
    /// Makes a session: on WebGPU, on the CPU, or (`auto`) on WebGPU where that is hardware, else on the CPU.
    ///
    /// # Errors
    /// `no_adapter` where WebGPU was asked for and is not to be had.
    #[wasm_bindgen(unchecked_return_type = "Promise<Session>")]
    pub fn create(
        #[wasm_bindgen(unchecked_optional_param_type = "CreateOptions")] options: JsValue,
    ) -> Promise {
        future_to_promise(async move {
            let CreateOptions { backend } = js::parse(&options)?;
            let (adapter, gpu) = choose(backend).await?;
            let engine = gpu.map_or(Engine::Cpu, Engine::Gpu);
            let inner = Rc::new(Inner { adapter, engine, capture: RefCell::new(None) });
            Ok(Self { inner }.into())
        })
    }

    /// What computes.
    #[wasm_bindgen(getter, unchecked_return_type = "Adapter")]
    pub fn adapter(&self) -> Result<JsValue, JsValue> {
        js::record(&self.inner.adapter)
    }

    /// Reads a capture, which takes the place of one loaded before; nothing leaves the machine.
    ///
    /// # Errors
    /// What [`Capture::from_bytes`] says of the file; `source`, `io`, `cancelled`.
    #[wasm_bindgen(unchecked_return_type = "Promise<CaptureInfo>")]
    pub fn load(
        &self,
        #[wasm_bindgen(unchecked_param_type = "File | Blob | ArrayBuffer | Uint8Array")] source: JsValue,
        #[wasm_bindgen(unchecked_optional_param_type = "LoadOptions")] options: JsValue,
    ) -> Promise {
        let inner = Rc::clone(&self.inner);
        future_to_promise(async move {
            let task = Task::of(&options);
            // Two captures at once may be more than there is memory for.
            inner.capture.replace(None);
            let file = load::bytes(&source, &task).await?;
            let file_bytes = file.len();
            let capture = Capture::from_bytes(&file).map_err(js::error)?;
            drop(file);
            task.check(file_bytes, file_bytes)?;
            let summary = js::record(&Summary::of(&capture, file_bytes))?;
            inner.capture.replace(Some(Rc::new(capture)));
            Ok(summary)
        })
    }

    /// The cosine of every two neighbouring layers' rows.
    #[wasm_bindgen(unchecked_return_type = "Promise<PairRows[]>")]
    pub fn probe(
        &self,
        #[wasm_bindgen(unchecked_optional_param_type = "Options & Call")] options: JsValue,
    ) -> Promise {
        self.run(options, measure::probe)
    }

    /// MiniCache over every two neighbouring layers.
    #[wasm_bindgen(unchecked_return_type = "Promise<MergeResult>")]
    pub fn merge(
        &self,
        #[wasm_bindgen(unchecked_optional_param_type = "Options & Call & { rows?: boolean }")]
        options: JsValue,
    ) -> Promise {
        self.run(options, measure::merge)
    }

    /// QJL, sign planes where asked for, and the baselines, in every layer or some.
    #[wasm_bindgen(unchecked_return_type = "Promise<SketchResult>")]
    pub fn sketch(
        &self,
        #[wasm_bindgen(unchecked_optional_param_type = "Options & Call & { layers?: number[] }")]
        options: JsValue,
    ) -> Promise {
        self.run(options, measure::sketch)
    }

    /// Everything that `kvfold report --json` prints.
    #[wasm_bindgen(unchecked_return_type = "Promise<Report>")]
    pub fn report(
        &self,
        #[wasm_bindgen(unchecked_optional_param_type = "Options & Call")] options: JsValue,
    ) -> Promise {
        self.run(options, measure::report)
    }

    /// Exact and estimated attention of one head's captured queries.
    #[wasm_bindgen(unchecked_return_type = "Promise<HeadAttention>")]
    pub fn attend(
        &self,
        #[wasm_bindgen(unchecked_param_type = "Options & Call & AttendOptions")] options: JsValue,
    ) -> Promise {
        self.run(options, attend::attend)
    }

    /// Folds the capture into a store, the file that `kvfold unfold` reads. It runs on the CPU, in one go.
    #[wasm_bindgen(unchecked_return_type = "Promise<FoldResult>")]
    pub fn fold(
        &self,
        #[wasm_bindgen(unchecked_optional_param_type = "Options & Call & FoldOptions")] options: JsValue,
    ) -> Promise {
        self.run(options, fold::fold)
    }

    /// Every kernel on this device against its twin on the CPU: what `kvfold doctor` prints.
    #[wasm_bindgen(unchecked_return_type = "Promise<Check[]>")]
    pub fn selftest(
        &self,
        #[wasm_bindgen(unchecked_optional_param_type = "Call")] options: JsValue,
    ) -> Promise {
        self.run(options, room::selftest)
    }

    /// How long each operation takes, on the device and on the CPU.
    #[wasm_bindgen(unchecked_return_type = "Promise<Timing[]>")]
    pub fn timings(
        &self,
        #[wasm_bindgen(unchecked_optional_param_type = "Call")] options: JsValue,
    ) -> Promise {
        self.run(options, room::timings)
    }

    /// Labels of the kernel variants that this session has compiled; none on the CPU.
    #[must_use]
    pub fn variants(&self) -> Vec<String> {
        self.inner.gpu().map(Gpu::variants).unwrap_or_default()
    }

    /// Runs a call that outlives this borrow.
    fn run<F: Future<Output = Result<JsValue, JsValue>>>(
        &self,
        options: JsValue,
        call: impl FnOnce(Rc<Inner>, Options, Task) -> F + 'static,
    ) -> Promise {
        let inner = Rc::clone(&self.inner);
        future_to_promise(async move {
            let task = Task::of(&options);
            let parsed = js::parse(&options)?;
            call(inner, parsed, task).await
        })
    }
}
