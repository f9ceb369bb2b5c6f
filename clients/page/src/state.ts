/** The threads of the user, and the thread that the page shows. */

import { computed, effect, signal } from "@preact/signals";
import type {
  AgentShape,
  Event,
  OneRun,
  Question,
  RunShape,
  SnapshotShape,
  ThreadShape,
} from "retinue-client";
import { ApiError, get, list, post, segment, user } from "./api.ts";
import { LiveRun } from "./live.ts";
import { address, open, route } from "./route.ts";
import * as socket from "./socket.ts";

export const agents = signal<readonly AgentShape[]>([]);

// --- the list of threads

export const threads = signal<readonly ThreadShape[]>([]);
export const search = signal("");
const ROOT_RUNS = 20;
/** The kinds of events that change a tree, without words as they come. */
export const STRUCTURE = [
  "run_started run_finished step_started inference_finished tool_call_started tool_call_ready",
  "tool_call_finished tool_call_resumed messages_snapshot state_delta activity_snapshot",
  "child_started child_finished task_updated handoff error step_finished state_snapshot custom message_added message_dropped",
]
  .join(" ")
  .replaceAll(" ", ",");

const time = (thread: ThreadShape): number => Date.parse(thread.used_at ?? "") || 0;

function sorted(found: Iterable<ThreadShape>): ThreadShape[] {
  return [...found].sort((a, b) => time(b) - time(a));
}

/** The place of the list after which older threads follow; null at its end. */
let older: string | null = null;

/** Load the list from its beginning, or what follows the threads that are known. */
export async function loadThreads(isMore = false): Promise<void> {
  if (isMore && older === null) return;
  const asked = search.value;
  const query = asked ? `&q=${segment(asked.slice(0, 200))}` : "";
  const cursor = isMore ? `&cursor=${segment(older!)}` : "";
  older = null;
  const path = `api/v1/threads?limit=100${query}${cursor}`;
  const page = await get<{ items: ThreadShape[]; next_cursor: string | null }>(path);
  if (asked !== search.value) return;
  const known = new Set(page.items.map((one) => one.thread_id));
  const before = isMore ? threads.value.filter((one) => !known.has(one.thread_id)) : [];
  threads.value = sorted([...before, ...page.items]);
  older = page.next_cursor;
}

function changeThread(changed: ThreadShape): void {
  if (search.value && !changed.title.toLowerCase().includes(search.value.toLowerCase())) return;
  const others = threads.value.filter((one) => one.thread_id !== changed.thread_id);
  threads.value = sorted([changed, ...others]);
  const shown = conversation.value;
  if (shown?.threadId === changed.thread_id) void shown.update(changed);
}

// --- one thread

export class Conversation {
  /** Its root runs, the oldest first. */
  readonly runs = signal<readonly LiveRun[]>([]);
  readonly title = signal("");
  readonly state = signal<"loading" | "shown" | "missing">("loading");
  /** True if it has older runs, which are not loaded. */
  readonly hasOlder = signal(false);
  readonly questions = computed(() => this.runs.value.flatMap((run) => run.questions.value));
  /** The newest root run. */
  readonly newest = computed(() => this.runs.value.at(-1));
  private oldest: string | null = null;
  private closed = false;
  private readonly stops = new Map<string, () => void>();

  constructor(readonly threadId: string) {}

