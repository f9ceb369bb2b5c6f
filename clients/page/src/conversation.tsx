/** The middle: the head of a thread, its turns, its questions, and the box for messages. */

import type { RunNode } from "retinue-client";
import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { BASE } from "./api.ts";
import { pathOf } from "./body.ts";
import { CopyButton, IconButton } from "./buttons.tsx";
import { Composer } from "./composer.tsx";
import {
  clock,
  counted,
  exact,
  isOver,
  modelName,
  money,
  prose,
  runWord,
  statusOf,
  timeOfDay,
  tokens,
  tokensOf,
  waitOf,
} from "./format.ts";
import { Glyph, Icon } from "./icons.tsx";
import { now, type LiveRun, type RunView } from "./live.ts";
import * as page from "./page.ts";
import { Questions } from "./questions.tsx";
import { address, route } from "./route.ts";
import { Body, elapsed, nameOf, RootRun, RunGlyph } from "./run.tsx";
import { link, lostAt, nextTry, retryNow } from "./socket.ts";
import { agents, conversation, type Conversation } from "./state.ts";
import { agent } from "./composer.tsx";

/** A reader within so many pixels of the end follows it. */
const NEAR = 80;

export function Middle() {
  const shown = conversation.value;
  return (
    <main class={link.value === "live" ? "" : "stale"}>
      <Head shown={shown} />
      <Lost />
      {shown === null ? <Start /> : <Thread key={shown.threadId} shown={shown} />}
      <Questions />
      <Composer />
    </main>
  );
}

// --- head

function Head({ shown }: { shown: Conversation | null }) {
  const focus = page.focus.value;
  const newest = shown?.newest.value;
  const place =
    focus?.place ?? (newest?.begun.value ? { live: newest, runId: newest.root!.runId } : null);
  const view = place?.live.view(place.runId);
  const node = view?.node.value;
  const title = shown === null ? "New thread" : shown.title.value || "Untitled";
  return (
    <header class="top" data-wait={node && waitOf(node)}>
      <div class="col">
        <button
          type="button"
          class="btn quiet only phone-only"
          aria-label="Show threads"
          onClick={() => (page.pane.value = "threads")}>
          <Icon name="back" />
        </button>
        {focus === null || shown === null || node === undefined ? (
          <h1 class="cut said" dir="auto">
            {prose(title)}
          </h1>
        ) : (
          <Crumbs shown={shown} node={node} live={focus.place.live} />
        )}
        {place !== null && view !== undefined && <Sum place={place} view={view} />}
        <button
          type="button"
          class="btn quiet only drawer-only"
          aria-label="Details"
          aria-expanded={page.drawer.value}
          onClick={() => (page.drawer.value = !page.drawer.value)}>
          <Icon name="time" />
        </button>
      </div>
    </header>
  );
}

function Crumbs({ shown, node, live }: { shown: Conversation; node: RunNode; live: LiveRun }) {
  const above = pathOf(live.tree, node).slice(0, -1);
  return (
    <nav class="crumbs" aria-label="Path">
      <a class="cut said" href={address(shown.threadId)}>
        {prose(shown.title.value)}
      </a>
      {above.slice(1).map((one) => (
        <>
          <span>›</span>
          <a class="said" href={address(shown.threadId, live.runId, one.ns)}>
            {exact(one.agent)}
          </a>
        </>
      ))}
      <span>›</span>
      <h1 class="cut said">{exact(node.agent)}</h1>
    </nav>
  );
}

function Sum({ place, view }: { place: page.Place; view: RunView }) {
  const node = view.node.value;
  const { usage, agents: count } = view.sum.value;
  const status = statusOf(node.status);
  const cost = money(usage);
  return (
    <div class="sum" data-tone={node.wait === null ? status : "retrying"}>
      <span class="word">
        <RunGlyph node={node} />
        {view.stopping.value && !isOver(status) ? "stopping" : runWord(node)} {clock(elapsed(node))}
      </span>
      {count > 1 && <span class="wide-only">{counted(count, "agent")}</span>}
      {tokensOf(usage) > 0 && <span class="wide-only tok">{tokens(tokensOf(usage))} tokens</span>}
      {cost !== "—" && <span>{cost}</span>}
      {!isOver(status) && (
        <button
          type="button"
          class="btn small"
          aria-label={`Stop ${node.agent}`}
          aria-haspopup="menu"
          title="Stop (x)"
          onClick={(event) => (page.menu.value = { place, anchor: event.currentTarget })}>
          <Icon name="stop" />
          <span class="wide-only">Stop</span>
        </button>
      )}
    </div>
  );
}

