/** The keys of the page. They are off while somebody types. */

import { isOver, statusOf } from "./format.ts";
import * as page from "./page.ts";
import { nextQuestion } from "./questions.tsx";
import { open } from "./route.ts";
import { linkTo } from "./run.tsx";
import { conversation } from "./state.ts";
import { newThread } from "./threads.tsx";
import { nextTheme } from "./theme.ts";

export const ROWS: readonly (readonly [string, string])[] = [
  ["j k", "next, previous card"],
  ["l h", "open, close the card"],
  ["Enter", "the card as a page of its own"],
  ["Esc", "up to the agent above"],
  ["n", "next question"],
  ["a e r", "approve, edit, reject that question"],
  ["x", "stop (asks what)"],
  ["m", "message this agent"],
  ["f", "fork from the last message"],
  ["y c", "copy link, copy text"],
  ["1 5", "tabs Timeline to Events"],
  ["/", "search threads"],
  ["N", "new thread"],
  ["Shift+T", "theme"],
  ["?", "this list"],
];

/** A question takes no key for so long after it appeared or moved. */
const SETTLE = 500;
const since = new WeakMap<Element, { at: number; place: number }>();

/** Note where each question stands, so that a key never answers another one than was seen. */
export function noteQuestions(): void {
  document.querySelectorAll("article[data-question]").forEach((one, place) => {
    if (since.get(one)?.place !== place) since.set(one, { at: performance.now(), place });
  });
}

const cards = (): HTMLElement[] => [
  ...document.querySelectorAll<HTMLElement>("article.card, tr[data-run]"),
];

function chosenCard(): HTMLElement | undefined {
  const id = page.chosen.value?.runId;
  return cards().find((one) => one.dataset["run"] === id);
}

function step(by: number): void {
  const all = cards();
  const present = chosenCard();
  const place = present === undefined ? (by > 0 ? -1 : 0) : all.indexOf(present);
  const next = all[Math.min(all.length - 1, Math.max(0, place + by))];
  const live = conversation.value?.find(next?.dataset["run"] ?? "");
  if (next === undefined || live === undefined) return;
  page.chosen.value = { live, runId: next.dataset["run"]! };
  next.scrollIntoView({ block: "nearest" });
}

/** Return the card that a key is about: the chosen one, else the one that is the page, else the newest root run. */
function place(): page.Place | null {
  const newest = conversation.value?.newest.value;
  const root = newest?.begun.value ? { live: newest, runId: newest.root!.runId } : null;
  return page.chosen.value ?? page.focus.value?.place ?? root;
}

function press(name: string, within: ParentNode | null | undefined): void {
  const buttons = [...(within?.querySelectorAll<HTMLElement>("button, a") ?? [])];
  buttons
    .find((one) => (one.getAttribute("aria-label") ?? one.textContent ?? "").startsWith(name))
    ?.click();
}

function answerWith(name: string): void {
  const all = [...document.querySelectorAll("article[data-question]")];
  const one =
    all.find((found) => found.contains(document.activeElement)) ??
    (all.length === 1 ? all[0] : undefined);
  if (one === undefined || performance.now() - (since.get(one)?.at ?? Infinity) < SETTLE) return;
  press(name, one);
}

function up(): void {
  const focus = page.focus.value;
  const shown = conversation.value;
  if (focus === null || shown === null) return void (page.chosen.value = null);
  const node = page.nodeOf(focus.place);
  const parent = focus.place.live.tree.runs.get(node?.parentRunId ?? "");
  if (parent === undefined) return;
  const isRoot = parent.ns.length === 0;
  open(isRoot ? `#/t/${encodeURIComponent(shown.threadId)}` : linkTo(focus.place.live, parent));
}

function stopChosen(): void {
  const at = place();
  const node = at === null ? undefined : page.nodeOf(at);
  if (at === null || node === undefined || isOver(statusOf(node.status))) return;
  const anchor = chosenCard()?.querySelector(".head") ?? document.querySelector(".top .sum");
  if (anchor !== null) page.menu.value = { place: at, anchor };
}

const ACTIONS: Readonly<Record<string, () => void>> = {
  j: () => step(1),
  ArrowDown: () => step(1),
  k: () => step(-1),
  ArrowUp: () => step(-1),
  l: () => page.chosen.value && page.setOpened(page.chosen.value.runId, true),
  ArrowRight: () => page.chosen.value && page.setOpened(page.chosen.value.runId, true),
  h: () => page.chosen.value && page.setOpened(page.chosen.value.runId, false),
  ArrowLeft: () => page.chosen.value && page.setOpened(page.chosen.value.runId, false),
  Enter: () => {
    const at = page.chosen.value;
    const node = at === null ? undefined : page.nodeOf(at);
    if (at !== null && node !== undefined) open(linkTo(at.live, node));
  },
  Escape: up,
  n: nextQuestion,
  a: () => answerWith("Approve"),
  e: () => answerWith("Edit"),
  r: () => answerWith("Reject"),
  x: stopChosen,
  m: () => {
    const at = place();
    if (at !== null) page.messageTo(at);
  },
  f: () => press("Fork from here", lastOf(".turn")),
  y: () => press("Copy link", chosenCard()),
  c: () => press("Copy text", chosenCard() ?? lastOf(".turn")),
  "/": () => document.querySelector<HTMLElement>("input[type=search]")?.focus(),
  N: newThread,
  T: nextTheme,
  "?": () => (page.isKeysShown.value = true),
};

function lastOf(selector: string): Element | undefined {
  return [...document.querySelectorAll(selector)].findLast((one) =>
    one.querySelector('[aria-label^="Fork"]'),
  );
}

function isTyping(target: EventTarget | null): boolean {
  const one = target as HTMLElement | null;
  return one !== null && /^(INPUT|TEXTAREA|SELECT)$/.test(one.tagName);
}

/** Keys that a focused control has for itself. */
function isOwn(event: KeyboardEvent): boolean {
  const one = event.target as HTMLElement;
  const isControl = /^(BUTTON|A|SUMMARY)$/.test(one.tagName);
  if (isControl && (event.key === "Enter" || event.key === " ")) return true;
  const scrolls =
    one.scrollHeight > one.clientHeight + 1 && one.tabIndex === 0 && !one.matches("article");
  return event.key.startsWith("Arrow") && (one.getAttribute("role") === "tab" || scrolls);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || isOwn(event))
    return;
  if (document.querySelector("dialog[open]") !== null) return;
  const tab = page.TABS[Number(event.key) - 1];
  if (tab !== undefined) page.tab.value = tab;
  const action = ACTIONS[event.key];
  if (action === undefined) return;
  event.preventDefault();
  action();
});
