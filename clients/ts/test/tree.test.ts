/** Recorded logs and the snapshots that the server made of them: the tree is the same, from wherever it is read. */

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import {
  EMPTY,
  fromSnapshot,
  questions,
  reduce,
  reduceAll,
  totalUsage,
  type Event,
  type RunNode,
  type SnapshotShape,
  type Tree,
} from "../src/index.js";

interface Recording {
  readonly events: readonly Event[];
  readonly snapshots: readonly SnapshotShape[];
}

const folder =
  process.env["RECORDINGS"] ?? new URL("../../test/recordings", import.meta.url).pathname;
const recordings = readdirSync(folder)
  .filter((name) => name.endsWith(".json"))
  .sort();

/** Return what of a tree both sources know: a snapshot has no waits, activities or times of the last event. */
function known(tree: Tree): unknown {
  const runs = [...tree.runs.values()].map((run: RunNode) => ({
    ...run,
    wait: null,
    at: 0,
    calls: [...run.calls.values()].map((call) => ({ ...call, activity: null })),
  }));
  return {
    ...tree,
    runs: runs.sort((a, b) => (a.runId < b.runId ? -1 : 1)),
    tasks: [...tree.tasks],
  };
}

test("there are recordings", () => assert.ok(recordings.length > 0));

for (const name of recordings) {
  const { events, snapshots } = JSON.parse(readFileSync(join(folder, name), "utf8")) as Recording;
  const whole = events.reduce(reduce, EMPTY);

  test(`${name}: the tree of a snapshot is that of its events`, () => {
    for (const snapshot of snapshots) {
      const upTo = reduceAll(EMPTY, events.slice(0, snapshot.seq));
      assert.deepEqual(known(fromSnapshot(snapshot)), known(upTo), `at ${snapshot.seq}`);
    }
  });

  test(`${name}: the events after a snapshot continue it`, () => {
    for (const snapshot of snapshots) {
      const rest = events.slice(snapshot.seq);
      assert.deepEqual(
        known(reduceAll(fromSnapshot(snapshot), rest)),
        known(whole),
        `after ${snapshot.seq}`,
      );
    }
  });

  test(`${name}: questions and usage are those of the server`, () => {
    for (const snapshot of snapshots) {
      const tree = reduceAll(EMPTY, events.slice(0, snapshot.seq));
      const paths = questions(tree).map((one) => [one.path, one.answerTo]);
      assert.deepEqual(
        paths,
        snapshot.questions.map((one) => [one.path, one.answer_to]),
      );
      const root = tree.root === null ? undefined : tree.runs.get(tree.root);
      if (root === undefined || snapshot.run === null) continue;
      const { cost, ...tokens } = totalUsage(tree, root);
      const { cost: theirs, ...counted } = snapshot.run.total_usage;
      assert.deepEqual(tokens, counted);
      assert.ok(Math.abs(cost - theirs!) < 1e-9);
    }
  });

  test(`${name}: an event that is known changes nothing, and others share what they leave alone`, () => {
    assert.equal(reduceAll(whole, events), whole);
    const before = reduceAll(EMPTY, events.slice(0, -1));
    const last = events.at(-1)!;
    for (const [runId, run] of reduce(before, last).runs) {
      if (runId !== last.run_id && runId !== last.parent_run_id)
        assert.equal(run, before.runs.get(runId));
    }
  });
}
