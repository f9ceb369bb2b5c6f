/** Many children of one run as rows. Only those in view are in the document; their order never changes by itself. */

import type { RunNode } from "retinue-client";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import {
  callWords,
  clock,
  exact,
  firstLine,
  isOver,
  lastLine,
  money,
  plain,
  prose,
  runWord,
  statusOf,
  tokens,
  tokensOf,
  waitOf,
  wordOf,
  type Status,
} from "./format.ts";
import { callNow, lastWords } from "./body.ts";
import { Glyph } from "./icons.tsx";
import { tailFor, type LiveRun, type RunView } from "./live.ts";
import * as page from "./page.ts";
import { open } from "./route.ts";
import { elapsed, linkTo, nameOf, RunGlyph } from "./run.tsx";

const ROW = 28;
const LEAST = 8 * ROW;
/** What stands above and below the rows. */
const AROUND = 150;
const SPARE = 6;
/** Those that need somebody come first. */
const CHIPS: readonly Status[] = [
  "waiting",
  "failed",
  "timeout",
  "running",
  "queued",
  "cancelled",
  "completed",
];
const BAR: readonly Status[] = [
  "completed",
  "running",
  "waiting",
  "failed",
  "timeout",
  "cancelled",
  "queued",
];

function childrenIds(node: RunNode): string[] {
  return [...node.calls.values()].flatMap((call) => call.children);
}

