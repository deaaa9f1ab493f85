// Depth: how alike neighbouring layers are, and what MiniCache makes of it.
import { Chart, axis, curve, figureOf, rule, tooltip, wholes } from "./charts.js";
import { list, number, slider } from "./controls.js";
import { bytes, count, counted, figure, fixed, h, inFrames, percent } from "./dom.js";
import { HeatMap, cosineColors } from "./heat.js";
import { mergeOptions } from "./settings.js";

const KINDS = [["keys", "Keys"], ["values", "Values"]];

/** Whether a merge result is of these settings. */
export function isCurrent(merge, settings) {
  if (!merge) return false;
  const o = merge.options;
  const close = (a, b) => Math.abs(a - b) < 1e-6;
  return o.mode === settings.mode && close(o.threshold, settings.threshold) && close(o.slerp_t, settings.t) &&
    o.sinks === settings.sinks && close(o.start_frac, settings.start);
}

/** The view. @param {any} app @param {HTMLElement} into */
export function depth(app, into) {
  let colors = cosineColors();
  const lead = h("p", { className: "lead" }, "MiniCache stores two neighbouring layers’ rows on one shared direction where they point the same way. Each cell below is one token’s row in one KV head of two neighbouring layers: its colour is their cosine, and it turns green when the row would merge.");
  const controls = h("div", { className: "controls" },
    slider(app, { name: "threshold", label: "Merge at cosine", min: -0.5, max: 1, step: 0.01, text: (x) => x.toFixed(2) }),
    slider(app, { name: "t", label: "Direction at t", min: 0, max: 1, step: 0.05, text: (x) => x.toFixed(2), hint: "0 is the lower layer’s direction, 1 the upper’s" }),
    slider(app, { name: "start", label: "Pair from depth", min: 0, max: 1, step: 0.05, text: (x) => percent(x, 0) }),
    number(app, { name: "sinks", label: "First tokens kept raw", min: 0, max: 64 }),
    list(app, { name: "mode", label: "Merged rows are kept as", wide: true, options: [["shared", "a shared direction"], ["anchor", "the lower layer’s rows"]] }),
  );

  const maps = Object.fromEntries(KINDS.map(([kind, title]) => [kind, heat(kind, title)]));
  const legend = () => [
    ["cosine −1 to +1, kept raw", "--low --mid --high"], ["merged", "--merged"],
  ];
  const heats = figureOf(
    {
      title: "Cosine of neighbouring layers, row by row", name: "cosines", full: true, legend: legend(),
      note: "A band for each pair of layers, a line in it for each KV head, a column for each token. Point at a cell, or focus a map and use the arrow keys.",
      table: () => cosineTable(),
    },
    h("div", { className: "pair-of" }, ...KINDS.map(([kind, title]) => h("div", {}, h("h3", { className: "muted" }, title), maps[kind].element))),
  );

  const cosines = new Chart(cosineChart, "Mean and 5th percentile of the cosine by pair");
  const curves = figureOf(
    {
      title: "Cosine by depth", name: "cosine-by-depth",
      note: "Mean over a pair’s rows, and the 5th percentile below it.",
      legend: [["keys, mean", "--key", "line"], ["values, mean", "--value", "line"], ["5th percentile", "--ink", "dots"], ["threshold", "--muted", "dashes"]],
      table: () => ({
        header: ["lower", "upper", "key_mean", "key_p5", "key_p95", "value_mean", "value_p5", "value_p95"],
        rows: folded().map((p) => [p.lower, p.upper, ...KINDS.flatMap(([k]) => [p[k].cosine.mean, p[k].cosine.p5, p[k].cosine.p95])]),
      }),
    },
    cosines.element,
  );
  const merged = new Chart(mergedChart, "Share of rows that merge, by pair");
  const shares = figureOf(
    {
      title: "What merges, and at what error", name: "merged-by-depth",
      note: "Share of a pair’s rows that merge, and the error of the merged rows as a share of their norm.",
      legend: [["keys merge", "--key", "line"], ["values merge", "--value", "line"], ["error of merged rows", "--merged", "dashes"]],
      table: pairTable,
    },
    merged.element,
  );
  const body = h("tbody");
  const table = figureOf(
    { title: "Pair by pair", name: "pairs", full: true, picture: false, table: pairTable, note: "" },
    h("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Pair by pair, table" },
      h("table", {},
        h("thead", {}, h("tr", {}, ...["Layers", "", "Cosine", "5 %", "95 %", "Kept raw", "Rows", "Restored error", "of merged rows", "Before", "After"]
          .map((text, i) => h("th", { scope: "col", className: i < 2 ? "left" : "" }, text)))),
        body)),
  );
  into.append(lead, controls, h("div", { className: "grid" }, heats.element, curves.element, shares.element, table.element));

  function folded() {
    return (app.data.merge?.pairs ?? []).filter((pair) => !pair.skipped);
  }

  function heat(kind, title) {
    const at = (row) => {
      const rows = app.data.probe?.[Math.floor(row / heads())];
      return { rows, head: row % heads(), figures: rows?.[kind] };
    };
    return new HeatMap({
      label: `${title}: cosine of neighbouring layers by pair, head and token`,
      height: (rows, width) => Math.min(Math.max(rows * 4, 180), Math.max(300, width * 0.95)),
      axes: {
        rows: (row) => (row % heads() === Math.floor(heads() / 2) ? pairName(at(row).rows) : null),
        columns: "token",
      },
      describe: (row, column) => {
        const { rows, head, figures } = at(row);
        if (!figures) return [`layers ${pairName(rows)}`, "no pair"];
        const cosine = value(figures, head, column);
        const kept = isRaw(decided(), rows.upper - 1, kind, head, column, cosine);
        return [`layers ${pairName(rows)}, head ${head}, token ${column}`, `cosine ${fixed(cosine, 4)}: ${kept ? "kept raw" : "merges"}`];
      },
    });
  }

  const heads = () => Math.max(1, ...(app.data.probe ?? []).map((rows) => rows.keys?.heads ?? 1));
  const pairName = (rows) => `${rows.lower}–${rows.upper}`;
  const value = (figures, head, tokenAt) =>
    head < figures.heads ? figures.cosines[head * figures.tokens + tokenAt] : Number.NaN;

  /** What the fold decided of every row, if it has under these settings. */
  const decided = () => (isCurrent(app.data.merge, app.settings) ? app.data.merge.rows : null);

  /** As the fold decided, else as the threshold says at once. */
  function isRaw(folds, pair, kind, head, tokenAt, cosine) {
    const exact = folds?.[pair]?.[kind];
    if (exact?.retained.length) return exact.retained[head * exact.tokens + tokenAt] === 1;
    return tokenAt < app.settings.sinks || !(cosine >= app.settings.threshold);
  }

  const cosineTable = () => ({ header: ["lower", "upper", "kind", "head", "token", "cosine", "merged"], rows: cosineRows() });

  function* cosineRows() {
    const folds = decided();
    for (const [pair, { lower, upper, ...kinds }] of (app.data.probe ?? []).entries()) {
      for (const [kind] of KINDS) {
        const figures = kinds[kind];
        for (let head = 0; figures && head < figures.heads; head += 1) {
          for (let t = 0; t < figures.tokens; t += 1) {
            const cosine = value(figures, head, t);
            yield [lower, upper, kind, head, t, cosine, isRaw(folds, pair, kind, head, t, cosine) ? 0 : 1];
          }
        }
      }
    }
  }

  function pairTable() {
    const header = ["lower", "upper", "kind", "planned", "cosine_mean", "cosine_p5", "cosine_p95", "retained", "rows", "relative_error", "relative_error_merged", "bytes_before", "bytes_after"];
    const rows = folded().flatMap((p) => KINDS.map(([k]) => [p.lower, p.upper, k, p.planned, p[k].cosine.mean, p[k].cosine.p5, p[k].cosine.p95, p[k].retained, p[k].rows, p[k].relative_error, p[k].relative_error_merged, p[k].bytes_before, p[k].bytes_after]));
    return { header, rows };
  }

  function cosineChart(width) {
    const band = (color) => curve("5 %", color, { width: 1, dash: [3, 3] });
    return {
      width, height: 270, legend: { show: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => [Math.min(-0.2, low - 0.05), Math.max(1, high)] } },
      axes: [wholes("lower layer of the pair"), axis("cosine")],
      series: [{}, curve("keys", "--key"), band("--key"), curve("values", "--value"), band("--value")],
      plugins: [
        rule(() => app.settings.threshold, "--muted"),
        tooltip((i) => {
          const p = folded()[i];
          return p ? [`layers ${p.lower}–${p.upper}`, ...KINDS.map(([k, name]) => `${name.toLowerCase()} ${figure(p[k].cosine.mean)}, 5 % ${figure(p[k].cosine.p5)}`)] : [];
        }),
      ],
    };
  }

  function mergedChart(width) {
    return {
      width, height: 270, legend: { show: false },
      scales: { x: { time: false }, y: { range: (_, __, high) => [0, Math.max(1, Math.min(high, 2))] } },
      axes: [wholes("lower layer of the pair"), axis("share, error")],
      series: [{}, curve("keys", "--key"), curve("values", "--value"), curve("error", "--merged", { dash: [4, 3] })],
      plugins: [tooltip((i) => {
        const p = folded()[i];
        return p ? [`layers ${p.lower}–${p.upper}`, ...KINDS.map(([k, name]) => `${name.toLowerCase()}: ${percent(share(p[k]))}, error ${figure(p[k].relative_error_merged)}`)] : [];
      })],
    };
  }

  const share = (f) => (f.rows ? (f.rows - f.retained) / f.rows : 0);

  function paint(kind) {
    const probe = app.data.probe;
    if (!probe?.length) return;
    const each = heads();
    const folds = decided();
    const tokens = Math.max(...probe.map((rows) => rows[kind]?.tokens ?? 0));
    maps[kind].set(probe.length * each, tokens, (pixels, row) => {
      const [pair, head] = [Math.floor(row / each), row % each];
      const figures = probe[pair][kind];
      if (!figures || head >= figures.heads) return;
      for (let column = 0; column < figures.tokens; column += 1) {
        const cosine = value(figures, head, column);
        if (Number.isNaN(cosine)) continue;
        const at = Math.round((Math.min(Math.max(cosine, -1), 1) * 0.5 + 0.5) * 255);
        pixels[column] = (isRaw(folds, pair, kind, head, column, cosine) ? colors.retained : colors.merged)[at];
      }
    });
  }

  /** The curves' x: the lower layer of each pair; and what `pick` finds of a kind. */
  const depths = () => folded().map((p) => p.lower);
  const along = (kind, pick) => folded().map((p) => pick(p[kind]));

  function drawCosines() {
    if (!app.data.merge) return;
    const curves = KINDS.flatMap(([kind]) => [along(kind, (f) => f.cosine.mean), along(kind, (f) => f.cosine.p5)]);
    cosines.draw([depths(), ...curves]);
  }

  function drawMerged() {
    if (!app.data.merge) return;
    const error = (p) => p.keys.relative_error_merged ?? p.values.relative_error_merged;
    const shares = KINDS.map(([kind]) => along(kind, share));
    const none = shares.flat().every((found) => found === 0);
    merged.draw([depths(), ...shares, folded().map(error)], none ? "Nothing merges at this threshold." : "");
  }

  function rowsOfTable() {
    const merge = app.data.merge;
    if (!merge) return;
    const row = (pair, kind, first) => {
      const f = pair[kind];
      const name = first ? [`${pair.lower}–${pair.upper}`, ...(pair.planned ? [" ", h("span", { className: "tag" }, "planned")] : [])] : [""];
      const cells = [fixed(f.cosine.mean), fixed(f.cosine.p5), fixed(f.cosine.p95), count(f.retained), count(f.rows), figure(f.relative_error), figure(f.relative_error_merged), bytes(f.bytes_before), bytes(f.bytes_after)];
      return h("tr", {}, h("td", {}, ...name), h("td", { className: "left" }, kind === "keys" ? "K" : "V"), ...cells.map((text, i) => h("td", { className: i === 3 && f.retained < f.rows ? "ok" : "" }, text)));
    };
    body.replaceChildren(...merge.pairs.flatMap((pair) => pair.skipped
      ? [h("tr", { className: "aside" }, h("td", {}, `${pair.lower}–${pair.upper}`), h("td", { className: "left", colSpan: 10 }, `no pair: ${pair.skipped}`))]
      : [row(pair, "keys", true), row(pair, "values", false)]));
    const { planned_pairs: planned, merged: rows, rows: all } = merge.totals.minicache;
    table.setNote(`The totals fold the ${counted(planned, "planned pair")}: ${count(rows)} of ${count(all)} rows merge, ${count(merge.totals.bytes_before)} bytes become ${count(merge.totals.bytes_after)}.`);
  }

  const [painted, told] = [inFrames(), inFrames()];
  const live = () => painted(...KINDS.map(([kind]) => () => paint(kind)));
  const render = () => {
    live();
    told(drawCosines, drawMerged, rowsOfTable);
  };
  return {
    live,
    render,
    theme() {
      colors = cosineColors();
      render();
    },
    options: () => mergeOptions(app.settings),
  };
}
