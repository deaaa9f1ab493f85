// Drives the page in headless Chromium, with WebGPU (SwiftShader, a program on the CPU) and without:
//
//   node tests/browser/main.mjs [FILTER]
//
// web/build has been run, and the command line built (target/debug/kvfold, or KVFOLD_BIN).
import { CPU, ENGINE, WEBGPU } from "./engine.mjs";
import { run } from "./harness.mjs";
import { LARGE } from "./large.mjs";
import { BOTH, LAST, forget } from "./page.mjs";

let [passed, failed] = [0, 0];
for (const [kind, more] of [["cpu", CPU], ["webgpu", WEBGPU]]) {
  forget();
  const [good, bad] = await run(kind, [...BOTH, ...ENGINE, ...LARGE, ...more, ...LAST], process.argv[2]);
  passed += good;
  failed += bad;
}
console.log(`test result: ${failed ? "FAILED" : "ok"}. ${passed} passed; ${failed} failed; 0 ignored`);
process.exitCode = failed || !passed ? 1 : 0;
