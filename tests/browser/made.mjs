// Captures made for tests.

/** A safetensors file of f32 tensors. @param {Record<string, { shape: number[], numbers: Float32Array }>} tensors */
export function safetensors(tensors, metadata = {}) {
  const header = { __metadata__: metadata };
  let at = 0;
  for (const [name, { shape, numbers }] of Object.entries(tensors)) {
    header[name] = { dtype: "F32", shape, data_offsets: [at, (at += numbers.byteLength)] };
  }
  let text = JSON.stringify(header);
  text += " ".repeat((8 - (text.length % 8)) % 8);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([length, Buffer.from(text), ...Object.values(tensors).map(({ numbers }) => Buffer.from(numbers.buffer))]);
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
