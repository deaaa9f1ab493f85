// Compiled, never run: what a TypeScript program writes against the package.
import init, { Session, estimate, memoryUse, version } from "../pkg/kvfold.js";
import type { KvfoldError, Pair, Report } from "../pkg/kvfold.js";
import { RemoteSession } from "../pkg/remote.js";

function folded(pair: Pair): number {
  return "skipped" in pair ? 0 : pair.keys.rows - pair.keys.retained;
}

export async function direct(file: File, signal: AbortSignal): Promise<number> {
  await init();
  const session: Session = await Session.create({ backend: "auto" });
  try {
    const info = await session.load(file, { signal, onProgress: ({ loaded, total }) => loaded / total });
    const rows = await session.probe({ sinks: 4 });
    const merged = await session.merge({ threshold: 0.9, rows: true, signal, onProgress: ({ done, of }) => done / of });
    const sketched = await session.sketch({ presets: ["balanced"], layers: [0] });
    const report: Report = await session.report({ retention: { fraction: 0.1 } });
    const head = await session.attend({ layer: 0, head: 1, method: "balanced", presets: ["balanced"] });
    const store = await session.fold({ method: "planes", preset: "compact" });
    const { live } = memoryUse();
    const models = estimate({ layers: 32, kv_heads: 8, head_dim: 128, tokens: 8192 }, { presets: ["extreme"] });
    return (
      info.layers.length + (rows[0]?.keys?.cosines[0] ?? 0) + merged.pairs.reduce((sum, pair) => sum + folded(pair), 0) +
      (sketched.planes?.coded_tokens ?? 0) + report.layers.length + head.queries + store.bytes.length + live +
      models.length + version().length + session.variants().length + (session.adapter.caps ? 1 : 0)
    );
  } catch (error) {
    return (error as KvfoldError).code === "cancelled" ? 0 : Promise.reject(error);
  } finally {
    session.free();
  }
}

export async function remote(): Promise<string | null> {
  const session = await RemoteSession.create({ backend: "cpu" });
  const report = await session.report();
  await session.free();
  session.terminate();
  // @ts-expect-error a threshold is a number
  await session.merge({ threshold: "0.9" });
  return report.verdict ?? session.adapter.reason;
}
