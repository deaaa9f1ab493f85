// What the page is asked to show. Everything that differs from the defaults stands in the address, so that a link shows
// the same.

export const DEFAULTS = Object.freeze({
  view: "depth",
  backend: "auto",
  theme: "auto",
  // Depth
  threshold: 0.9,
  t: 0.5,
  mode: "shared",
  sinks: 4,
  start: 0.5,
  // Sketch
  method: "balanced",
  hi: 3,
  lo: -1, // -1: no split
  values: 3,
  centring: "pre-rope",
  recent: 64,
  projection: "gaussian",
  signs: 1, // sign bits of a key for each channel
  layer: 14, // where the sample's heads attend in patterns one can see; fewer layers have less
  head: 4,
  query: -1, // -1: the last
  // Memory
  store: "planes",
  mlayers: 32,
  mheads: 8,
  mdim: 128,
  mtokens: 32768,
});

const CHOICES = {
  view: ["depth", "sketch", "memory", "engine"],
  backend: ["auto", "webgpu", "cpu"],
  theme: ["auto", "light", "dark"],
  mode: ["shared", "anchor"],
  method: ["near-lossless", "balanced", "compact", "extreme", "custom", "qjl"],
  centring: ["pre-rope", "block-mean", "none"],
  projection: ["gaussian", "orthogonal", "hadamard"],
  store: ["planes", "qjl", "minicache"],
};

const RANGES = {
  threshold: [-1, 1],
  t: [0, 1],
  sinks: [0, 64],
  start: [0, 1],
  hi: [1, 5],
  lo: [-1, 5],
  values: [1, 5],
  recent: [0, 4096],
  signs: [0.5, 8],
  layer: [0, 1023],
  head: [0, 1023],
  query: [-1, 1 << 20],
  mlayers: [1, 1024],
  mheads: [1, 1024],
  mdim: [1, 512],
  mtokens: [1, 1 << 24],
};

/** Settings from an address's fragment; what cannot be read is left at its default. */
export function parse(fragment) {
  const settings = { ...DEFAULTS };
  for (const [name, text] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    if (CHOICES[name]?.includes(text)) settings[name] = text;
    const number = Number(text);
    const range = RANGES[name];
    if (range && text !== "" && number >= range[0] && number <= range[1]) settings[name] = number;
  }
  return settings;
}

/** The fragment of these settings. */
export function format(settings) {
  const changed = Object.keys(DEFAULTS).filter((name) => settings[name] !== DEFAULTS[name]);
  return new URLSearchParams(changed.map((name) => [name, String(settings[name])])).toString();
}

/** The bits of each preset: of keys, of their other half, of values. */
export const PRESETS = {
  "near-lossless": { label: "Near-lossless", hi: 4, lo: -1, values: 4 },
  balanced: { label: "Balanced", hi: 3, lo: -1, values: 3 },
  compact: { label: "Compact", hi: 3, lo: 1, values: 3 },
  extreme: { label: "Extreme", hi: 2, lo: 0, values: 2 },
};

/** Options of `merge`. */
export function mergeOptions(s) {
  return { mode: s.mode, threshold: s.threshold, slerp_t: s.t, sinks: s.sinks, start_frac: s.start };
}

/** The code that the sliders say. */
export function customPlanes(s) {
  const centring = s.centring === "block-mean" ? { "block-mean": 64 } : s.centring;
  return { planes_hi: s.hi, planes_lo: s.lo < 0 ? null : s.lo, value_planes: s.values, centring };
}

/** Whether sliders stand exactly where a preset has them. */
export function presetOf(s) {
  if (s.centring !== "pre-rope") return "custom";
  const found = Object.entries(PRESETS).find(([, p]) => p.hi === s.hi && p.lo === s.lo && p.values === s.values);
  return found ? found[0] : "custom";
}

/** Options of `sketch` and `attend`. @param {any} s @param {number} keyDim */
export function sketchOptions(s, keyDim, method = s.method) {
  const options = {
    sinks: s.sinks,
    recent: s.recent,
    projection: s.projection,
    sketch_dim: Math.max(1, Math.round(s.signs * keyDim)),
  };
  if (method === "custom") return { ...options, custom: customPlanes(s), presets: [] };
  return { ...options, presets: method === "qjl" ? [] : [method] };
}
