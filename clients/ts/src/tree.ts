/**
 * The tree of runs and calls that the events of one log describe.
 *
 * A tree never changes: `reduce` returns a new one that shares what the event left alone. A node whose identity is the
 * same is the same, so a view draws again only what changed.
 */

import type {
  CallShape,
  Message,
  Receipt,
  RetinueEvent,
  RunStatus,
  SnapshotShape,
  SuspendTicket,
  TreeShape,
  Usage,
} from "./events.js";

export type CallStatus = CallShape["status"];
export type Event = RetinueEvent;

/** An answer that the model has begun and not ended. */
export interface OpenMessage {
  readonly id: string;
  readonly text: string;
  readonly reasoning: string;
  /** The JSON text of the arguments so far, by call id. */
  readonly calls: ReadonlyMap<string, string>;
}

/** A run that waits for its model provider. */
export interface Wait {
  readonly reason: string;
  readonly message: string;
  /** When it goes on, in milliseconds; null if that is not known. */
  readonly until: number | null;
  /** The requests before its own, where that is known. */
  readonly position: number | null;
}

/** What a call reports while it works. */
export interface Activity {
  readonly type: string;
  readonly content: unknown;
}

export interface CallNode {
  readonly callId: string;
  readonly tool: string;
  readonly status: CallStatus;
  readonly step: number;
  readonly args: Readonly<Record<string, unknown>>;
  readonly result: string | null;
  /** The end of its streamed output while it runs. */
  readonly output: string;
  readonly error: string | null;
  readonly isTask: boolean;
  readonly startedAt: number | null;
  readonly endedAt: number | null;
  /** The question that it waits for. */
  readonly ticket: SuspendTicket | null;
  /** Announced children that have not begun, by run id. */
  readonly starting: readonly string[];
  /** The run ids of its children, in order. */
  readonly children: readonly string[];
  readonly activity: Activity | null;
}

export interface RunNode {
  readonly runId: string;
  readonly parentRunId: string | null;
  /** The call that started it; null for the root. */
  readonly callId: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly threadId: string;
  readonly task: string;
  readonly model: string;
  readonly status: RunStatus;
  readonly termination: string;
  readonly error: string | null;
  readonly response: string | null;
  /** What it did by the account of the runtime, once it has ended or waits. */
  readonly receipt: Receipt | null;
  readonly notes: readonly string[];
  /** Times are in milliseconds since 1970, with fractions: questions stand in the order of these times. */
  readonly startedAt: number | null;
  readonly endedAt: number | null;
  readonly steps: number;
  /** The usage of its own model calls. */
  readonly usage: Required<Usage>;
  readonly calls: ReadonlyMap<string, CallNode>;
  /** What was said, without the results of its own calls: those are in `calls`. */
  readonly messages: readonly Message[];
  /** Messages that were added to it and that its model has not read. */
  readonly queued: readonly Message[];
  readonly open: OpenMessage | null;
  readonly wait: Wait | null;
  /** When its last event happened. */
  readonly at: number;
}

export interface TaskNode {
  readonly taskId: string;
  readonly agent: string;
  readonly runId: string | null;
  readonly callId: string;
  readonly status: string;
  readonly startedAt: number | null;
  readonly updatedAt: number | null;
}

export interface Tree {
  /** The number of the last event in it. */
  readonly seq: number;
  readonly root: string | null;
  readonly runs: ReadonlyMap<string, RunNode>;
  readonly tasks: ReadonlyMap<string, TaskNode>;
}

export const EMPTY: Tree = { seq: 0, root: null, runs: new Map(), tasks: new Map() };

const NO_USAGE: Required<Usage> = {
  requests: 0,
  input_tokens: 0,
  output_tokens: 0,
  cached_tokens: 0,
  cache_write_tokens: 0,
  reasoning_tokens: 0,
  cost: 0,
  waited: 0,
};
const TAIL = 400;
const TERMINAL = new Set<RunStatus>(["completed", "failed", "cancelled", "timeout"]);

export const hasEnded = (run: RunNode): boolean => TERMINAL.has(run.status);

