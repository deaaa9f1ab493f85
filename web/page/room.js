// The engine room: what computes here, how fast, and whether it computes right.
import { figureOf } from "./charts.js";
import { binary, bytes, counted, h, power } from "./dom.js";

const LIMITS = {
  max_storage_buffer_binding_size: "Largest storage binding",
  max_buffer_size: "Largest buffer",
  max_storage_buffers_per_shader_stage: "Storage buffers of a stage",
  max_compute_invocations_per_workgroup: "Invocations of a workgroup",
  max_compute_workgroup_storage_size: "Workgroup memory",
  max_compute_workgroups_per_dimension: "Workgroups in a dimension",
  min_storage_buffer_offset_alignment: "Alignment of a binding",
};

const BYTES = ["max_storage_buffer_binding_size", "max_buffer_size", "max_compute_workgroup_storage_size", "min_storage_buffer_offset_alignment"];

/** The view. @param {any} app @param {HTMLElement} into */
export function room(app, into) {
  const lead = h("p", { className: "lead" }, "The same WGSL kernels as in the library, through WebGPU; each has a twin on the CPU, in WebAssembly, that gives the same numbers. Here you can see both at work on this machine.");
  const facts = h("dl", { className: "list" });
  const adapter = figureOf({ title: "Adapter", name: "adapter", picture: false }, facts);
  const variants = h("pre", { className: "text", tabIndex: 0, "aria-label": "Kernel variants" });
  const ran = figureOf({ title: "Kernels that ran", name: "variants", picture: false, note: "" }, variants);

  const timed = h("tbody");
  const untimed = h("p", { className: "empty" }, "Twelve operations, some seconds.");
  const timeButton = h("button", { type: "button", className: "primary", id: "time", onclick: () => time() }, "Time the kernels");
  const timing = figureOf(
    { title: "Time of each operation", name: "timings", picture: false, note: "", table: () => ({ header: ["operation", "ms_device", "ms_cpu_twin", "calls_per_submit"], rows: (app.data.timings ?? []).map((t) => [t.kernel, t.milliseconds, t.twin_milliseconds, t.batch]) }) },
    h("div", { className: "line" }, timeButton),
    h("div", { className: "scroll low", style: "margin-top:10px", tabIndex: 0, role: "region", "aria-label": "Timings, table" },
      untimed, h("table", {}, h("thead", {}, h("tr", {}, ...["Operation", "Here, ms", "CPU twin, ms"].map((text) => h("th", { scope: "col" }, text)))), timed)),
  );

  const checked = h("tbody");
  const none = h("p", { className: "empty" });
  const summary = h("p", { role: "status" });
  const testButton = h("button", { type: "button", className: "primary", id: "selftest", onclick: () => test() }, "Run the self-test");
  const copyButton = h("button", { type: "button", hidden: true, onclick: () => copy() }, "Copy as text");
  const testing = figureOf(
    { title: "Self-test: every kernel against its twin", name: "selftest", picture: false, note: "Each kernel on this machine’s adapter against the CPU twin, on rows of the capture and on made-up rows: zero, tiny, huge, opposite, not finite.", table: () => ({ header: ["kernel", "rows", "apart", "bound", "passed"], rows: (app.data.checks ?? []).map((c) => [c.kernel, c.rows, c.apart, c.bound, c.passed]) }) },
    h("div", { className: "line" }, testButton, copyButton, summary),
    h("div", { className: "scroll", style: "margin-top:10px", tabIndex: 0, role: "region", "aria-label": "Self-test, table" },
      none, h("table", {}, h("thead", {}, h("tr", {}, ...["Kernel", "Rows", "Apart", "At most", ""].map((text, i) => h("th", { scope: "col", className: i === 1 ? "left" : "" }, text)))), checked)),
  );
  into.append(lead, h("div", { className: "grid" }, adapter.element, ran.element, timing.element, testing.element));

  const definitions = (entries) => entries.filter(([, value]) => value !== null && value !== undefined && value !== "").flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]);

  async function about() {
    const a = app.engine.adapter;
    if (!a) return;
    const use = await app.engine.session.memory();
    const kind = a.backend === "webgpu" ? `WebGPU${a.software ? ", software" : ""}` : "CPU twins in WebAssembly";
    const limits = a.caps ? Object.entries(LIMITS).map(([key, name]) => [name, BYTES.includes(key) ? binary(a.caps[key]) : a.caps[key]]) : [];
    facts.replaceChildren(...definitions([
      ["Computes on", kind], ["Adapter", a.name], ["Why not WebGPU", a.backend === "cpu" ? a.reason : null],
      ["Subgroups", a.caps ? (a.caps.subgroups ? a.caps.subgroups.join(" to ") : "not through wgpu on the web") : null],
      ...limits,
      ["Module’s memory", `${bytes(use.module)}, ${bytes(use.live)} in use`],
      ["Browser", navigator.userAgent.replace(/^Mozilla\/5\.0 /, "")],
    ]));
    const labels = await app.engine.session.variants();
    variants.textContent = labels.length ? labels.join("\n") : a.backend === "cpu" ? "none: the CPU twins compute" : "none yet";
    ran.setNote(labels.length ? `${counted(labels.length, "variant")} compiled so far; a name says the kernel, its constants and its element types.` : "");
  }

  async function time() {
    timeButton.disabled = true;
    try {
      const found = await app.run("timings", "timings", [{}]);
      if (found) app.data.timings = found;
    } finally {
      timeButton.disabled = false;
      render();
    }
  }

  async function test() {
    testButton.disabled = true;
    summary.textContent = "running…";
    try {
      const found = await app.run("selftest", "selftest", [{}], ({ done, of }) => (summary.textContent = `${done} of ${of}…`));
      if (found) app.data.checks = found;
      else summary.textContent = "";
    } finally {
      testButton.disabled = app.engine.adapter?.backend !== "webgpu";
      render();
    }
  }

  /** What may be pasted into an issue. */
  function text() {
    const a = app.engine.adapter;
    const checks = app.data.checks ?? [];
    const failed = checks.filter((c) => !c.passed).length;
    const line = (c) => `${c.passed ? "ok    " : "FAILED"} ${c.kernel}, ${c.rows}: ${c.failure ?? `${c.apart?.toExponential(1)} apart, at most ${c.bound.toExponential(1)}`}`;
    return [
      `kvfold ${app.engine.version} self-test in a browser`,
      `adapter: ${a.name} (${a.backend}${a.software ? ", software" : ""})`,
      `browser: ${navigator.userAgent}`,
      ...checks.map(line),
      `${checks.length - failed} passed, ${failed} failed`,
    ].join("\n");
  }

  async function copy() {
    await navigator.clipboard.writeText(text());
    summary.textContent = "copied";
  }

  const ms = (x) => (x === null ? "–" : x < 0.1 ? x.toFixed(3) : x.toFixed(2));

  function render() {
    about().catch(() => {});
    const a = app.engine.adapter;
    const gpu = a?.backend === "webgpu";
    testButton.disabled = !gpu;
    testButton.title = gpu ? "" : "There is no GPU to compare with the CPU";
    const software = a?.software && gpu ? " This adapter is itself a program on the CPU: its times show that the kernels run, and nothing about a GPU’s speed." : "";
    timing.setNote(`On one layer of the capture. Here: the median of 5 submits of up to 16 calls, over the calls; the twin: the median of 5 calls, one thread.${software}`);
    timed.replaceChildren(...(app.data.timings ?? []).map((t) => h("tr", {}, h("td", {}, t.kernel), h("td", {}, ms(t.milliseconds)), h("td", {}, ms(t.twin_milliseconds)))));
    untimed.hidden = Boolean(app.data.timings);
    untimed.nextSibling.hidden = !app.data.timings;
    const checks = app.data.checks;
    copyButton.hidden = !checks;
    none.hidden = Boolean(checks);
    none.nextSibling.hidden = !checks;
    none.textContent = gpu ? "About 50 checks, a few seconds on a GPU." : `There is no GPU to compare with the CPU: ${a?.reason ?? ""}.`;
    if (!checks) return;
    const failed = checks.filter((c) => !c.passed).length;
    summary.textContent = `${counted(checks.length - failed, "check")} passed, ${failed} failed`;
    checked.replaceChildren(...checks.map((c) => h("tr", {}, h("td", {}, c.kernel), h("td", { className: "left" }, c.rows), h("td", {}, c.failure ?? (c.apart === null ? "–" : power(c.apart))), h("td", {}, power(c.bound)), h("td", { className: c.passed ? "ok" : "bad" }, c.passed ? "ok" : "FAILED"))));
  }

  return { render, theme() {}, text };
}
