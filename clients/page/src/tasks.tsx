/** Background tasks of a thread with their progress, and what each agent has cost. */

import type { RunNode, TaskNode } from "retinue-client";
import { Meter, progressOf } from "./call.tsx";
import {
  clock,
  exact,
  firstLine,
  isOver,
  money,
  prose,
  statusOf,
  tokens,
  tokensOf,
  wordOf,
} from "./format.ts";
import { Glyph } from "./icons.tsx";
import { now, type LiveRun } from "./live.ts";
import { linkTo } from "./run.tsx";
import { conversation } from "./state.ts";

const MOST_COSTS = 100;

export function TasksTab() {
  const runs = conversation.value?.runs.value ?? [];
  const tasks = runs.flatMap((live) => live.tasks.value.map((task) => ({ live, task }))).reverse();
  return (
    <>
      {tasks.length === 0 && (
        <p class="blank">
          <b>No background tasks</b>Agents that work on after their answer appear here, with their
          progress.
        </p>
      )}
      <div>
        {tasks.map(({ live, task }) => (
          <Task key={task.taskId} live={live} task={task} />
        ))}
      </div>
      <Costs runs={runs} />
    </>
  );
}

function Task({ live, task }: { live: LiveRun; task: TaskNode }) {
  void live.beat.value;
  const parent = live.tree.runs.get(task.runId ?? "");
  const call = parent?.calls.get(task.callId);
  const child = live.tree.runs.get(call?.children[0] ?? "");
  const status = child === undefined ? statusOf(task.status) : statusOf(child.status);
  const end = isOver(status) ? (task.updatedAt ?? now.value) : now.value;
  const progress = progressOf(call);
  const hasRunEnded = parent !== undefined && isOver(statusOf(parent.status)) && !isOver(status);
  const notes = [progress?.text, hasRunEnded ? "its run has ended, the task goes on" : ""]
    .filter(Boolean)
    .join(" · ");
  return (
    <div class="task-row" data-tone={status}>
      <Glyph status={status} />
      {child === undefined ? (
        <b class="said">{exact(task.agent)}</b>
      ) : (
        <a class="said" href={linkTo(live, child)}>
          <b>{exact(child.agent)}</b>
        </a>
      )}
      <span class="muted num">{clock(end - (task.startedAt ?? end))}</span>
      <div class="sub">
        <span class="say">{wordOf(status)} </span>
        <span class="cut said" dir="auto">
          {prose(firstLine(child?.task ?? "")) || wordOf(status)}
        </span>
      </div>
      {progress?.share != null && (
        <div class="sub">
          <Meter share={progress.share} />
          <span class="num">{Math.round(100 * progress.share)} %</span>
        </div>
      )}
      {notes && <div class="sub">{notes}</div>}
    </div>
  );
}

interface Cost {
  readonly node: RunNode;
  readonly depth: number;
}

function costsOf(live: LiveRun): Cost[] {
  const found: Cost[] = [];
  const add = (node: RunNode, depth: number): void => {
    found.push({ node, depth });
    for (const call of node.calls.values()) {
      for (const id of call.children) {
        const child = live.tree.runs.get(id);
        if (child !== undefined) add(child, depth + 1);
      }
    }
  };
  if (live.root !== undefined) add(live.root, 0);
  return found;
}

function Costs({ runs }: { runs: readonly LiveRun[] }) {
  const live = runs.at(-1);
  if (live === undefined || !live.begun.value) return null;
  void live.beat.value;
  const costs = costsOf(live);
  const sum = live.view(live.root!.runId)?.sum.value.usage ?? {};
  return (
    <>
      <h2>Cost of the last turn</h2>
      <table class="cost num">
        <tbody>
          {costs.slice(0, MOST_COSTS).map(({ node, depth }) => (
            <tr key={node.runId}>
              <td class={`said d${Math.min(depth, 4)}`}>
                {exact(node.agent)}
                {!isOver(statusOf(node.status)) && <span class="muted"> so far</span>}
              </td>
              <td>{tokens(tokensOf(node.usage))}</td>
              <td>{money(node.usage)}</td>
            </tr>
          ))}
        </tbody>
        <tfoot>
          <tr>
            <td>Together{costs.length > MOST_COSTS ? ` (${costs.length} agents)` : ""}</td>
            <td>{tokens(tokensOf(sum))}</td>
            <td>{money(sum)}</td>
          </tr>
        </tfoot>
      </table>
    </>
  );
}