/** What a lost connection means, and what is kept. */
function Lost() {
  const isLate = useSignal(false);
  useEffect(() => {
    isLate.value = false;
    if (link.value === "live") return undefined;
    const timer = setTimeout(() => (isLate.value = true), lostAt.value === 0 ? 4000 : 2000);
    return () => clearTimeout(timer);
  }, [link.value]);
  if (link.value === "live" || !isLate.value) return null;
  const seconds = Math.max(0, Math.ceil((nextTry.value - now.value) / 1000));
  const since = lostAt.value > 0 ? ` You see the state of ${timeOfDay(lostAt.value, true)}.` : "";
  return (
    <div class="bar" role="alert" data-wait="connection">
      <div class="col">
        <Glyph status="retrying" />
        <span>
          <b>Connection lost.</b> Agents keep working.{" "}
          {seconds > 0 ? (
            <>
              Next try in <span class="num">{seconds} s</span>.
            </>
          ) : (
            "Connecting."
          )}
          {since}
        </span>
        <button type="button" class="btn small" onClick={retryNow}>
          Retry now
        </button>
      </div>
    </div>
  );
}

// --- the turns

function Thread({ shown }: { shown: Conversation }) {
  const log = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const height = useRef(Infinity);
  const fresh = useSignal(false);
  const { value: focus } = page.focus;
  const focused = focus?.place.runId;
  useLayoutEffect(() => {
    follows.current = focused === undefined;
    height.current = Infinity;
    fresh.value = false;
    const { runId } = route.value;
    const named = focused === undefined && runId !== shown.newest.value?.runId ? runId : null;
    const turn = log.current?.querySelector(`[data-ns=""][data-run="${CSS.escape(named ?? "")}"]`);
    if (turn) {
      follows.current = false;
      turn.scrollIntoView({ block: "start" });
    } else if (log.current) {
      log.current.scrollTop = focused === undefined ? log.current.scrollHeight : 0;
    }
  }, [focused, route.value.runId, shown.state.value]);
  useEffect(() => {
    const inner = log.current?.firstElementChild;
    if (!inner) return undefined;
    height.current = Infinity;
    let beat = -1;
    const observer = new ResizeObserver(() => {
      const box = log.current;
      if (box === null) return;
      // What the reader opens makes the log longer, too; new is what came from the server.
      const present = shown.newest.peek()?.beat.peek() ?? 0;
      const isNew = box.scrollHeight > height.current + 8 && present !== beat;
      [height.current, beat] = [box.scrollHeight, present];
      if (follows.current) box.scrollTop = box.scrollHeight;
      else if (isNew && box.scrollHeight - box.scrollTop - box.clientHeight > NEAR)
        fresh.value = true;
    });
    observer.observe(inner);
    observer.observe(log.current!);
    return () => observer.disconnect();
  }, [shown.state.value]);
  const scrolled = (): void => {
    const box = log.current!;
    follows.current = box.scrollHeight - box.scrollTop - box.clientHeight <= NEAR;
    if (follows.current) fresh.value = false;
  };
  const toEnd = (): void => {
    follows.current = true;
    log.current!.scrollTop = log.current!.scrollHeight;
  };
  const isWide =
    focus === null && shown.runs.value.some((run) => run.begun.value && widest(run) > 50);
  return (
    <>
      <div
        class={`log scroll ${isWide ? "wide" : ""}`}
        ref={log}
        tabIndex={0}
        role="region"
        aria-label="Conversation"
        onScroll={scrolled}>
        <div class="col">
          <Turns shown={shown} focus={focus} />
        </div>
      </div>
      <div class="newer">
        {fresh.value && (
          <button type="button" class="btn small" onClick={toEnd}>
            New <Icon name="up" />
          </button>
        )}
      </div>
    </>
  );
}

