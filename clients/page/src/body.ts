/** What a run shows, in order: what was said to it, its words, and its calls. */

import { textOf, type CallNode, type Message, type RunNode, type Tree } from "retinue-client";

export type Item =
  | {
      readonly kind: "user";
      readonly key: string;
      readonly message: Message;
      readonly text: string;
      /** True until the model has read it. */
      readonly isNew?: boolean;
    }
  | { readonly kind: "thought"; readonly key: string; readonly text: string }
  | {
      readonly kind: "text";
      readonly key: string;
      readonly text: string;
      readonly isOpen: boolean;
      readonly message: Message | null;
    }
  | { readonly kind: "images"; readonly key: string; readonly message: Message }
  | { readonly kind: "call"; readonly key: string; readonly callId: string }
  | { readonly kind: "past"; readonly key: string; readonly call: CallNode };

const reasoningOf = (message: Message): string =>
  (message.parts ?? []).map((part) => (part.type === "reasoning" ? part.text : "")).join("");

const hasImages = (message: Message): boolean =>
  (message.parts ?? []).some((part) => part.type === "image" && part.data !== null);

/** Return what a run shows. `before` has the ids of messages that earlier runs of the thread show. */
export function itemsOf(node: RunNode, before: ReadonlySet<string>): Item[] {
  const items: Item[] = [];
  const listed = new Set<string>();
  const results = new Map<string, string>();
  for (const one of node.messages)
    if (one.tool_call_id != null) results.set(one.tool_call_id, textOf(one));
  node.messages.forEach((message, place) => {
    if (before.has(message.id ?? "") || message.visibility === "internal") return;
    const key = message.id ?? `${place}`;
    const text = textOf(message);
    if (message.role === "user") {
      items.push({ kind: "user", key, message, text });
      if (hasImages(message)) items.push({ kind: "images", key: `${key}-i`, message });
    }
    if (message.role !== "assistant") return;
    const thought = reasoningOf(message);
    if (thought) items.push({ kind: "thought", key: `${key}-r`, text: thought });
    if (text) items.push({ kind: "text", key, text, isOpen: false, message });
    if (hasImages(message)) items.push({ kind: "images", key: `${key}-i`, message });
    for (const call of message.tool_calls ?? []) {
      listed.add(call.id);
      if (node.calls.has(call.id)) items.push({ kind: "call", key: call.id, callId: call.id });
      else
        items.push({
          kind: "past",
          key: call.id,
          call: pastCall(call.id, call.name, call.args, results),
        });
    }
  });
  const { open } = node;
  if (open !== null) {
    if (open.reasoning) items.push({ kind: "thought", key: `${open.id}-r`, text: open.reasoning });
    // The key is that of the whole message later, so that its text stays where it is.
    if (open.text) {
      items.push({ kind: "text", key: open.id, text: open.text, isOpen: true, message: null });
    }
  }
  for (const [place, message] of node.queued.entries()) {
    const key = message.id ?? `queued-${place}`;
    items.push({ kind: "user", key, message, text: textOf(message), isNew: true });
  }
  for (const id of node.calls.keys()) {
    if (!listed.has(id)) items.push({ kind: "call", key: id, callId: id });
  }
  return items;
}

function pastCall(
  callId: string,
  tool: string,
  args: Readonly<Record<string, unknown>>,
  results: ReadonlyMap<string, string>,
): CallNode {
  const result = results.get(callId) ?? null;
  return {
    callId,
    tool,
    status: "succeeded",
    step: 0,
    args,
    result,
    output: "",
    error: null,
    isTask: false,
    startedAt: null,
    endedAt: null,
    ticket: null,
    starting: [],
    children: [],
    activity: null,
  };
}

/** Return the last words of a run, for its closed card: of one that is done the first line of its answer. */
export function lastWords(
  node: RunNode,
  tail: string,
  lines: { first: (text: string) => string; last: (text: string) => string },
): string {
  if (node.status === "completed") return lines.first(node.response ?? "") || lines.last(tail);
  return lines.last(tail);
}

/** Return the agents from the root down to a run. */
export function pathOf(tree: Tree, node: RunNode): RunNode[] {
  const path = [node];
  for (let above = node.parentRunId; above !== null;) {
    const parent = tree.runs.get(above);
    if (parent === undefined) break;
    path.unshift(parent);
    above = parent.parentRunId;
  }
  return path;
}

/** Return the run at a namespace, else the nearest one above it that is known. */
export function runAt(
  tree: Tree,
  calls: readonly string[],
): { node: RunNode; exact: boolean } | null {
  const root = tree.root === null ? undefined : tree.runs.get(tree.root);
  if (root === undefined) return null;
  let node = root;
  for (const [depth, part] of calls.entries()) {
    const call = node.calls.get(part.split("~")[0] ?? "");
    const wanted = `tools:${part}`;
    const next = (call?.children ?? [])
      .map((id) => tree.runs.get(id))
      .find((child) => child?.ns[depth] === wanted);
    if (next === undefined) return { node, exact: false };
    node = next;
  }
  return { node, exact: true };
}

/** Return what a call does now, in a few words. */
export function callNow(node: RunNode): CallNode | undefined {
  return [...node.calls.values()].findLast(
    (call) => call.status === "running" || call.status === "new",
  );
}
