/**
 * A connection to the events of a run, a subtree or a thread, which goes on where it broke.
 *
 * Each event comes once and in order. In a page it is a WebSocket, because tabs share few other connections; elsewhere,
 * and with a token, it is a stream of server-sent events.
 */

import type { Event } from "./tree.js";

/** The state of a connection: everything that is stored was sent; the server is asked again. */
export type ConnectionStatus = "live" | "reconnecting";

export interface ConnectOptions {
  /** The address of the server, such as `http://127.0.0.1:8123`. */
  readonly url: string;
  /** A bearer token. Without it the cookie of the page's session is sent. */
  readonly token?: string;
  readonly runId?: string;
  readonly threadId?: string;
  /** The place after which to begin: a number, or of a thread the `id` of an event or `cursorOf(…)`. */
  readonly after?: number | string;
  /** Only a subtree, as events name it. */
  readonly ns?: readonly string[];
  readonly kinds?: readonly Event["kind"][];
  /** `idle`: the events end where the run waits for a human, too. */
  readonly until?: "idle";
  /** Milliseconds for which deltas are joined; a message that is complete comes without its deltas. */
  readonly merge?: number;
  /** Called whenever everything that is stored has come, with the place that was reached, and when the connection breaks. */
  readonly onStatus?: (status: ConnectionStatus, cursor: string) => void;
  /** Ends the connection. */
  readonly signal?: AbortSignal;
  /** Seconds for which a server that is away is tried again; 60. */
  readonly patience?: number;
  readonly fetch?: typeof fetch;
  /** Opens a WebSocket; by default one is opened where there is no token. */
  readonly webSocket?: (address: string) => WebSocket;
}

/** An event on the stream of a thread: `log_id` is the root run whose log has it, `id` the place of the reader after it. */
export type ThreadEvent = Event & { readonly log_id: string; readonly id?: string };

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
/** The codes with which a server closes a WebSocket. */
const [DONE, REVOKED, REFUSED] = [1000, 1008, 4000];

/** A part of a stream in the shape of LangGraph's, in which every sub-agent is a call named `task`. */
export interface StreamPart {
  readonly type: string;
  readonly ns: readonly string[];
  /** Each mode has a shape of its own. */
  readonly data: any;
}

/** Yield the events of a run or thread as they are stored, until its log has ended. */
export function connect(
  options: ConnectOptions & { readonly threadId: string },
): AsyncGenerator<ThreadEvent, void, undefined>;
export function connect(options: ConnectOptions): AsyncGenerator<Event, void, undefined>;
export async function* connect(options: ConnectOptions): AsyncGenerator<Event, void, undefined> {
  for await (const events of connectBatches(options)) yield* events;
}

/** The same, with events that came together in one array: reduce them together, and paint once. */
export function connectBatches(
  options: ConnectOptions & { readonly threadId: string },
): AsyncGenerator<readonly ThreadEvent[], void, undefined>;
export function connectBatches(
  options: ConnectOptions,
): AsyncGenerator<readonly Event[], void, undefined>;
export function connectBatches(
  options: ConnectOptions,
): AsyncGenerator<readonly Event[], void, undefined> {
  const open = options.webSocket ?? (options.token === undefined ? browserSocket : undefined);
  const merge = options.merge ? String(options.merge) : undefined;
  return follow<Event>(options, "events", { merge }, open);
}

/** Yield a run as LangGraph-shaped parts. */
export async function* connectParts(
  options: ConnectOptions & { readonly modes?: readonly string[] },
): AsyncGenerator<StreamPart, void, undefined> {
  for await (const parts of follow<StreamPart>(options, "parts", {
    modes: options.modes?.join(),
  })) {
    yield* parts;
  }
}

function browserSocket(address: string): WebSocket {
  return new WebSocket(address);
}

/** What came at once. */
interface Piece<T> {
  readonly found: readonly T[];
  /** The place of the reader after it. */
  readonly cursor?: string;
  /** Everything that is stored has come. */
  readonly isCaughtUp?: boolean;
  /** The log has ended. */
  readonly isLast?: boolean;
}

