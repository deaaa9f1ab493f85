// Compiles WGSL files with Tint, through Dawn's null backend: every feature, no GPU and no driver.
//   node check.mjs FOLDER
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { create } from 'webgpu';

const [folder] = process.argv.slice(2);
if (folder === undefined) {
  console.error('usage: node check.mjs FOLDER');
  process.exit(2);
}
const files = readdirSync(folder).filter((name) => name.endsWith('.wgsl')).sort();
if (files.length === 0) {
  console.error(`no .wgsl file in ${folder}`);
  process.exit(1);
}

// Held here for as long as the program runs: Dawn crashes if it is collected before its devices.
globalThis.gpu = create(['backend=null']);
const adapter = await globalThis.gpu.requestAdapter();
if (adapter === null) {
  console.error('Dawn offers no null adapter');
  process.exit(1);
}
const device = await adapter.requestDevice({ requiredFeatures: ['shader-f16', 'subgroups'] });

let refused = 0;
for (const name of files) {
  device.pushErrorScope('validation');
  const module = device.createShaderModule({ code: readFileSync(join(folder, name), 'utf8') });
  const { messages } = await module.getCompilationInfo();
  const error = await device.popErrorScope();
  for (const { type, lineNum, linePos, message } of messages) {
    console.log(`${name}:${lineNum}:${linePos} ${type}: ${message}`);
  }
  if (error !== null) {
    refused += 1;
    if (messages.length === 0) console.log(`${name}: ${error.message}`);
  }
}
console.log(`${files.length - refused} of ${files.length} shaders compile`);
// Dawn keeps the event loop alive as long as the device exists.
process.exit(refused === 0 ? 0 : 1);
