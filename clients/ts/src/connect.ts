/** A connection to the events of a run, a subtree or a thread, which goes on where it broke. */

import type { Event } from "./tree.js";

export interface ConnectOptions {
  /** The address of the server, such as `http://127.0.0.1:8123`. */
  readonly url: string;
  /** A bearer token. Without it the cookie of the page's session is sent. */
  readonly token?: string;
  readonly runId?: string;
  readonly threadId?: string;
  /** The last event that is known: a number, or of a thread the id of an event. */
  readonly after?: number | string;
  /** Only a subtree, as events name it. */
  readonly ns?: readonly string[];
  readonly kinds?: readonly Event["kind"][];
  /** `idle`: the events end where the run waits for a human, too. */
  readonly until?: "idle";
  /** Ends the connection. */
  readonly signal?: AbortSignal;
  /** Seconds for which a server that is away is tried again; 60. */
  readonly patience?: number;
  readonly fetch?: typeof fetch;
}

/** The server refused the request: trying again would not help. */
export class ServerError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    detail: string,
  ) {
    super(detail);
  }
}

const FIRST_PAUSE = 250;
const LONGEST_PAUSE = 10_000;

/** A part of a stream in the shape of LangGraph's, in which every sub-agent is a call named `task`. */
export interface StreamPart {
  readonly type: string;
  readonly ns: readonly string[];
  /** Each mode has a shape of its own. */
  readonly data: any;
}

/** Yield the events of a run or thread as they are stored, until its log has ended. */
export function connect(options: ConnectOptions): AsyncGenerator<Event, void, undefined> {
  return read<Event>(options, "events", {});
}

/** Yield a run as LangGraph-shaped parts. */
export function connectParts(
  options: ConnectOptions & { readonly modes?: readonly string[] },
): AsyncGenerator<StreamPart, void, undefined> {
  return read<StreamPart>(options, "parts", { modes: options.modes?.join(",") });
}

async function* read<T>(
  options: ConnectOptions,
  what: "events" | "parts",
  query: Query,
): AsyncGenerator<T, void, undefined> {
  const patience = (options.patience ?? 60) * 1000;
  let after = options.after === undefined ? "" : String(options.after);
  let pause = FIRST_PAUSE;
  let lostAt = 0;
  while (!options.signal?.aborted) {
    try {
      for await (const frame of frames(options, addressOf(options, what, { ...query, after }))) {
        [pause, lostAt] = [FIRST_PAUSE, 0];
        if (frame.id) after = frame.id;
        if (frame.restarts) break;
        if (frame.data) yield JSON.parse(frame.data) as T;
        if (frame.ended) return;
      }
    } catch (error) {
      if (options.signal?.aborted) return;
      if (error instanceof ServerError && error.status < 500 && error.status !== 429) throw error;
      lostAt ||= Date.now();
      if (Date.now() - lostAt > patience) throw error;
    }
    await sleep(pause * (0.5 + Math.random()), options.signal);
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }
}

interface Frame {
  readonly id?: string;
  readonly data?: string;
  /** The server ends: connect again. */
  readonly restarts?: boolean;
  /** The log has ended. */
  readonly ended?: boolean;
}

type Query = Readonly<Record<string, string | undefined>>;

function addressOf(options: ConnectOptions, what: string, query: Query): URL {
  const { runId, threadId } = options;
  if ((runId === undefined) === (threadId === undefined)) {
    throw new TypeError("connect: give either a runId or a threadId");
  }
  const [of, id] = runId === undefined ? ["threads", threadId!] : ["runs", runId];
  const path = `/api/v1/${of}/${encodeURIComponent(id)}/${what}`;
  const url = new URL(options.url.replace(/\/+$/, "") + path);
  const all = {
    ...query,
    ns: options.ns?.join("|"),
    kinds: options.kinds?.join(","),
    until: options.until,
  };
  for (const [name, value] of Object.entries(all)) if (value) url.searchParams.set(name, value);
  return url;
}

async function* frames(options: ConnectOptions, address: URL): AsyncGenerator<Frame> {
  const headers: Record<string, string> = { accept: "text/event-stream" };
  if (options.token !== undefined) headers["authorization"] = `Bearer ${options.token}`;
  const response = await (options.fetch ?? fetch)(address, {
    headers,
    credentials: "same-origin",
    signal: options.signal ?? null,
  });
  if (!response.ok || response.body === null) throw await refusal(response);
  yield* serverSentEvents(response.body);
  yield { ended: true };
}

async function refusal(response: Response): Promise<ServerError> {
  const body = (await response.json().catch(() => ({}))) as { detail?: string; code?: string };
  const detail = body.detail ?? `the server answered ${response.status}`;
  return new ServerError(response.status, body.code ?? "unknown", detail);
}

/** Decode a stream of server-sent events. */
async function* serverSentEvents(body: ReadableStream<Uint8Array>): AsyncGenerator<Frame> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      const blocks = (rest + decoder.decode(piece.value, { stream: true })).split("\n\n");
      rest = blocks.pop() ?? "";
      for (const block of blocks) yield frameOf(block);
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

function frameOf(block: string): Frame {
  const frame: { id?: string; data?: string; restarts?: boolean } = {};
  for (const line of block.split("\n")) {
    const [, name, value] = /^(\w*): ?(.*)$/.exec(line) ?? [];
    if (name === "id") frame.id = value ?? "";
    else if (name === "data")
      frame.data = frame.data === undefined ? value! : `${frame.data}\n${value}`;
    else if (name === "retry") frame.restarts = true;
  }
  return frame;
}

function sleep(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