  async load(): Promise<void> {
    try {
      const thread = await get<ThreadShape>(`api/v1/threads/${segment(this.threadId)}`);
      this.title.value = thread.title;
      await this.loadRuns();
      this.state.value = "shown";
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) this.state.value = "missing";
      else if (!this.closed) window.setTimeout(() => void this.load(), 2000);
    }
  }

  close(): void {
    this.closed = true;
    for (const run of this.runs.value) this.leave(run);
  }

  /** Take over what the list of threads says, and look for runs that have begun elsewhere. */
  async update(thread: ThreadShape): Promise<void> {
    this.title.value = thread.title;
    if (this.state.value === "shown") await this.loadRuns().catch(() => undefined);
  }

  /** Load the runs that are not known yet, each with its snapshot. */
  async loadRuns(): Promise<void> {
    const path = `api/v1/runs?thread_id=${segment(this.threadId)}&limit=${ROOT_RUNS}`;
    const page = await get<{ items: RunShape[]; next_cursor: string | null }>(path);
    if (this.oldest === null) {
      this.oldest = page.next_cursor;
      this.hasOlder.value = page.next_cursor !== null;
    }
    await this.add(page.items);
  }

  async loadOlder(): Promise<void> {
    if (this.oldest === null) return;
    const path = `api/v1/runs?thread_id=${segment(this.threadId)}&limit=${ROOT_RUNS}`;
    const cursor = `&cursor=${segment(this.oldest)}`;
    const page = await get<{ items: RunShape[]; next_cursor: string | null }>(path + cursor);
    this.oldest = page.next_cursor;
    this.hasOlder.value = page.next_cursor !== null;
    await this.add(page.items);
  }

  private async add(shapes: readonly RunShape[]): Promise<void> {
    const known = new Set(this.runs.value.map((run) => run.runId));
    const fresh = shapes
      .filter((shape) => shape.parent_run_id === null && !known.has(shape.run_id))
      .map((shape) => {
        const startedAt = shape.started_at === null ? null : Date.parse(shape.started_at);
        return new LiveRun(shape.run_id, shape.agent, shape.status, startedAt);
      });
    if (fresh.length === 0) return;
    await Promise.all(fresh.map((run) => this.begin(run)));
    if (this.closed) return;
    const present = new Set(this.runs.value.map((run) => run.runId));
    const all = [...this.runs.value, ...fresh.filter((run) => !present.has(run.runId))];
    this.runs.value = all.sort((a, b) => (a.startedAt ?? 0) - (b.startedAt ?? 0));
    for (const run of fresh) if (!present.has(run.runId)) this.follow(run);
  }

  private async begin(run: LiveRun): Promise<void> {
    run.load(await get<SnapshotShape>(`api/v1/runs/${segment(run.runId)}/snapshot`));
  }

  private follow(run: LiveRun): void {
    const isLarge = run.isLarge.peek();
    socket.subscribe(run.runId, {
      request: () => ({
        run_id: run.runId,
        ...(run.tree.seq > 0 ? { after: run.tree.seq } : {}),
        ...(isLarge ? { kinds: STRUCTURE } : {}),
      }),
      receive: (message) => {
        if (message.event !== undefined) run.receive(message.event as Event);
        if (message.ended) {
          run.ended = true;
          this.leave(run);
        }
        if (message.error !== undefined) window.setTimeout(() => void this.reload(run), 1000);
      },
    });
    if (isLarge) this.followRoster(run);
    const stop = effect(() => {
      if (run.isLarge.value === isLarge) return;
      stop();
      if (!run.ended) queueMicrotask(() => void this.reload(run));
    });
    this.stops.set(run.runId, stop);
  }

  /** Follow the last words of the runs in view, instead of all words. */
  private followRoster(run: LiveRun): void {
    const name = `${run.runId}/roster`;
    const inView = (): string[] =>
      [...run.inView.keys()]
        .flatMap((id) => run.tree.runs.get(id)?.ns.join("|") || [])
        .slice(0, 200);
    let isKnown = false;
    socket.subscribe(name, {
      request: () => ({ run_id: run.runId, roster: true, window: inView() }),
      receive: (message) => {
        const roster = message["roster"] as
          { rows: { run_id: string; tail?: string }[] } | undefined;
        if (roster === undefined) return;
        run.hear(roster.rows);
        // Before its first message the server may not have known the roster whose window changed.
        if (!isKnown) socket.send({ watch: name, window: inView() });
        isKnown = true;
      },
    });
    const stop = effect(() => {
      if (run.viewed.value > 0) socket.send({ watch: name, window: inView() });
    });
    this.stops.set(name, stop);
  }

  private leave(run: LiveRun): void {
    for (const name of [run.runId, `${run.runId}/roster`]) {
      this.stops.get(name)?.();
      this.stops.delete(name);
      socket.unsubscribe(name);
    }
  }

  /** Start again from the snapshot: a tree has become large or small, or its log was pruned. */
  private async reload(run: LiveRun): Promise<void> {
    this.leave(run);
    try {
      await this.begin(run);
      if (!this.closed) this.follow(run);
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) this.state.value = "missing";
      else window.setTimeout(() => !this.closed && void this.reload(run), 2000);
    }
  }

  /** Return the root run that has a run, and that run's id. */
  find(runId: string): LiveRun | undefined {
    return this.runs.value.find((run) => run.runId === runId || run.tree.runs.has(runId));
  }
}

