/** Says what has changed to those who listen: joined, and at most every two seconds. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { counted, isOver, statusOf } from "./format.ts";
import { conversation } from "./state.ts";

const PAUSE = 2000;

interface Seen {
  readonly threadId: string;
  readonly questions: number;
  readonly over: number;
}

function look(): Seen | null {
  const shown = conversation.value;
  if (shown === null || shown.state.value !== "shown") return null;
  let over = 0;
  for (const live of shown.runs.value) {
    void live.beat.value;
    for (const node of live.tree.runs.values()) if (isOver(statusOf(node.status))) over += 1;
  }
  return { threadId: shown.threadId, questions: shown.questions.value.length, over };
}

export function Announcer() {
  const said = useSignal("");
  const seen = useRef<Seen | null>(null);
  const timer = useRef(0);
  const present = look();
  useEffect(() => {
    if (timer.current !== 0 || present === null) return;
    if (seen.current?.threadId !== present.threadId) {
      seen.current = present;
      return;
    }
    timer.current = window.setTimeout(() => {
      timer.current = 0;
      const [before, after] = [seen.current, look()];
      seen.current = after;
      if (before === null || after === null) return;
      const parts: string[] = [];
      if (after.over > before.over)
        parts.push(`${counted(after.over - before.over, "agent")} finished`);
      if (after.questions > before.questions)
        parts.push(`${counted(after.questions, "question")} for you`);
      if (parts.length > 0) said.value = parts.join(", ");
    }, PAUSE);
  }, [present?.threadId, present?.questions, present?.over]);
  return (
    <div class="say" aria-live="polite">
      {said.value}
    </div>
  );
}
