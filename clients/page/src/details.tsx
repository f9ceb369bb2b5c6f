/** The right pane: what the chosen run is, and five tabs about the thread. */

import { exact } from "./format.ts";
import { EventsTab } from "./events.tsx";
import { FilesTab } from "./files.tsx";
import { Icon } from "./icons.tsx";
import * as page from "./page.ts";
import { StateTab } from "./statetab.tsx";
import { conversation } from "./state.ts";
import { TasksTab } from "./tasks.tsx";
import { TimelineTab } from "./timeline.tsx";

const PANELS = {
  Timeline: TimelineTab,
  Tasks: TasksTab,
  State: StateTab,
  Files: FilesTab,
  Events: EventsTab,
};

function openTasks(): number {
  const tasks = (conversation.value?.runs.value ?? []).flatMap((run) => run.tasks.value);
  return tasks.filter((task) => ["pending", "running", "awaiting"].includes(task.status)).length;
}

export function Details() {
  const tasks = openTasks();
  const name = page.tab.value;
  const Panel = PANELS[name];
  const move = (event: KeyboardEvent): void => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = page.TABS[(page.TABS.indexOf(name) + by + page.TABS.length) % page.TABS.length]!;
    page.tab.value = next;
    queueMicrotask(() => document.getElementById(`tab-${next}`)?.focus());
  };
  return (
    <aside class="detail" aria-label="Details">
      <div class="tabs" role="tablist" aria-label="Details" onKeyDown={move}>
        {page.TABS.map((one) => (
          <button
            type="button"
            role="tab"
            key={one}
            id={`tab-${one}`}
            class="tab"
            aria-selected={one === name}
            aria-controls="panel"
            tabIndex={one === name ? 0 : -1}
            onClick={() => (page.tab.value = one)}>
            {one}
            {one === "Tasks" && tasks > 0 && (
              <span class="n" aria-hidden="true">
                {tasks}
              </span>
            )}
          </button>
        ))}
      </div>
      <div
        class="panel scroll"
        id="panel"
        role="tabpanel"
        aria-labelledby={`tab-${name}`}
        tabIndex={0}
        key={name}>
        <Panel />
      </div>
    </aside>
  );
}

const DOCK = [
  ["Chat", "msg"],
  ["Timeline", "time"],
  ["Tasks", "list"],
  ["Files", "copy"],
  ["More", "more"],
] as const;

/** The panes of a phone. */
export function Dock() {
  const choose = (name: string): void => {
    if (name === "Chat") return void (page.pane.value = "chat");
    page.pane.value = "detail";
    page.tab.value = name === "More" ? "Events" : (name as page.Tab);
  };
  const present = page.pane.value === "detail" ? page.tab.value : "Chat";
  const isCurrent = (name: string): boolean =>
    name === present || (name === "More" && ["State", "Events"].includes(present));
  return (
    <nav class="dock" aria-label="Panes">
      {DOCK.map(([name, icon]) => (
        <button
          type="button"
          key={name}
          aria-current={isCurrent(name) ? "page" : undefined}
          onClick={() => choose(name)}>
          <Icon name={icon} />
          {exact(name)}
        </button>
      ))}
    </nav>
  );
}