/** Return what a run is to do that waits in the queue of its thread. */
export async function inputOf(runId: string): Promise<string> {
  const run = await get<OneRun>(`api/v1/runs/${segment(runId)}`).catch(() => null);
  return (run?.input ?? []).map((message) => message.text).join("\n");
}

export const conversation = signal<Conversation | null>(null);

effect(() => {
  const { threadId } = route.value;
  const known = conversation.peek();
  if (!user.value || threadId === known?.threadId) return;
  known?.close();
  const next = threadId === null ? null : new Conversation(threadId);
  conversation.value = next;
  void next?.load();
});

// --- what the user does

/** Start a run and show its thread. */
export async function start(
  agent: string,
  input: string,
  threadId: string | null,
  options: object = {},
): Promise<void> {
  const body = { agent, input, ...(threadId === null ? {} : { thread_id: threadId }), ...options };
  const run = await post<{ run_id: string; thread_id: string }>("api/v1/runs", body);
  const shown = conversation.value;
  if (shown?.threadId === run.thread_id) await shown.loadRuns();
  else open(address(run.thread_id));
}

/** Send a message to an agent at work. */
export async function steer(rootId: string, ns: readonly string[], input: string): Promise<void> {
  const body = { input, ...(ns.length > 0 ? { ns } : {}) };
  await post(`api/v1/runs/${segment(rootId)}/messages`, body);
}

export async function stop(rootId: string, ns: readonly string[], options: object): Promise<void> {
  const body = { reason: "stopped on the page", ...options };
  const part = ns.length > 0 ? { ns } : {};
  await post(`api/v1/runs/${segment(rootId)}/cancel`, { ...body, ...part });
}

/** Continue a conversation from one of its messages, on a new thread. */
export async function fork(runId: string, messageId: string, input: string): Promise<void> {
  const body = { message_id: messageId, ...(input ? { input } : {}) };
  const run = await post<{ thread_id: string }>(`api/v1/runs/${segment(runId)}/fork`, body);
  open(address(run.thread_id));
}

export async function answer(question: Question, decision: object): Promise<void> {
  const decisions = { [question.path]: decision };
  await post(`api/v1/runs/${segment(question.answerTo)}/decisions`, { decisions });
}

// --- beginning and end

let timer = 0;

effect(() => {
  void search.value;
  clearTimeout(timer);
  if (user.value) timer = window.setTimeout(() => void loadThreads().catch(() => undefined), 150);
});

effect(() => {
  if (!user.value) {
    socket.disconnect();
    conversation.peek()?.close();
    conversation.value = null;
    threads.value = [];
    agents.value = [];
    search.value = "";
    return;
  }
  socket.subscribe("threads", {
    request: () => ({}),
    receive: (message) => {
      if (message.caught_up) void loadThreads().catch(() => undefined);
      const changed = message["thread_updated"] as ThreadShape | undefined;
      if (changed !== undefined) changeThread(changed);
    },
  });
  socket.connect();
  void list<AgentShape>("api/v1/agents").then((found) => {
    agents.value = found.filter((one) => one.served);
  });
});
