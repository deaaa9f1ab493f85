//! The bindings in a browser, by themselves: `web/test-bindings` runs them in headless Chromium.

#![cfg_attr(
    target_arch = "wasm32",
    allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that panics is a test that fails")
)]

#[cfg(target_arch = "wasm32")]
mod js;
#[cfg(target_arch = "wasm32")]
mod session;

fn main() {}
