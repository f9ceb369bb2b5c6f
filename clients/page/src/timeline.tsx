/** The timeline: a bar for each run, drawn on a canvas, with a table beside it for keyboards and screen readers. */

import type { RunNode } from "retinue-client";
import { useEffect, useRef } from "preact/hooks";
import { pathOf } from "./body.ts";
import { CopyButton } from "./buttons.tsx";
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
} from "./format.ts";
import { Icon } from "./icons.tsx";
import { now, type LiveRun } from "./live.ts";
import * as page from "./page.ts";
import { open } from "./route.ts";
import { elapsed, linkTo } from "./run.tsx";
import { conversation } from "./state.ts";

const ROW = 28;
const TOP = 26;
const NAMES = 132;
/** Above so many runs each is one line, without a name. */
const MOST_NAMED = 60;
const MOST_ROWS = 400;

interface Bar {
  readonly node: RunNode;
  readonly depth: number;
  readonly isTask: boolean;
}

/** Return the runs of a tree, each below the one that started it. */
function barsOf(live: LiveRun): Bar[] {
  const bars: Bar[] = [];
  const add = (node: RunNode, depth: number, isTask: boolean): void => {
    bars.push({ node, depth, isTask });
    for (const call of node.calls.values()) {
      for (const id of call.children) {
        const child = live.tree.runs.get(id);
        if (child !== undefined) add(child, depth + 1, call.isTask);
      }
    }
  };
  if (live.root !== undefined) add(live.root, 0, false);
  return bars;
}

/** Return the times in which a run only waited for the agents below it. */
function delegated(node: RunNode, end: number): [number, number][] {
  const spans: [number, number][] = [];
  for (const call of node.calls.values()) {
    if (call.children.length === 0 || call.isTask || call.startedAt === null) continue;
    const to = call.status === "suspended" ? end : (call.endedAt ?? end);
    const last = spans.at(-1);
    if (last !== undefined && call.startedAt <= last[1]) last[1] = Math.max(last[1], to);
    else spans.push([call.startedAt, to]);
  }
  return spans;
}

function waitsSince(node: RunNode): number | null {
  const own = [...node.calls.values()].filter(
    (call) => call.status === "suspended" && call.children.length === 0,
  );
  const times = own.flatMap((call) => (call.endedAt === null ? [] : [call.endedAt]));
  return times.length > 0 ? Math.min(...times) : null;
}

/** Return a round number of milliseconds for about four marks. */
function stepOf(span: number): number {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200];
  return 1000 * (steps.find((one) => span / (one * 1000) <= 4) ?? Math.ceil(span / 4000));
}

interface Paint {
  readonly [name: string]: string;
}

function colours(canvas: HTMLCanvasElement): Paint {
  const names = [
    "running",
    "waiting",
    "failed",
    "cancelled",
    "control",
    "line",
    "text",
    "muted",
    "raised",
    "retrying",
    "bg",
  ];
  const found: Record<string, string> = {};
  for (const name of names) {
    canvas.style.color = `var(--${name})`;
    found[name] = getComputedStyle(canvas).color;
  }
  canvas.style.color = "";
  return found;
}

function hatch(context: CanvasRenderingContext2D, colour: string): CanvasPattern | string {
  const tile = document.createElement("canvas");
  [tile.width, tile.height] = [6, 6];
  const drawn = tile.getContext("2d");
  if (drawn === null) return colour;
  drawn.strokeStyle = colour;
  drawn.lineWidth = 2.5;
  for (const x of [-6, 0, 6]) {
    drawn.beginPath();
    drawn.moveTo(x - 1, 7);
    drawn.lineTo(x + 7, -1);
    drawn.stroke();
  }
  return context.createPattern(tile, "repeat") ?? colour;
}

function heightOf(bars: readonly Bar[]): number {
  if (bars.length <= MOST_NAMED) return TOP + bars.length * ROW;
  return TOP + Math.max(120, Math.min(360, bars.length));
}

function draw(canvas: HTMLCanvasElement, bars: readonly Bar[], chosen: string | undefined): void {
  const context = canvas.getContext("2d");
  if (context === null) return;
  const width = canvas.clientWidth;
  const height = heightOf(bars);
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  context.scale(scale, scale);
  const paint = colours(canvas);
  const isNamed = bars.length <= MOST_NAMED;
  const left = isNamed ? NAMES : 4;
  const first = Math.min(...bars.map((bar) => bar.node.startedAt ?? bar.node.at));
  const last = Math.max(...bars.map(({ node }) => endOf(node)), first + 1000);
  const x = (at: number): number => left + ((width - left - 4) * (at - first)) / (last - first);
  context.font = `12px ${getComputedStyle(canvas).fontFamily}`;
  context.textBaseline = "middle";
  grid(context, paint, { first, last, height, x, width });
  const row = isNamed ? ROW : (height - TOP) / bars.length;
  bars.forEach((bar, place) => {
    const y = TOP + place * row;
    if (isNamed && bar.node.runId === chosen) {
      context.fillStyle = paint["raised"]!;
      context.fillRect(0, y, width, row);
    }
    if (isNamed) name(context, paint, bar, y + row / 2);
    one(context, paint, bar, { x, y: y + row / 2, thick: isNamed ? 8 : Math.max(0.7, row * 0.7) });
  });
}