export function addUsage(one: Required<Usage>, other: Usage): Required<Usage> {
  const sum = { ...one };
  for (const name of Object.keys(NO_USAGE) as (keyof Usage)[]) sum[name] += other[name] ?? 0;
  return sum;
}

export function textOf(message: Message): string {
  const texts = (message.parts ?? []).map((part) => (part.type === "text" ? part.text : ""));
  return texts.join("");
}

/** Return milliseconds of seconds since 1970, to the microsecond, as the ISO times of a snapshot are. */
const millis = (at: number): number => Math.round(at * 1e6) / 1e3;
const parsed = (iso: string | null): number | null =>
  iso === null
    ? null
    : (Date.parse(`${iso.slice(0, 23)}Z`) * 1e3 + Number(iso.slice(23, 26))) / 1e3;

// --- one event, or many

/** Return the tree after an event. An event that the tree has already seen changes nothing. */
export function reduce(tree: Tree, event: Event): Tree {
  return reduceAll(tree, [event]);
}

/** Return the tree after events; faster than `reduce` for each of them. */
export function reduceAll(tree: Tree, events: Iterable<Event>): Tree {
  const draft = new Draft(tree);
  for (const event of events) {
    // A notice has no number: it is about the owner of the log, and is not stored.
    if (event.seq !== 0 && event.seq <= draft.seq) continue;
    draft.apply(event);
    draft.seq = Math.max(draft.seq, event.seq);
  }
  return draft.finish(tree);
}

type Writable<T> = { -readonly [K in keyof T]: T[K] };
type RunDraft = Writable<Omit<RunNode, "calls">> & { calls: Map<string, CallNode> };

/** The changes of a batch: each node is copied once, when the batch first writes to it. */
class Draft {
  seq: number;
  private root: string | null;
  private runs: Map<string, RunNode>;
  private tasks: Map<string, TaskNode>;
  private readonly fresh = new Map<string, RunDraft>();
  private readonly freshCalls = new Set<RunDraft>();
  private hasNewRuns = false;
  private hasNewTasks = false;

  constructor(tree: Tree) {
    this.seq = tree.seq;
    this.root = tree.root;
    this.runs = tree.runs as Map<string, RunNode>;
    this.tasks = tree.tasks as Map<string, TaskNode>;
  }

  finish(tree: Tree): Tree {
    if (!this.hasNewRuns && !this.hasNewTasks && this.seq === tree.seq) return tree;
    return { seq: this.seq, root: this.root, runs: this.runs, tasks: this.tasks };
  }

  /** Return a run that this batch may write to. */
  private edit(run: RunNode): RunDraft {
    let draft = this.fresh.get(run.runId);
    if (draft === undefined) {
      draft = { ...run } as RunDraft;
      this.put(draft);
    }
    return draft;
  }

  private put(draft: RunDraft): void {
    if (!this.hasNewRuns) {
      this.runs = new Map(this.runs);
      this.hasNewRuns = true;
    }
    this.fresh.set(draft.runId, draft);
    this.runs.set(draft.runId, draft);
  }

  private calls(run: RunDraft): Map<string, CallNode> {
    if (!this.freshCalls.has(run)) {
      run.calls = new Map(run.calls);
      this.freshCalls.add(run);
    }
    return run.calls;
  }

  private setCall(run: RunDraft, callId: string, change: Partial<CallNode>): void {
    const call = run.calls.get(callId);
    if (call !== undefined) this.calls(run).set(callId, { ...call, ...change });
  }

  apply(event: Event): void {
    if (event.kind === "task_updated") return this.taskUpdated(event);
    if (event.kind === "run_started") return this.runStarted(event);
    const run = this.runs.get(event.run_id);
    if (!(event.kind in READERS)) {
      if (run?.wait) this.edit(run).wait = null;
      return;
    }
    const draft = run === undefined ? this.addRun(event) : this.edit(run);
    draft.at = millis(event.at);
    draft.wait = null;
    (READERS[event.kind as ReaderKind] as Reader<Event>)(this, event, draft);
  }

