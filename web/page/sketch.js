// Sketch: what coding keys and values in few bits does to attention.
import { Chart, axis, curve, figureOf, tooltip, wholes } from "./charts.js";
import { choices, list, number, slider } from "./controls.js";
import { bytes, count, figure, h, inFrames, percent, ratio, token } from "./dom.js";
import { HeatMap, ramp } from "./heat.js";
import { PRESETS } from "./settings.js";

export const NAMES = {
  ...Object.fromEntries(Object.entries(PRESETS).map(([name, { label }]) => [name, label])),
  custom: "Custom planes",
  qjl: "QJL, 8-bit values",
  int8: "8 bits per token",
  int4: "4 bits, groups of 32",
  kivi4: "KIVI, 4 bits",
  kivi2: "KIVI, 2 bits",
};

/** The view. @param {any} app @param {HTMLElement} into */
export function sketch(app, into) {
  const lead = h("p", { className: "lead" }, "QJL keeps a key as the signs of a random projection; sign planes refine that to a few bits a channel, centred and rotated. Below, what either does to the scores and to the attention weights of this capture’s own queries, beside the codes that others use.");
  const bits = (x) => (x < 0 ? "same" : x === 0 ? "dropped" : `${x}`);
  const layers = list(app, { name: "layer", label: "Layer", options: [[0, "0"]] });
  const heads = list(app, { name: "head", label: "Query head", options: [[0, "0"]] });
  const queries = list(app, { name: "query", label: "Query at token", options: [[-1, "last"]] });
  const planes = [
    slider(app, { name: "hi", label: "Key bits, half 1", min: 1, max: 5, step: 1 }),
    slider(app, { name: "lo", label: "Key bits, half 2", min: -1, max: 5, step: 1, text: bits }),
    slider(app, { name: "values", label: "Value bits", min: 1, max: 5, step: 1 }),
    list(app, { name: "centring", label: "Centring of keys", options: [["pre-rope", "before RoPE"], ["block-mean", "blocks of 64"], ["none", "none"]] }),
  ];
  const qjl = [
    list(app, { name: "projection", label: "Projection", options: [["gaussian", "Gaussian, as published"], ["orthogonal", "orthogonal"], ["hadamard", "Hadamard"]] }),
    list(app, { name: "signs", label: "Signs for each channel", options: [[0.5, "½"], [1, "1, as published"], [2, "2"], [4, "4"]] }),
  ];
  const controls = h("div", { className: "controls" },
    choices(app, { name: "method", label: "Code", wide: true, options: [...Object.entries(PRESETS).map(([name, { label }]) => [name, label]), ["custom", "Custom"], ["qjl", "QJL"]] }),
    ...planes, ...qjl,
    number(app, { name: "sinks", label: "First tokens raw", min: 0, max: 64 }),
    slider(app, { name: "recent", label: "Last tokens raw", min: 0, max: 128, step: 4 }),
    layers, heads, queries,
  );

  const scatter = new Chart(scatterChart, "Estimated against exact scores");
  const scores = figureOf(
    {
      title: "Scores: estimated against exact", name: "scores", note: "",
      legend: [["a key and a query of this head", "--accent"], ["no error", "--muted", "line"]],
      table: () => headTable(["exact_scores", "estimated_scores"]),
    },
    scatter.element,
  );
  const lines = new Chart(weightChart, "Attention weights of one query, exact and estimated");
  const weights = figureOf(
    {
      title: "Weights of one query", name: "weights", note: "",
      legend: [["exact", "--c4"], ["estimated", "--accent", "line"]],
      table: () => headTable(["exact_weights", "estimated_weights"]),
    },
    lines.element,
  );
  const maps = { exact: map("exact"), estimated: map("estimated") };
  const heat = figureOf(
    {
      title: "Attention weights of every captured query", name: "attention", full: true,
      note: "Exact on the left, estimated on the right, in one scale of colour. Choose a row to see that query above.",
      table: () => headTable(["exact_weights", "estimated_weights"]),
    },
    h("div", { className: "pair-of" },
      h("div", {}, h("h3", { className: "muted" }, "Exact"), maps.exact.element),
      h("div", {}, h("h3", { className: "muted" }, "Estimated"), maps.estimated.element)),
  );
  const body = h("tbody");
  const methods = figureOf(
    { title: "Every code on this capture", name: "methods", full: true, picture: false, note: "", table: methodTable },
    h("div", { className: "scroll low", tabIndex: 0, role: "region", "aria-label": "Every code on this capture, table" },
      h("table", {},
        h("thead", {}, h("tr", {}, ...["Code", "Key bits", "Value bits", "Bytes", "Ratio", "Output error", "KL, nats", "Same top token", "No window: error", "KL, nats", "Same top token"]
          .map((text) => h("th", { scope: "col" }, text)))),
        body)),
  );
  const errors = new Chart(errorChart, "Error of the attention output by layer");
  const byLayer = figureOf(
    {
      title: "Error of the attention output, layer by layer", name: "error-by-layer", full: true,
      note: "|o − o′| / |o| over the captured queries, only the first tokens raw; a logarithmic scale.",
      table: () => ({
        header: ["layer", ...curves().map((c) => c.name)],
        rows: layerIndices().map((l, i) => [l, ...curves().map((c) => c.values[i])]),
      }),
    },
    errors.element,
  );
  const none = h("p", { className: "banner", hidden: true }, "This capture holds no queries, so scores and weights cannot be compared; sizes are in the table.");
  into.append(lead, controls, none, h("div", { className: "grid" }, scores.element, weights.element, heat.element, methods.element, byLayer.element));

  const query = () => {
    const a = app.data.attend;
    if (!a) return 0;
    const at = app.settings.query < 0 ? a.queries - 1 : app.settings.query - a.first_query;
    return Math.min(Math.max(at, 0), a.queries - 1);
  };
  const pick = (row) => app.data.attend && app.set({ query: app.data.attend.first_query + row });

  function map(kind) {
    return new HeatMap({
      label: `${kind} attention weights by query and token`,
      height: (rows, width) => Math.min(Math.max(rows * 6, 150), Math.max(200, width * 0.6)),
      axes: { rows: (row) => String((app.data.attend?.first_query ?? 0) + row), columns: "token attended to" },
      describe: (row, column) => {
        const a = app.data.attend;
        const at = row * a.tokens + column;
        return [`query at ${a.first_query + row}, token ${column}`, `exact ${percent(a.exact_weights[at], 2)}, estimated ${percent(a.estimated_weights[at], 2)}`];
      },
      pick: (row) => pick(row),
    });
  }

  const headTable = (columns) => ({ header: ["query", "token", ...columns], rows: headRows(columns) });

  function* headRows(columns) {
    const a = app.data.attend;
    for (let q = 0; a && q < a.queries; q += 1) {
      for (let t = 0; t < a.tokens; t += 1) {
        const at = q * a.tokens + t;
        if (!Number.isNaN(a.exact_scores[at])) yield [a.first_query + q, t, ...columns.map((name) => a[name][at])];
      }
    }
  }

  /** Coded keys of the head: exact scores in order and the estimated ones, at most so many. */
  function points(most = 4000) {
    const a = app.data.attend;
    const { sinks, recent } = app.settings;
    const end = Math.min(a.tokens, (app.info?.lengths[0] ?? a.tokens) - recent);
    const places = [];
    let [sx, sy] = [0, 0];
    for (let from = 0; from < a.exact_scores.length; from += a.tokens) {
      for (let at = from + sinks; at < from + end; at += 1) {
        if (Number.isNaN(a.exact_scores[at])) continue;
        places.push(at);
        sx += a.exact_scores[at];
        sy += a.estimated_scores[at];
      }
    }
    const n = places.length;
    let [xx, yy, xy] = [0, 0, 0];
    for (const at of places) {
      const [x, y] = [a.exact_scores[at] - sx / n, a.estimated_scores[at] - sy / n];
      xx += x * x;
      yy += y * y;
      xy += x * y;
    }
    const step = Math.max(1, Math.ceil(n / most));
    const shown = Float64Array.from({ length: Math.ceil(n / step) }, (_, i) => places[i * step]).sort((p, q) => a.exact_scores[p] - a.exact_scores[q]);
    const data = [a.exact_scores, a.estimated_scores].map((scores) => Array.from(shown, (at) => scores[at]));
    return { data, n, correlation: n > 1 ? xy / Math.sqrt(xx * yy) : null };
  }

  function scatterChart(width) {
    const diagonal = {
      hooks: {
        draw: [(plot) => {
          const { min, max } = plot.scales.x;
          const pen = plot.ctx;
          const { left, top, width: w, height: tall } = plot.bbox;
          pen.save();
          pen.beginPath();
          pen.rect(left, top, w, tall);
          pen.clip();
          pen.strokeStyle = token("--muted");
          pen.lineWidth = 1.2 * devicePixelRatio;
          pen.beginPath();
          pen.moveTo(plot.valToPos(min, "x", true), plot.valToPos(min, "y", true));
          pen.lineTo(plot.valToPos(max, "x", true), plot.valToPos(max, "y", true));
          pen.stroke();
          pen.restore();
        }],
      },
    };
    const fill = `color-mix(in srgb, ${token("--accent")} 45%, transparent)`;
    return {
      width, height: 300, legend: { show: false }, cursor: { show: false },
      scales: { x: { time: false }, y: {} },
      axes: [axis("exact score, scaled", { size: 30 }), axis("estimated")],
      series: [{}, { label: "estimated", paths: () => null, points: { show: true, size: 4, width: 0, fill, stroke: fill } }],
      plugins: [diagonal],
    };
  }

  function weightChart(width) {
    return {
      width, height: 300, legend: { show: false },
      scales: { x: { time: false }, y: { range: (_, __, high) => [0, Math.max(high * 1.05, 0.01)] } },
      axes: [wholes("token attended to"), axis("weight")],
      // The exact one as an area, so that both are seen where they agree.
      series: [{}, curve("exact", "--c4", { width: 1, fill: `color-mix(in srgb, ${token("--c4")} 45%, transparent)` }), curve("estimated", "--accent", { width: 1.6 })],
      plugins: [tooltip((i) => {
        const a = app.data.attend;
        const at = query() * a.tokens + i;
        return [`token ${i}`, `exact ${percent(a.exact_weights[at], 2)}`, `estimated ${percent(a.estimated_weights[at], 2)}`];
      })],
    };
  }

  let gathered;
  function gather() {
    gathered = points();
  }

  function cloud() {
    const { data, n, correlation } = gathered;
    scatter.draw(data, n ? "" : "All of this head’s keys stay raw.");
    scores.setNote(n ? `Layer ${app.settings.layer}, head ${app.settings.head}: correlation ${figure(correlation)} over ${count(n)} coded keys. Scores are scale · (q · k), in nats.` : "Lower the window of last tokens to see what coding does.");
  }

  function one() {
    const a = app.data.attend;
    const q = query();
    const row = (name) => Array.from(a[name].subarray(q * a.tokens, (q + 1) * a.tokens), (x) => (Number.isNaN(x) ? null : x));
    lines.draw([Array.from({ length: a.tokens }, (_, t) => t), row("exact_weights"), row("estimated_weights")]);
    weights.setNote(`Layer ${app.settings.layer}, head ${app.settings.head}, the query at token ${a.first_query + q}.`);
  }

  function paint(kind) {
    const a = app.data.attend;
    const found = a[`${kind}_weights`];
    const colors = ramp("--sunk", "--c3", "--value", "--ink");
    const most = a.exact_weights.reduce((most, x) => (x > most ? x : most), 1e-9);
    maps[kind].chosen = query();
    maps[kind].set(a.queries, a.tokens, (pixels, row) => {
      for (let column = 0; column < a.tokens; column += 1) {
        const x = found[row * a.tokens + column];
        // The square root shows small weights too; both maps share the scale.
        if (!Number.isNaN(x)) pixels[column] = colors[Math.round(Math.sqrt(Math.min(Math.max(x / most, 0), 1)) * 255)];
      }
    });
  }

  const [headDrawn, layersDrawn] = [inFrames(), inFrames()];
  /** Draws a head, while somebody looks; another capture may come between two frames. */
  function attention() {
    if (!app.data.attend?.queries || app.settings.view !== "sketch") return;
    const steps = [gather, cloud, one, () => paint("exact"), () => paint("estimated")];
    headDrawn(...steps.map((step) => () => app.data.attend && step()));
  }

  const all = () => app.methods();
  function methodTable() {
    const header = ["code", "key_bits_per_channel", "value_bits_per_channel", "bytes", "ratio", "output_relative_error", "weights_kl", "top1_agreement", "no_window_output_relative_error", "no_window_weights_kl", "no_window_top1_agreement"];
    return { header, rows: all().map((m) => [m.name, m.key_bits_per_channel, m.value_bits_per_channel, m.bytes, m.ratio, ...[m.errors, m.errors_without_recent].flatMap((e) => [e.output_relative_error, e.weights_kl, e.top1_agreement])]) };
  }

  function table() {
    const result = app.data.sketch;
    if (!result?.planes) return;
    const { coded_tokens: coded, tokens, sinks, recent, centring } = result.planes;
    const worst = Math.max(...all().map((m) => Math.min(m.errors_without_recent.output_relative_error ?? 0, 1)), 1e-9);
    body.replaceChildren(...all().map((m) => {
      const e = m.errors;
      const bare = m.errors_without_recent;
      const meter = h("span", { className: "meter", "aria-hidden": "true" }, h("i"));
      meter.firstChild.style.width = `${Math.min(100, (100 * Math.min(bare.output_relative_error ?? 0, 1)) / worst)}%`;
      const cells = [figure(m.key_bits_per_channel), figure(m.value_bits_per_channel), bytes(m.bytes), ratio(m.ratio), figure(e.output_relative_error), figure(e.weights_kl), percent(e.top1_agreement), [figure(bare.output_relative_error), meter], figure(bare.weights_kl), percent(bare.top1_agreement)];
      return h("tr", { className: m.name === app.settings.method ? "chosen" : "", "data-method": m.name }, h("td", {}, NAMES[m.name] ?? m.name), ...cells.map((cell) => h("td", {}, ...[cell].flat())));
    }));
    const few = 2 * coded < tokens ? " On a capture this short most tokens stay raw: judge by bits and by the columns without a window." : "";
    const centred = typeof centring === "object" ? "RoPE unknown, so means of blocks" : "means before RoPE";
    methods.setNote(`The first ${sinks} and the last ${recent} tokens raw under every code, ${centred}: ${count(coded)} of ${count(tokens)} tokens are coded.${few}`);
  }

  const layerIndices = () => (app.data.sketch?.planes?.layers ?? []).map((l) => l.layer);
  function curves() {
    const planes = app.data.sketch?.planes;
    if (!planes) return [];
    const names = [...new Set([app.settings.method, "qjl", "int8", "int4"])];
    const find = (layer, name) => [...layer.presets, ...layer.rivals].find((m) => m.name === name);
    return names.map((name) => ({ name, values: planes.layers.map((l) => find(l, name)?.errors_without_recent.output_relative_error ?? null) }));
  }
  const colorOf = (name) => ({ qjl: "--value", int8: "--muted", int4: "--key" })[name] ?? "--accent";

  /** Powers of ten alone: a line for each part of one would hide the curves. */
  function decades(_, __, low, high) {
    const [from, to] = [low, high].map((x) => Math.round(Math.log10(x)));
    return Array.from({ length: to - from + 1 }, (_, i) => 10 ** (from + i));
  }

  function errorChart(width) {
    return {
      width, height: 260, legend: { show: false },
      scales: { x: { time: false }, y: { distr: 3, log: 10 } },
      axes: [wholes("layer"), axis("error", { size: 54, splits: decades })],
      series: [{}, ...curves().map(({ name }) => curve(NAMES[name], colorOf(name)))],
      plugins: [tooltip((i) => [`layer ${layerIndices()[i]}`, ...curves().map((c) => `${NAMES[c.name]}: ${figure(c.values[i])}`)])],
    };
  }

  function layered() {
    const found = curves();
    if (!found.length || found.every((c) => c.values.every((x) => x === null))) return;
    errors.draw([layerIndices(), ...found.map((c) => c.values)]);
    byLayer.setLegend(found.map((c) => [NAMES[c.name] ?? c.name, colorOf(c.name), "line"]));
  }

  function pickers() {
    const info = app.info;
    if (!info) return;
    layers.fill(info.layers.map((_, i) => [i, String(i)]));
    const layer = info.layers[app.settings.layer] ?? info.layers[0];
    heads.fill(Array.from({ length: layer.query_heads ?? 1 }, (_, i) => [i, String(i)]));
    const [start, end] = layer.query_positions ?? [0, 0];
    queries.fill([[-1, `last (${end - 1})`], ...Array.from({ length: end - start }, (_, i) => [start + i, String(start + i)])]);
    none.hidden = layer.query_heads !== null;
  }

  function relevant() {
    const isQjl = app.settings.method === "qjl";
    for (const control of planes) control.hidden = isQjl;
    for (const control of qjl) control.hidden = !isQjl;
  }

  return {
    pickers,
    attention,
    render() {
      relevant();
      attention();
      layersDrawn(table, layered);
    },
    theme() {
      attention();
      layersDrawn(layered);
    },
  };
}
