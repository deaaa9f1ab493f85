// A session in a Worker, so that the page stays responsive: the methods of Session, each a promise.

/** An error that came from the Worker. */
function revive(/** @type {any} */ { name, message, code, stack }) {
  return Object.assign(new Error(message), { name: name ?? "KvfoldError", code, remoteStack: stack });
}

export class RemoteSession {
  /** @type {Worker} */ #worker;
  /** @type {Map<number, { resolve: (value: any) => void, reject: (error: unknown) => void, onProgress?: Function }>} */
  #pending = new Map();
  #next = 0;
  /** @type {any} */ adapter;
  /** @type {string} */ version = "";

  /** @param {Worker} worker */
  constructor(worker) {
    this.#worker = worker;
    worker.addEventListener("message", ({ data: { id, result, error, progress } }) => {
      const call = this.#pending.get(id);
      if (!call) return;
      if (progress) {
        call.onProgress?.(progress);
        return;
      }
      this.#pending.delete(id);
      if (error) call.reject(revive(error));
      else call.resolve(result);
    });
    worker.addEventListener("error", (event) => {
      const error = revive({ message: event.message || "the worker could not be started", code: "worker" });
      for (const call of this.#pending.values()) call.reject(error);
      this.#pending.clear();
    });
  }

  /** Starts a Worker with a session in it. @param {any} [options] */
  static async create(options = {}) {
    const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    const session = new RemoteSession(worker);
    try {
      ({ adapter: session.adapter, version: session.version } = await session.#call("create", [options]));
    } catch (error) {
      worker.terminate();
      throw error;
    }
    return session;
  }

  /**
   * @param {string} method
   * @param {any[]} args
   * @param {any} [options] with signal and onProgress, which stay on this side
   * @returns {Promise<any>}
   */
  #call(method, args, options) {
    const id = this.#next++;
    const { signal, onProgress, ...rest } = options ?? {};
    const sent = options === undefined ? args : [...args, { call: true, options: rest }];
    return new Promise((resolve, reject) => {
      if (signal?.aborted) {
        reject(revive({ message: "cancelled before it began", code: "cancelled" }));
        return;
      }
      signal?.addEventListener("abort", () => this.#worker.postMessage({ id, abort: true }), { once: true });
      this.#pending.set(id, { resolve, reject, onProgress });
      this.#worker.postMessage({ id, method, args: sent });
    });
  }

  /** @param {File | Blob | ArrayBuffer | Uint8Array} source @param {any} [options] */
  load(source, options = {}) {
    return this.#call("load", [source], options);
  }
  /** @param {any} [options] */
  probe(options = {}) {
    return this.#call("probe", [], options);
  }
  /** @param {any} [options] */
  merge(options = {}) {
    return this.#call("merge", [], options);
  }
  /** @param {any} [options] */
  sketch(options = {}) {
    return this.#call("sketch", [], options);
  }
  /** @param {any} [options] */
  report(options = {}) {
    return this.#call("report", [], options);
  }
  /** @param {any} options */
  attend(options) {
    return this.#call("attend", [], options);
  }
  /** @param {any} [options] */
  fold(options = {}) {
    return this.#call("fold", [], options);
  }
  /** @param {any} [options] */
  selftest(options = {}) {
    return this.#call("selftest", [], options);
  }
  /** @param {any} [options] */
  timings(options = {}) {
    return this.#call("timings", [], options);
  }
  variants() {
    return this.#call("variants", []);
  }
  /** @param {any} model @param {any} [options] */
  estimate(model, options = {}) {
    return this.#call("estimate", [model, options]);
  }
  memory() {
    return this.#call("memory", []);
  }

  /** Frees the session; its GPU buffers are destroyed. The Worker stays, for `memory` and `restart`. */
  free() {
    return this.#call("free", []);
  }

  /** A new session in the same Worker, after `free` or a lost device. @param {any} [options] */
  async restart(options = {}) {
    ({ adapter: this.adapter, version: this.version } = await this.#call("create", [options]));
  }

  /** Ends the Worker, whatever it is doing. */
  terminate() {
    this.#worker.terminate();
    const error = revive({ message: "the session was ended", code: "cancelled" });
    for (const call of this.#pending.values()) call.reject(error);
    this.#pending.clear();
  }
}
