/** What the parts of the page tell each other: which card is chosen, whom the composer addresses, which tab is open. */

import { computed, signal } from "@preact/signals";
import type { RunNode } from "retinue-client";
import { runAt } from "./body.ts";
import type { LiveRun } from "./live.ts";
import { route } from "./route.ts";
import { conversation } from "./state.ts";

/** A run, with the root run in whose tree it is. */
export interface Place {
  readonly live: LiveRun;
  readonly runId: string;
}

export type Tab = "Timeline" | "Tasks" | "State" | "Files" | "Events";
export const TABS: readonly Tab[] = ["Timeline", "Tasks", "State", "Files", "Events"];

export const tab = signal<Tab>("Timeline");
/** The card that the right pane describes. */
export const chosen = signal<Place | null>(null);
/** On a phone one pane is seen: the threads, the conversation or the details. */
export const pane = signal<"threads" | "chat" | "detail">("chat");
/** The details are a drawer on a middle width. */
export const drawer = signal(false);
/** The agent at work that the next message goes to; null: the thread. */
export const recipient = signal<Place | null>(null);
/** The message from which the next one forks. */
export const forkAt = signal<{ readonly runId: string; readonly messageId: string } | null>(null);
export const draft = signal("");
/** The cards that the user opened or closed, by run id. */
export const opened = signal<ReadonlyMap<string, boolean>>(new Map());
/** An error of something that the user did; what it was about is kept. */
export const problem = signal("");
/** An element for which a stop menu is open. */
export const menu = signal<{ readonly place: Place; readonly anchor: Element } | null>(null);
export const isKeysShown = signal(false);

export function setOpened(runId: string, isOpen: boolean): void {
  opened.value = new Map(opened.value).set(runId, isOpen);
}

/** The run that the address names as the root of the page; null where the whole thread is shown. */
export const focus = computed<{ place: Place; exact: boolean } | null>(() => {
  const { runId, calls } = route.value;
  const shown = conversation.value;
  if (shown === null || runId === null || calls.length === 0) return null;
  const live = shown.runs.value.find((run) => run.runId === runId);
  if (live === undefined || !live.begun.value) return null;
  void live.beat.value;
  const found = runAt(live.tree, calls);
  if (found === null || found.node.runId === live.tree.root) return null;
  return { place: { live, runId: found.node.runId }, exact: found.exact };
});

export const nodeOf = (place: Place): RunNode | undefined => place.live.tree.runs.get(place.runId);

/** Address the composer to a run, and put the cursor into it. */
export function messageTo(place: Place): void {
  forkAt.value = null;
  recipient.value = place;
  pane.value = "chat";
  focusComposer();
}

export function forkFrom(runId: string, messageId: string, text: string): void {
  recipient.value = null;
  forkAt.value = { runId, messageId };
  draft.value = text;
  focusComposer();
}

export function focusComposer(): void {
  queueMicrotask(() => document.querySelector<HTMLElement>(".composer textarea")?.focus());
}
