// Firefox, driven by WebDriver BiDi: playwright-core drives only builds of its own.
import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { serve } from "../../web/server.mjs";

const require = createRequire(new URL("../../web/package.json", import.meta.url));
const { ws: WebSocket } = require("playwright-core/lib/utilsBundle");

const PREFERENCES = {
  "dom.webgpu.enabled": true,
  "dom.webgpu.workers.enabled": true,
  "gfx.webgpu.ignore-blocklist": true,
  // Nothing but localhost, by Firefox itself neither: all else goes to a proxy that is not there.
  "network.proxy.type": 1,
  "network.proxy.http": "127.0.0.1",
  "network.proxy.http_port": 9,
  "network.proxy.ssl": "127.0.0.1",
  "network.proxy.ssl_port": 9,
  "app.update.enabled": false,
  "datareporting.policy.dataSubmissionEnabled": false,
  "network.captive-portal-service.enabled": false,
  "network.connectivity-service.enabled": false,
  "toolkit.telemetry.enabled": false,
};

/** Milliseconds for Firefox to start, or to leave. */
const START = 60_000;

/** Where Firefox is. */
function executable() {
  const known = [
    process.env.KVFOLD_FIREFOX, "/usr/bin/firefox-esr", "/usr/bin/firefox", "/Applications/Firefox.app/Contents/MacOS/firefox",
  ];
  const found = known.find((path) => path && existsSync(path));
  if (!found) throw new Error("no Firefox: install it or name it in KVFOLD_FIREFOX");
  return found;
}

/** Resolves to the address that Firefox says it listens on. */
function listening(firefox) {
  return new Promise((resolve, reject) => {
    let said = "";
    const fail = (why) => reject(new Error(`Firefox ${why}:\n${said}`));
    const late = setTimeout(() => fail("does not listen"), START);
    firefox.once("error", (error) => fail(error.message));
    firefox.once("exit", (code) => fail(`ended with ${code}`));
    firefox.stderr.setEncoding("utf8").on("data", (text) => {
      said += text;
      const found = said.match(/WebDriver BiDi listening on (ws:\S+)/);
      if (!found) return;
      clearTimeout(late);
      resolve(found[1]);
    });
  });
}

/** A Firefox with one tab; what it reports as errors and asks for is kept. */
export class Gecko {
  #calls = new Map();
  #last = 0;
  faults = [];
  requests = [];

  static async open() {
    const gecko = new Gecko();
    gecko.scratch = mkdtempSync(join(tmpdir(), "kvfold-firefox-"));
    const preferences = Object.entries(PREFERENCES).map(([name, value]) => `user_pref(${JSON.stringify(name)}, ${JSON.stringify(value)});\n`);
    writeFileSync(join(gecko.scratch, "user.js"), preferences.join(""));
    const flags = ["--headless", "--no-remote", "--remote-debugging-port", "0", "--profile", gecko.scratch, "about:blank"];
    gecko.firefox = spawn(executable(), flags, { stdio: ["ignore", "ignore", "pipe"] });
    try {
      await gecko.#connect(await listening(gecko.firefox));
    } catch (error) {
      gecko.firefox.kill("SIGKILL");
      throw error;
    }
    gecko.server = await serve();
    gecko.origin = `http://localhost:${gecko.server.address().port}`;
    return gecko;
  }

  async #connect(address) {
    this.socket = new WebSocket(`${address}/session`);
    await new Promise((resolve, reject) => this.socket.once("open", resolve).once("error", reject));
    this.socket.on("message", (text) => this.#hear(JSON.parse(text)));
    this.socket.once("close", () => this.#calls.forEach(({ reject }) => reject(new Error("Firefox has gone"))));
    await this.#call("session.new", { capabilities: {} });
    await this.#call("session.subscribe", { events: ["log.entryAdded", "network.beforeRequestSent"] });
    this.context = (await this.#call("browsingContext.getTree", {})).contexts[0].context;
  }

  #hear({ type, id, method, params, result, error, message }) {
    if (type === "event") {
      if (method === "network.beforeRequestSent") this.requests.push(params.request.url);
      else if (params.level === "error") this.faults.push(params.text);
      return;
    }
    const call = this.#calls.get(id);
    this.#calls.delete(id);
    if (type === "success") call?.resolve(result);
    else call?.reject(new Error(`${error}: ${message}`));
  }

  #call(method, params) {
    this.#last += 1;
    const id = this.#last;
    return new Promise((resolve, reject) => {
      this.#calls.set(id, { resolve, reject });
      this.socket.send(JSON.stringify({ id, method, params }));
    });
  }

  async goto(fragment) {
    await this.#call("browsingContext.navigate", { context: this.context, url: `${this.origin}/#${fragment}`, wait: "complete" });
  }

  /** What a function gives in the page, as JSON. */
  async evaluate(call, ...args) {
    const expression = `(async () => JSON.stringify(await (${call})(...${JSON.stringify(args)})) ?? "null")()`;
    const found = await this.#call("script.evaluate", { expression, target: { context: this.context }, awaitPromise: true });
    if (found.type !== "success") throw new Error(found.exceptionDetails.text);
    return JSON.parse(found.result.value);
  }

  /** Waits until a function gives something true in the page. */
  async until(call, limit = 300_000) {
    const end = Date.now() + limit;
    while (!(await this.evaluate(call))) {
      if (Date.now() > end) throw new Error(`not within ${limit / 1000} s: ${call}`);
      await new Promise((resolve) => setTimeout(resolve, 250));
    }
  }

  async close() {
    const gone = new Promise((resolve) => this.firefox.once("exit", resolve));
    const late = setTimeout(() => this.firefox.kill("SIGKILL"), START);
    await this.#call("browser.close", {}).catch(() => {});
    await gone;
    clearTimeout(late);
    this.server.close();
    rmSync(this.scratch, { recursive: true, force: true });
  }
}
