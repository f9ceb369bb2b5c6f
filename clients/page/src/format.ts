/** Words and numbers as the page shows them. */

import type { CallNode, RunNode } from "retinue-client";

/** The status of whatever the page shows: a run, a call, a task or a thread. */
export type Status =
  "queued" | "running" | "waiting" | "completed" | "failed" | "cancelled" | "timeout";

const WORDS: Readonly<Record<Status, string>> = {
  queued: "queued",
  running: "running",
  waiting: "needs you",
  completed: "done",
  failed: "failed",
  cancelled: "stopped",
  timeout: "timed out",
};

const STATUS: Readonly<Record<string, Status>> = {
  suspended: "waiting",
  waiting_input: "waiting",
  waiting_auth: "waiting",
  waiting: "waiting",
  new: "queued",
  pending: "queued",
  queued: "queued",
  resuming: "running",
  running: "running",
  awaiting: "waiting",
  succeeded: "completed",
  success: "completed",
  completed: "completed",
  idle: "completed",
  failed: "failed",
  error: "failed",
  cancelled: "cancelled",
  timeout: "timeout",
};

export const statusOf = (status: string): Status => STATUS[status] ?? "running";
export const wordOf = (status: Status): string => WORDS[status];
export const isOver = (status: Status): boolean =>
  status === "completed" || status === "failed" || status === "cancelled" || status === "timeout";

/** Return the status word of a run: one that waits for its provider says so. */
export function runWord(run: RunNode): string {
  return run.wait === null ? wordOf(statusOf(run.status)) : "provider wait";
}

/** Return why a run waits for its provider, as `data-wait` has it. */
export function waitOf(run: RunNode): string | undefined {
  return run.wait?.reason;
}

const two = (number: number): string => String(number).padStart(2, "0");

/** Return a length of time as a clock shows it: `1:42`. */
export function clock(milliseconds: number): string {
  const all = Math.max(0, Math.floor(milliseconds / 1000));
  const [hours, minutes, seconds] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  return hours > 0 ? `${hours}:${two(minutes)}:${two(seconds)}` : `${minutes}:${two(seconds)}`;
}

/** Return the time that a call took: `0.4 s` below ten seconds. */
export function took(milliseconds: number): string {
  return milliseconds < 10_000
    ? `${(Math.max(0, milliseconds) / 1000).toFixed(1)} s`
    : clock(milliseconds);
}

const plural = (count: number, word: string): string => `${count} ${word}${count === 1 ? "" : "s"}`;
export const counted = plural;

/** Return a length of time in words, for screen readers. */
export function spoken(milliseconds: number): string {
  const all = Math.max(0, Math.floor(milliseconds / 1000));
  const parts = [
    [Math.floor(all / 3600), "hour"],
    [Math.floor(all / 60) % 60, "minute"],
    [all % 60, "second"],
  ] as const;
  const said = parts.filter(([count]) => count > 0).map(([count, word]) => plural(count, word));
  return said.join(" ") || "0 seconds";
}

/** Return the time of day: `10:02`. */
export function timeOfDay(at: number, seconds = false): string {
  const date = new Date(at);
  const shown = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return seconds ? `${shown}:${two(date.getSeconds())}` : shown;
}

/** Return a count of tokens: `18k`. */
export function tokens(count: number): string {
  if (count < 1000) return String(count);
  if (count < 999_500) return `${Math.round(count / 1000)}k`;
  return `${(count / 1_000_000).toFixed(1)}M`;
}

/** What the page reads of a usage: a price that is not known is not free. */
export interface Spent {
  readonly input_tokens?: number;
  readonly output_tokens?: number;
  readonly requests?: number;
  readonly cost?: number;
  readonly cost_known?: boolean;
  readonly unpriced?: number;
}

export const tokensOf = (usage: Spent): number =>
  (usage.input_tokens ?? 0) + (usage.output_tokens ?? 0);

/** Return a price; `—` if it is not known, or if nothing was asked of a model yet. */
export function money(usage: Spent): string {
  const cost = usage.cost ?? 0;
  if (cost === 0) return "—";
  const shown = cost < 0.005 ? "<$0.01" : `$${cost.toFixed(2)}`;
  return usage.cost_known === false || (usage.unpriced ?? 0) > 0 ? `≈ ${shown}` : shown;
}

// Bidirectional controls and characters without width change what a reader believes to see.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb]|\udb40[\udc00-\udfff]/g;
/** Joiners that scripts and emoji need: they stay in prose. */
const JOINERS = /[\u200c\u200d\ufe0e\ufe0f]/;

const mark = (found: string): string =>
  `⟨${found.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}⟩`;

/** Return a text with a visible mark for each character that cannot be seen: for what somebody approves or copies. */
export function exact(text: string): string {
  return text.replace(HIDDEN, mark);
}

/** Return prose with a visible mark for each character that changes the direction of text or has no width. */
export function prose(text: string): string {
  return text.replace(HIDDEN, (found) => (JOINERS.test(found) ? found : mark(found)));
}

export function firstLine(text: string): string {
  return (
    text
      .slice(0, 2000)
      .split("\n")
      .find((line) => line.trim() !== "") ?? ""
  );
}

export function lastLine(text: string): string {
  return (
    text
      .slice(-2000)
      .split("\n")
      .findLast((line) => line.trim() !== "") ?? ""
  );
}

/** Return the arguments of a call on one line. */
export function argumentsLine(args: Readonly<Record<string, unknown>>): string {
  const parts = Object.entries(args).map(([name, value], place) => {
    const text = typeof value === "string" ? value : (JSON.stringify(value) ?? "");
    return place === 0 && typeof value === "string" ? text : `${name}=${text}`;
  });
  return exact(parts.join(" ").slice(0, 400).replace(/\s+/g, " "));
}

/** Return a text as JSON, if it is an object or a list. */
export function asJson(text: string): unknown {
  if (!/^\s*[[{]/.test(text) || text.length > 200_000) return undefined;
  try {
    const value: unknown = JSON.parse(text);
    return typeof value === "object" && value !== null ? value : undefined;
  } catch {
    return undefined;
  }
}

/** Return a line without the marks of Markdown. */
export function plain(line: string): string {
  return line.replace(/\*\*|__|`|^#+ |^> |^[-*] /g, "").replace(/\[([^\]]*)\]\([^)]*\)/g, "$1");
}

/** Return the name of a model without its provider. */
export const modelName = (model: string): string => exact(model.slice(model.indexOf(":") + 1));

/** Return a call in a few words: its tool and its first argument. */
export function callWords(tool: string, args: Readonly<Record<string, unknown>>): string {
  const [first] = Object.values(args);
  return `${exact(tool)} ${typeof first === "string" ? exact(first.slice(0, 120).replace(/\s+/g, " ")) : argumentsLine(args)}`;
}

export function callTime(call: CallNode, now: number): string {
  if (call.startedAt === null) return "";
  return took((call.endedAt ?? now) - call.startedAt);
}
