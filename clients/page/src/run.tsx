/** A run: the body with its words and calls, the card of a sub-agent, and the turn of a root run. */

import { useSignal } from "@preact/signals";
import { type CallNode, type RunNode } from "retinue-client";
import { useEffect, useMemo } from "preact/hooks";
import { callNow, itemsOf, lastWords, type Item } from "./body.ts";
import { CopyButton, IconButton } from "./buttons.tsx";
import { Call, Meter, progressOf } from "./call.tsx";
import {
  callWords,
  clock,
  exact,
  firstLine,
  isOver,
  lastLine,
  modelName,
  money,
  plain,
  prose,
  runWord,
  spoken,
  statusOf,
  timeOfDay,
  tokens,
  tokensOf,
  waitOf,
  wordOf,
} from "./format.ts";
import { Glyph, Icon } from "./icons.tsx";
import { Images } from "./images.tsx";
import { now, tailFor, watched, type LiveRun, type RunView } from "./live.ts";
import { Prose } from "./markdown.tsx";
import * as page from "./page.ts";
import { ReceiptOf } from "./receipt.tsx";
import { Roster } from "./roster.tsx";
import { address } from "./route.ts";
import { inputOf } from "./state.ts";

/** From so many children of one parent on, rows take the place of cards. */
const MOST_CARDS = 50;
/** A closed card shows its last lines where it has at most so many siblings. */
const MOST_PEEKS = 5;
const QUIET = 30_000;
const NOTHING: ReadonlySet<string> = new Set();

export function linkTo(live: LiveRun, node: RunNode): string {
  const threadId = live.root?.threadId ?? node.threadId;
  return address(threadId, live.runId, node.ns);
}

export function elapsed(node: RunNode): number {
  const since = node.startedAt ?? node.at;
  const isRunning = !isOver(statusOf(node.status));
  return Math.max(0, (isRunning ? now.value : (node.endedAt ?? node.at)) - since);
}

/** Return the accessible name of whatever shows a run. */
export function nameOf(node: RunNode): string {
  return `${node.agent}, ${runWord(node)}, ${spoken(elapsed(node))}`;
}

export function RunGlyph({ node }: { node: RunNode }) {
  return <Glyph status={node.wait === null ? statusOf(node.status) : "retrying"} />;
}

// --- body

interface BodyProps {
  readonly live: LiveRun;
  readonly view: RunView;
  /** 0 for the root of the page: fan-outs have a box there, and a guide line below. */
  readonly depth: number;
  readonly before?: ReadonlySet<string>;
  /** Messages of a root can be forked. */
  readonly isRoot: boolean;
}

type Group =
  | { readonly kind: "item"; readonly item: Item }
  | { readonly kind: "fan"; readonly key: string; readonly calls: readonly CallNode[] };

/** Put calls that follow each other and have sub-agents into one box. */
function grouped(node: RunNode, items: readonly Item[]): Group[] {
  const groups: Group[] = [];
  for (const item of items) {
    const call = item.kind === "call" ? node.calls.get(item.callId) : undefined;
    const hasCards = call !== undefined && call.children.length > 0;
    const last = groups.at(-1);
    if (!hasCards) groups.push({ kind: "item", item });
    else if (last?.kind === "fan")
      groups[groups.length - 1] = { ...last, calls: [...last.calls, call] };
    else groups.push({ kind: "fan", key: item.key, calls: [call] });
  }
  return groups;
}

export function Body({ live, view, depth, before = NOTHING, isRoot }: BodyProps) {
  const node = view.node.value;
  useEffect(() => {
    watched.add(node.runId);
    const leave = live.see(node.runId);
    return () => {
      watched.delete(node.runId);
      leave();
    };
  }, [live, node.runId]);
  // Of a large tree the pieces of text do not come, but the last words do.
  const tail = isOver(statusOf(node.status)) ? "" : view.tail.value;
  const shown = tail ? { ...node, open: null } : node;
  const items = itemsOf(shown, before).filter(
    (item) => isRoot || item.kind !== "user" || item.key !== firstKey(node),
  );
  const children = [...node.calls.values()].reduce((sum, call) => sum + call.children.length, 0);
  const isRoster = children > MOST_CARDS;
  let hasRoster = false;
  return (
    <>
      {grouped(node, items).map((group) => {
        if (group.kind === "item")
          return <Single key={group.item.key} {...{ live, view, isRoot }} item={group.item} />;
        if (isRoster) {
          if (hasRoster) return null;
          hasRoster = true;
          return <Roster key="roster" live={live} view={view} />;
        }
        const size = group.calls.reduce((sum, call) => sum + call.children.length, 0);
        const cards = group.calls.map((call) => (
          <CallCards key={call.callId} call={call} live={live} depth={depth} siblings={size} />
        ));
        return depth === 0 ? (
          <div class="fan" key={group.key}>
            {cards}
          </div>
        ) : (
          cards
        );
      })}
      {isOver(statusOf(node.status)) && node.error !== null && isRoot && <Failure node={node} />}
      {tail && <Prose text={`… ${tail}`} isOpen />}
      <ReceiptOf node={node} isRoot={isRoot} />
    </>
  );
}