  private addRun(event: Event): RunDraft {
    const above = this.runs.get(event.parent_run_id ?? "");
    const last = event.ns.at(-1);
    const callId = last === undefined ? null : (last.replace(/^tools:/, "").split("~")[0] ?? null);
    const draft: RunDraft = {
      runId: event.run_id,
      parentRunId: event.parent_run_id,
      callId,
      agent: event.agent,
      ns: event.ns,
      threadId: "",
      task: "",
      model: "",
      status: "running",
      termination: "",
      error: null,
      response: null,
      receipt: null,
      notes: [],
      startedAt: millis(event.at),
      endedAt: null,
      steps: 0,
      usage: NO_USAGE,
      calls: new Map(),
      messages: [],
      queued: [],
      open: null,
      wait: null,
      at: millis(event.at),
    };
    this.root ??= event.run_id;
    this.put(draft);
    const call = above?.calls.get(callId ?? "");
    if (above !== undefined && call !== undefined) {
      this.setCall(this.edit(above), call.callId, {
        children: [...call.children, event.run_id],
        starting: call.starting.filter((one) => one !== event.run_id),
      });
    }
    return draft;
  }

  private runStarted(event: EventOf<"run_started">): void {
    const known = this.runs.get(event.run_id);
    const run = known === undefined ? this.addRun(event) : this.edit(known);
    if (known !== undefined) {
      Object.assign(run, { endedAt: null, error: null, status: "running" });
    }
    run.at = millis(event.at);
    run.threadId = event.thread_id;
    run.messages = event.messages;
    run.open = null;
    run.wait = null;
    const last = event.messages.at(-1);
    const said = last === undefined ? "" : textOf(last);
    run.task = said || run.task || (event.continues ? "(goes on)" : "");
  }

  private taskUpdated(event: EventOf<"task_updated">): void {
    if (!this.hasNewTasks) {
      this.tasks = new Map(this.tasks);
      this.hasNewTasks = true;
    }
    const known = this.tasks.get(event.task_id);
    this.tasks.set(event.task_id, {
      taskId: event.task_id,
      agent: event.agent,
      runId: event.parent_run_id,
      callId: event.call_id,
      status: event.status.toLowerCase(),
      startedAt: known?.startedAt ?? millis(event.at),
      updatedAt: millis(event.at),
    });
    const run = this.runs.get(event.parent_run_id ?? "");
    if (run?.calls.has(event.call_id)) {
      this.setCall(this.edit(run), event.call_id, { isTask: true });
    }
  }

  /** Return a call of a run, which begins with this event if it is not known. */
  callOf(run: RunDraft, event: CallEvent): CallNode {
    const known = run.calls.get(event.call_id);
    if (known !== undefined) return known;
    const call = newCall(event.call_id, event.tool_name, run.steps, millis(event.at));
    this.calls(run).set(event.call_id, call);
    return call;
  }

  change(run: RunDraft, callId: string, change: Partial<CallNode>): void {
    this.setCall(run, callId, change);
  }

  dropCall(run: RunDraft, callId: string): void {
    if (run.calls.get(callId)?.status === "new") this.calls(run).delete(callId);
  }

  knows(runId: string): boolean {
    return this.runs.has(runId);
  }
}

function newCall(callId: string, tool: string, step: number, at: number): CallNode {
  return {
    callId,
    tool,
    status: "new",
    step,
    args: {},
    result: null,
    output: "",
    error: null,
    isTask: false,
    startedAt: at,
    endedAt: null,
    ticket: null,
    starting: [],
    children: [],
    activity: null,
  };
}

function openMessage(run: RunDraft, id: string): OpenMessage {
  return run.open?.id === id ? run.open : { id, text: "", reasoning: "", calls: new Map() };
}

// --- what each kind of event changes

export type EventOf<K extends Event["kind"]> = Extract<Event, { readonly kind: K }>;
type CallEvent = EventOf<
  | "tool_call_started"
  | "tool_call_ready"
  | "tool_call_resumed"
  | "tool_call_finished"
  | "tool_call_stream_delta"
>;
type Reader<E extends Event> = (draft: Draft, event: E, run: RunDraft) => void;
type ReaderKind = keyof typeof READERS;

function beginCall(
  draft: Draft,
  run: RunDraft,
  callId: string,
  args: Readonly<Record<string, unknown>> | null,
): void {
  draft.change(run, callId, {
    status: "running",
    result: null,
    error: null,
    endedAt: null,
    ticket: null,
    args: args ?? {},
  });
}

