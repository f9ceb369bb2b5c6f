/** The box for messages: to a thread, to an agent at work, or a fork. */

import { useRef, useLayoutEffect } from "preact/hooks";
import { ApiError } from "./api.ts";
import { exact, firstLine, isOver, prose, statusOf } from "./format.ts";
import { Icon } from "./icons.tsx";
import * as page from "./page.ts";
import { link } from "./socket.ts";
import { agents, conversation, fork, start, steer } from "./state.ts";
import { signal, useSignal } from "@preact/signals";

/** The agent that new runs begin with. */
export const agent = signal<string | null>(null);
const drafts = new Map<string, string>();

/** Return the agent to start: the chosen one, else that of the thread, else the first. */
function startedAgent(): string {
  const names = agents.value.map((one) => one.name);
  const ofThread = conversation.value?.newest.value?.agent;
  return [agent.value, ofThread, names[0]].find((one) => one != null && names.includes(one)) ?? "";
}

/** Return the agent at work that a message goes to, if there is one. */
function worker(): page.Place | null {
  const place = page.recipient.value ?? page.focus.value?.place ?? null;
  if (place !== null) {
    const node = place.live.view(place.runId)?.node.value;
    if (node !== undefined && !isOver(statusOf(node.status))) return place;
  }
  const newest = conversation.value?.newest.value;
  if (newest === undefined || !newest.begun.value || isOver(statusOf(newest.listed.value)))
    return null;
  return { live: newest, runId: newest.root!.runId };
}

async function send(text: string, isQueued: boolean): Promise<void> {
  const shown = conversation.value;
  const at = page.forkAt.value;
  if (at !== null) {
    await fork(at.runId, at.messageId, text);
    page.forkAt.value = null;
    return;
  }
  const place = worker();
  const node = place === null ? undefined : page.nodeOf(place);
  if (place !== null && node !== undefined && !isQueued) {
    try {
      await steer(place.live.runId, node.ns, text);
      return;
    } catch (error) {
      // It has ended meanwhile: the message begins the next turn.
      if (
        !(error instanceof ApiError) ||
        ![404, 405, 409].includes(error.status) ||
        node.ns.length > 0
      )
        throw error;
    }
  }
  await start(
    startedAgent(),
    text,
    shown?.threadId ?? null,
    place === null ? {} : { when_busy: "enqueue" },
  );
}

export function Composer() {
  const area = useRef<HTMLTextAreaElement>(null);
  const isBusy = useSignal(false);
  const text = page.draft.value;
  const threadId = conversation.value?.threadId ?? "";
  useLayoutEffect(() => {
    page.draft.value = drafts.get(threadId) ?? "";
    page.forkAt.value = null;
    page.recipient.value = null;
    page.problem.value = "";
    return () => void drafts.set(threadId, page.draft.peek());
  }, [threadId]);
  useLayoutEffect(() => {
    const box = area.current!;
    box.style.height = "auto";
    box.style.height = `${Math.min(240, box.scrollHeight)}px`;
  }, [text]);
  const submit = async (isQueued = false): Promise<void> => {
    const given = page.draft.value.trim();
    if (!given && page.forkAt.value === null) return;
    if (isBusy.value || link.value !== "live") return;
    isBusy.value = true;
    try {
      page.problem.value = "";
      await send(given, isQueued);
      page.draft.value = "";
      drafts.delete(threadId);
    } catch (error) {
      page.problem.value = `${error instanceof ApiError ? error.message : String(error)} Your words are kept.`;
    } finally {
      isBusy.value = false;
    }
  };
  const place = worker();
  const node = place?.live.view(place.runId)?.node.value;
  const to = node?.agent ?? startedAgent();
  const isFork = page.forkAt.value !== null;
  const isOff = link.value !== "live" || isBusy.value || (!text.trim() && !isFork);
  return (
    <footer class="composer">
      <div class="col">
        {page.problem.value && (
          <p class="err" role="alert">
            {page.problem.value}
          </p>
        )}
        <form
          class="box"
          onSubmit={(event) => {
            event.preventDefault();
            void submit();
          }}>
          <textarea
            ref={area}
            aria-label="Message"
            rows={1}
            dir="auto"
            placeholder={
              node === undefined
                ? `Message ${to}`
                : `Message ${to}. It is read before the next step.`
            }
            value={text}
            onInput={(event) => (page.draft.value = event.currentTarget.value)}
            onKeyDown={(event) => {
              event.stopPropagation();
              if (event.key === "Escape") area.current?.blur();
              if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
              event.preventDefault();
              void submit(event.altKey);
            }}
          />
          <div class="line">
            {isFork ? <ForkLine /> : <To place={place} />}
            <span class="hint">
              {node === undefined || isFork
                ? "Enter sends · Shift+Enter breaks the line"
                : "Enter sends · Alt+Enter sends after this turn"}
            </span>
            <button type="submit" class="btn main small send" disabled={isOff}>
              {isFork ? "Fork" : "Send"}
            </button>
          </div>
        </form>
      </div>
    </footer>
  );
}

function ForkLine() {
  const cancel = (): void => {
    page.forkAt.value = null;
    page.draft.value = "";
  };
  return (
    <span class="to">
      <Icon name="fork" more="here" />
      <span class="cut">A fork begins a thread from this message. This one stays as it is.</span>
      <button type="button" class="link" onClick={cancel}>
        Cancel
      </button>
    </span>
  );
}

/** The choice of the agent: those that are served, and the one at work that was chosen. */
function To({ place }: { place: page.Place | null }) {
  const chosen = page.recipient.value ?? page.focus.value?.place ?? null;
  const node = chosen === null ? undefined : page.nodeOf(chosen);
  const names = agents.value.map((one) => one.name);
  const isWorker = node !== undefined && place?.runId === chosen?.runId;
  if (names.length < 2 && !isWorker) {
    return (
      <span class="to">
        To <b>{exact(startedAgent())}</b>
      </span>
    );
  }
  return (
    <label class="to">
      To
      <select
        class="pick"
        aria-label="Agent"
        value={isWorker ? "" : startedAgent()}
        onChange={(event) => {
          page.recipient.value = null;
          agent.value = event.currentTarget.value || agent.value;
        }}>
        {isWorker && (
          <option value="">
            {exact(node.agent)} · {prose(firstLine(node.task).slice(0, 40))}
          </option>
        )}
        {names.map((name) => (
          <option key={name} value={name}>
            {exact(name)}
          </option>
        ))}
      </select>
      <Icon name="chev" />
    </label>
  );
}