/** The task of a sub-agent is in the head of its card, not in its body. */
const firstKey = (node: RunNode): string | null | undefined =>
  node.messages.find((message) => message.role === "user")?.id;

function Single({
  live,
  view,
  item,
  isRoot,
}: {
  live: LiveRun;
  view: RunView;
  item: Item;
  isRoot: boolean;
}) {
  switch (item.kind) {
    case "user":
      return (
        <UserTurn
          live={live}
          text={item.text}
          messageId={item.isNew ? "" : (item.message.id ?? "")}
          isRoot={isRoot}
          note={item.isNew ? "read before the next step" : ""}
        />
      );
    case "thought":
      return (
        <details class="thought">
          <summary>
            <Icon name="chev" />
            Reasoning
          </summary>
          <div class="words said" dir="auto">
            {prose(item.text.slice(-32_000))}
          </div>
        </details>
      );
    case "text":
      return (
        <div class="said-box">
          <Prose text={item.text} isOpen={item.isOpen} />
          <span class="acts">
            <CopyButton text={item.text} label="Copy text" hint="Copy text (c)" />
            {isRoot && item.message?.id != null && (
              <IconButton
                icon="fork"
                label="Fork from here"
                hint="Fork from here (f)"
                onClick={() => page.forkFrom(live.runId, item.message!.id!, "")}
              />
            )}
          </span>
        </div>
      );
    case "images":
      return <Images message={item.message} />;
    case "past":
      return <Call call={item.call} />;
    case "call": {
      const node = view.node.value;
      const call = node.calls.get(item.callId);
      return call === undefined ? null : (
        <Call call={call} draft={node.open?.calls.get(call.callId)} />
      );
    }
  }
}

function CallCards(options: { call: CallNode; live: LiveRun; depth: number; siblings: number }) {
  const { call, live, depth, siblings } = options;
  return (
    <div
      class="at"
      data-part="call"
      data-call-id={call.callId}
      data-tool={call.tool}
      data-status={statusOf(call.status)}>
      {call.children.map((id) => (
        <Card key={id} live={live} runId={id} call={call} depth={depth + 1} siblings={siblings} />
      ))}
    </div>
  );
}

function Failure({ node }: { node: RunNode }) {
  const reason = firstLine(node.error ?? "");
  const status = statusOf(node.status);
  if (status === "completed" || status === "cancelled") return null;
  return (
    <div class="why" role="note">
      <p class="mono said" dir="auto">
        {exact(reason.slice(0, 500))}
      </p>
    </div>
  );
}

// --- card

interface CardProps {
  readonly live: LiveRun;
  readonly runId: string;
  readonly call: CallNode;
  readonly depth: number;
  readonly siblings: number;
}

export function Card({ live, runId, call, depth, siblings }: CardProps) {
  useEffect(() => live.see(runId), [live, runId]);
  const view = live.view(runId);
  if (view === undefined) return null;
  const node = view.node.value;
  const status = statusOf(node.status);
  const chosen = page.opened.value.get(runId);
  // By itself a card is open while agents below it work, so that questions at any depth are seen.
  const hasChildren = [...node.calls.values()].some((one) => one.children.length > 0);
  const isOpen = chosen ?? (hasChildren && !isOver(status) && depth < 4);
  const isChosen = page.chosen.value?.runId === runId;
  const isPeeking = hasPeek(view, isOpen, siblings);
  const place = { live, runId };
  return (
    <article
      class="card"
      data-ns={node.ns.join("|")}
      data-run={runId}
      data-agent={node.agent}
      data-status={status}
      data-wait={waitOf(node)}
      data-call-id={node.callId ?? call.callId}
      aria-label={nameOf(node)}
      aria-current={isChosen ? "true" : undefined}
      onClick={(event) => {
        event.stopPropagation();
        page.chosen.value = place;
      }}>
      <header class="head">
        <button
          type="button"
          class="toggle"
          aria-expanded={isOpen}
          onClick={() => page.setOpened(runId, !isOpen)}>
          <Icon name="chev" />
          <RunGlyph node={node} />
          {exact(node.agent)}
        </button>
        <span class="task cut said" dir="auto">
          {prose(firstLine(node.task).slice(0, 300))}
        </span>
        <Below view={view} />
        <Numbers view={view} />
      </header>
      <Now live={live} view={view} call={call} hasWords={isOpen || isPeeking} />
      {isPeeking && <Peek view={view} />}
      {!isOpen && status === "failed" && <Failure node={node} />}
      {isOpen && (
        <div class="body">
          <Body live={live} view={view} depth={depth} isRoot={false} />
          {status === "failed" && <Failure node={node} />}
        </div>
      )}
    </article>
  );
}

