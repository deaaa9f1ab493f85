// The page: settings, the session, and the four views.
import { depth, isCurrent } from "./depth.js";
import { byId, bytes, count, counted, download, figure, h, percent, ratio } from "./dom.js";
import { Engine, REMEDIES } from "./engine.js";
import { memory } from "./memory.js";
import { room } from "./room.js";
import { DEFAULTS, PRESETS, customPlanes, format, mergeOptions, parse, presetOf, sketchOptions } from "./settings.js";
import { NAMES, sketch } from "./sketch.js";

const SAMPLE = "samples/smollm2_prose_s128.safetensors";
// Its weights' file names a training run; people know the model by another name.
const [RUN, MODEL] = ["Smollm2 135M 8k Lc100K Mix1 Ep2", "SmolLM2-135M-Instruct"];
const VIEWS = ["depth", "sketch", "memory", "engine"];
const CODE = ["hi", "lo", "values", "centring"];

/** A verdict without its first words, which the headline says. */
function reason(verdict) {
  const rest = verdict.replace(/^nothing to merge: /, "");
  return `${rest[0].toUpperCase()}${rest.slice(1)}.`;
}

class App {
  settings = parse(location.hash);
  engine = new Engine();
  info = null;
  fileName = null;
  #source = null;
  #bound = new Map();
  #cache = new Map();
  data = {};
  views = {};

  /** Calls `show` now and whenever the setting changes. */
  bind(name, show) {
    this.#bound.set(name, [...(this.#bound.get(name) ?? []), show]);
    show();
  }

  /** Changes settings and everything that follows from them. */
  set(patch) {
    const before = this.settings;
    const s = { ...before, ...patch };
    // A preset sets the sliders, and a slider leaves the preset.
    if (patch.method && PRESETS[patch.method]) {
      const { hi, lo, values } = PRESETS[patch.method];
      Object.assign(s, { hi, lo, values, centring: "pre-rope" });
    } else if (!patch.method && CODE.some((name) => name in patch)) s.method = presetOf(s);
    this.settings = s;
    const changed = Object.keys(s).filter((name) => s[name] !== before[name]);
    if (!changed.length) return;
    history.replaceState(null, "", `#${format(s)}`);
    for (const name of changed) for (const show of this.#bound.get(name) ?? []) show();
    this.#follow(new Set(changed));
  }

  #follow(changed) {
    const any = (...names) => names.some((name) => changed.has(name));
    if (any("view")) this.show();
    if (any("backend")) {
      this.start();
      return;
    }
    if (any("theme")) this.theme();
    if (any("threshold", "sinks")) this.views.depth.live();
    if (any("threshold", "t", "mode", "sinks", "start")) this.merge();
    if (any("method", ...CODE, "recent", "sinks", "projection", "signs")) this.sketch();
    if (any("layer", "head")) {
      this.views.sketch.pickers();
      this.attend();
    }
    if (any("query")) this.views.sketch.attention();
    if (any("mlayers", "mheads", "mdim", "mtokens", ...CODE, "method", "recent", "sinks")) this.estimate();
    if (any("store")) this.views.memory.render();
  }

  show() {
    for (const view of VIEWS) {
      const on = view === this.settings.view;
      const tab = byId(`tab-${view}`);
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      byId(`view-${view}`).hidden = !on;
    }
    this.views[this.settings.view].render();
    if (this.settings.view === "sketch") this.others();
  }