const READERS = {
  messages_snapshot: (_draft, event, run) => {
    run.messages = [...event.messages, ...run.messages].filter(
      (message) => message.tool_call_id == null || !run.calls.has(message.tool_call_id),
    );
  },
  message_added: (_draft, event, run) => {
    run.queued = [...run.queued, event.message];
  },
  message_dropped: (_draft, event, run) => {
    run.queued = run.queued.filter((message) => message.id !== event.message_id);
  },
  step_started: (_draft, event, run) => {
    if (event.step > run.steps && run.queued.length > 0) {
      run.messages = [...run.messages, ...run.queued];
      run.queued = [];
    }
    run.steps = Math.max(run.steps, event.step);
    if (event.model) run.model = event.model;
  },
  text_delta: (_draft, event, run) => {
    const open = openMessage(run, event.message_id);
    run.open = { ...open, text: open.text + event.delta };
  },
  reasoning_delta: (_draft, event, run) => {
    const open = openMessage(run, event.message_id);
    run.open = { ...open, reasoning: open.reasoning + event.delta };
  },
  tool_call_args_delta: (_draft, event, run) => {
    const text = run.open?.calls.get(event.call_id);
    if (run.open == null || text === undefined) return;
    const calls = new Map(run.open.calls).set(event.call_id, text + event.delta);
    run.open = { ...run.open, calls };
  },
  inference_finished: (_draft, event, run) => {
    run.usage = addUsage(run.usage, event.usage);
    run.open = null;
    run.messages = [...run.messages, event.message];
    if (event.model) run.model = event.model;
  },
  inference_waiting: (_draft, event, run) => {
    run.wait = {
      reason: event.reason,
      message: event.message,
      until: millis(event.until),
      position: event.position,
    };
  },
  tool_call_started: (draft, event, run) => {
    draft.callOf(run, event);
    const open = openMessage(run, event.message_id);
    const calls = open.calls.has(event.call_id)
      ? open.calls
      : new Map(open.calls).set(event.call_id, "");
    run.open = { ...open, calls };
  },
  tool_call_ready: (draft, event, run) => {
    draft.callOf(run, event);
    draft.change(run, event.call_id, { startedAt: millis(event.at) });
    beginCall(draft, run, event.call_id, event.args);
  },
  tool_call_resumed: (draft, event, run) => {
    const call = draft.callOf(run, event);
    const asked = run.messages.flatMap((one) => one.tool_calls ?? []);
    const args = event.args ?? (call.status === "new" ? null : call.args);
    const found = asked.findLast((one) => one.id === event.call_id)?.args ?? null;
    beginCall(draft, run, event.call_id, args ?? found);
  },
  tool_call_stream_delta: (draft, event, run) => {
    const call = draft.callOf(run, event);
    if (call.status === "running" && call.children.length + call.starting.length === 0) {
      draft.change(run, event.call_id, { output: (call.output + event.delta).slice(-TAIL) });
    }
  },
  tool_call_finished: (draft, event, run) => {
    draft.callOf(run, event);
    const text = textOf(event.message);
    draft.change(run, event.call_id, {
      status: event.status,
      endedAt: millis(event.at),
      output: "",
      activity: null,
      result: text,
      ticket: event.result.suspension ?? null,
      ...(event.status === "failed" ? { error: text } : {}),
    });
  },
  child_started: (draft, event, run) => {
    const call = run.calls.get(event.call_id);
    if (call === undefined) return;
    const starting = draft.knows(event.child_run_id)
      ? call.starting
      : [...call.starting, event.child_run_id];
    draft.change(run, event.call_id, { output: "", starting });
  },
  handoff: (_draft, event, run) => {
    run.notes = [...run.notes, `handed over to ${event.to_agent}`];
  },
  compacted: (_draft, event, run) => {
    run.usage = addUsage(run.usage, event.usage);
    run.notes = [...run.notes, compactionNote(event)];
  },
  cache_prefix_changed: (_draft, event, run) => {
    run.notes = [...run.notes, `the cached prefix has changed: ${event.cause}`];
  },
  activity_snapshot: (draft, event, run) => {
    const activity = { type: event.activity_type, content: event.content };
    draft.change(run, event.call_id, { activity });
  },
  error: (draft, event, run) => {
    if (event.fatal) return;
    run.notes = [...run.notes, noteOf(event)];
    if (event.retry_model !== null) {
      const until = millis(event.at + event.retry_delay);
      const reason = event.code ?? "unknown";
      run.wait = { reason, message: event.message, until, position: null };
    }
    if (event.dropped_message_id === null || run.open?.id !== event.dropped_message_id) return;
    for (const callId of run.open.calls.keys()) draft.dropCall(run, callId);
    run.open = null;
  },
  run_finished: (draft, event, run) => {
    Object.assign(run, {
      status: event.status,
      termination: event.termination,
      endedAt: millis(event.at),
      error: event.error,
      response: event.response,
      receipt: event.receipt,
    });
    const waits = !TERMINAL.has(event.status) && event.status !== "running";
    if (event.status === "completed" || waits) run.open = null;
    for (const call of run.calls.values()) {
      if (call.status === "running") {
        draft.change(run, call.callId, { status: "cancelled", endedAt: millis(event.at) });
      }
    }
  },
} satisfies { [K in Event["kind"]]?: Reader<EventOf<K>> };