interface Frame {
  readonly first: number;
  readonly last: number;
  readonly height: number;
  readonly width: number;
  readonly x: (at: number) => number;
}

function grid(context: CanvasRenderingContext2D, paint: Paint, frame: Frame): void {
  const step = stepOf(frame.last - frame.first);
  for (let at = 0; at <= frame.last - frame.first; at += step) {
    const x = Math.round(frame.x(frame.first + at)) + 0.5;
    context.strokeStyle = paint["line"]!;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, 18);
    context.lineTo(x, frame.height);
    context.stroke();
    context.fillStyle = paint["muted"]!;
    const text = at === 0 ? "0" : clock(at);
    context.textAlign = x > frame.width - 24 ? "right" : at === 0 ? "left" : "center";
    context.fillText(text, x, 9);
  }
  context.textAlign = "left";
}

function name(context: CanvasRenderingContext2D, paint: Paint, bar: Bar, y: number): void {
  const from = 4 + 10 * Math.min(bar.depth, 5);
  context.save();
  context.beginPath();
  context.rect(0, y - ROW / 2, NAMES - 8, ROW);
  context.clip();
  context.fillStyle = paint["text"]!;
  context.fillText(exact(bar.node.agent), from, y);
  context.restore();
}

const endOf = (node: RunNode): number =>
  isOver(statusOf(node.status)) ? (node.endedAt ?? node.at) : now.value;

function one(
  context: CanvasRenderingContext2D,
  paint: Paint,
  bar: Bar,
  at: { x: (time: number) => number; y: number; thick: number },
): void {
  const { node, isTask } = bar;
  const { x, y, thick } = at;
  const status = statusOf(node.status);
  const tone = {
    failed: "failed",
    timeout: "failed",
    completed: "control",
    cancelled: "cancelled",
  }[status as string];
  const colour = paint[node.wait !== null ? "retrying" : (tone ?? "running")]!;
  const [start, end] = [node.startedAt ?? node.at, endOf(node)];
  const bars = (from: number, to: number, height: number, fill: string | CanvasPattern): void => {
    context.fillStyle = fill;
    context.beginPath();
    context.roundRect(
      x(from),
      y - height / 2,
      Math.max(2, x(to) - x(from)),
      height,
      Math.min(2, height / 2),
    );
    context.fill();
  };
  if (isTask && !isOver(status)) {
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.strokeRect(x(start) + 0.5, y - thick / 2, Math.max(2, x(end) - x(start)), thick);
    return;
  }
  context.globalAlpha = status === "completed" ? 0.6 : 1;
  const since = waitsSince(node);
  let from = start;
  for (const [begin, finish] of delegated(node, end)) {
    if (begin > from) bars(from, begin, thick, colour);
    bars(begin, finish, Math.min(2, thick), colour);
    from = Math.max(from, finish);
  }
  if (since !== null) {
    if (since > from) bars(from, since, thick, colour);
    bars(Math.max(since, from), end, thick, hatch(context, paint["waiting"]!));
  } else if (from < end) {
    bars(from, end, thick, colour);
  }
  context.globalAlpha = 1;
}

export function TimelineTab() {
  const shown = conversation.value;
  const focus = page.focus.value;
  const live = focus?.place.live ?? shown?.newest.value;
  if (live === undefined || !live.begun.value) {
    return (
      <p class="blank">
        <b>Nothing has run yet</b>A bar for every agent appears here, so that you see what runs side
        by side and what is slow.
      </p>
    );
  }
  return <Timeline live={live} />;
}