  theme() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const theme = this.settings.theme === "auto" ? (dark ? "dark" : "light") : this.settings.theme;
    document.documentElement.dataset.theme = theme;
    for (const view of Object.values(this.views)) view.theme();
  }

  /** A call whose failure is told on the page. */
  async run(key, method, args, onProgress) {
    try {
      return await this.engine.latest(key, method, args, (progress) => {
        this.progress(key, progress);
        onProgress?.(progress);
      });
    } catch (error) {
      this.fail(error);
      return undefined;
    } finally {
      this.progress(key, null);
    }
  }

  #working = new Map();
  progress(key, progress) {
    if (progress) this.#working.set(key, (progress.done ?? progress.loaded) / Math.max(1, progress.of ?? progress.total));
    else this.#working.delete(key);
    document.body.dataset.busy = [...this.#working.keys()].some((key) => key !== "others") ? "yes" : "no";
    const shares = [...this.#working.values()];
    const share = shares.length ? Math.min(...shares) : 1;
    const bar = byId("progress");
    bar.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    bar.firstElementChild.style.width = `${100 * share}%`;
    bar.firstElementChild.style.opacity = shares.length ? "1" : "0";
    byId("cancel").hidden = !shares.length;
  }

  /** Starts the session and loads what was loaded before, or the sample. */
  async start() {
    byId("engine-name").textContent = "starting…";
    this.clear("device");
    try {
      await this.engine.start(this.settings.backend);
    } catch (error) {
      byId("engine-name").textContent = "no WebGPU";
      this.banner("device", "error", `WebGPU was asked for and is not to be had: ${error.message}`, "", [["Use the CPU", () => this.set({ backend: "cpu" })]]);
      return;
    }
    this.engineChip();
    await (this.#source ? this.load(this.#source, this.fileName) : this.sample());
  }

  engineChip() {
    const a = this.engine.adapter;
    const chip = byId("engine");
    chip.dataset.kind = a.backend === "cpu" ? "cpu" : a.software ? "software" : "gpu";
    const name = a.backend === "cpu" ? "CPU twins" : `WebGPU · ${a.name}${a.software ? " (software)" : ""}`;
    byId("engine-name").textContent = name;
    chip.title = a.reason ?? "";
    byId("version").textContent = `kvfold ${this.engine.version}`;
    if (a.backend === "webgpu" || a.cause === "asked") this.clear("webgpu");
    else {
      const more = a.cause === "software" ? [["Use it all the same", () => this.set({ backend: "webgpu" })]] : [];
      const remedy = REMEDIES[a.cause] ?? "";
      this.banner("webgpu", "warn", `Computing on the CPU: ${a.reason}.`, `Every view works and the numbers are the same. ${remedy}`, more);
    }
  }

  banner(key, kind, strong, text, actions = []) {
    this.clear(key);
    const buttons = actions.map(([name, act]) => h("button", { type: "button", onclick: act }, name));
    const close = h("button", { type: "button", className: "quiet", "aria-label": "Dismiss", onclick: () => this.clear(key) }, "✕");
    byId("banners").append(h("div", { className: `banner ${kind === "error" ? "error" : ""}`, "data-banner": key }, h("div", {}, h("strong", {}, strong), text, buttons.length ? h("div", { className: "line" }, ...buttons) : null), close));
  }

  clear(key) {
    document.querySelector(`[data-banner="${key}"]`)?.remove();
  }

  fail(error) {
    if (error.code === "device_lost") {
      this.engine.stop();
      this.banner("device", "error", "The GPU device was lost.", `${error.message}. Your settings are kept.`, [["Try again", () => this.start()], ["Use the CPU", () => this.set({ backend: "cpu" })]]);
    } else this.banner("error", "error", "That did not work.", `${error.message} (${error.code ?? error.name})`);
  }

  async sample() {
    try {
      const response = await fetch(SAMPLE);
      if (!response.ok) throw new Error(`${SAMPLE}: ${response.status}`);
      await this.load(await response.blob(), null);
    } catch (error) {
      this.fail(error);
    }
  }

  /** Loads a capture; one that cannot be read leaves the page as it was. */
  async load(source, name) {
    this.clear("error");
    this.engine.stop();
    byId("model").textContent = name ? `Reading ${name}…` : "Reading the sample…";
    const failed = async (error) => {
      if (error) this.banner("error", "error", `${name ?? "The sample"} cannot be read as a capture.`, `${error.message} (${error.code}). docs/capture-format.md says what a capture holds.`);
      if (this.#source && this.#source !== source) await this.load(this.#source, this.fileName);
      else this.describe();
    };
    let info;
    try {
      info = await this.engine.latest("load", "load", [source, {}], (progress) => this.progress("load", progress));
      if (info && !info.has_keys) throw Object.assign(new Error("it holds keys before RoPE alone"), { code: "missing_tensor" });
    } catch (error) {
      this.progress("load", null);
      if (error.code === "device_lost") return this.fail(error);
      const shown = document.querySelector('[data-banner="error"]');
      await failed(shown ? null : error);
      if (!shown) this.banner("error", "error", `${name ?? "The sample"} cannot be read as a capture.`, `${error.message} (${error.code}). docs/capture-format.md says what a capture holds.`);
      return undefined;
    }
    this.progress("load", null);
    if (!info) return failed(null);
    [this.info, this.#source, this.fileName] = [info, source, name];
    this.data = { estimate: this.data.estimate };
    this.#cache.clear();
    const layer = Math.min(this.settings.layer, info.layers.length - 1);
    const head = Math.min(this.settings.head, (info.layers[layer].query_heads ?? 1) - 1);
    this.set({ layer, head });
    this.describe();
    return this.measure();
  }

  describe() {
    const info = this.info;
    if (!info) return;
    const first = info.layers[0];
    byId("model").textContent = (info.model === RUN ? MODEL : info.model) ?? this.fileName ?? "A capture";
    byId("sample").hidden = this.fileName === null;
    const dims = first.key_dim === first.value_dim ? `${first.key_dim} channels` : `${first.key_dim} and ${first.value_dim} channels`;
    const facts = [
      this.fileName ?? "the bundled sample", counted(info.layers.length, "layer"), `${counted(first.kv_heads, "KV head")} of ${dims}`,
      first.query_heads ? counted(first.query_heads, "query head") : "no queries", info.batch > 1 ? counted(info.batch, "sequence") : null,
      counted(info.tokens, "token"), `${bytes(info.bytes)} in ${first.dtype}`, info.rope_known ? null : "RoPE unknown",
    ];
    byId("facts").replaceChildren(...facts.filter(Boolean).map((fact) => h("span", {}, fact)));
    this.views.sketch.pickers();
  }

  #cancelled = 0;
  /** Ends what is at work, and what would have followed it. */
  cancel() {
    this.#cancelled += 1;
    this.engine.stop();
  }

  async measure() {
    const cancelled = this.#cancelled;
    const rows = await this.run("probe", "probe", [{}]);
    if (!rows) return;
    this.data.probe = rows;
    this.views.depth.live();
    for (const step of [this.merge, this.sketch, this.estimate]) {
      await step.call(this);
      if (this.#cancelled !== cancelled) return;
    }
    document.body.dataset.ready = "yes";
  }

  async merge() {
    if (!this.data.probe) return;
    const found = await this.run("merge", "merge", [{ ...mergeOptions(this.settings), rows: true }]);
    if (!found) return;
    this.data.merge = found;
    this.views.depth.render();
    if (this.settings.view === "memory") this.views.memory.render();
    this.verdict();
  }

  keyDim() {
    return this.info?.layers[0].key_dim ?? 64;
  }

  async sketch() {
    if (!this.data.probe) return;
    this.engine.cancel("others");
    const cancelled = this.#cancelled;
    await this.attend();
    if (this.#cancelled !== cancelled) return;
    // QJL is shown beside a preset, whose sizes the view of memory needs.
    const method = this.settings.method === "qjl" ? "balanced" : this.settings.method;
    const options = sketchOptions(this.settings, this.keyDim(), method);
    const found = await this.cached(options, "sketch");
    if (!found) return;
    this.data.sketch = found;
    this.sketched();
    this.others();
  }

  /** Measures the presets that were not chosen, one after the other, for the table: while somebody looks at it. */
  async others() {
    // A software adapter takes a minute for one.
    if (this.engine.adapter?.backend === "webgpu" && this.engine.adapter.software) return;
    for (const name of Object.keys(PRESETS)) {
      const options = sketchOptions(this.settings, this.keyDim(), name);
      if (this.settings.view !== "sketch" || !this.data.sketch || this.#cache.has(JSON.stringify(options))) continue;
      if (!(await this.cached(options, "others"))) return;
      this.sketched();
    }
  }

  async cached(options, key) {
    const id = JSON.stringify(options);
    if (this.#cache.has(id)) {
      this.engine.cancel(key);
      return this.#cache.get(id);
    }
    const source = this.#source;
    const found = await this.run(key, "sketch", [options]);
    if (found && source === this.#source) this.#cache.set(id, found);
    return found;
  }

  sketched() {
    if (this.settings.view === "sketch") this.views.sketch.render();
    if (this.settings.view === "memory") this.views.memory.render();
    this.verdict();
  }

  /** Every code that was measured under these settings: presets in order, the custom one, rivals. */
  methods() {
    const result = this.data.sketch;
    if (!result?.planes) return [];
    const of = (name) => this.#cache.get(JSON.stringify(sketchOptions(this.settings, this.keyDim(), name)));
    const presets = Object.keys(PRESETS).map((name) => of(name)?.planes.presets[0]).filter(Boolean);
    const custom = result.planes.presets.filter((m) => m.name === "custom");
    return [...presets, ...custom, ...result.planes.rivals];
  }

  async attend() {
    const s = this.settings;
    if (!this.data.probe || this.info.layers[s.layer]?.query_heads == null) return;
    const options = { ...sketchOptions(s, this.keyDim()), layer: s.layer, head: s.head, method: s.method };
    const found = await this.run("attend", "attend", [options]);
    if (!found) return;
    this.data.attend = found;
    this.views.sketch.attention();
  }

  async estimate() {
    const s = this.settings;
    const model = { layers: s.mlayers, kv_heads: s.mheads, head_dim: s.mdim, tokens: s.mtokens };
    const options = { sinks: s.sinks, recent: s.recent, presets: Object.keys(PRESETS), ...(s.method === "custom" ? { custom: customPlanes(s) } : {}) };
    try {
      this.data.estimate = await this.engine.session.estimate(model, options);
    } catch (error) {
      if (error.code !== "cancelled") this.fail(error);
    }
    if (s.view === "memory") this.views.memory.estimated();
  }

  fold() {
    const s = this.settings;
    const planes = s.method === "custom" ? { custom: customPlanes(s) } : { preset: s.method === "qjl" ? "balanced" : s.method };
    const { projection, sketch_dim } = sketchOptions(s, this.keyDim());
    const options = {
      minicache: { method: "minicache", ...mergeOptions(s) },
      planes: { method: "planes", ...planes, sinks: s.sinks, recent: s.recent },
      qjl: { method: "qjl", projection, sketch_dim },
    };
    return this.run("fold", "fold", [options[s.store]]);
  }

  verdict() {
    const { merge, sketch: found } = this.data;
    const tile = (title, big, text, id) => h("div", { className: "tile", id }, h("h3", {}, title), h("div", { className: "big" }, big), h("p", {}, text));
    const tiles = [];
    if (merge) {
      const m = merge.totals.minicache;
      const current = isCurrent(merge, this.settings);
      const errors = merge.pairs.filter((p) => p.planned && !p.skipped).flatMap((p) => [p.keys, p.values].map((f) => f.relative_error_merged)).filter((x) => x !== null);
      const sentence = merge.verdict ? "Nothing merges." : `${percent(m.merged / m.rows)} of the planned rows merge.`;
      const why = merge.verdict
        ? `${reason(merge.verdict)} MiniCache would save nothing on this model as it stands.`
        : `A merged row comes back wrong by up to ${figure(Math.max(...errors))} of its norm, pair by pair. A model is usually hurt above a few hundredths.`;
      tiles.push(h("div", { className: `tile says ${current ? "" : "busy"}`, id: "says" }, h("h3", {}, "In short"), h("div", { className: "sentence" }, sentence), h("p", {}, why)));
      tiles.push(tile(`MiniCache from cosine ${merge.options.threshold.toFixed(2)}`, ratio(merge.totals.ratio), `${count(m.merged)} of ${count(m.rows)} rows merge in ${counted(m.planned_pairs, "planned pair")}`, "tile-minicache"));
    }
    const name = this.settings.method === "qjl" ? "balanced" : this.settings.method;
    const method = this.methods().find((m) => m.name === name);
    const qjl = found?.planes?.rivals.find((m) => m.name === "qjl");
    const costs = (m) => `smaller than f16, coded rows alone; attention output wrong by ${figure(m.errors_without_recent.output_relative_error)} of its norm`;
    const size = (m) => ratio(32 / (m.key_bits_per_channel + m.value_bits_per_channel));
    if (method) tiles.push(tile(`${NAMES[name]} sign planes`, size(method), costs(method), "tile-planes"));
    if (qjl) tiles.push(tile("QJL, 8-bit values", size(qjl), costs(qjl), "tile-qjl"));
    byId("verdict").replaceChildren(...tiles);
  }
}

const app = new App();
app.views = {
  depth: depth(app, byId("view-depth")),
  sketch: sketch(app, byId("view-sketch")),
  memory: memory(app, byId("view-memory")),
  engine: room(app, byId("view-engine")),
};

for (const view of VIEWS) byId(`tab-${view}`).addEventListener("click", () => app.set({ view }));
document.querySelector('[role="tablist"]').addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = VIEWS[(VIEWS.indexOf(app.settings.view) + step + VIEWS.length) % VIEWS.length];
  app.set({ view: next });
  byId(`tab-${next}`).focus();
});
byId("backend").addEventListener("change", (event) => app.set({ backend: event.target.value }));
app.bind("backend", () => (byId("backend").value = app.settings.backend));
byId("theme").addEventListener("click", () => app.set({ theme: document.documentElement.dataset.theme === "dark" ? "light" : "dark" }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.theme());
byId("open").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", ({ target }) => {
  if (target.files[0]) app.load(target.files[0], target.files[0].name);
  target.value = "";
});
byId("sample").addEventListener("click", () => app.sample());
byId("cancel").addEventListener("click", () => app.cancel());
byId("link").addEventListener("click", async ({ target }) => {
  await navigator.clipboard.writeText(location.href);
  target.textContent = "Copied";
  setTimeout(() => (target.textContent = "Copy link to these settings"), 1500);
});
byId("json").addEventListener("click", async () => {
  const s = app.settings;
  const options = { ...mergeOptions(s), ...sketchOptions(s, app.keyDim()) };
  const report = await app.run("report", "report", [options]);
  if (report) download(new Blob([JSON.stringify(report, null, 2)], { type: "application/json" }), "kvfold-report.json");
});
addEventListener("hashchange", () => app.set(parse(location.hash)));

let inside = 0;
addEventListener("dragenter", () => document.body.classList.toggle("dropping", (inside += 1) > 0));
addEventListener("dragleave", () => document.body.classList.toggle("dropping", (inside -= 1) > 0));
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  inside = 0;
  document.body.classList.remove("dropping");
  const file = event.dataTransfer?.files[0];
  if (file) app.load(file, file.name);
});

app.theme();
app.show();
// For the console and for tests: the settings, the session, and what was found.
Object.assign(window, { kvfold: app, defaults: DEFAULTS });
app.start();
