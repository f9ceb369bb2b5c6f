/** The events of the newest run as they are stored: the newest from memory, older ones by page. */

import { useSignal } from "@preact/signals";
import type { Event } from "retinue-client";
import { useEffect } from "preact/hooks";
import { list, segment } from "./api.ts";
import { counted, exact } from "./format.ts";
import { Icon } from "./icons.tsx";
import { Json } from "./json.tsx";
import type { LiveRun } from "./live.ts";
import * as page from "./page.ts";
import { conversation, STRUCTURE } from "./state.ts";

const ROW = 28;
const PAGE = 200;

export function EventsTab() {
  const live = page.focus.value?.place.live ?? conversation.value?.newest.value;
  if (live === undefined || !live.begun.value) {
    return (
      <p class="blank">
        <b>No events yet</b>Everything that agents do is an event; the log of a run appears here.
      </p>
    );
  }
  return <Events key={live.runId} live={live} />;
}

/** Pieces of text are events, too; they are shown to those who ask for them. */
function matches(event: Event, words: readonly string[]): boolean {
  const isPiece = event.kind.endsWith("_delta") && event.kind !== "state_delta";
  if (isPiece && !words.some((word) => word.includes("delta"))) return false;
  const text = `${event.kind} ${event.agent} ${summary(event)}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

/** Return what distinguishes an event from others of its kind. */
function summary(event: Event): string {
  switch (event.kind) {
    case "tool_call_started":
    case "tool_call_ready":
    case "tool_call_resumed":
      return event.tool_name;
    case "tool_call_finished":
      return `${event.tool_name} ${event.status}`;
    case "text_delta":
    case "reasoning_delta":
    case "tool_call_args_delta":
    case "tool_call_stream_delta":
      return event.delta;
    case "run_finished":
      return event.status;
    case "child_started":
    case "child_finished":
      return event.child_agent;
    case "state_delta":
      return Object.keys(event.delta).join(", ");
    case "error":
      return event.message;
    default:
      return "";
  }
}

function Events({ live }: { live: LiveRun }) {
  void live.beat.value;
  const filter = useSignal("");
  const older = useSignal<readonly Event[]>([]);
  const isFirst = useSignal(false);
  const top = useSignal(0);
  const chosen = useSignal<Event | null>(null);
  const before = older.value[0]?.seq ?? live.events[0]?.seq ?? live.tree.seq + 1;
  const load = async (): Promise<void> => {
    const path = `api/v1/runs/${segment(live.runId)}/events?before=${before}&limit=${PAGE}&kinds=${STRUCTURE}`;
    const found = await list<Event>(path).catch(() => []);
    isFirst.value = found.length === 0 || found[0]!.seq <= 1;
    older.value = [...found, ...older.value];
  };
  useEffect(() => {
    if (live.events.length < PAGE) void load();
  }, [live]);
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const known = [
    ...older.value,
    ...live.events.filter((one) => one.seq > (older.value.at(-1)?.seq ?? 0)),
  ];
  const ns = page.focus.value === null ? [] : (page.nodeOf(page.focus.value.place)?.ns ?? []);
  const shown = known
    .filter((one) => ns.every((part, place) => one.ns[place] === part) && matches(one, words))
    .reverse();
  const from = Math.max(0, Math.floor(top.value / ROW) - 10);
  const rows = shown.slice(from, from + 60);
  const first = (live.root?.startedAt ?? 0) / 1000;
  return (
    <>
      <div class="search inpane">
        <Icon name="search" />
        <input
          class="field"
          type="search"
          aria-label="Filter events"
          placeholder="Filter by kind, agent or text"
          value={filter.value}
          onInput={(event) => (filter.value = event.currentTarget.value)}
          onKeyDown={(event) => event.stopPropagation()}
        />
      </div>
      <div
        class="evs scroll"
        tabIndex={0}
        role="group"
        aria-label="Events"
        onScroll={(event) => (top.value = (event.currentTarget as HTMLElement).scrollTop)}>
        <div style={{ height: `${from * ROW}px` }} />
        {rows.map((one) => (
          <button
            type="button"
            class="ev"
            key={`${one.seq}-${one.at}`}
            onClick={() => (chosen.value = one)}>
            <span>{one.seq || "·"}</span>
            <span>{Math.max(0, one.at - first).toFixed(1)}</span>
            <span class="cut">{one.kind}</span>
            <span class="what cut said">
              {exact(summary(one).slice(0, 80)) || exact(one.agent)}
            </span>
          </button>
        ))}
        <div style={{ height: `${Math.max(0, shown.length - from - rows.length) * ROW}px` }} />
      </div>
      <p class="blank">
        {counted(shown.length, "event")} of {known.length} loaded. Write “delta” to see words as
        they came.{" "}
        {!isFirst.value && (
          <button type="button" class="link" onClick={() => void load()}>
            Load older
          </button>
        )}
      </p>
      {chosen.value !== null && (
        <Json key={chosen.value.seq} value={chosen.value} name={chosen.value.kind} />
      )}
    </>
  );
}