function Timeline({ live }: { live: LiveRun }) {
  void live.beat.value;
  const canvas = useRef<HTMLCanvasElement>(null);
  const bars = barsOf(live);
  const chosen = page.chosen.value;
  const tick = isOver(statusOf(live.listed.value)) && live.ended ? 0 : now.value;
  useEffect(() => {
    if (canvas.current !== null) draw(canvas.current, bars, chosen?.runId);
  }, [live, live.beat.value, tick, chosen?.runId, document.documentElement.dataset["theme"]]);
  const pick = (event: MouseEvent): void => {
    const box = canvas.current!.getBoundingClientRect();
    const row = bars.length <= MOST_NAMED ? ROW : (heightOf(bars) - TOP) / bars.length;
    const bar = bars[Math.floor((event.clientY - box.top - TOP) / row)];
    if (bar !== undefined) page.chosen.value = { live, runId: bar.node.runId };
  };
  const isNamed = bars.length <= MOST_NAMED;
  return (
    <>
      <canvas
        class="tl"
        ref={canvas}
        style={{ height: `${heightOf(bars)}px` }}
        role="img"
        aria-label={`Timeline of ${counted(bars.length, "agent")}; the same as a table follows`}
        onClick={pick}
      />
      {isNamed ? <Key /> : <p class="blank">One line a run, in the order of their calls.</p>}
      <Table bars={bars.slice(0, MOST_ROWS)} />
      <Facts live={live} />
    </>
  );
}

function Key() {
  return (
    <p class="key">
      {["works", "delegates", "waits for you", "ended"].map((word) => (
        <span key={word}>
          <i class={`k-${word.split(" ")[0]}`} />
          {word}
        </span>
      ))}
    </p>
  );
}

function Table({ bars }: { bars: Bar[] }) {
  const first = Math.min(...bars.map((bar) => bar.node.startedAt ?? bar.node.at));
  return (
    <div class="say">
      <table>
        <caption>Timeline</caption>
        <tbody>
          {bars.slice(0, MOST_NAMED).map(({ node }) => (
            <tr key={node.runId}>
              <th scope="row">{exact(node.agent)}</th>
              <td>{runWord(node)}</td>
              <td>began after {clock((node.startedAt ?? node.at) - first)}</td>
              <td>took {clock(elapsed(node))}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** What there is to know of the chosen run, and what can be done with it. */
function Facts({ live }: { live: LiveRun }) {
  const place = page.chosen.value ?? page.focus.value?.place ?? { live, runId: live.root!.runId };
  const view = place.live.view(place.runId);
  if (view === undefined) return null;
  const node = view.node.value;
  const { usage } = view.sum.value;
  const status = statusOf(node.status);
  const above = pathOf(place.live.tree, node).slice(0, -1);
  const own = node.usage;
  return (
    <>
      <div class="rule" />
      <h2 class="said">{exact(node.agent)}</h2>
      <dl class="facts">
        <dt>Status</dt>
        <dd>
          <b class="st" data-tone={node.wait === null ? status : "retrying"}>
            {runWord(node)}
          </b>{" "}
          for {clock(elapsed(node))}
        </dd>
        <dt>Task</dt>
        <dd class="said" dir="auto">
          {prose(node.task.slice(0, 400)) || "—"}
        </dd>
        {above.length > 0 && <dt>Path</dt>}
        {above.length > 0 && (
          <dd class="said">{above.map((one) => exact(one.agent)).join(" › ")}</dd>
        )}
        <dt>Model</dt>
        <dd>
          {modelName(node.model) || "—"} · step {node.steps}
        </dd>
        <dt>Tokens</dt>
        <dd>
          {own.input_tokens.toLocaleString("en")} in · {own.output_tokens.toLocaleString("en")} out
          {own.cached_tokens > 0 && ` · ${own.cached_tokens.toLocaleString("en")} cached`}
        </dd>
        <dt>Cost</dt>
        <dd>
          {money(own)}
          {(usage.cost ?? 0) > (own.cost ?? 0) && `, with the agents below ${money(usage)}`}
        </dd>
        {node.notes.length > 0 && <dt>Notes</dt>}
        {node.notes.length > 0 && (
          <dd class="said">
            {node.notes.slice(-3).map((one) => (
              <p key={one}>{exact(one)}</p>
            ))}
          </dd>
        )}
      </dl>
      <div class="rowacts">
        {node.ns.length > 0 && (
          <button type="button" class="btn small" onClick={() => open(linkTo(place.live, node))}>
            Open
          </button>
        )}
        <button type="button" class="btn small" onClick={() => page.messageTo(place)}>
          <Icon name="msg" />
          Message
        </button>
        {!isOver(status) && (
          <button
            type="button"
            class="btn small"
            aria-haspopup="menu"
            onClick={(event) => (page.menu.value = { place, anchor: event.currentTarget })}>
            <Icon name="stop" />
            Stop
          </button>
        )}
        <CopyButton
          icon="chain"
          label="Copy link"
          text={() => new URL(linkTo(place.live, node), location.href).href}
        />
      </div>
    </>
  );
}
