/** The list of threads: those that need somebody first, then those at work, then the others by day. */

import type { ThreadShape } from "retinue-client";
import { useState } from "preact/hooks";
import { signOut, user } from "./api.ts";
import { IconButton } from "./buttons.tsx";
import { counted, money, prose, statusOf, tokens, tokensOf, wordOf } from "./format.ts";
import { Glyph, Icon } from "./icons.tsx";
import * as page from "./page.ts";
import { address, open } from "./route.ts";
import { link } from "./socket.ts";
import { conversation, loadThreads, search, threads } from "./state.ts";
import { nextTheme } from "./theme.ts";

const ROW = 50;
const FIRST = 60;

function day(thread: ThreadShape): string {
  const then = new Date(thread.used_at ?? 0);
  const today = new Date();
  const start = (date: Date): number =>
    new Date(date.getFullYear(), date.getMonth(), date.getDate()).getTime();
  const days = Math.round((start(today) - start(then)) / 86_400_000);
  if (days <= 0) return "Earlier today";
  if (days === 1) return "Yesterday";
  return days < 7 ? "This week" : "Earlier";
}

function groupOf(thread: ThreadShape): string {
  if (thread.status === "waiting" || thread.questions > 0) return "Needs you";
  if (thread.status === "running" || thread.status === "queued") return "Working";
  return day(thread);
}

const ORDER = ["Needs you", "Working", "Earlier today", "Yesterday", "This week", "Earlier"];

function meta(thread: ThreadShape): string {
  const parts: string[] = [];
  if (thread.questions > 0) parts.push(counted(thread.questions, "question"));
  if (thread.children > 0) parts.push(counted(thread.children + 1, "agent"));
  else if (thread.status === "running") parts.push("running");
  if (thread.status === "queued") parts.push("queued");
  if (thread.status === "failed") parts.push("failed");
  if (parts.length > 0) return parts.join(" · ");
  const count = tokensOf(thread.usage);
  const cost = thread.usage.cost ? ` · ${money(thread.usage)}` : "";
  return count > 0 ? `${tokens(count)} tokens${cost}` : wordOf(statusOf(thread.status));
}

export function Threads() {
  const [most, setMost] = useState(FIRST);
  const shown = threads.value.slice(0, most);
  const groups = ORDER.map((name) => [name, shown.filter((one) => groupOf(one) === name)] as const);
  return (
    <nav class="threads" aria-label="Threads">
      <div class="brand">
        <Icon name="mark" more="mark" />
        Retinue
        <IconButton icon="plus" label="New thread" hint="New thread (N)" onClick={newThread} />
      </div>
      <div class="search">
        <Icon name="search" />
        <input
          class="field"
          type="search"
          aria-label="Search threads"
          placeholder="Search threads"
          value={search.value}
          onInput={(event) => (search.value = event.currentTarget.value)}
          onKeyDown={(event) => {
            event.stopPropagation();
            if (event.key === "Escape") event.currentTarget.blur();
          }}
        />
        <kbd aria-hidden="true">/</kbd>
      </div>
      <div
        class="scroll"
        tabIndex={0}
        role="group"
        aria-label="Thread list"
        onScroll={(event) => {
          const list = event.currentTarget as HTMLElement;
          if (list.scrollTop + list.clientHeight < list.scrollHeight - 8 * ROW) return;
          if (most >= threads.value.length) void loadThreads(true).catch(() => undefined);
          setMost(most + FIRST);
        }}>
        {threads.value.length === 0 && (
          <p class="blank">
            {search.value
              ? "No title has these words."
              : "Threads you start appear here. Those that need you come first."}
          </p>
        )}
        {groups.map(
          ([name, list]) =>
            list.length > 0 && (
              <section key={name} aria-label={name}>
                <h2>{name}</h2>
                <ul>
                  {list.map((thread) => (
                    <Thread key={thread.thread_id} thread={thread} />
                  ))}
                </ul>
              </section>
            ),
        )}
      </div>
      <Foot />
    </nav>
  );
}

function Thread({ thread }: { thread: ThreadShape }) {
  const status = thread.questions > 0 ? "waiting" : statusOf(thread.status);
  const isShown = conversation.value?.threadId === thread.thread_id;
  return (
    <li>
      <a
        class="thread"
        href={address(thread.thread_id)}
        data-thread={thread.thread_id}
        data-status={status}
        aria-current={isShown ? "page" : undefined}
        onClick={() => (page.pane.value = "chat")}>
        <Glyph status={status} />
        <span class="title cut said" dir="auto">
          {prose(thread.title || "Untitled")}
        </span>
        <span class="meta cut">
          <span class="say">{wordOf(status)}, </span>
          {meta(thread)}
        </span>
      </a>
    </li>
  );
}

export function newThread(): void {
  open("#/");
  page.pane.value = "chat";
  page.focusComposer();
}

const LINK = { live: "Live", reconnecting: "Reconnecting", offline: "Offline" };

function Foot() {
  return (
    <div class="foot">
      <span class="live" role="status" aria-label="Connection" data-link={link.value}>
        <span class="dot" />
        {LINK[link.value]}
      </span>
      <IconButton
        icon="key"
        label="Keys"
        hint="Keys (?)"
        onClick={() => (page.isKeysShown.value = true)}
      />
      <IconButton icon="theme" label="Theme" hint="Theme (Shift+T)" onClick={nextTheme} />
      <IconButton
        icon="out"
        label="Sign out"
        hint={`Sign out ${user.value?.user_id ?? ""}`}
        onClick={() => void signOut()}
      />
    </div>
  );
}
