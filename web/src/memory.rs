//! How much memory the module has and uses.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use wasm_bindgen::prelude::*;

use crate::js;

/// The system's allocator, and the bytes that it has given out.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[allow(unsafe_code, reason = "an allocator cannot be written without; every call is handed on as it came")]
// SAFETY: what the system's allocator promises, since it does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.fetch_add(size, Ordering::Relaxed);
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Bytes that are allocated now, and bytes of the module's memory, which never shrinks.
#[wasm_bindgen(js_name = memoryUse, unchecked_return_type = "Memory")]
#[must_use]
pub fn memory_use() -> JsValue {
    let memory = wasm_bindgen::memory();
    let buffer = js::get(&memory, "buffer").map(|buffer| js::number(&buffer, "byteLength"));
    js::object([
        ("live", JsValue::from(LIVE.load(Ordering::Relaxed) as f64)),
        ("module", JsValue::from(buffer.flatten().unwrap_or_default())),
    ])
}
