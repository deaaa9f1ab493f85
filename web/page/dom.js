// Elements, numbers, downloads.

/**
 * An element. Properties that begin with "on" are listeners, `class` and `aria-*` are attributes.
 * @param {string} tag @param {Record<string, any>} [props] @param {...any} children
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.startsWith("aria") && name !== "list" && name !== "form") element[name] = value;
    else element.setAttribute(name === "className" ? "class" : name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A count. */
export const count = (n) => grouped.format(n);

/** `1 layer`, `2 layers`. */
export const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** A dash where there is no number. */
const isNone = (x) => x === null || x === undefined || Number.isNaN(x);

/** A number's text with a minus sign, which is as wide as a digit. */
const signed = (text) => text.replace("-", "−");

/** A power of ten as one writes it: `4.7·10⁻⁴`. */
export function power(x) {
  if (x === 0) return "0";
  const [digits, exponent] = x.toExponential(1).split("e");
  const raised = [...exponent.replace("+", "")].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
  return `${signed(digits)}·10${raised}`;
}

/** A figure with about three digits that matter. */
export function figure(x) {
  if (isNone(x)) return "–";
  const size = Math.abs(x);
  if (size < 0.001) return power(x);
  return signed(x.toFixed(size < 0.1 ? 4 : size < 10 ? 3 : size < 100 ? 1 : 0));
}

/** A number of a column: as many decimals in every line. */
export const fixed = (x, decimals = 3) => (isNone(x) ? "–" : signed(x.toFixed(decimals)));

/** A ratio as it is: unrounded enough that 0.9993 is not 1. */
export const ratio = (x) => (x === null || x === undefined ? "–" : `${x.toFixed(x < 1.005 ? 4 : 2)}×`);

export const percent = (x, digits = 1) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(digits)} %`);

/** A size that is a power of two, as limits are. */
export function binary(n) {
  const power = Math.min(3, Math.floor(Math.log2(Math.max(1, n)) / 10));
  return `${Number((n / 1024 ** power).toFixed(1))} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

/** Bytes in decimal units. */
export function bytes(n) {
  if (n === null || n === undefined) return "–";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (n >= size) return `${(n / size).toFixed(n / size < 10 ? 2 : n / size < 100 ? 1 : 0)} ${unit}`;
  }
  return `${n} B`;
}

/** @param {Blob} blob @param {string} name */
export function download(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Rows as CSV, made in slices: there may be half a million. @param {string[]} header @param {Iterable<any[]>} rows */
export async function csv(header, rows) {
  const cell = (x) => {
    const text = x === null || x === undefined ? "" : String(x);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const parts = [`${header.join(",")}\n`];
  let [part, from] = ["", performance.now()];
  for (const row of rows) {
    part += `${row.map(cell).join(",")}\n`;
    if (part.length < 1 << 14) continue;
    parts.push(part);
    part = "";
    if (performance.now() - from < 12) continue;
    await new Promise((resolve) => setTimeout(resolve));
    from = performance.now();
  }
  return new Blob([...parts, part], { type: "text/csv" });
}

/** The value of a custom property of the style sheet. */
export const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Lanes that have steps to run, in the order they asked, and whether a frame was asked for. */
const lanes = [];
let asked = false;

/** Milliseconds of a frame that steps may take before the next one waits for another frame. */
const SHARE = 8;

function ask() {
  if (asked || !lanes.length) return;
  asked = true;
  // In a task of its own, so that the frame's work (style, layout, painting) is not added to that of the steps.
  requestAnimationFrame(() => setTimeout(run));
}

function run() {
  asked = false;
  const start = performance.now();
  try {
    while (lanes.length && performance.now() - start < SHARE) {
      const lane = lanes.shift();
      const step = lane.steps.shift();
      if (lane.steps.length) lanes.push(lane);
      step?.();
    }
  } finally {
    ask();
  }
}

/** Takes steps that are run as frames have time for them, so that none holds the page up for long; steps asked for later take their place. */
export function inFrames() {
  const lane = { steps: [] };
  return (...steps) => {
    lane.steps = steps;
    if (!lanes.includes(lane)) lanes.push(lane);
    ask();
  };
}

/** Calls at most once a frame. @param {() => void} step */
export function framed(step) {
  const lane = inFrames();
  return () => lane(step);
}
