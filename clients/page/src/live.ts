/**
 * One root run as the page follows it: its tree, and a signal for each run of it.
 *
 * Events gather until the next frame; then the tree is reduced once. A run whose card is open gets its new node at
 * once, the others at most four times a second. So the work of a frame follows what is seen, not how fast agents talk.
 */

import { batch, signal, type Signal } from "@preact/signals";
import {
  addUsage,
  EMPTY,
  fromSnapshot,
  hasEnded,
  questions,
  reduceAll,
  tailOf,
  type Event,
  type Question,
  type RunNode,
  type SnapshotShape,
  type TaskNode,
  type Tree,
  type Usage,
} from "retinue-client";
import { statusOf } from "./format.ts";

/** What a run and everything below it come to. */
export interface Sum {
  readonly usage: Required<Usage>;
  readonly agents: number;
  /** The open questions below it, without its own. */
  readonly waiting: number;
}

export interface RunView {
  readonly node: Signal<RunNode>;
  readonly sum: Signal<Sum>;
  /** The end of its text, of a tree that is too large for all its words. */
  readonly tail: Signal<string>;
  /** True from the click on Stop until the log says that it has stopped. */
  readonly stopping: Signal<boolean>;
}

const SLOW = 250;
const MOST_EVENTS = 5000;
const DELTAS = new Set<Event["kind"]>([
  "text_delta",
  "reasoning_delta",
  "tool_call_args_delta",
  "tool_call_stream_delta",
]);

/** With more runs at work than this, the server sends the last words of those in view, not all words. */
const LARGE = 60;

/** The runs whose cards are open: their text is drawn in each frame. */
export const watched = new Set<string>();
/** Changes once a second, for the clocks that run. */
export const now = signal(Date.now());
setInterval(() => (now.value = Date.now()), 1000);

const dirty = new Set<LiveRun>();
let frame = 0;

function schedule(run: LiveRun): void {
  dirty.add(run);
  if (frame !== 0) return;
  frame = document.hidden
    ? window.setTimeout(flush, SLOW)
    : requestAnimationFrame(() => window.setTimeout(flush));
}

function flush(): void {
  frame = 0;
  const runs = [...dirty];
  dirty.clear();
  batch(() => runs.forEach((run) => run.flush()));
}

export class LiveRun {
  tree: Tree = EMPTY;
  /** Its root node exists. */
  readonly begun = signal(false);
  /** What the list of runs says, until its first event. */
  readonly listed: Signal<string>;
  readonly questions = signal<readonly Question[]>([]);
  readonly tasks = signal<readonly TaskNode[]>([]);
  /** More runs are at work than the page follows word by word. */
  readonly isLarge = signal(false);
  /** The runs in view, of which a large tree gets the last words. */
  readonly inView = new Map<string, number>();
  /** Grows when other runs have come into view. */
  readonly viewed = signal(0);
  /** Grows at most four times a second, while anything in it changes. */
  readonly beat = signal(0);
  /** The newest events, for the tab that shows them. */
  readonly events: Event[] = [];
  /** True once its log has ended. */
  ended = false;
  private readonly views = new Map<string, RunView>();
  private pending: Event[] = [];
  private readonly late = new Set<string>();
  private slowTimer = 0;
  private viewTimer = 0;

  constructor(
    readonly runId: string,
    readonly agent: string,
    status: string,
    readonly startedAt: number | null,
  ) {
    this.listed = signal(status);
  }

  get root(): RunNode | undefined {
    return this.tree.root === null ? undefined : this.tree.runs.get(this.tree.root);
  }

  /** Return the signals of a run of the tree. */
  view(runId: string): RunView | undefined {
    const known = this.views.get(runId);
    if (known !== undefined) return known;
    const node = this.tree.runs.get(runId);
    if (node === undefined) return undefined;
    const sum: Sum = { usage: addUsage({ ...node.usage }, {}), agents: 1, waiting: 0 };
    const view = {
      node: signal(node),
      sum: signal(sum),
      tail: signal(""),
      stopping: signal(false),
    };
    this.views.set(runId, view);
    return view;
  }

  /** Take over the last words of runs in view. */
  hear(rows: readonly { readonly run_id: string; readonly tail?: string }[]): void {
    batch(() => {
      for (const row of rows) {
        const view = row.tail === undefined ? undefined : this.view(row.run_id);
        if (view !== undefined) view.tail.value = row.tail!;
      }
    });
  }

