// Memory: bytes of the capture before and after, of a model of one's own, and the folded capture as a file.
import { choices, list, number } from "./controls.js";
import { figureOf } from "./charts.js";
import { bytes, download, figure, h, percent, ratio, token } from "./dom.js";
import { NAMES } from "./sketch.js";

const MODELS = [
  ["this", "This capture’s"],
  ["32,8,128", "32 layers, 8 KV heads of 128 (Llama 3.1 8B)"],
  ["80,8,128", "80 layers, 8 KV heads of 128 (Llama 3.1 70B)"],
  ["28,4,128", "28 layers, 4 KV heads of 128 (Qwen2.5 7B)"],
  ["30,3,64", "30 layers, 3 KV heads of 64 (SmolLM2 135M)"],
];

const PARTS = {
  planes: [["codes", "--c1"], ["raw rows", "--c2"], ["tables", "--c3"]],
  qjl: [["signs of keys", "--c1"], ["8-bit values", "--c2"]],
  minicache: [["directions, magnitudes, raw rows", "--c1"]],
};

/** The view. @param {any} app @param {HTMLElement} into */
export function memory(app, into) {
  const lead = h("p", { className: "lead" }, "Bytes are those of buffers that exist: codes, scales, tables, page tables and every row that stays raw. The codes are chosen under Sketch, the merging under Depth.");
  const controls = h("div", { className: "controls" },
    choices(app, { name: "store", label: "Fold with", wide: true, options: [["planes", "Sign planes"], ["qjl", "QJL"], ["minicache", "MiniCache"]] }),
  );
  const canvas = h("canvas", { role: "img" });
  const bars = figureOf(
    { title: "Bytes by layer", name: "bytes-by-layer", full: true, note: "", table: layerTable },
    canvas,
  );
  new ResizeObserver(() => draw()).observe(bars.content);

  const models = h("select", { id: "models", onchange: () => choose(models.value) }, h("option", { value: "" }, "Choose, or type below"), ...MODELS.map(([value, text]) => h("option", { value }, text)));
  const rows = h("div", { className: "bars" });
  const estimates = figureOf(
    { title: "Your model’s cache", name: "model", full: true, note: "Arithmetic on sizes for one sequence, keys and values alike; quality is what your own capture says.", picture: false, table: estimateTable },
    h("div", { className: "pair-of" }, h("div", { className: "controls bare" },
      h("div", { className: "control wide" }, h("label", { htmlFor: "models" }, "Model"), models),
      number(app, { name: "mlayers", label: "Layers", min: 1, max: 1024 }),
      number(app, { name: "mheads", label: "KV heads", min: 1, max: 1024 }),
      number(app, { name: "mdim", label: "Head dimension", min: 1, max: 512 }),
      number(app, { name: "mtokens", label: "Tokens of context", min: 1, max: 1 << 24 })), rows),
  );
  const status = h("p", { className: "muted", role: "status" });
  const button = h("button", { className: "primary", type: "button", id: "fold", onclick: () => fold() }, "Fold and download");
  const command = h("pre", { className: "text" });
  const folding = figureOf(
    { title: "The folded capture as a file", name: "fold", full: true, picture: false, note: "A store in safetensors, checked by a digest (docs/store-format.md). The command line restores it." },
    h("div", { className: "stack", style: "gap:10px" }, h("div", { className: "line" }, button, status), command),
  );
  into.append(lead, controls, h("div", { className: "grid" }, bars.element, folding.element, estimates.element));

  function choose(value) {
    if (value === "") return;
    const layer = app.info?.layers[0];
    const [l, heads, dim] = value === "this" ? [app.info.layers.length, layer.kv_heads, layer.key_dim] : value.split(",").map(Number);
    app.set({ mlayers: l, mheads: heads, mdim: dim });
  }

  /** Of every layer: bytes as captured, and the parts after. */
  function perLayer() {
    const { sketch, merge } = app.data;
    const how = app.settings.store;
    if (!sketch) return [];
    if (how === "qjl") return sketch.layers.map((l) => ({ layer: l.layer, before: l.bytes, parts: [l.qjl.key_bytes, l.qjl.value_bytes] }));
    if (how === "planes") {
      const chosen = (l) => l.presets.find((m) => m.name === app.settings.method) ?? l.presets[0];
      return (sketch.planes?.layers ?? []).map((l, i) => {
        const m = chosen(l);
        return { layer: l.layer, before: sketch.layers[i].bytes, parts: m ? [m.code_bytes, m.raw_bytes, m.table_bytes] : [0, 0, 0] };
      });
    }
    const after = new Map();
    for (const pair of merge?.pairs ?? []) {
      if (!pair.planned || pair.skipped) continue;
      const half = (pair.keys.bytes_after + pair.values.bytes_after) / 2;
      after.set(pair.lower, half).set(pair.upper, half);
    }
    return sketch.layers.map((l) => ({ layer: l.layer, before: l.bytes, parts: [after.get(l.layer) ?? l.bytes] }));
  }

  function layerTable() {
    const names = PARTS[app.settings.store].map(([name]) => name);
    return { header: ["layer", "before", ...names], rows: perLayer().map((l) => [l.layer, l.before, ...l.parts]) };
  }

  function draw() {
    const layers = perLayer();
    const width = bars.content.clientWidth;
    if (!layers.length || width === 0) return;
    const height = 230;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.cssText = `display:block;width:${width}px;height:${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const [left, bottom, top] = [54, 34, 8];
    const most = Math.max(...layers.map((l) => Math.max(l.before, l.parts.reduce((a, b) => a + b, 0))));
    const y = (n) => height - bottom - (n / most) * (height - bottom - top);
    pen.font = `11px ${token("--sans")}`;
    pen.textBaseline = "middle";
    const unit = 10 ** Math.floor(Math.log10(most));
    const round = [0.2, 0.25, 0.5, 1, 2].find((step) => most / (step * unit) <= 5) * unit;
    for (let n = 0; n <= most; n += round) {
      pen.fillStyle = token("--line");
      pen.fillRect(left, y(n), width - left, 1);
      pen.fillStyle = token("--muted");
      pen.textAlign = "right";
      pen.fillText(bytes(n).replace(/\.0+ /, " "), left - 6, y(n));
    }
    const step = (width - left) / layers.length;
    const wide = Math.max(2, step * 0.66);
    const colors = PARTS[app.settings.store].map(([, color]) => token(color));
    layers.forEach((l, i) => {
      const x = left + i * step + (step - wide) / 2;
      let sum = 0;
      l.parts.forEach((part, k) => {
        pen.fillStyle = colors[k];
        pen.fillRect(x, y(sum + part), wide, Math.max(0, y(sum) - y(sum + part)));
        sum += part;
      });
      pen.strokeStyle = token("--muted");
      pen.lineWidth = 1;
      pen.strokeRect(x + 0.5, y(l.before) + 0.5, wide - 1, height - bottom - y(l.before));
      pen.fillStyle = token("--muted");
      pen.textAlign = "center";
      if (step > 17 || i % Math.ceil(17 / step) === 0) pen.fillText(String(l.layer), x + wide / 2, height - bottom + 11);
    });
    pen.textAlign = "right";
    pen.fillText("layer", width, height - 8);
  }

  function summary() {
    const layers = perLayer();
    const before = layers.reduce((sum, l) => sum + l.before, 0);
    const { sketch, merge } = app.data;
    const how = app.settings.store;
    const m = app.methods().find((m) => m.name === app.settings.method);
    const after = how === "qjl" ? sketch?.qjl.bytes_after : how === "planes" ? (m ?? sketch?.planes?.presets[0])?.bytes : merge?.totals.bytes_after;
    const more = how === "minicache" && merge?.verdict ? ` ${merge.verdict}.` : how === "planes" && m?.ratio ? ` Coded rows alone are ${ratio(32 / (m.key_bits_per_channel + m.value_bits_per_channel))} smaller.` : "";
    bars.setNote(`${bytes(before)} become ${bytes(after)}, ${ratio(after ? before / after : null)} smaller; outlines are the bytes as captured.${more}`);
    bars.setLegend([...PARTS[how], ["as captured", "--muted", "outline"]]);
    canvas.setAttribute("aria-label", `Bytes by layer: ${bytes(before)} before, ${bytes(after)} after`);
    command.textContent = `kvfold unfold ${fileName()} -o restored.safetensors`;
    button.disabled = !app.info;
    if (!status.dataset.done) status.textContent = "";
  }

  const fileName = () => `${(app.fileName ?? "sample").replace(/\.safetensors$/, "")}.folded.safetensors`;

  function estimateTable() {
    return { header: ["code", "key_bits", "value_bits", "bytes", "ratio"], rows: (app.data.estimate ?? []).map((m) => [m.name, m.key_bits_per_channel, m.value_bits_per_channel, m.bytes, m.ratio]) };
  }

  function estimated() {
    const found = app.data.estimate;
    if (!found?.length) return;
    const whole = found[0].f16_bytes;
    const merge = app.data.merge?.totals.ratio;
    const lines = [{ name: "f16", label: "As it is, f16", bytes: whole, ratio: 1 }, ...found.map((m) => ({ ...m, label: NAMES[m.name] ?? m.name }))];
    if (merge) lines.splice(1, 0, { name: "minicache", label: "MiniCache", bytes: whole / merge, ratio: merge, note: "at this capture’s ratio" });
    rows.replaceChildren(...lines.map((m) => {
      const fill = h("i");
      fill.style.cssText = `width:${Math.min(100, (100 * m.bytes) / whole)}%;background:var(${m.name === app.settings.method ? "--accent" : m.name === "f16" ? "--c4" : "--c2"})`;
      return h("div", { className: "row", "data-model": m.name, title: m.note ?? "" }, h("span", {}, m.label), h("span", { className: "track", "aria-hidden": "true" }, fill), h("span", {}, `${bytes(Math.round(m.bytes))}, ${ratio(m.ratio)}`));
    }));
  }

  async function fold() {
    button.disabled = true;
    status.dataset.done = "";
    status.textContent = "folding…";
    try {
      const result = await app.fold();
      if (!result) return;
      download(new Blob([result.bytes], { type: "application/octet-stream" }), fileName());
      const r = result.report;
      status.dataset.done = "yes";
      status.textContent = `${bytes(r.bytes_before)} folded into ${bytes(r.bytes_after)} (${ratio(r.ratio)}); restored keys are wrong by ${figure(r.key_relative_error)} of their norm, values by ${figure(r.value_relative_error)}. The file, with queries and metadata, has ${bytes(result.bytes.length)}.`;
    } finally {
      button.disabled = false;
    }
  }

  return {
    estimated,
    render() {
      draw();
      summary();
      estimated();
    },
    theme: draw,
  };
}
