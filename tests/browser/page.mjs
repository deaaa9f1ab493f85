// What the page does with the sample and with files: the same on both backends.
import assert from "node:assert/strict";
import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";

import { AXE, SAMPLE, SHOTS, agree, drop, kvfold, slide } from "./harness.mjs";
import { alike, first } from "./made.mjs";

/** What the page found, without what says where. */
const found = (page) => page.evaluate(() => {
  const { merge, sketch, attend } = window.kvfold.data;
  return { merge: { ...merge, rows: undefined }, sketch, queries: attend?.queries };
});

/** Waits until the merge of the settings on show has come, or a fault in its place. */
async function merged(page, threshold, t) {
  const end = await page.waitForFunction(([threshold, t]) => {
    const fault = document.querySelector('[data-banner="error"], [data-banner="device"]');
    if (fault) return fault.innerText;
    const o = window.kvfold.data.merge?.options;
    const come = o && Math.abs(o.threshold - threshold) < 1e-6 && Math.abs(o.slerp_t - t) < 1e-6 && document.body.dataset.busy === "no";
    return come && "merged";
  }, [threshold, t], { timeout: 300_000 });
  assert.equal(await end.jsonValue(), "merged");
}

const cells = (row) => row.locator("td").allInnerTexts();

/** Layers of the sample: SwiftShader takes seconds for one, since it runs every barrier as a switch of coroutines. */
const LAYERS = { cpu: 30, webgpu: 4 };

/** One page with the sample for all tests of a browser that do not need another. */
const shared = new WeakMap();
async function sample(browser) {
  if (!shared.has(browser)) {
    shared.set(browser, browser.kind === "cpu" ? browser.page() : served(browser, first(await readFile(SAMPLE), LAYERS.webgpu)));
  }
  return shared.get(browser);
}

/** A page that finds this file where the sample is. */
const served = (browser, file, settings = {}, about = {}) =>
  browser.page(settings, {
    ...about,
    before: async (page) => {
      await page.route("**/samples/*", (route) => route.fulfill({ body: file, contentType: "application/octet-stream" }));
      await about.before?.(page);
    },
  });

/** What the command line says of the same sample. */
async function reported(browser, ...options) {
  const file = join(browser.scratch, "sample.safetensors");
  await writeFile(file, first(await readFile(SAMPLE), LAYERS[browser.kind]));
  return JSON.parse(await kvfold("report", file, "--json", "--backend", "cpu", ...options));
}

async function loads(browser) {
  const page = await sample(browser);
  assert.equal(await page.locator("#model").innerText(), "SmolLM2-135M-Instruct");
  const facts = await page.locator("#facts").innerText();
  for (const fact of [`${LAYERS[browser.kind]} layers`, "3 KV heads of 64 channels", "9 query heads", "128 tokens"]) assert.ok(facts.includes(fact), facts);
  const says = await page.locator("#says").innerText();
  assert.match(says, /Nothing merges\./);
  if (browser.kind === "cpu") assert.match(says, /No key row and no value row of the planned pairs reaches 0\.9 outside the first 4 tokens \(5208 rows below it, 168 kept as attention sinks\)/);
  const chip = await page.locator("#engine-name").innerText();
  const banner = page.locator('[data-banner="webgpu"]');
  if (browser.kind === "webgpu") {
    assert.match(chip, /^WebGPU · .*swiftshader.* \(software\)$/i);
    assert.equal(await banner.count(), 0);
  } else {
    assert.equal(chip, "CPU twins");
    assert.match(await banner.innerText(), /Computing on the CPU: the browser has WebGPU and offers no adapter\.[^]*numbers are the same[^]*--enable-unsafe-webgpu/);
  }
}

