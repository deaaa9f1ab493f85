// The engine room, lost devices, memory, and the bindings by themselves.
import assert from "node:assert/strict";
import { join } from "node:path";

import { SHOTS, drop } from "./harness.mjs";
import { alike } from "./made.mjs";
import { PAGE, small, watch } from "./page.mjs";

async function room(browser) {
  const page = await small(browser, { view: "engine" });
  await page.click("#time");
  await page.waitForFunction(() => window.kvfold.data.timings && document.body.dataset.busy === "no", null, { timeout: 300_000 });
  const timings = await page.evaluate(() => window.kvfold.data.timings);
  assert.equal(timings.length, 12);
  const text = await page.locator("#view-engine").innerText();
  if (browser.kind === "cpu") {
    assert.ok(timings.every((t) => t.milliseconds === null && t.twin_milliseconds >= 0));
    assert.match(text, /CPU twins in WebAssembly/);
    assert.ok(await page.locator("#selftest").isDisabled());
    return;
  }
  assert.ok(timings.every((t) => t.milliseconds > 0));
  assert.match(text, /nothing about a GPU’s speed/);
  assert.match(text, /minicache-merge/);
  await page.click("#selftest");
  await page.waitForFunction(() => window.kvfold.data.checks, null, { timeout: 180_000 });
  const checks = await page.evaluate(() => window.kvfold.data.checks);
  assert.deepEqual(checks.filter((check) => !check.passed), []);
  assert.ok(checks.length >= 40);
  await page.getByRole("button", { name: "Copy as text" }).click();
  const copied = await page.evaluate(() => navigator.clipboard.readText());
  assert.match(copied, /^kvfold [\d.]+ self-test in a browser\nadapter: .*swiftshader.*software/i);
  assert.match(copied, new RegExp(`${checks.length} passed, 0 failed$`));
  await page.screenshot({ path: join(SHOTS, "webgpu-engine-run.png"), fullPage: true });
}

async function lost(browser) {
  const page = await small(browser, { threshold: "0.7" }, watch);
  const [worker] = page.workers();
  await worker.evaluate(() => self.watched.devices.at(-1).destroy());
  await page.evaluate(() => { document.body.dataset.ready = "no"; });
  await page.evaluate(() => { window.kvfold.set({ threshold: 0.6 }); });
  const banner = page.locator('[data-banner="device"]');
  await banner.waitFor();
  assert.match(await banner.innerText(), /The GPU device was lost[^]*Your settings are kept/);
  await banner.getByRole("button", { name: "Try again" }).click();
  await browser.ready(page);
  assert.equal(await banner.count(), 0);
  const { threshold } = await page.evaluate(() => window.kvfold.data.merge.options);
  assert.ok(Math.abs(threshold - 0.6) < 1e-6);
  assert.match(await page.locator("#engine-name").innerText(), /^WebGPU/);
}

async function asked(browser) {
  const page = await browser.page({ backend: "webgpu" }, { ready: false });
  const banner = page.locator('[data-banner="device"]');
  await banner.waitFor();
  assert.match(await banner.innerText(), /WebGPU was asked for and is not to be had: no adapter/);
  await banner.getByRole("button", { name: "Use the CPU" }).click();
  await browser.ready(page);
  assert.equal(await page.locator("#engine-name").innerText(), "CPU twins");
}

/** A capture of 18 MB, so that what is kept would show. */
const large = () => alike(12, 256, { heads: 4, dim: 128, queries: false });

async function frees(browser) {
  const page = await small(browser, {}, watch);
  const load = async () => {
    await drop(page, "large.safetensors", large());
    await browser.ready(page);
  };
  const use = () => page.evaluate(() => window.kvfold.engine.session.memory());
  const start = (await page.evaluate(async () => {
    const session = window.kvfold.engine.session;
    await session.free();
    const use = await session.memory();
    await session.restart({ backend: window.kvfold.engine.adapter.backend });
    return use;
  })).live;
  await load();
  const first = await use();
  assert.ok(first.live > start + 10e6, "the capture is in memory");
  await load();
  const second = await use();
  // A page of the module's memory is 64 KiB; what came and went in other sizes may leave a few of them between.
  assert.ok(second.module <= first.module + 16 * 65536, `a second load grows the module from ${first.module} to ${second.module}`);
  const end = await page.evaluate(async () => {
    await window.kvfold.engine.session.free();
    return window.kvfold.engine.session.memory();
  });
  assert.ok(end.live <= start + 4096, `after free ${end.live} bytes are live, ${start} were at the start`);
  const [worker] = page.workers();
  const devices = await worker.evaluate(() => self.watched.devices.map((device) => device.isLost ?? false));
  assert.equal(devices.length > 0, browser.kind === "webgpu");
  assert.ok(devices.every((isLost) => isLost), "a destroyed device has no buffers");
}

