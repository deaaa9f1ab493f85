// Runs kernels with Dawn, which compiles them with Tint as Chrome does, for tests/dawn: requests on standard input, answers on
// standard output. Either is the lengths of a header and of what follows it, as two u32, then a JSON header, then bytes.
//   {subgroups, text, entry, bindings: [{number, type}]}   compiles a kernel; the answer has its number, `kernel`
//   {kernel, groups, sizes}, the bindings' bytes           runs it; the answer has the bytes of those that it may write
// What goes wrong is the answer's `error`. The first answer, unasked, says what the adapter is.
import { readSync, writeSync } from 'node:fs';
import { create, globals } from 'webgpu';

const { GPUBufferUsage, GPUMapMode, GPUShaderStage } = globals;

// Blocking, since there is nothing to do until all of a request is there.
function read(size) {
  const bytes = Buffer.alloc(size);
  for (let at = 0; at < size; ) {
    const got = readSync(0, bytes, at, size - at);
    if (got === 0) process.exit(0);
    at += got;
  }
  return bytes;
}

function write(bytes) {
  for (let at = 0; at < bytes.length; ) at += writeSync(1, bytes, at);
}

function answer(header, bytes = Buffer.alloc(0)) {
  const text = Buffer.from(JSON.stringify(header));
  const lengths = Buffer.alloc(8);
  lengths.writeUInt32LE(text.length, 0);
  lengths.writeUInt32LE(bytes.length, 4);
  write(Buffer.concat([lengths, text, bytes]));
}

// Held here for as long as the program runs: Dawn crashes if it is collected before its devices.
globalThis.gpu = create(['backend=vulkan']);
const adapter = await globalThis.gpu.requestAdapter();
if (adapter === null || !adapter.features.has('subgroups')) {
  answer({ error: adapter === null ? 'no Vulkan driver here suits Dawn' : 'the adapter has no subgroups' });
  process.exit(0);
}
// As a page gets one with the feature, and as wgpu's web backend does, which never asks for it.
const withSubgroups = await adapter.requestDevice({ requiredFeatures: ['subgroups'] });
const without = await (await globalThis.gpu.requestAdapter()).requestDevice();
const { description, subgroupMinSize, subgroupMaxSize } = adapter.info;
answer({ description, features: [...withSubgroups.features], sizes: [subgroupMinSize, subgroupMaxSize] });

// What `make` returns, unless the device objects to something meanwhile.
async function checked(device, make) {
  const kinds = ['validation', 'internal', 'out-of-memory'];
  for (const kind of kinds) device.pushErrorScope(kind);
  const made = await make();
  const errors = (await Promise.all(kinds.map(() => device.popErrorScope()))).filter((error) => error !== null);
  if (errors.length > 0) throw new Error(errors[0].message);
  return made;
}

const kernels = [];

async function compile({ subgroups, text, entry, bindings }) {
  const device = subgroups ? withSubgroups : without;
  const entries = bindings.map(({ number, type }) =>
    ({ binding: number, visibility: GPUShaderStage.COMPUTE, buffer: { type } }));
  kernels.push(await checked(device, () => {
    const layout = device.createBindGroupLayout({ entries });
    const pipeline = device.createComputePipeline({
      layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }),
      compute: { module: device.createShaderModule({ code: text }), entryPoint: entry },
    });
    return { device, layout, pipeline, bindings };
  }));
  answer({ kernel: kernels.length - 1 });
}

async function run({ kernel, groups, sizes }, bytes) {
  const { device, layout, pipeline, bindings } = kernels[kernel];
  const made = [];
  const buffer = (size, usage) => {
    made.push(device.createBuffer({ size, usage }));
    return made.at(-1);
  };
  const results = await checked(device, () => {
    let at = 0;
    const bound = bindings.map(({ type }, index) => {
      const usage = type === 'uniform' ? GPUBufferUsage.UNIFORM : GPUBufferUsage.STORAGE;
      const own = buffer(sizes[index], usage | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST);
      device.queue.writeBuffer(own, 0, bytes, at, sizes[index]);
      at += sizes[index];
      return own;
    });
    const entries = bindings.map(({ number }, index) => ({ binding: number, resource: { buffer: bound[index] } }));
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({ layout, entries }));
    pass.dispatchWorkgroups(...groups);
    pass.end();
    const written = bound.filter((_, index) => bindings[index].type === 'storage').map((own) => {
      const result = buffer(own.size, GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST);
      encoder.copyBufferToBuffer(own, 0, result, 0, own.size);
      return result;
    });
    device.queue.submit([encoder.finish()]);
    return written;
  });
  await Promise.all(results.map((result) => result.mapAsync(GPUMapMode.READ)));
  answer({}, Buffer.concat(results.map((result) => Buffer.from(result.getMappedRange()))));
  for (const own of made) own.destroy();
}

for (;;) {
  const lengths = read(8);
  const header = JSON.parse(read(lengths.readUInt32LE(0)).toString());
  const bytes = read(lengths.readUInt32LE(4));
  try {
    await ('text' in header ? compile(header) : run(header, bytes));
  } catch (error) {
    answer({ error: error.message });
  }
}
