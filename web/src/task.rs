//! A call from JavaScript at work: progress, cancelling, and letting the event loop run.

use std::cell::Cell;

use js_sys::{Function, Promise};
use kvfold::Error;
use wasm_bindgen::JsCast;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

use crate::js;

/// Milliseconds of work between two turns of the event loop: less than a frame.
const SLICE: f64 = 12.0;

/// What a caller wants to hear, and whether it still wants the result.
pub(crate) struct Task {
    on_progress: Option<Function>,
    signal: Option<JsValue>,
    turned: Cell<f64>,
}

impl Task {
    /// The `onProgress` and the `signal` of a call's options.
    pub(crate) fn of(options: &JsValue) -> Self {
        let on_progress = js::get(options, "onProgress").and_then(|f| f.dyn_into::<Function>().ok());
        Self { on_progress, signal: js::get(options, "signal"), turned: Cell::new(now()) }
    }

    /// Tells the caller of steps done and lets the event loop run, if it is time to.
    pub(crate) async fn step(&self, done: usize, of: usize) -> Result<(), JsValue> {
        self.tell([("done", done as f64), ("of", of as f64)]);
        if now() - self.turned.get() >= SLICE {
            turn().await?;
            self.turned.set(now());
        }
        self.check(done, of)
    }

    /// Tells the caller; what its function throws is its own.
    pub(crate) fn tell<const N: usize>(&self, numbers: [(&str, f64); N]) {
        if let Some(on_progress) = &self.on_progress {
            let progress = js::object(numbers.map(|(name, number)| (name, JsValue::from(number))));
            let _ = on_progress.call1(&JsValue::UNDEFINED, &progress);
        }
    }

    /// Tells the caller of steps done, and says whether it still wants the result.
    pub(crate) fn goes_on(&self, done: usize, of: usize) -> bool {
        self.tell([("done", done as f64), ("of", of as f64)]);
        !self.is_cancelled()
    }

    /// Whether the caller gave up.
    fn is_cancelled(&self) -> bool {
        let aborted = self.signal.as_ref().and_then(|signal| js::get(signal, "aborted"));
        aborted.is_some_and(|aborted| aborted.is_truthy())
    }

    /// `cancelled` where the caller gave up.
    pub(crate) fn check(&self, done: usize, of: usize) -> Result<(), JsValue> {
        if self.is_cancelled() { Err(js::error(Error::Cancelled { done, of })) } else { Ok(()) }
    }
}

/// Milliseconds since some start.
pub(crate) fn now() -> f64 {
    let performance = js::get(&js_sys::global(), "performance");
    let clock = performance.as_ref().and_then(|p| js::get(p, "now")?.dyn_into::<Function>().ok());
    let time = performance.zip(clock).and_then(|(this, clock)| clock.call0(&this).ok()?.as_f64());
    time.unwrap_or_else(js_sys::Date::now)
}

/// Lets the event loop run once. A timer would be held back for 4 ms; a message is not.
pub(crate) async fn turn() -> Result<(), JsValue> {
    let channel = web_sys::MessageChannel::new()?;
    let (here, there) = (channel.port1(), channel.port2());
    let promise = Promise::new(&mut |resolve, _| here.set_onmessage(Some(&resolve)));
    there.post_message(&JsValue::NULL)?;
    JsFuture::from(promise).await?;
    here.close();
    Ok(())
}
