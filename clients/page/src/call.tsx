/** One call of a tool: a row that opens to its arguments and its output. */

import type { CallNode } from "retinue-client";
import { useState } from "preact/hooks";
import { argumentsLine, asJson, callTime, exact, firstLine, statusOf } from "./format.ts";
import { Glyph } from "./icons.tsx";
import { Json } from "./json.tsx";
import { now } from "./live.ts";
import { Long } from "./markdown.tsx";

/** A progress that a call reports: a fraction, and words beside it. */
export function progressOf(
  call: CallNode | undefined,
): { share: number | null; text: string } | null {
  const content = call?.activity?.content;
  if (typeof content !== "object" || content === null) return null;
  const found = content as Readonly<Record<string, unknown>>;
  const [done, total] = [Number(found["done"] ?? found["current"]), Number(found["total"])];
  const share = total > 0 && done >= 0 ? Math.min(1, done / total) : Number(found["progress"]);
  const text = String(
    found["text"] ?? found["message"] ?? (total > 0 ? `${done} of ${total}` : ""),
  );
  return {
    share: Number.isFinite(share) ? Math.min(1, Math.max(0, share)) : null,
    text: exact(text),
  };
}

export function Meter({ share }: { share: number }) {
  return (
    <span class="meter">
      <svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
        <rect width={100 * share} height="4" />
      </svg>
    </span>
  );
}

export function Value({ text }: { text: string }) {
  const json = asJson(text);
  if (json !== undefined) return <Json value={json} name="output" />;
  return (
    <pre class="out said" dir="auto" tabIndex={0} aria-label="Output">
      <Long text={exact(text)} />
    </pre>
  );
}

function Time({ call }: { call: CallNode }) {
  const isRunning = statusOf(call.status) === "running";
  return <span class="took">{callTime(call, isRunning ? now.value : 0)}</span>;
}

export function Call({
  call,
  draft,
}: {
  readonly call: CallNode;
  readonly draft?: string | undefined;
}) {
  const [isOpen, setOpen] = useState(false);
  const status = statusOf(call.status);
  const failed = status === "failed" ? firstLine(call.error ?? call.result ?? "") : "";
  const args = call.status === "new" ? exact((draft ?? "").slice(-200)) : argumentsLine(call.args);
  return (
    <div
      class="callbox"
      data-part="call"
      data-call-id={call.callId}
      data-tool={call.tool}
      data-status={status}>
      <details
        class="call"
        open={isOpen}
        onToggle={(event) => setOpen((event.currentTarget as HTMLDetailsElement).open)}>
        <summary>
          <Glyph status={status} />
          <span class="tool">{exact(call.tool)}</span>
          <span class="args cut said" dir="auto">
            {args}
          </span>
          <Time call={call} />
        </summary>
        {isOpen && (
          <div class="inside">
            {Object.keys(call.args).length > 0 && <Json value={call.args} name="arguments" />}
            {(call.output || call.result) && <Value text={call.output || (call.result ?? "")} />}
          </div>
        )}
      </details>
      {failed && (
        <p class="callerr said" dir="auto">
          {exact(failed.slice(0, 300))}
        </p>
      )}
    </div>
  );
}