/** Return how many children a run has that has the most. */
function widest(run: LiveRun): number {
  void run.beat.value;
  let most = 0;
  for (const node of run.tree.runs.values()) {
    let count = 0;
    for (const call of node.calls.values()) count += call.children.length;
    most = Math.max(most, count);
  }
  return most;
}

function Turns({ shown, focus }: { shown: Conversation; focus: typeof page.focus.value }) {
  if (shown.state.value === "missing") return <p class="blank missing">Not found, or not yours</p>;
  if (shown.state.value === "loading") return <p class="blank">Loading…</p>;
  if (focus !== null) return <Focus place={focus.place} exact={focus.exact} />;
  const seen = new Set<string>();
  return (
    <>
      {shown.hasOlder.value && (
        <button type="button" class="btn small older" onClick={() => void shown.loadOlder()}>
          Show older turns
        </button>
      )}
      {shown.runs.value.map((live) => {
        const before = new Set(seen);
        for (const message of live.root?.messages ?? [])
          if (message.id != null) seen.add(message.id);
        return <RootRun key={live.runId} live={live} before={before} />;
      })}
    </>
  );
}

/** One sub-agent as the root of the page. */
function Focus({ place, exact: isExact }: { place: page.Place; exact: boolean }) {
  const { live, runId } = place;
  const view = live.view(runId);
  if (view === undefined) return null;
  const node = view.node.value;
  const parent = live.tree.runs.get(node.parentRunId ?? "");
  return (
    <>
      {!isExact && (
        <p class="blank">
          The agent of this address is not there. This is the nearest one above it.
        </p>
      )}
      <article
        class="root focus"
        data-ns={node.ns.join("|")}
        data-run={node.runId}
        data-agent={node.agent}
        data-status={statusOf(node.status)}
        data-wait={waitOf(node)}
        data-call-id={node.callId ?? ""}
        aria-label={nameOf(node)}>
        <div class="who">
          <b>Task from {exact(parent?.agent ?? "its parent")}</b>
          {node.startedAt !== null && <span class="num">{timeOfDay(node.startedAt)}</span>}
        </div>
        <div class="user">
          <p class="said" dir="auto">
            {prose(node.task)}
          </p>
        </div>
        <div class="who">
          <b>{exact(node.agent)}</b>
          <span>
            {modelName(node.model)} · step {node.steps}
          </span>
          <span class="acts on">
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
              text={() => location.href}
            />
          </span>
        </div>
        <Body live={live} view={view} depth={0} isRoot={false} />
      </article>
    </>
  );
}

// --- a new thread

function Start() {
  return (
    <div class="log scroll" tabIndex={0} role="region" aria-label="Conversation">
      <div class="col start">
        <div>
          <h2 class="title">What should be done?</h2>
          <p class="lead">Write it below. The agents that answer here:</p>
        </div>
        {agents.value.length > 0 && (
          <div class="picks">
            {agents.value.slice(0, 6).map((one) => (
              <button
                type="button"
                key={one.name}
                class="pickrow"
                onClick={() => {
                  agent.value = one.name;
                  page.focusComposer();
                }}>
                <b class="said">{exact(one.name)}</b>
                <span class="does said">{exact(one.model ?? "")}</span>
                <span class="ask said" dir="auto">
                  {prose(one.description || "No description")}
                </span>
                <Icon name="chev" />
              </button>
            ))}
          </div>
        )}
        <div class="three">
          <div data-tone="running">
            <h3>
              <Glyph status="running" />
              One card an agent
            </h3>
            <p>Each sub-agent appears where it was called, with its words, calls, time and cost.</p>
          </div>
          <div data-tone="waiting">
            <h3>
              <Glyph status="waiting" />
              Questions come to you
            </h3>
            <p>From any depth, in one place above the message. Nothing happens until you answer.</p>
          </div>
          <div data-tone="completed">
            <h3>
              <Glyph status="completed" />
              Closing stops nothing
            </h3>
            <p>Agents work on the server. Come back to this address at any time and see it all.</p>
          </div>
        </div>
        <div>
          <p class="blank">The same from a terminal:</p>
          <Command />
        </div>
      </div>
    </div>
  );
}

function Command() {
  const text = `retinue chat --server ${BASE.href.replace(/\/$/, "")}`;
  return (
    <div class="shell">
      <span class="cut">{text}</span>
      <CopyButton text={text} label="Copy command" />
    </div>
  );
}