function compactionNote(event: EventOf<"compacted">): string {
  const [before, after] = [event.tokens_before, event.tokens_after].map(commas);
  const used = (event.usage.input_tokens ?? 0) + (event.usage.output_tokens ?? 0);
  const cost = used ? `, which cost ${commas(used)}` : "";
  const without = event.problem ? `, without a summary: ${event.problem}` : "";
  return `compacted: ${before} → ${after} tokens${cost}${without}`;
}

const commas = (value: number): string => value.toLocaleString("en-US");

function noteOf(event: EventOf<"error">): string {
  if (event.retry_model === null) return event.message;
  const delay = event.retry_delay ? ` in ${event.retry_delay.toFixed(1)} s` : "";
  const restarts = event.dropped_message_id ? "; the answer starts again" : "";
  return `retrying with ${event.retry_model}${delay}${restarts}: ${event.message}`;
}

// --- from a snapshot

/** Return the tree of a snapshot (`GET /api/v1/runs/{id}/snapshot`), ready for the events after its `seq`. */
export function fromSnapshot(snapshot: SnapshotShape): Tree {
  const runs = new Map<string, RunNode>();
  const tasks = new Map<string, TaskNode>();
  if (snapshot.run !== null) restoreRun(snapshot.run, null, null, runs);
  for (const task of snapshot.tasks) {
    tasks.set(task.task_id, {
      taskId: task.task_id,
      agent: task.agent,
      runId: task.run_id,
      callId: task.call_id ?? "",
      status: task.status,
      startedAt: parsed(task.started_at),
      updatedAt: parsed(task.updated_at),
    });
  }
  return { seq: snapshot.seq, root: snapshot.run?.run_id ?? null, runs, tasks };
}

function restoreRun(
  shown: TreeShape,
  parent: string | null,
  callId: string | null,
  runs: Map<string, RunNode>,
): void {
  const own = new Set(shown.calls.map((call) => call.call_id));
  const open = shown.open_message;
  runs.set(shown.run_id, {
    runId: shown.run_id,
    parentRunId: parent,
    callId,
    agent: shown.agent,
    ns: shown.ns,
    threadId: shown.thread_id,
    task: shown.task,
    model: shown.model,
    status: shown.status,
    termination: shown.termination,
    error: shown.error,
    response: shown.response,
    receipt: shown.receipt,
    notes: shown.notes,
    startedAt: parsed(shown.started_at),
    endedAt: parsed(shown.ended_at),
    steps: shown.steps,
    usage: addUsage(NO_USAGE, shown.usage),
    calls: new Map(shown.calls.map((call) => [call.call_id, restoreCall(call)])),
    messages: shown.messages.filter(
      (message) => message.tool_call_id == null || !own.has(message.tool_call_id),
    ),
    queued: shown.queued,
    open: open === null ? null : { ...open, calls: new Map(Object.entries(open.calls)) },
    wait: shown.wait && { ...shown.wait, until: parsed(shown.wait.until) },
    at: lastTime(shown),
  });
  for (const call of shown.calls) {
    for (const child of call.children) restoreRun(child, shown.run_id, call.call_id, runs);
  }
}

