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

/** A figure with about three digits that matter; a dash where there is none. */
export function figure(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && size < 0.001) return x.toExponential(1);
  return x.toFixed(size < 0.1 ? 4 : size < 10 ? 3 : size < 100 ? 1 : 0);
}

/** A ratio as it is: unrounded enough that 0.9993 is not 1. */
export const ratio = (x) => (x === null || x === undefined ? "–" : `${x.toFixed(x < 1.005 ? 4 : 2)}×`);

export const percent = (x, digits = 1) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(digits)} %`);

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

/** Rows as CSV. @param {string[]} header @param {any[][]} rows */
export function csv(header, rows) {
  const cell = (x) => {
    const text = x === null || x === undefined ? "" : String(x);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [header, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

/** The value of a custom property of the style sheet. */
export const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Calls at most once a frame. @param {() => void} run */
export function framed(run) {
  let asked = 0;
  return () => {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(run);
  };
}
