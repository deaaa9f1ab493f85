// Drives the page in headless Chromium, with WebGPU (SwiftShader, a program on the CPU) and without:
//
//   node tests/browser/main.mjs [FILTER]
//
// web/build has been run, and the command line built (target/debug/kvfold, or KVFOLD_BIN).
import { CPU, ENGINE, WEBGPU } from "./engine.mjs";
import { run } from "./harness.mjs";
import { LARGE } from "./large.mjs";
import { BOTH, LAST } from "./page.mjs";

const kinds = [["cpu", CPU], ["webgpu", WEBGPU]];
const filter = process.argv[2];
// Side by side, since either leaves a core idle at times; then one after the other what must not be held up.
const results = await Promise.all(kinds.map(([kind, more]) => run(kind, [...BOTH, ...ENGINE, ...more, ...LAST], filter)));
for (const [kind] of kinds) results.push(await run(kind, [...LARGE, ...LAST], filter));
const [passed, failed] = [0, 1].map((i) => results.reduce((sum, counts) => sum + counts[i], 0));
console.log(`test result: ${failed ? "FAILED" : "ok"}. ${passed} passed; ${failed} failed; 0 ignored`);
process.exitCode = failed || !passed ? 1 : 0;