/** The number of open questions below a card. */
function Below({ view }: { view: RunView }) {
  const { waiting } = view.sum.value;
  if (waiting === 0) return null;
  return (
    <span class="inner" title={`${waiting} open below`}>
      <Glyph status="waiting" />
      {waiting}
      <span class="say"> below needs you</span>
    </span>
  );
}

function Numbers({ view }: { view: RunView }) {
  const usage = view.sum.value.usage;
  return (
    <span class="nums">
      <span>{clock(elapsed(view.node.value))}</span>
      <span class="tok">{tokens(tokensOf(usage))}</span>
      <span>{money(usage)}</span>
    </span>
  );
}

/** Return what a run does now, for the second line of its card. */
function nowWords(
  view: RunView,
  call: CallNode | null,
  hasWords: boolean,
): { text: string; isText: boolean } {
  const node = view.node.value;
  const status = statusOf(node.status);
  if (node.wait !== null) {
    const seconds =
      node.wait.until === null
        ? null
        : Math.max(0, Math.ceil((node.wait.until - now.value) / 1000));
    const reason = firstLine(node.wait.message).slice(0, 120);
    return { text: `${reason}${seconds === null ? "" : ` · waiting ${seconds} s`}`, isText: false };
  }
  if (status === "waiting") {
    const asked = [...node.calls.values()].find(
      (one) => one.status === "suspended" && one.children.length === 0,
    );
    if (asked !== undefined) return { text: callWords(asked.tool, asked.args), isText: false };
  }
  const progress = progressOf(call ?? undefined) ?? progressOf(callNow(node));
  const background = call?.isTask && !isOver(status) ? "in the background · " : "";
  if (status === "running" && progress !== null)
    return { text: background + progress.text, isText: false };
  const working = status === "running" && node.open === null ? callNow(node) : undefined;
  if (hasWords && working === undefined)
    return { text: `${background}step ${node.steps} · ${modelName(node.model)}`, isText: false };
  const words = lastWords(node, tailFor(view), { first: firstLine, last: lastLine });
  const quiet = now.value - node.at;
  const silence = status === "running" && quiet > QUIET ? ` · quiet for ${clock(quiet)}` : "";
  if (words && working === undefined)
    return { text: background + prose(plain(words.slice(0, 400))) + silence, isText: true };
  if (working !== undefined) {
    return {
      text: `${background}${callWords(working.tool, working.args)}${silence}`,
      isText: false,
    };
  }
  return { text: `${background}step ${node.steps}${silence}`, isText: false };
}

function Now(options: { live: LiveRun; view: RunView; call: CallNode; hasWords: boolean }) {
  const { live, view, call, hasWords } = options;
  const node = view.node.value;
  const { text, isText } = nowWords(view, call, hasWords);
  const isRunning = statusOf(node.status) === "running";
  const share = isRunning ? (progressOf(call) ?? progressOf(callNow(node)))?.share : undefined;
  const word = view.stopping.value && !isOver(statusOf(node.status)) ? "stopping" : runWord(node);
  return (
    <div class="now">
      <span class="word">{word}</span>
      <span class="cut said" dir="auto" data-part={isText ? "text" : undefined}>
        {text}
      </span>
      {!isText && !hasWords && (
        <span class="say said" data-part="text">
          {prose(lastLine(tailFor(view)).slice(-400))}
        </span>
      )}
      {share != null && (
        <>
          <Meter share={share} />
          <span class="num">{Math.round(100 * share)} %</span>
        </>
      )}
      <Acts live={live} node={node} />
    </div>
  );
}

function Acts({ live, node }: { live: LiveRun; node: RunNode }) {
  const place = { live, runId: node.runId };
  const isDone = isOver(statusOf(node.status));
  return (
    <span class="acts">
      <a
        class="btn quiet small only"
        href={linkTo(live, node)}
        aria-label={`Open ${node.agent}`}
        title="Open (Enter)">
        <Icon name="open" />
      </a>
      <IconButton
        icon="msg"
        label={`Message ${node.agent}`}
        hint="Message (m)"
        onClick={() => page.messageTo(place)}
      />
      <CopyButton
        icon="chain"
        label="Copy link"
        hint="Copy link (y)"
        text={() => new URL(linkTo(live, node), location.href).href}
      />
      {!isDone && (
        <IconButton
          icon="stop"
          label={`Stop ${node.agent}`}
          hint="Stop (x)"
          popup
          onClick={(event) => {
            event.stopPropagation();
            page.menu.value = { place, anchor: event.currentTarget as Element };
          }}
        />
      )}
    </span>
  );
}