  /** Note that a run comes into view; return what ends that. */
  see(runId: string): () => void {
    const count = (by: number): void => {
      this.inView.set(runId, (this.inView.get(runId) ?? 0) + by);
      if (this.inView.get(runId) === 0) this.inView.delete(runId);
      clearTimeout(this.viewTimer);
      this.viewTimer = window.setTimeout(() => (this.viewed.value += 1), SLOW);
    };
    count(1);
    return () => count(-1);
  }

  load(snapshot: SnapshotShape): void {
    const tree = fromSnapshot(snapshot);
    if (tree.seq < this.tree.seq) return;
    this.tree = tree;
    batch(() => {
      for (const [id, view] of this.views) {
        const node = tree.runs.get(id);
        if (node !== undefined) view.node.value = node;
        view.tail.value = "";
      }
      this.settle();
    });
  }

  receive(event: Event): void {
    this.pending.push(event);
    schedule(this);
  }

  flush(): void {
    const events = this.pending;
    this.pending = [];
    if (events.length === 0) return;
    this.tree = reduceAll(this.tree, events);
    this.events.push(...events);
    if (this.events.length > MOST_EVENTS) this.events.splice(0, this.events.length - MOST_EVENTS);
    const quick = new Set<string>();
    let isStructural = false;
    for (const event of events) {
      const isDelta = DELTAS.has(event.kind);
      isStructural ||= !isDelta;
      if (!isDelta || watched.has(event.run_id)) quick.add(event.run_id);
      else this.late.add(event.run_id);
      if (event.parent_run_id !== null && !isDelta) quick.add(event.parent_run_id);
    }
    for (const id of quick) this.show(id);
    if (isStructural) this.settle(this.tree.runs.size > 60);
    else this.beatSoon();
  }

  private show(id: string): void {
    this.late.delete(id);
    const node = this.tree.runs.get(id);
    const view = this.views.get(id);
    if (node === undefined || view === undefined) return;
    view.node.value = node;
    if (statusOf(node.status) !== "running") view.stopping.value = false;
  }

  /** Bring up to date what follows from the whole tree; of a large one at most four times a second. */
  private settle(isLarge = false): void {
    this.begun.value = this.tree.root !== null;
    if (this.root !== undefined) this.listed.value = this.root.status;
    if (isLarge) {
      this.beatSoon();
      return;
    }
    this.settleNow();
    this.beatSoon();
  }

  private settleNow(): void {
    this.questions.value = questions(this.tree);
    this.tasks.value = [...this.tree.tasks.values()];
    let working = 0;
    for (const node of this.tree.runs.values()) if (!hasEnded(node)) working += 1;
    this.isLarge.value = working > LARGE;
    this.sumUp();
  }

  private beatSoon(): void {
    this.slowTimer ||= window.setTimeout(() => {
      this.slowTimer = 0;
      batch(() => {
        for (const id of [...this.late]) this.show(id);
        this.settleNow();
        this.beat.value += 1;
      });
    }, SLOW);
  }

  private sumUp(): void {
    const asked = new Map<string, number>();
    for (const one of this.questions.value) asked.set(one.runId, (asked.get(one.runId) ?? 0) + 1);
    const add = (node: RunNode): Sum => {
      let sum: Sum = { usage: node.usage, agents: 1, waiting: 0 };
      for (const call of node.calls.values()) {
        for (const id of call.children) {
          const child = this.tree.runs.get(id);
          if (child === undefined) continue;
          const below = add(child);
          sum = {
            usage: addUsage(sum.usage, below.usage),
            agents: sum.agents + below.agents,
            waiting: sum.waiting + below.waiting + (asked.get(id) ?? 0),
          };
        }
      }
      const view = this.views.get(node.runId);
      if (view !== undefined && !isSame(view.sum.value, sum)) view.sum.value = sum;
      return sum;
    };
    if (this.root !== undefined) add(this.root);
  }
}

function isSame(one: Sum, other: Sum): boolean {
  if (one.agents !== other.agents || one.waiting !== other.waiting) return false;
  const names = Object.keys(one.usage) as (keyof Usage)[];
  return names.every((name) => one.usage[name] === other.usage[name]);
}

/** Return the last words of a run. */
export function tailFor(view: RunView): string {
  const node = view.node.value;
  return (!hasEnded(node) && view.tail.value) || tailOf(node);
}
