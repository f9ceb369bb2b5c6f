/** The state of a thread, and the revisions that led to it. */

import { useEffect, useState } from "preact/hooks";
import type { Event } from "retinue-client";
import { get, list, segment } from "./api.ts";
import { counted, exact, timeOfDay } from "./format.ts";
import { Json } from "./json.tsx";
import { conversation } from "./state.ts";

type Commit = Extract<Event, { kind: "state_delta" }>;

interface State {
  readonly values: Readonly<Record<string, unknown>>;
  readonly commits: readonly Commit[];
}

async function load(threadId: string, runId: string | undefined): Promise<State> {
  const state = await get<{ values: Record<string, unknown> }>(
    `api/v1/threads/${segment(threadId)}/state`,
  );
  const commits =
    runId === undefined
      ? []
      : await list<Commit>(`api/v1/runs/${segment(runId)}/events?kinds=state_delta&limit=200`);
  return { values: state.values, commits };
}

export function StateTab() {
  const shown = conversation.value;
  const live = shown?.newest.value;
  const [state, setState] = useState<State | null>(null);
  const beat = live?.beat.value ?? 0;
  const slow = Math.floor(beat / 4);
  useEffect(() => {
    if (shown === null || shown === undefined) return;
    void load(shown.threadId, live?.begun.value ? live.runId : undefined).then(
      setState,
      () => undefined,
    );
  }, [shown?.threadId, live?.runId, slow, live?.listed.value]);
  const names = Object.keys(state?.values ?? {});
  if (state === null || (names.length === 0 && state.commits.length === 0)) {
    return (
      <p class="blank">
        <b>No state yet</b>What agents keep in their state appears here, with each revision.
      </p>
    );
  }
  return (
    <>
      <Json value={state.values} name="state" />
      {state.commits.length > 0 && (
        <h2>{counted(state.commits.length, "revision")} in the last turn</h2>
      )}
      <ol class="revisions">
        {state.commits.toReversed().map((one) => (
          <li key={one.seq}>
            <details>
              <summary>
                <b>{one.revision}</b>
                <span class="cut said">{exact(Object.keys(one.delta).join(", "))}</span>
                <span class="muted said">{exact(one.agent)}</span>
                <span class="muted num">{timeOfDay(one.at * 1000, true)}</span>
              </summary>
              <Json value={one.delta} name="changed" />
            </details>
          </li>
        ))}
      </ol>
    </>
  );
}