async function numbers(browser) {
  const [page, report] = [await sample(browser), await reported(browser, "--preset", "balanced")];
  const { merge, sketch, queries } = await found(page);
  agree(report.pairs, merge.pairs, "pairs");
  agree(report.totals.minicache, merge.totals.minicache, "totals.minicache");
  agree(report.totals.qjl, sketch.qjl, "totals.qjl");
  agree(report.layers, sketch.layers, "layers");
  agree(report.planes, sketch.planes, "planes");
  assert.equal(report.verdict, merge.verdict);
  assert.equal(queries, 32);
  // And as a person reads them.
  const last = report.pairs.length - 1;
  const row = page.locator("#view-depth tbody tr").nth(2 * last);
  const keys = report.pairs[last].keys;
  const shown = await cells(row);
  assert.equal(shown[0], `${last}–${last + 1}${report.pairs[last].planned ? " planned" : ""}`);
  assert.deepEqual(shown.slice(5, 7), [String(keys.retained), String(keys.rows)]);
  assert.ok(Math.abs(Number(shown[2]) - keys.cosine.mean) < 2e-3, shown.join());
  await page.click("#tab-sketch");
  const balanced = await cells(page.locator('tr[data-method="balanced"]'));
  const planes = report.planes.presets[0];
  assert.deepEqual(balanced.slice(1, 3), ["3.250", "3.250"]);
  assert.ok(Math.abs(Number(balanced[5]) - planes.errors.output_relative_error) < 2e-3, balanced.join());
  assert.ok(Math.abs(Number(balanced[9]) - planes.errors_without_recent.weights_kl) < 2e-3, balanced.join());
  await page.click("#tab-depth");
}

async function sliders(browser) {
  const page = await sample(browser);
  const green = () => page.evaluate(() => {
    const map = document.querySelector("#view-depth .heat canvas");
    const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
    const merged = getComputedStyle(document.documentElement).getPropertyValue("--merged").trim();
    const [r, g, b] = [1, 3, 5].map((i) => Number.parseInt(merged.slice(i, i + 2), 16));
    let count = 0;
    for (let i = 0; i < data.length; i += 4) count += Math.hypot(data[i] - r, data[i + 1] - g, data[i + 2] - b) < 40;
    return count;
  });
  assert.ok((await green()) < 40, "nothing is drawn as merged");
  await slide(page, "threshold", 0.2);
  await merged(page, 0.2, 0.5);
  await page.waitForTimeout(100);
  assert.ok((await green()) > 400, "merged rows are drawn");
  const report = await reported(browser, "--threshold", "0.2");
  let { merge } = await found(page);
  agree(report.pairs, merge.pairs, "pairs");
  assert.equal(merge.verdict, report.verdict);
  const share = report.totals.minicache.merged / report.totals.minicache.rows;
  const says = share ? `${(100 * share).toFixed(1)} % of the planned rows merge` : "Nothing merges";
  assert.ok((await page.locator("#says").innerText()).includes(says), says);
  const pair = merge.pairs.findIndex(({ keys }) => keys.retained < keys.rows);
  const before = merge.pairs[pair].keys.relative_error;
  await slide(page, "t", 0.25);
  await merged(page, 0.2, 0.25);
  ({ merge } = await found(page));
  assert.ok(Math.abs(merge.pairs[pair].keys.relative_error - before) > 1e-4, "t moves the restored error");
  assert.match(page.url(), /threshold=0\.2.*t=0\.25/);
  await slide(page, "threshold", 0.9);
  await slide(page, "t", 0.5);
  await merged(page, 0.9, 0.5);
}

async function codes(browser) {
  const page = await small(browser);
  await page.click("#tab-sketch");
  const settled = (method) => page.waitForFunction((method) => document.body.dataset.busy === "no" && document.querySelector(`tr.chosen[data-method="${method}"]`), method, { timeout: 120_000 });
  await settled("balanced");
  const before = await page.evaluate(() => Array.from(window.kvfold.data.attend.estimated_scores.slice(0, 40)));
  await slide(page, "hi", 1);
  await settled("custom");
  assert.ok(await page.locator('input[value="custom"]').isChecked());
  const after = await page.evaluate(() => Array.from(window.kvfold.data.attend.estimated_scores.slice(0, 40)));
  assert.notDeepEqual(after, before);
  const row = await cells(page.locator("tr.chosen"));
  assert.equal(row[1], "1.750", "of 32 channels: a bit, a share of the scalar and of means of blocks");
  await page.locator('label:has(input[value="qjl"][type="radio"])').first().click();
  await settled("qjl");
  assert.ok(await page.locator('[data-setting="projection"]').isVisible());
  assert.ok(await page.locator('[data-setting="hi"]').isHidden());
  const qjl = (await cells(page.locator("tr.chosen")))[7];
  await page.selectOption('[data-setting="projection"] select', "orthogonal");
  await page.waitForFunction((was) => document.querySelector("tr.chosen td:nth-child(8)")?.innerText !== was, qjl, { timeout: 120_000 });
  await page.selectOption('[data-setting="head"] select', "1");
  await page.waitForFunction(() => document.querySelector("#view-sketch .note").innerText.includes("head 1"));
}

