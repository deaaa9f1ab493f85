// The page and every kernel in headless Firefox with WebGPU, whose compiler is naga:
//
//   node tests/browser/firefox.mjs [FILTER]
//
// web/build has been run, and the command line built (target/debug/kvfold, or KVFOLD_BIN). Firefox takes the adapter that
// its Vulkan loader offers first: VK_DRIVER_FILES names lavapipe in tests/run.
import assert from "node:assert/strict";

import { Gecko } from "./gecko.mjs";
import { SAMPLE, agree, kvfold } from "./harness.mjs";

async function measures(firefox) {
  const { adapter, chip, banners } = await firefox.evaluate(() => ({
    adapter: window.kvfold?.engine?.adapter,
    chip: document.querySelector("#engine-name").innerText,
    banners: [...document.querySelectorAll("[data-banner]")].map((banner) => banner.innerText),
  }));
  assert.deepEqual(banners, []);
  assert.equal(adapter.backend, "webgpu");
  assert.equal(adapter.caps.backend, "webgpu");
  assert.equal(adapter.cause, null);
  assert.match(chip, /^WebGPU/);
  const agent = await firefox.evaluate(() => navigator.userAgent);
  const [version] = agent.match(/(?<=Firefox\/)\d+[.\d]*/);
  console.log(`adapter: Firefox ${version}${adapter.software ? ", a software adapter" : ""}`);
}

async function kernels(firefox) {
  const checks = await firefox.evaluate(() => window.kvfold.engine.session.selftest());
  assert.deepEqual(checks.filter((check) => !check.passed), []);
  assert.ok(checks.length >= 40, `${checks.length} checks`);
  for (const kernel of ["similarity", "merge", "restore", "quantize", "attend"]) {
    assert.ok(checks.some((check) => check.kernel.includes(kernel)), `${kernel} ran`);
  }
  console.log(`      ${checks.length} checks of ${new Set(checks.map((check) => check.kernel)).size} kernels`);
}

async function numbers(firefox) {
  const report = JSON.parse(await kvfold("report", SAMPLE, "--json", "--backend", "cpu", "--preset", "balanced"));
  const { merge, sketch } = await firefox.evaluate(() => {
    const { merge, sketch } = window.kvfold.data;
    return { merge: { ...merge, rows: undefined }, sketch };
  });
  agree(report.pairs, merge.pairs, "pairs");
  agree(report.totals.minicache, merge.totals.minicache, "totals.minicache");
  agree(report.totals.qjl, sketch.qjl, "totals.qjl");
  agree(report.layers, sketch.layers, "layers");
  agree(report.planes, sketch.planes, "planes");
  assert.equal(report.verdict, merge.verdict);
  assert.equal(report.pairs.length, 29);
}

async function quiet(firefox) {
  assert.deepEqual(firefox.faults, []);
  assert.ok(firefox.requests.length > 0, "requests are seen");
  const own = ["about:", "blob:", "data:", `${firefox.origin}/`];
  assert.deepEqual(firefox.requests.filter((url) => !own.some((start) => url.startsWith(start))), []);
}

const TESTS = [
  ["the_page_measures_the_sample_with_webgpu", measures],
  ["every_kernel_equals_its_twin", kernels],
  ["numbers_are_those_of_the_command_line", numbers],
  ["no_console_error_and_no_request_elsewhere", quiet],
];

const filter = process.argv[2] ?? "";
const firefox = await Gecko.open();
let [passed, failed] = [0, 0];
try {
  await firefox.goto("backend=webgpu");
  // Or until the page says what is wrong, which the first test then shows.
  await firefox.until(() => document.querySelector('[data-banner="device"], [data-banner="error"]')
    || (document.body.dataset.ready === "yes" && document.body.dataset.busy === "no"));
  for (const [name, test] of TESTS.filter(([name]) => name.includes(filter))) {
    const start = performance.now();
    try {
      await test(firefox);
      passed += 1;
      console.log(`test firefox/${name} ... ok (${((performance.now() - start) / 1000).toFixed(1)} s)`);
    } catch (error) {
      failed += 1;
      console.log(`test firefox/${name} ... FAILED\n${error.stack}`);
    }
  }
} finally {
  await firefox.close();
}
console.log(`test result: ${failed ? "FAILED" : "ok"}. ${passed} passed; ${failed} failed; 0 ignored`);
process.exitCode = failed || !passed ? 1 : 0;