/** The package as its users meet it: three lines, no worker. */
async function bindings(browser) {
  const page = await small(browser);
  const found = await page.evaluate(async ({ base64, backend }) => {
    const { default: init, Session, estimate, memoryUse, version } = await import("./pkg/kvfold.js");
    await init();
    const session = await Session.create({ backend });
    const code = async (call) => {
      try {
        await call();
        return "none";
      } catch (error) {
        return error instanceof Error && error.name === "KvfoldError" ? error.code : `not ours: ${error}`;
      }
    };
    const codes = [
      await code(() => session.merge()),
      await code(() => session.load("a text")),
      await code(() => session.load(new Blob(["no capture"]))),
      await code(() => Session.create({ backend: "vulkan" })),
    ];
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const loads = [];
    const info = await session.load(new Blob([bytes]), { onProgress: (p) => loads.push(p.loaded === p.total) });
    await session.load(bytes.buffer);
    const steps = [];
    const merged = await session.merge({ rows: true, onProgress: ({ done, of }) => steps.push(`${done}/${of}`) });
    const controller = new AbortController();
    const stop = session.report({ signal: controller.signal, onProgress: () => controller.abort() });
    codes.push(
      await code(() => stop),
      await code(() => session.merge({ threshold: 2 })),
      await code(() => session.merge({ treshold: 0.5 })),
      await code(() => session.attend({ layer: 0, head: 99 })),
      await code(() => session.attend({ layer: 99, head: 0 })),
      await code(() => session.attend({ layer: 0, head: 0, method: "extreme" })),
      await code(() => session.fold({ method: "zip" })),
      await code(() => estimate({ layers: 1, kv_heads: 1, head_dim: 9999, tokens: 1 })),
    );
    const head = await session.attend({ layer: 1, head: 2, method: "qjl" });
    const rows = await session.probe();
    // Calls at work outlive the session that they were asked of.
    const late = session.merge();
    const kind = session.adapter.backend;
    session.free();
    const result = {
      codes, loads, steps, kind, layers: info.layers.length, merged: merged.totals.minicache.merged,
      retained: Array.from(merged.rows[0].keys.retained.slice(0, 6)), cosines: rows[0].keys.cosines.length,
      weights: head.exact_weights.slice(0, head.tokens).reduce((sum, x) => sum + (Number.isNaN(x) ? 0 : x), 0),
      late: (await late).pairs.length, version: version(), live: memoryUse().live > 0,
    };
    return result;
  }, { base64: alike(4, 96).toString("base64"), backend: browser.kind === "cpu" ? "cpu" : "webgpu" });
  assert.deepEqual(found.codes, [
    "no_capture", "source", "safetensors", "options", "cancelled", "range", "options", "range", "range", "range", "range", "range",
  ]);
  assert.deepEqual(found.loads, [true]);
  assert.deepEqual(found.steps, ["0/3", "1/3", "2/3", "3/3"]);
  assert.equal(found.kind, browser.kind);
  assert.deepEqual([found.layers, found.merged, found.late], [4, 2 * 2 * 92, 3]);
  assert.deepEqual(found.retained, [1, 1, 1, 1, 0, 0]);
  assert.equal(found.cosines, 2 * 96);
  assert.ok(Math.abs(found.weights - 1) < 1e-5);
  assert.match(found.version, /^\d+\.\d+\.\d+/);
  assert.ok(found.live);
}

export const ENGINE = [
  ["the_engine_room_times_and_tests", room],
  ["free_gives_memory_back", frees],
  ["the_bindings_work_by_themselves", bindings],
];

export const WEBGPU = [["a_lost_device_can_be_tried_again", lost]];
export const CPU = [...PAGE, ["webgpu_that_is_asked_for_and_missing_is_said", asked]];
