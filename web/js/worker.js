// Runs a session in a Worker for remote.js.
import init, { Session, estimate, memoryUse, version } from "./kvfold.js";

/** @type {Session | undefined} */
let session;
/** @type {Map<number, AbortController>} */
const running = new Map();
const ready = init();

/** The buffers of typed arrays in a result, which move instead of being copied. */
function buffers(/** @type {any} */ value, /** @type {Set<ArrayBuffer>} */ found = new Set()) {
  if (ArrayBuffer.isView(value)) found.add(/** @type {ArrayBuffer} */ (value.buffer));
  else if (value && typeof value === "object") for (const part of Object.values(value)) buffers(part, found);
  return found;
}

/** @type {Record<string, (...args: any[]) => unknown>} */
const calls = {
  async create(/** @type {any} */ options) {
    session?.free();
    session = undefined;
    session = await Session.create(options);
    return { adapter: session.adapter, version: version() };
  },
  estimate,
  memory: memoryUse,
  free() {
    session?.free();
    session = undefined;
  },
};

async function call(/** @type {string} */ method, /** @type {any[]} */ args) {
  await ready;
  if (Object.hasOwn(calls, method)) return calls[method](...args);
  if (!session) throw Object.assign(new Error("the session is closed"), { code: "closed" });
  return /** @type {any} */ (session)[method](...args);
}

addEventListener("message", async ({ data: { id, method, args, abort } }) => {
  if (abort) {
    running.get(id)?.abort();
    return;
  }
  const controller = new AbortController();
  running.set(id, controller);
  const onProgress = (/** @type {unknown} */ progress) => postMessage({ id, progress });
  // Options are the last argument of every call that may be cancelled.
  const last = args.at(-1);
  if (last?.call) args[args.length - 1] = { ...last.options, signal: controller.signal, onProgress };
  try {
    const result = await call(method, args);
    /** @type {any} */ (self).postMessage({ id, result }, [...buffers(result)]);
  } catch (/** @type {any} */ error) {
    const { name, message, code, stack } = error ?? {};
    postMessage({ id, error: { name, message: message ?? String(error), code: code ?? "internal", stack } });
  } finally {
    running.delete(id);
  }
});
