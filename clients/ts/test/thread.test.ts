/** The trees of a thread, and the place after which to follow it. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { cursorOf, reduceThread, type ThreadEvent } from "../src/index.js";

const stamp = { at: 1, agent: "a", ns: [], parent_run_id: null };

function started(log_id: string, seq: number): ThreadEvent {
  const more = { thread_id: "t", parent_tool_call_id: null, messages: [], continues: false };
  return { kind: "run_started", ...stamp, ...more, seq, run_id: log_id, log_id };
}

function finished(log_id: string, seq: number): ThreadEvent {
  const more = {
    kind: "run_finished",
    status: "completed",
    termination: "natural",
    usage: {},
    response: "",
    error: null,
  };
  return { ...stamp, ...more, seq, run_id: log_id, log_id } as unknown as ThreadEvent;
}

function task(log_id: string, seq: number, status: string): ThreadEvent {
  const more = { kind: "task_updated", task_id: "k", call_id: "c", status, agent: "b" };
  return { ...stamp, ...more, seq, run_id: "child", parent_run_id: log_id, log_id } as ThreadEvent;
}

test("each log has its tree, and events that come again change nothing", () => {
  const events = [started("one", 1), finished("one", 2), started("two", 1)];
  const thread = reduceThread(new Map(), events);
  assert.deepEqual([...thread.keys()], ["one", "two"]);
  assert.equal(thread.get("one")!.runs.get("one")!.status, "completed");
  const again = reduceThread(thread, [...events, finished("two", 2)]);
  assert.equal(again.get("one"), thread.get("one"));
  assert.equal(again.get("two")!.seq, 2);
  assert.equal(reduceThread(thread, []), thread);
});

test("the cursor has the newest log, and older ones whose background tasks work", () => {
  let thread = reduceThread(new Map(), [
    started("one", 1),
    task("one", 2, "RUNNING"),
    finished("one", 3),
  ]);
  assert.equal(cursorOf(thread), "one:3");
  thread = reduceThread(thread, [started("two", 1), finished("two", 2), started("three", 1)]);
  assert.equal(cursorOf(thread), "three:1;one:3");
  thread = reduceThread(thread, [task("one", 4, "COMPLETED")]);
  assert.equal(cursorOf(thread), "three:1");
});