/** A page on a small capture in the sample's place, so that it is ready soon. */
export async function small(browser, settings = {}, about = {}) {
  return served(browser, alike(4, 96, { model: "small" }), settings, about);
}

/** Keeps every device of the page's worker, and counts its buffers. */
const WATCHED = `
  const made = [];
  self.watched = { devices: [], buffers: made };
  if (self.GPUAdapter) {
    const request = GPUAdapter.prototype.requestDevice;
    GPUAdapter.prototype.requestDevice = async function (...args) {
      const device = await request.apply(this, args);
      self.watched.devices.push(device);
      device.lost.then(() => { device.isLost = true; });
      return device;
    };
  }
`;

/** Options of a page whose devices are kept. */
export const watch = {
  before: (page) => page.route("**/pkg/worker.js", async (route) => {
    const response = await route.fetch();
    await route.fulfill({ response, body: WATCHED + (await response.text()) });
  }),
};

async function dropped(browser) {
  const page = await small(browser);
  await drop(page, "my-model.safetensors", alike(6, 128, { model: "my model" }));
  await browser.ready(page);
  assert.equal(await page.locator("#model").innerText(), "my model");
  assert.match(await page.locator("#facts").innerText(), /my-model\.safetensors.*6 layers/s);
  const { merge } = await found(page);
  const { planned_pairs: pairs, rows, merged } = merge.totals.minicache;
  assert.deepEqual([pairs, rows, merged], [1, 2 * 2 * 128, 2 * 2 * 124], "all but the sinks merge");
  assert.match(await page.locator("#says").innerText(), /96\.9 % of the planned rows merge/);
  assert.ok(merge.totals.ratio > 1.1);
  await page.click("#sample");
  await page.waitForFunction(() => document.querySelector("#model").innerText === "small");
}

async function withoutQueries(browser) {
  const page = await small(browser, { view: "sketch" });
  await drop(page, "plain.safetensors", alike(3, 64, { queries: false }));
  await browser.ready(page);
  assert.match(await page.locator("#facts").innerText(), /no queries/);
  assert.ok(await page.getByText("This capture holds no queries").isVisible());
  // Tables are drawn in a later step than what is said above them.
  await page.locator('tr[data-method="balanced"] td').nth(5).filter({ hasText: /^–$/ }).waitFor();
}

async function wrong(browser) {
  const page = await small(browser);
  const cut = alike(3, 64).subarray(0, 4000);
  const store = Buffer.from("this is no capture");
  for (const [name, bytes, code] of [["cut.safetensors", cut, "too_short"], ["notes.txt", store, "safetensors|too_short"]]) {
    await drop(page, name, bytes);
    const banner = page.locator('[data-banner="error"]');
    await banner.waitFor();
    assert.match(await banner.innerText(), new RegExp(`${name} cannot be read as a capture[^]*\\((${code})\\)`));
    await browser.ready(page);
    assert.equal(await page.locator("#model").innerText(), "small", "the capture before is back");
    await page.locator('[data-banner="error"] [aria-label="Dismiss"]').click();
  }
}

async function cancels(browser) {
  const page = await sample(browser);
  const result = page.evaluate(() => window.kvfold.run("report", "report", [{ presets: ["balanced"] }]));
  await page.locator("#cancel").click();
  assert.equal(await result, undefined);
  await page.waitForFunction(() => document.body.dataset.busy === "no");
  assert.equal(await page.locator('[data-banner="error"]').count(), 0);
  // A slider that moves on leaves only the last merge.
  for (const threshold of [0.8, 0.7, 0.6, 0.5]) await slide(page, "threshold", threshold);
  await merged(page, 0.5, 0.5);
  await slide(page, "threshold", 0.9);
  await merged(page, 0.9, 0.5);
}

