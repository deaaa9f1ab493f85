// The session in its Worker, and the calls that the page makes of it.
import { RemoteSession } from "./pkg/remote.js";

export class Engine {
  /** @type {RemoteSession | null} */ session = null;
  #running = new Map();
  /** Whether the browser could hand out a GPU if it were asked to. */
  adapter = null;

  /** Starts, or starts again on another backend. */
  async start(backend) {
    this.stop();
    this.session?.terminate();
    this.session = null;
    this.session = await RemoteSession.create({ backend });
    this.adapter = this.session.adapter;
    return this.adapter;
  }

  get version() {
    return this.session?.version ?? "";
  }

  /** Cancels everything that runs. */
  stop() {
    for (const controller of this.#running.values()) controller.abort();
    this.#running.clear();
  }

  cancel(key) {
    this.#running.get(key)?.abort();
    this.#running.delete(key);
  }

  /**
   * Makes a call that takes the place of the one before it under the same key. Resolves to undefined where another call
   * took its place in turn, or it was cancelled.
   * @param {string} key @param {string} method @param {any[]} args the last one is its options
   * @param {(progress: any) => void} [onProgress]
   */
  async latest(key, method, args, onProgress) {
    this.cancel(key);
    const controller = new AbortController();
    this.#running.set(key, controller);
    const options = { ...args.at(-1), signal: controller.signal, onProgress };
    try {
      const result = await this.session[method](...args.slice(0, -1), options);
      return controller.signal.aborted ? undefined : result;
    } catch (error) {
      if (error.code === "cancelled" || controller.signal.aborted) return undefined;
      throw error;
    } finally {
      if (this.#running.get(key) === controller) this.#running.delete(key);
    }
  }
}

/** What to try where there is no WebGPU, by the adapter's cause. */
export const REMEDIES = {
  insecure: "Open the page over https or on localhost: browsers hide WebGPU elsewhere.",
  missing:
    "Chrome and Edge have WebGPU from version 113, Safari from 26, Firefox from 141 on Windows and 145 on macOS; in " +
    "others it may stand behind a flag.",
  no_adapter:
    "Hardware acceleration may be off in the browser's settings, or this GPU on its blocklist: chrome://gpu says " +
    "which. On Linux, Chrome may want --enable-unsafe-webgpu and --enable-features=Vulkan.",
  device: "Another program may hold the GPU, or its driver may want an update. A reload often helps.",
};