export function Roster({ live, view }: { live: LiveRun; view: RunView }) {
  void live.beat.value;
  const [filter, setFilter] = useState<Status | null>(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(18 * ROW);
  const section = useRef<HTMLElement>(null);
  useEffect(() => {
    const log = section.current?.closest(".log");
    if (!log) return undefined;
    const observer = new ResizeObserver(() =>
      setHeight(Math.max(LEAST, log.clientHeight - AROUND)),
    );
    observer.observe(log);
    return () => observer.disconnect();
  }, []);
  const node = view.node.value;
  const ids = useMemo(() => childrenIds(node), [node.calls]);
  const status = (id: string): Status => statusOf(live.tree.runs.get(id)?.status ?? "queued");
  const counts = new Map<Status, number>();
  for (const id of ids) counts.set(status(id), (counts.get(status(id)) ?? 0) + 1);
  const shown = filter === null ? ids : ids.filter((id) => status(id) === filter);
  const from = Math.max(0, Math.floor(top / ROW) - SPARE);
  const rows = shown.slice(from, from + Math.ceil(height / ROW) + 2 * SPARE);
  const said = BAR.flatMap((one) => (counts.has(one) ? [`${counts.get(one)} ${wordOf(one)}`] : []));
  return (
    <section class="roster" ref={section} aria-label={`${ids.length} agents`}>
      <div class="chips">
        <Chip status={null} count={ids.length} filter={filter} choose={setFilter} />
        {CHIPS.filter((one) => counts.has(one)).map((one) => (
          <Chip
            key={one}
            status={one}
            count={counts.get(one)!}
            filter={filter}
            choose={setFilter}
          />
        ))}
      </div>
      <div class="split" role="img" aria-label={said.join(", ")}>
        <Share counts={counts} all={ids.length} />
      </div>
      <div
        class="rosterbox scroll"
        tabIndex={0}
        role="group"
        aria-label="Agents"
        style={{ height: `${Math.min(height, (shown.length + 1) * ROW)}px` }}
        onScroll={(event) => setTop((event.currentTarget as HTMLElement).scrollTop)}>
        <table class="rows" aria-label="Agents" aria-rowcount={shown.length + 1}>
          <thead>
            <tr aria-rowindex={1}>
              <th class="c-g">
                <span class="say">Glyph</span>
              </th>
              <th class="c-s">Status</th>
              <th class="c-v">Agent</th>
              <th class="c-t">Task</th>
              <th>Now</th>
              <th class="r c-n">Time</th>
              <th class="r c-n tok">Tokens</th>
              <th class="r c-m">Cost</th>
            </tr>
          </thead>
          <tbody>
            {from > 0 && <Gap rows={from} />}
            {rows.map((id, place) => (
              <Row key={id} live={live} runId={id} place={from + place} />
            ))}
            {from + rows.length < shown.length && <Gap rows={shown.length - from - rows.length} />}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Gap({ rows }: { rows: number }) {
  return (
    <tr class="gap" aria-hidden="true" style={{ height: `${rows * ROW}px` }}>
      <td colSpan={8} />
    </tr>
  );
}

function Chip(options: {
  status: Status | null;
  count: number;
  filter: Status | null;
  choose: (status: Status | null) => void;
}) {
  const { status, count, filter, choose } = options;
  return (
    <button
      type="button"
      class="chip"
      data-filter={status ?? "all"}
      aria-pressed={filter === status}
      onClick={() => choose(status)}>
      {status === null ? "All" : <Glyph status={status} />}
      {status !== null && wordOf(status)} <b>{count}</b>
    </button>
  );
}

function Share({
  counts,
  all,
}: {
  readonly counts: ReadonlyMap<Status, number>;
  readonly all: number;
}) {
  let left = 0;
  return (
    <svg viewBox="0 0 1000 6" preserveAspectRatio="none">
      {BAR.map((status) => {
        const width = (1000 * (counts.get(status) ?? 0)) / Math.max(1, all);
        const x = left;
        left += width;
        return (
          width > 0 && (
            <rect key={status} class={status} x={x} width={Math.max(1, width - 3)} height="6" />
          )
        );
      })}
    </svg>
  );
}

function words(view: RunView): { text: string; isText: boolean } {
  const node = view.node.value;
  const call =
    statusOf(node.status) === "running" && node.open === null ? callNow(node) : undefined;
  if (node.wait !== null)
    return { text: firstLine(node.wait.message).slice(0, 100), isText: false };
  if (statusOf(node.status) === "failed")
    return { text: exact(firstLine(node.error ?? "")), isText: false };
  const asked = [...node.calls.values()].find((one) => one.status === "suspended");
  if (asked !== undefined) return { text: `wants ${exact(asked.tool)}`, isText: false };
  if (call !== undefined) return { text: callWords(call.tool, call.args), isText: false };
  const last = lastWords(node, tailFor(view), { first: firstLine, last: lastLine });
  const isRunning = statusOf(node.status) === "running";
  return { text: prose(plain(isRunning ? last.slice(-64) : last.slice(0, 200))), isText: true };
}

function Row({ live, runId, place }: { live: LiveRun; runId: string; place: number }) {
  useEffect(() => live.see(runId), [live, runId]);
  const view = live.view(runId);
  if (view === undefined) return null;
  const node = view.node.value;
  const usage = view.sum.value.usage;
  const { text, isText } = words(view);
  const isChosen = page.chosen.value?.runId === runId;
  const show = (): void => open(linkTo(live, node));
  return (
    <tr
      role="row"
      aria-rowindex={place + 2}
      tabIndex={0}
      data-ns={node.ns.join("|")}
      data-run={runId}
      data-agent={node.agent}
      data-status={statusOf(node.status)}
      data-wait={waitOf(node)}
      data-call-id={node.callId ?? ""}
      aria-label={nameOf(node)}
      aria-selected={isChosen}
      onClick={() => (page.chosen.value = { live, runId })}
      onDblClick={show}
      onKeyDown={(event) => event.key === "Enter" && (event.stopPropagation(), show())}>
      <td class="g">
        <RunGlyph node={node} />
      </td>
      <td>
        <span class="word">{runWord(node)}</span>
      </td>
      <td class="said">
        <a href={linkTo(live, node)}>{exact(node.agent)}</a>
      </td>
      <td class="said" dir="auto">
        {prose(firstLine(node.task).slice(0, 120))}
      </td>
      <td class="said muted" dir="auto" data-part={isText ? "text" : undefined}>
        {text}
      </td>
      <td class="r muted">
        {isOver(statusOf(node.status)) || node.startedAt ? clock(elapsed(node)) : ""}
      </td>
      <td class="r muted tok">{tokens(tokensOf(usage))}</td>
      <td class="r">{money(usage)}</td>
    </tr>
  );
}