async function folds(browser) {
  const page = await sample(browser);
  await page.click("#tab-memory");
  for (const [store, method] of [["planes", "planes"], ["qjl", "sketch"], ["minicache", "minicache"]]) {
    await page.locator(`#view-memory label:has(input[value="${store}"])`).click();
    const [download] = await Promise.all([page.waitForEvent("download"), page.click("#fold")]);
    assert.equal(download.suggestedFilename(), "sample.folded.safetensors");
    const [file, restored] = [join(browser.scratch, `${store}.safetensors`), join(browser.scratch, `${store}-back.safetensors`)];
    await download.saveAs(file);
    const told = JSON.parse(await kvfold("unfold", file, "-o", restored, "--json"));
    assert.equal(told.method, method);
    // Codes at a cell's border may fall on either side, since two machines' cosines differ in the last bit.
    const same = join(browser.scratch, `${store}-cli.safetensors`);
    const own = JSON.parse(await kvfold("fold", "-o", same, "--json", ...({ minicache: ["--minicache"], qjl: ["--preset", "qjl"], planes: [] })[store]));
    const read = JSON.parse(await kvfold("unfold", same, "-o", restored, "--force", "--json"));
    agree(read, told, "unfold");
    await page.waitForFunction((ratio) => document.querySelector("#view-memory [role=status]").innerText.includes(ratio), `${own.ratio.toFixed(own.ratio < 1.005 ? 4 : 2)}×`);
    await page.waitForFunction(() => document.querySelector("#view-memory [role=status]").innerText.includes("folded into"));
  }
  await page.locator('label:has(input[value="planes"])').click();
  await page.selectOption("#models", "this");
  await page.waitForFunction(() => window.kvfold.settings.mlayers === 30);
  await page.fill('[data-setting="mtokens"] input', "1000000000");
  await page.locator('[data-setting="mtokens"] input').blur();
  assert.equal(await page.inputValue('[data-setting="mtokens"] input'), "32768", "out of range");
  const f16 = page.locator('[data-model="f16"]');
  await page.waitForFunction(() => document.querySelector('[data-model="f16"]').innerText.includes("755 MB"));
  assert.match(await f16.innerText(), /755 MB, 1\.0000×/);
  await page.click("#tab-depth");
}

async function links(browser) {
  const page = await small(browser, { view: "sketch", method: "extreme", recent: "8", layer: "2", head: "1", threshold: "0.5", theme: "dark", nonsense: "1", t: "7" });
  assert.equal(await page.getAttribute("#tab-sketch", "aria-selected"), "true");
  assert.ok(await page.locator('input[value="extreme"]').isChecked());
  assert.equal(await page.inputValue('[data-setting="recent"] input'), "8");
  assert.equal(await page.inputValue('[data-setting="layer"] select'), "2");
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "dark");
  assert.deepEqual(await page.evaluate(() => [window.kvfold.settings.t, window.kvfold.settings.threshold]), [0.5, 0.5]);
  assert.equal((await found(page)).sketch.planes.presets[0].name, "extreme");
  await page.click("#link");
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), page.url());
}

async function keyboard(browser) {
  const page = await small(browser);
  await page.focus("#tab-depth");
  await page.keyboard.press("ArrowRight");
  assert.equal(await page.evaluate(() => document.activeElement.id), "tab-sketch");
  assert.ok(await page.locator("#view-sketch").isVisible());
  await page.keyboard.press("ArrowLeft");
  const map = page.locator("#view-depth .heat canvas").first();
  await map.focus();
  for (const key of ["ArrowDown", "ArrowRight", "ArrowRight"]) await page.keyboard.press(key);
  const tip = page.locator("#view-depth .heat .tip").first();
  assert.match(await tip.innerText(), /layers 0–1, head 1, token 2\s+cosine 0\.9\d+: kept raw/);
  await page.keyboard.press("Escape");
  assert.ok(await tip.isHidden());
}

