/** The trees of a thread: one for each root run, in the order in which the runs began. */

import type { ThreadEvent } from "./connect.js";
import { EMPTY, hasEnded, reduceAll, type Event, type Tree } from "./tree.js";

/** The tree of each root run, by its id. */
export type Thread = ReadonlyMap<string, Tree>;

/** Return the trees after events of the thread's stream. A tree that they left alone keeps its identity. */
export function reduceThread(thread: Thread, events: Iterable<ThreadEvent>): Thread {
  const byLog = new Map<string, Event[]>();
  for (const event of events) {
    const known = byLog.get(event.log_id);
    if (known === undefined) byLog.set(event.log_id, [event]);
    else known.push(event);
  }
  if (byLog.size === 0) return thread;
  const after = new Map(thread);
  for (const [logId, found] of byLog) after.set(logId, reduceAll(after.get(logId) ?? EMPTY, found));
  return after;
}

/** Return the place after which to follow a thread of which these trees are known. */
export function cursorOf(thread: Thread): string {
  const begun = [...thread].filter(([, tree]) => tree.seq > 0).reverse();
  const wanted = begun.filter(([, tree], place) => place === 0 || !rests(tree));
  return wanted.map(([logId, tree]) => `${logId}:${tree.seq}`).join(";");
}

/** Return whether nothing can happen in a log any more: its root run and its background tasks have ended. */
function rests(tree: Tree): boolean {
  const root = tree.root === null ? undefined : tree.runs.get(tree.root);
  const isAtWork = [...tree.tasks.values()].some(
    (task) => task.status === "pending" || task.status === "running",
  );
  return root !== undefined && hasEnded(root) && !isAtWork;
}
