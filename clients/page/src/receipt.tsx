/** The receipt of a run: what the runtime saw it do, beside what it says of itself. */

import type { Receipt, RunNode } from "retinue-client";
import type { ComponentChildren } from "preact";
import { counted, exact, isOver, statusOf } from "./format.ts";

/** True if a receipt says more than success. */
function saysMore(one: Receipt): boolean {
  const counts = [one.failed, one.files_changed, one.shell, one.open_tasks, one.not_completed];
  return counts.some(Boolean) || Boolean(one.limits?.length || one.approvals?.length);
}

function Line({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <>
      <dt>{name}</dt>
      <dd class="said">{children}</dd>
    </>
  );
}

export function ReceiptOf({ node, isRoot }: { node: RunNode; isRoot: boolean }) {
  const { receipt } = node;
  if (receipt === null || !isOver(statusOf(node.status)) || !saysMore(receipt)) return null;
  const { calls = 0, failed = 0, children = 0, steps = 0 } = receipt;
  const agents = children > 0 ? `${counted(children + 1, "agent")}, ` : "";
  return (
    <section class="receipt" aria-label="Receipt" data-root={isRoot}>
      <p class="h">
        <b>Receipt</b>
        {receipt.reported_by
          ? `reported by ${exact(receipt.reported_by)}`
          : "written by the runtime, not by the agents"}
      </p>
      <dl class="facts">
        <Line name="Work">
          {agents}
          {counted(steps, "step")}, {counted(calls, "call")}
        </Line>
        {failed > 0 && (
          <Line name="Failed">
            <b class="st" data-tone="failed">
              {counted(failed, "call")}
            </b>{" "}
            {(receipt.failures ?? [])
              .map((one) => `${exact(one.tool)}: ${exact(one.reason || one.code)}`)
              .join(" · ")}
          </Line>
        )}
        {receipt.limits?.length ? (
          <Line name="Limits">{exact(receipt.limits.join(", "))}</Line>
        ) : null}
        {receipt.files?.length ? (
          <Line name="Changed">{exact(receipt.files.join(", "))}</Line>
        ) : null}
        {receipt.shell ? <Line name="Shell">{counted(receipt.shell, "command")}</Line> : null}
        {receipt.approvals?.length ? (
          <Line name="Answers">
            {receipt.approvals
              .map((one) => `${exact(one.tool)} ${one.answer} by ${exact(one.by)}`)
              .join(" · ")}
          </Line>
        ) : null}
        {receipt.open_tasks ? (
          <Line name="Still open">{counted(receipt.open_tasks, "task")}</Line>
        ) : null}
      </dl>
    </section>
  );
}