/** True if the card shows the last lines of its run below its head. */
function hasPeek(view: RunView, isOpen: boolean, siblings: number): boolean {
  const isRunning = statusOf(view.node.value.status) === "running";
  return !isOpen && siblings <= MOST_PEEKS && isRunning && tailFor(view) !== "";
}

function Peek({ view }: { view: RunView }) {
  const node = view.node.value;
  return (
    <div class="peek">
      <p class="said" dir="auto" data-part="text">
        {prose(tailFor(view).trimEnd())}
        {node.open !== null && <span class="caret" />}
      </p>
    </div>
  );
}

// --- root

export function UserTurn(options: {
  live: LiveRun;
  text: string;
  messageId: string;
  isRoot: boolean;
  note?: string;
}) {
  const { live, text, messageId, isRoot, note = "" } = options;
  return (
    <section class="turn" aria-label={isRoot ? "You" : "Message"}>
      <div class="who">
        <b>{isRoot ? "You" : "Message"}</b>
        <span class="num">{note}</span>
        <span class="acts">
          <CopyButton text={text} label="Copy text" hint="Copy text (c)" />
          {isRoot && messageId && (
            <IconButton
              icon="fork"
              label="Fork from here"
              hint="Fork from here (f)"
              onClick={() => page.forkFrom(live.runId, messageId, text)}
            />
          )}
        </span>
      </div>
      <div class="user" data-part="user">
        <p class="said" dir="auto">
          {prose(text.slice(0, 64_000))}
        </p>
      </div>
    </section>
  );
}

/** A root run: what was said, then one element for all that came of it. */
export function RootRun({
  live,
  before,
}: {
  readonly live: LiveRun;
  readonly before: ReadonlySet<string>;
}) {
  const isBegun = live.begun.value;
  const view = isBegun ? live.view(live.root!.runId) : undefined;
  if (view === undefined) return <Queued live={live} />;
  return <Begun live={live} view={view} before={before} />;
}

function Begun({
  live,
  view,
  before,
}: {
  live: LiveRun;
  view: RunView;
  before: ReadonlySet<string>;
}) {
  const node = view.node.value;
  const status = statusOf(node.status);
  // What opens the turn stands above it; what is said later stands where it was read.
  const opening = useMemo(() => openingOf(node, before), [node.messages, before]);
  const said = useMemo(
    () => new Set([...before, ...opening.map((one) => one.id)]),
    [opening, before],
  );
  return (
    <>
      {opening.map((one) => (
        <UserTurn
          key={one.id}
          live={live}
          text={one.text}
          messageId={one.id}
          isRoot
          note={one.isLast ? timeOfDay(live.startedAt ?? node.startedAt ?? 0) : ""}
        />
      ))}
      <section
        class="turn root"
        data-ns=""
        data-run={node.runId}
        data-agent={node.agent}
        data-status={status}
        data-wait={waitOf(node)}
        aria-label={nameOf(node)}
        onClick={() => (page.chosen.value = { live, runId: node.runId })}>
        <div class="who">
          <b>{exact(node.agent)}</b>
          <span class="cut">
            {modelName(node.model)} · step {node.steps}
            {node.wait === null ? "" : ` · ${nowWords(view, null, false).text}`}
          </span>
        </div>
        <Body live={live} view={view} depth={0} before={said} isRoot />
      </section>
    </>
  );
}

interface Opening {
  readonly id: string;
  readonly text: string;
  readonly isLast: boolean;
}

/** Return what the user had said before the run answered. */
function openingOf(node: RunNode, before: ReadonlySet<string>): Opening[] {
  const found: Opening[] = [];
  for (const item of itemsOf({ ...node, open: null, calls: new Map() }, before)) {
    if (item.kind !== "user") break;
    found.push({ id: item.message.id ?? "", text: item.text, isLast: false });
  }
  return found.map((one, place) => ({ ...one, isLast: place === found.length - 1 }));
}

/** A run that waits for the one before it. */
function Queued({ live }: { live: LiveRun }) {
  const status = statusOf(live.listed.value);
  const input = useSignal("");
  useEffect(() => {
    void inputOf(live.runId).then((found) => (input.value = found));
  }, [live.runId]);
  return (
    <>
      {input.value && <UserTurn live={live} text={input.value} messageId="" isRoot />}
      <section
        class="turn root"
        data-ns=""
        data-run={live.runId}
        data-agent={live.agent}
        data-status={status}
        aria-label={`${live.agent}, ${wordOf(status)}`}>
        <div class="who">
          <Glyph status={status} />
          <b>{exact(live.agent)}</b>
          <span>
            {status === "queued" ? "queued: begins when the run before it ends" : wordOf(status)}
          </span>
        </div>
      </section>
    </>
  );
}