/** Return when something last happened in a run, as far as its snapshot says. */
function lastTime(shown: TreeShape): number {
  const times = shown.calls.flatMap((call) => [parsed(call.started_at), parsed(call.ended_at)]);
  return Math.max(0, ...[...times, parsed(shown.started_at), parsed(shown.ended_at)].map(Number));
}

function restoreCall(shown: CallShape): CallNode {
  return {
    callId: shown.call_id,
    tool: shown.tool,
    status: shown.status,
    step: shown.step,
    args: shown.args,
    result: shown.result,
    output: shown.output,
    error: shown.error,
    isTask: shown.is_task,
    startedAt: parsed(shown.started_at),
    endedAt: parsed(shown.ended_at),
    ticket: shown.ticket,
    starting: shown.starting,
    children: shown.children.map((child) => child.run_id),
    activity: null,
  };
}

// --- what a view asks a tree for

/** An open question, at any depth. */
export interface Question {
  readonly callId: string;
  /** The key of its decision. */
  readonly path: string;
  /** The run whose decisions they are: a background child has its own. */
  readonly answerTo: string;
  readonly runId: string;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly tool: string;
  readonly args: Readonly<Record<string, unknown>>;
  readonly ticket: SuspendTicket;
  readonly askedAt: number | null;
}

/** Return the open questions of a tree, in the order in which they were asked. */
export function questions(tree: Tree): Question[] {
  const root = tree.root === null ? undefined : tree.runs.get(tree.root);
  if (root === undefined) return [];
  return questionsOf(tree, root, root.runId, []).sort(
    (a, b) => (a.askedAt ?? 0) - (b.askedAt ?? 0),
  );
}

function questionsOf(
  tree: Tree,
  run: RunNode,
  answerTo: string,
  path: readonly string[],
): Question[] {
  const found: Question[] = [];
  for (const call of run.calls.values()) {
    const below: Question[] = [];
    for (const id of call.children) {
      const child = tree.runs.get(id);
      if (child === undefined) continue;
      const name = child.ns.at(-1)?.replace(/^tools:/, "") ?? call.callId;
      below.push(
        ...(call.isTask
          ? questionsOf(tree, child, child.runId, [])
          : questionsOf(tree, child, answerTo, [...path, name])),
      );
    }
    found.push(...below);
    const ticket = call.status === "suspended" ? call.ticket : null;
    if (ticket === null || (below.length > 0 && !call.isTask)) continue;
    // A child on another server may ask without calls in this log: then the ticket leads to its question.
    const own = ticket.path[0] === call.callId ? ticket.path : [call.callId];
    const asked = [...path, ...own];
    found.push({
      callId: call.callId,
      path: asked.join("/"),
      answerTo,
      runId: run.runId,
      agent: run.agent,
      ns: run.ns,
      tool: call.tool,
      args: call.args,
      ticket: { ...ticket, path: asked },
      askedAt: call.endedAt,
    });
  }
  return found;
}

/** Return the children of a run, in the order of its calls. */
export function childrenOf(tree: Tree, run: RunNode): RunNode[] {
  return [...run.calls.values()].flatMap((call) =>
    call.children.flatMap((id) => tree.runs.get(id) ?? []),
  );
}

/** Return the usage of a run and of everything below it. */
export function totalUsage(tree: Tree, run: RunNode): Required<Usage> {
  let total = run.usage;
  for (const child of childrenOf(tree, run)) total = addUsage(total, totalUsage(tree, child));
  return total;
}

/** Return the end of the text of a run: of the answer in progress, else of the last message with text. */
export function tailOf(run: RunNode): string {
  if (run.open !== null && run.open.text !== "") return run.open.text.slice(-TAIL);
  const spoken = run.messages.filter((message) => message.role === "assistant").map(textOf);
  return (spoken.findLast((text) => text !== "") ?? "").slice(-TAIL);
}