async function saves(browser) {
  const page = await small(browser);
  const saved = async (name) => {
    const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name, exact: true }).click()]);
    return readFile(await download.path());
  };
  const png = await saved("Cosine of neighbouring layers, row by row as PNG");
  assert.equal(png.subarray(1, 4).toString(), "PNG");
  assert.ok(png.length > 10_000);
  const csv = (await saved("Pair by pair as CSV")).toString().trim().split("\n");
  assert.equal(csv.length, 1 + 2 * 3);
  assert.match(csv[0], /^lower,upper,kind,planned,cosine_mean/);
  const json = JSON.parse((await saved("Report as JSON")).toString());
  const file = join(browser.scratch, "small.safetensors");
  await writeFile(file, alike(4, 96, { model: "small" }));
  const report = JSON.parse(await kvfold("report", file, "--json", "--backend", "cpu", "--preset", "balanced", "--sketch-dim", "32"));
  for (const where of ["backend", "adapter", "software", "fallback"]) delete json[where], delete report[where];
  agree(report, json);
}

async function accessible(browser) {
  const page = await sample(browser);
  await page.evaluate(await readFile(AXE, "utf8"));
  for (const theme of ["light", "dark"]) {
    await page.evaluate((theme) => window.kvfold.set({ theme }), theme);
    for (const view of ["depth", "sketch", "memory", "engine"]) {
      await page.click(`#tab-${view}`);
      const faults = await page.evaluate(async () => {
        const { violations } = await window.axe.run(document, { resultTypes: ["violations"] });
        return violations.filter((v) => ["serious", "critical"].includes(v.impact)).map((v) => `${v.id}: ${v.nodes.map((n) => `${n.target} ${n.failureSummary}`).slice(0, 3).join("; ")}`);
      });
      assert.deepEqual(faults, [], `${view}, ${theme}`);
    }
  }
  await page.evaluate(() => window.kvfold.set({ theme: "auto", view: "depth" }));
}

/** Pictures of every view; on a phone nothing may be wider than the screen. */
async function pictures(browser) {
  const page = await sample(browser);
  for (const [size, width, height] of [["desktop", 1360, 900], ["phone", 390, 844]]) {
    await page.setViewportSize({ width, height });
    for (const theme of ["light", "dark"]) {
      for (const view of ["depth", "sketch", "memory", "engine"]) {
        await page.evaluate((patch) => window.kvfold.set(patch), { theme, view });
        await page.waitForTimeout(150);
        await page.screenshot({ path: join(SHOTS, `${browser.kind}-${view}-${size}-${theme}.png`), fullPage: true });
        const wide = await page.evaluate(() => document.documentElement.scrollWidth);
        assert.ok(wide <= width, `${view} on a ${size} is ${wide} wide`);
      }
    }
  }
  await page.setViewportSize({ width: 1360, height: 900 });
  await page.evaluate(() => window.kvfold.set({ theme: "auto", view: "depth" }));
}

/** What holds of every page that the tests before opened. */
async function quiet(browser) {
  assert.deepEqual(browser.faults, [], "errors on the console");
  const away = browser.requests.filter((url) => !url.startsWith(browser.origin) && !/^(blob|data):/.test(url));
  assert.deepEqual(away, [], "requests to other servers");
}

/** What takes a device. */
export const BOTH = [
  ["the_sample_loads", loads],
  ["numbers_equal_the_command_line_s", numbers],
  ["sliders_change_numbers_and_colours", sliders],
  ["codes_can_be_chosen_and_made", codes],
  ["a_dropped_file_is_measured", dropped],
  ["cancel_cancels", cancels],
  ["every_view_fits_its_screen", pictures],
];

/** What does not. */
export const PAGE = [
  ["a_capture_without_queries_shows_sizes", withoutQueries],
  ["a_wrong_file_says_why_and_changes_nothing", wrong],
  ["a_fold_is_downloaded_and_the_command_line_reads_it", folds],
  ["a_link_shows_the_same_settings", links],
  ["the_keyboard_reaches_everything", keyboard],
  ["figures_are_saved_as_pictures_and_tables", saves],
  ["axe_finds_no_serious_fault", accessible],
];

export const LAST = [["no_console_error_and_no_request_elsewhere", quiet]];

export { found };