async function* follow<T>(
  options: ConnectOptions,
  what: string,
  query: Query,
  open?: (address: string) => WebSocket,
): AsyncGenerator<readonly T[], void, undefined> {
  const patience = (options.patience ?? 60) * 1000;
  let after = options.after === undefined ? "" : String(options.after);
  let pause = FIRST_PAUSE;
  let lostAt = 0;
  while (!options.signal?.aborted) {
    const address = addressOf(options, what, { ...query, after });
    try {
      const pieces =
        open === undefined
          ? readStream<T>(options, address)
          : readSocket<T>(options, open, address);
      for await (const piece of pieces) {
        [pause, lostAt] = [FIRST_PAUSE, 0];
        if (piece.cursor) after = piece.cursor;
        if (piece.found.length > 0) yield piece.found;
        if (piece.isCaughtUp) options.onStatus?.("live", after);
        if (piece.isLast) return;
      }
    } catch (error) {
      if (options.signal?.aborted) return;
      const isFinal = error instanceof ServerError && error.status < 500 && error.status !== 429;
      lostAt ||= Date.now();
      if (isFinal || Date.now() - lostAt > patience) throw error;
    }
    if (options.signal?.aborted) return;
    options.onStatus?.("reconnecting", after);
    await sleep(pause * (0.5 + Math.random()), options.signal);
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }
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

// --- over a WebSocket

type Message = {
  readonly id?: string;
  readonly seq?: number;
  readonly caught_up?: number | string;
};

async function* readSocket<T>(
  options: ConnectOptions,
  open: (address: string) => WebSocket,
  address: URL,
): AsyncGenerator<Piece<T>> {
  const socket = open(address.href.replace(/^http/, "ws"));
  const received: string[] = [];
  let wake = (): void => undefined;
  let end: CloseEvent | undefined;
  socket.onmessage = (message) => (received.push(message.data as string), wake());
  socket.onclose = (closed) => ((end = closed), wake());
  const stop = (): void => socket.close();
  options.signal?.addEventListener("abort", stop, { once: true });
  try {
    for (;;) {
      for (const text of received.splice(0)) yield pieceOf<T>(JSON.parse(text));
      if (received.length > 0) continue;
      if (end !== undefined) break;
      await new Promise<void>((resolve) => (wake = resolve));
    }
  } finally {
    options.signal?.removeEventListener("abort", stop);
    socket.close();
  }
  if (end.code === DONE) yield { found: [], isLast: true };
  else if (end.code === REVOKED) throw new ServerError(401, "unauthorized", end.reason);
  else if (end.code >= REFUSED) throw new ServerError(end.code - REFUSED, "refused", end.reason);
  else throw new Error(`the connection to ${address.origin} ended`);
}

function pieceOf<T>(message: Message | readonly Message[]): Piece<T> {
  const all: readonly Message[] = Array.isArray(message) ? message : [message];
  const [first] = all;
  if (first?.caught_up !== undefined) {
    return { found: [], cursor: String(first.caught_up), isCaughtUp: true };
  }
  const found = all.filter((one) => "kind" in one);
  const placed = found.findLast((one) => one.id !== undefined || (one.seq && !("log_id" in one)));
  const cursor = placed === undefined ? "" : (placed.id ?? String(placed.seq));
  return { found: found as readonly T[], cursor };
}

// --- as server-sent events

async function* readStream<T>(options: ConnectOptions, address: URL): AsyncGenerator<Piece<T>> {
  const headers: Record<string, string> = { accept: "text/event-stream" };
  if (options.token !== undefined) headers["authorization"] = `Bearer ${options.token}`;
  const response = await (options.fetch ?? fetch)(address, {
    headers,
    credentials: "same-origin",
    signal: options.signal ?? null,
  });
  if (!response.ok || response.body === null) throw await refusal(response);
  for await (const blocks of blocksOf(response.body)) {
    const frames = blocks.map(frameOf);
    const found = frames.flatMap((frame) => (frame.data ? [withId<T>(frame)] : []));
    const cursor = frames.findLast((frame) => frame.id !== undefined)?.id ?? "";
    const caughtUp = frames.find((frame) => frame.caughtUp !== undefined)?.caughtUp;
    if (found.length > 0 || cursor) yield { found, cursor };
    if (caughtUp !== undefined) yield { found: [], cursor: caughtUp, isCaughtUp: true };
    if (frames.some((frame) => frame.restarts)) return;
  }
  yield { found: [], isLast: true };
}

async function refusal(response: Response): Promise<ServerError> {
  const body = (await response.json().catch(() => ({}))) as { detail?: string; code?: string };
  const detail = body.detail ?? `the server answered ${response.status}`;
  return new ServerError(response.status, body.code ?? "unknown", detail);
}

/** Yield the blocks of a stream of server-sent events that came together. */
async function* blocksOf(body: ReadableStream<Uint8Array>): AsyncGenerator<string[]> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      const blocks = (rest + decoder.decode(piece.value, { stream: true })).split("\n\n");
      rest = blocks.pop() ?? "";
      if (blocks.length > 0) yield blocks;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

interface Frame {
  readonly id?: string;
  readonly data?: string;
  readonly caughtUp?: string;
  /** The server ends: connect again. */
  readonly restarts?: boolean;
}

function frameOf(block: string): Frame {
  const frame: { -readonly [K in keyof Frame]: Frame[K] } = {};
  for (const line of block.split("\n")) {
    const [, name, value = ""] = /^(\w*): ?(.*)$/.exec(line) ?? [];
    if (name === "id") frame.id = value;
    else if (name === "data")
      frame.data = frame.data === undefined ? value : `${frame.data}\n${value}`;
    else if (name === "retry") frame.restarts = true;
    else if (name === "" && value.startsWith("caught_up ")) frame.caughtUp = value.slice(10);
  }
  return frame;
}

/** Return the event of a frame; that of a thread has its id, as over a WebSocket. */
function withId<T>(frame: Frame): T {
  const event = JSON.parse(frame.data!);
  return "log_id" in event && frame.id ? { id: frame.id, ...event } : event;
}

function sleep(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
