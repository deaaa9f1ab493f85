// A capture of 49 MB: it loads with progress, the page stays responsive, and its memory comes back.
//
// KVFOLD_CAPTURE names a file to take in place of a made one, such as a real model's of this size.
import assert from "node:assert/strict";
import { existsSync, statSync } from "node:fs";
import { writeFile } from "node:fs/promises";
import { join } from "node:path";

import { long } from "./made.mjs";
import { small, watch } from "./page.mjs";

/**
 * Milliseconds that a task of the page's thread may take, of the time the thread itself ran: on a machine that is short of
 * cores a task also waits for others, of which the page knows nothing.
 */
const TASK = 100;

async function capture(browser) {
  if (process.env.KVFOLD_CAPTURE) return process.env.KVFOLD_CAPTURE;
  const file = join(browser.scratch, "long.safetensors");
  if (!existsSync(file)) await writeFile(file, long());
  return file;
}

/** Loads the file by the button, until what `done` looks at is there. */
async function load(page, file, done) {
  await page.evaluate(() => { window.kvfold.data = {}; window.kvfold.info = null; });
  await page.setInputFiles("#file", file);
  await page.waitForFunction(done, null, { timeout: 300_000, polling: 250 });
}

const loaded = () => window.kvfold.info !== null && document.body.dataset.busy === "yes";
const attended = () => window.kvfold.data.attend !== undefined;

/** Milliseconds that the tasks of a page's thread ran while `act` went on: those above a frame's, the longest first. */
async function tasks(browser, page, act) {
  await browser.chromium.startTracing(page, { categories: ["toplevel"] });
  let trace;
  try {
    await act();
  } finally {
    trace = await browser.chromium.stopTracing();
  }
  const events = JSON.parse(trace.toString()).traceEvents;
  const thread = (event) => `${event.pid} ${event.tid}`;
  const threads = new Set(events.filter((event) => event.ph === "M" && event.args.name === "CrRendererMain").map(thread));
  const durations = events.filter((event) => event.name === "ThreadControllerImpl::RunTask" && threads.has(thread(event)) && "tdur" in event);
  assert.ok(durations.length > 0, "tasks were traced");
  return durations.map((event) => Math.round(event.tdur / 1000)).filter((duration) => duration > 16).sort((a, b) => b - a);
}

/** Everything that draws all of a capture, a step after the other as a person goes. */
async function look(page, head) {
  await page.evaluate(() => { window.kvfold.data.attend = undefined; });
  for (const patch of [{ view: "sketch" }, { threshold: 0.5 }, { view: "depth" }, { threshold: 0.4 }, { theme: "dark" }, { theme: "light" }, { view: "memory" }, { view: "sketch", head }]) {
    await page.evaluate((patch) => window.kvfold.set(patch), patch);
    await page.waitForTimeout(300);
  }
  await page.waitForFunction(attended, null, { timeout: 120_000 });
  await page.waitForTimeout(300);
}

async function large(browser) {
  const file = await capture(browser);
  const { size } = statSync(file);
  assert.ok(size > 45e6, "as large as is said");
  const page = await small(browser, {}, watch);
  const memory = () => page.evaluate(() => window.kvfold.engine.session.memory());
  const start = (await page.evaluate(async () => {
    const { engine } = window.kvfold;
    await engine.session.free();
    const use = await engine.session.memory();
    await engine.session.restart({ backend: engine.adapter.backend });
    return use;
  })).live;
  await page.evaluate(() => {
    const app = window.kvfold;
    const tell = app.progress.bind(app);
    window.shares = [];
    app.progress = (key, progress) => {
      if (key === "load" && progress) window.shares.push(progress.loaded / progress.total);
      tell(key, progress);
    };
  });
  const busy = await tasks(browser, page, () => page.evaluate((ms) => {
    const start = performance.now();
    while (performance.now() - start < ms);
  }, 3 * TASK));
  assert.ok(busy[0] > TASK, `a task that is too long is found: ${busy} ms`);

  // A software adapter takes minutes for what comes after.
  const isGpu = browser.kind === "webgpu";
  const durations = await tasks(browser, page, async () => {
    await load(page, file, isGpu ? loaded : attended);
    if (!isGpu) await look(page, 1);
  });
  console.log(`     tasks of ${durations.slice(0, 8)} ms`);
  assert.deepEqual(durations.filter((duration) => duration > TASK), [], `tasks of ${durations} ms`);
  const shares = await page.evaluate(() => window.shares);
  assert.ok(shares.length >= 10 && shares.at(-1) === 1, `progress of the load: ${shares}`);
  assert.ok(shares.every((share, i) => i === 0 || share > shares[i - 1]), `progress goes on: ${shares}`);
  await page.click("#cancel");
  await page.waitForFunction(() => document.body.dataset.busy === "no", null, { timeout: 60_000 });
  const first = await memory();
  assert.ok(first.live > start + 0.9 * size, "the capture is in memory");
  await load(page, file, loaded);
  await page.click("#cancel");
  await page.waitForFunction(() => document.body.dataset.busy === "no", null, { timeout: 60_000 });
  const second = await memory();
  // A page of the module's memory is 64 KiB; what came and went in other sizes may leave a few of them between.
  assert.ok(second.module <= first.module + 16 * 65536, `a second load grows the module from ${first.module} to ${second.module}`);
  const end = await page.evaluate(async () => {
    await window.kvfold.engine.session.free();
    return window.kvfold.engine.session.memory();
  });
  assert.ok(end.live <= start + 4096, `after free ${end.live} bytes are live, ${start} were at the start`);
  const devices = await page.workers()[0].evaluate(() => self.watched.devices.map((device) => device.isLost ?? false));
  assert.equal(devices.length > 0, isGpu);
  assert.ok(devices.every((isLost) => isLost), "a destroyed device has no buffers");
}

export const LARGE = [["a_large_capture_leaves_the_page_responsive", large]];
