// Chromium, a server, and tests that are counted as cargo counts its own.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import { serve } from "../../web/server.mjs";

const require = createRequire(new URL("../../web/package.json", import.meta.url));
const { chromium } = require("playwright-core");
export const AXE = require.resolve("axe-core/axe.min.js");
export const ROOT = fileURLToPath(new URL("../../", import.meta.url));
export const SHOTS = join(ROOT, "web/shots");
export const SAMPLE = join(ROOT, "web/samples/smollm2_prose_s128.safetensors");

// Nothing but the page may be fetched, by Chromium itself neither.
const FLAGS = [
  "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
  "--disable-sync", "--disable-dev-shm-usage",
];

const KINDS = {
  webgpu: { flags: [...FLAGS, "--enable-unsafe-webgpu"], backend: "webgpu" },
  cpu: { flags: FLAGS, backend: "auto" },
};

/** Where Chromium is. */
function executable() {
  const known = [
    process.env.KVFOLD_CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
  ];
  const found = known.find((path) => path && existsSync(path));
  if (!found) throw new Error("no Chromium: install it or name it in KVFOLD_CHROMIUM");
  return found;
}

/** The command line's answer. */
export async function kvfold(...args) {
  const command = process.env.KVFOLD_BIN ?? join(ROOT, "target/debug/kvfold");
  const { stdout } = await promisify(execFile)(command, args, { maxBuffer: 1 << 28 });
  return stdout;
}

/** A browser of a kind and the pages it opens; errors and requests of all of them are kept. */
export class Browser {
  static async open(kind) {
    const browser = new Browser();
    browser.kind = kind;
    browser.backend = KINDS[kind].backend;
    browser.chromium = await chromium.launch({ executablePath: executable(), headless: true, args: KINDS[kind].flags });
    // Below a folder, as on a site of many projects.
    browser.server = await serve(0, { prefix: "/some/folder/" });
    browser.origin = `http://localhost:${browser.server.address().port}`;
    browser.scratch = mkdtempSync(join(tmpdir(), "kvfold-browser-"));
    browser.faults = [];
    browser.requests = [];
    mkdirSync(SHOTS, { recursive: true });
    return browser;
  }

  /** A page on its own, at these settings. `before` is run on it before it is opened. */
  async page(settings = {}, { size = [1360, 900], dark = false, before, ready = true } = {}) {
    const [width, height] = size;
    const context = await this.chromium.newContext({
      viewport: { width, height }, colorScheme: dark ? "dark" : "light", acceptDownloads: true,
      permissions: ["clipboard-read", "clipboard-write"], reducedMotion: "reduce",
    });
    const page = await context.newPage();
    page.on("console", (message) => {
      if (message.type() === "error") this.faults.push(message.text());
    });
    page.on("pageerror", (error) => this.faults.push(String(error.stack)));
    context.on("request", (request) => this.requests.push(request.url()));
    await before?.(page);
    const fragment = new URLSearchParams({ ...(this.backend === "auto" ? {} : { backend: this.backend }), ...settings });
    await page.goto(`${this.origin}/some/folder/#${fragment}`);
    if (ready) await this.ready(page);
    return page;
  }

  /** Waits until everything was measured. */
  async ready(page) {
    await page.waitForFunction(() => document.body.dataset.ready === "yes" && document.body.dataset.busy === "no", null, { timeout: 300_000 });
  }

  async close() {
    await this.chromium.close();
    this.server.close();
    rmSync(this.scratch, { recursive: true, force: true });
  }
}

/** Sets a slider as a person does. */
export async function slide(page, name, value) {
  await page.locator(`[role="tabpanel"]:not([hidden]) [data-setting="${name}"] input`).first().evaluate((input, value) => {
    input.value = String(value);
    input.dispatchEvent(new Event(input.type === "range" ? "input" : "change", { bubbles: true }));
  }, value);
}

/** Drops a file on the page. */
export async function drop(page, name, bytes) {
  const data = await page.evaluateHandle(({ name, base64 }) => {
    const data = new DataTransfer();
    data.items.add(new File([Uint8Array.from(atob(base64), (c) => c.charCodeAt(0))], name));
    return data;
  }, { name, base64: Buffer.from(bytes).toString("base64") });
  await page.evaluate(() => { document.body.dataset.ready = "no"; });
  await page.dispatchEvent("body", "drop", { dataTransfer: data });
}

/** How far figures of two engines may be apart (docs/report.schema.json). */
export function agree(a, b, at = "report") {
  if (typeof a === "number" && typeof b === "number" && !(Number.isInteger(a) && Number.isInteger(b))) {
    assert.ok(Math.abs(a - b) <= 1e-3 * Math.max(1, Math.abs(a)), `${at}: ${a} ${b}`);
  } else if (a && b && typeof a === "object") {
    assert.deepEqual(Object.keys(a), Object.keys(b), at);
    for (const key of Object.keys(a)) agree(a[key], b[key], `${at}.${key}`);
  } else assert.equal(a, b, at);
}

/** Runs tests one after the other; those whose name lacks `filter` are left out. */
export async function run(kind, tests, filter = "") {
  const browser = await Browser.open(kind);
  console.log(`adapter: Chromium ${browser.chromium.version()}`);
  let [passed, failed] = [0, 0];
  for (const [name, test] of tests.filter(([name]) => `${kind}/${name}`.includes(filter))) {
    const start = performance.now();
    try {
      await test(browser);
      passed += 1;
      console.log(`test ${kind}/${name} ... ok (${((performance.now() - start) / 1000).toFixed(1)} s)`);
    } catch (error) {
      failed += 1;
      console.log(`test ${kind}/${name} ... FAILED\n${error.stack}`);
    }
    // The first page is shared; the others have served.
    for (const context of browser.chromium.contexts().slice(1)) await context.close();
  }
  await browser.close();
  return [passed, failed];
}
