/** Addresses by fragment: they work below any path, and never reach the log of a server. */

import { signal } from "@preact/signals";

export interface Route {
  readonly threadId: string | null;
  readonly runId: string | null;
  /** The calls from the root run down to the run that is shown, as the namespace has them without `tools:`. */
  readonly calls: readonly string[];
}

function parse(hash: string): Route {
  const [path = ""] = hash.replace(/^#\/?/, "").split("?");
  const [kind, threadId, runId, ...calls] = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  if (kind !== "t" || !threadId) return { threadId: null, runId: null, calls: [] };
  return { threadId, runId: runId || null, calls: calls.filter(Boolean) };
}

export function address(
  threadId: string,
  runId?: string | null,
  ns: readonly string[] = [],
): string {
  const calls = ns.map((part) => part.replace(/^tools:/, ""));
  const parts = [threadId, ...(runId ? [runId, ...calls] : [])];
  return `#/t/${parts.map(encodeURIComponent).join("/")}`;
}

export const route = signal(parse(location.hash));

export function open(hash: string): void {
  if (location.hash !== hash) location.hash = hash;
}

window.addEventListener("hashchange", () => {
  route.value = parse(location.hash);
});
