// Captures made for tests.

/**
 * A safetensors file of f32 tensors, and of f16 ones given by their bits.
 * @param {Record<string, { shape: number[], numbers: Float32Array | Uint16Array }>} tensors
 */
export function safetensors(tensors, metadata = {}) {
  const header = { __metadata__: metadata };
  let at = 0;
  for (const [name, { shape, numbers }] of Object.entries(tensors)) {
    header[name] = { dtype: numbers instanceof Uint16Array ? "F16" : "F32", shape, data_offsets: [at, (at += numbers.byteLength)] };
  }
  return Buffer.concat([head(header), ...Object.values(tensors).map(({ numbers }) => Buffer.from(numbers.buffer, numbers.byteOffset, numbers.byteLength))]);
}

/** The first layers of a capture of which every layer has its own entry in some lists of the metadata. */
export function first(file, layers) {
  const length = Number(file.readBigUInt64LE(0));
  const { __metadata__: metadata, ...tensors } = JSON.parse(file.subarray(8, 8 + length).toString());
  for (const list of ["rope_theta", "sliding_window"]) metadata[list] = JSON.stringify(JSON.parse(metadata[list]).slice(0, layers));
  metadata.n_layers = String(layers);
  const header = { __metadata__: metadata };
  const parts = [];
  let at = 0;
  for (const [name, { dtype, shape, data_offsets: [start, end] }] of Object.entries(tensors)) {
    const layer = /^layer\.(\d+)\./.exec(name);
    if (layer && Number(layer[1]) >= layers) continue;
    header[name] = { dtype, shape, data_offsets: [at, (at += end - start)] };
    parts.push(file.subarray(8 + length + start, 8 + length + end));
  }
  return Buffer.concat([head(header), ...parts]);
}

/** A header with its length, padded to whole words. */
function head(header) {
  let text = JSON.stringify(header);
  text += " ".repeat((8 - (text.length % 8)) % 8);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([length, Buffer.from(text)]);
}

/** Layers whose rows are alike: all but the sinks merge. */
export function alike(layers = 4, tokens = 96, { heads = 2, dim = 32, queries = true, model = "alike" } = {}) {
  let state = 7;
  const next = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 31 - 1;
  };
  const rows = (count) => Float32Array.from({ length: count * dim }, next);
  const [keys, values] = [rows(heads * tokens), rows(heads * tokens)];
  const tensors = {};
  for (let layer = 0; layer < layers; layer += 1) {
    const near = (base) => base.map((x) => (1 + layer) * x + 0.1 * next());
    tensors[`layer.${layer}.key`] = { shape: [1, heads, tokens, dim], numbers: near(keys) };
    tensors[`layer.${layer}.value`] = { shape: [1, heads, tokens, dim], numbers: near(values) };
    if (queries) tensors[`layer.${layer}.query`] = { shape: [1, 2 * heads, 8, dim], numbers: rows(16 * heads) };
  }
  return safetensors(tensors, { "kvfold.capture": "1", model });
}

/** A capture of 49 MB: 30 layers of 3 KV heads, 2,048 tokens of 64 channels in f16, and 64 queries of 9 heads. Every other pair is alike. */
export function long({ layers = 30, heads = 3, tokens = 2048, dim = 64, queries = 64 } = {}) {
  let state = 11;
  // Between 0.25 and 1 in size, of either sign.
  const next = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return ((state >>> 16) & 0x83ff) | (state & 0x10000 ? 0x3400 : 0x3800);
  };
  const rows = (count) => Uint16Array.from({ length: count * dim }, next);
  const tensors = {};
  let pair = {};
  for (let layer = 0; layer < layers; layer += 1) {
    if (layer % 2 === 0) pair = { key: rows(heads * tokens), value: rows(heads * tokens) };
    for (const [kind, numbers] of Object.entries(pair)) tensors[`layer.${layer}.${kind}`] = { shape: [1, heads, tokens, dim], numbers };
    tensors[`layer.${layer}.query`] = { shape: [1, 3 * heads, queries, dim], numbers: rows(3 * heads * queries) };
  }
  return safetensors(tensors, { "kvfold.capture": "1", model: "long" });
}
