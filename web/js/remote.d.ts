import type {
  Adapter, AttendOptions, Call, CaptureInfo, Check, CreateOptions, FoldOptions, FoldResult, HeadAttention, LoadOptions,
  Memory, MergeResult, MethodFigures, ModelShape, Options, PairRows, Report, SketchResult, Timing,
} from "./kvfold.js";

/** A session in a Worker: the methods of `Session`, each a promise. */
export class RemoteSession {
  private constructor(worker: Worker);
  static create(options?: CreateOptions): Promise<RemoteSession>;
  readonly adapter: Adapter;
  readonly version: string;
  load(source: File | Blob | ArrayBuffer | Uint8Array, options?: LoadOptions): Promise<CaptureInfo>;
  probe(options?: Options & Call): Promise<PairRows[]>;
  merge(options?: Options & Call & { rows?: boolean }): Promise<MergeResult>;
  sketch(options?: Options & Call & { layers?: number[] }): Promise<SketchResult>;
  report(options?: Options & Call): Promise<Report>;
  attend(options: Options & Call & AttendOptions): Promise<HeadAttention>;
  fold(options?: Options & Call & FoldOptions): Promise<FoldResult>;
  selftest(options?: Call): Promise<Check[]>;
  timings(options?: Call): Promise<Timing[]>;
  variants(): Promise<string[]>;
  estimate(model: ModelShape, options?: Options): Promise<MethodFigures[]>;
  memory(): Promise<Memory>;
  /** Frees the session; its GPU buffers are destroyed. The Worker stays, for `memory` and `restart`. */
  free(): Promise<void>;
  /** A new session in the same Worker, after `free` or a lost device. */
  restart(options?: CreateOptions): Promise<void>;
  /** Ends the Worker, whatever it is doing. */
  terminate(): void;
}
