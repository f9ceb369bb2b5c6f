"""The tools with which a model works with sub-agents. The docstrings of their methods are what it reads.

Answers are lines of `key: value`; what went wrong is a line that begins with `Error: `.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.agents import agent_name
from ..core.content import to_json_text
from ..core.context import ToolContext
from ..core.errors import ExecutionBackendError, FilesystemError, LimitReached, TaskStoreError
from ..core.functions import FunctionTool
from ..core.results import ToolOutput, ToolResult
from ..core.runs import RunResult, RunStatus
from ..core.state import StateKey
from ..core.tools import Tool, answer_of, finished_calls, text_beside_data
from ..tasks.task import TaskRecord, TaskStatus
from .catalog import Catalog, Entry
from .spawned import LABEL, SPAWNED, Labels, Spawned, spawned_of
from .task_tools import ANNOUNCED, error_answer, with_receipt
from .work import ChildJob, Workers, stable_id

DEFAULT_SECONDS = 30
MOST_SECONDS = 600
_LIST = "Use agent_list() to see your sub-agents."
_ACCEPTED = (
    "note: It works in the background, and you are told when it has ended. Do NOT call task_output now; go on or answer "
    "the user. Later: task_output(task_id, block=false), task_cancel, task_list."
)
_GOES_ON = (
    "goes on in the background; nothing is lost, and you are told when it has ended. Do NOT start the same task again."
)


class AgentTools:
    """`agent_spawn`, `agent_send`, `agent_list` and `agent_close` over one catalog."""

    def __init__(self, catalog: Catalog, workers: Workers) -> None:
        self._catalog, self._workers = catalog, workers
        self.labels = Labels()

    def tools(self) -> tuple[Tool, ...]:
        functions: list[Callable[..., Any]] = [self.agent_spawn, self.agent_send, self.agent_list, self.agent_close]
        return tuple([FunctionTool(function, category="subagents", idempotent=True) for function in functions])

    def forget_run(self, run_id: str) -> None:
        self.labels.forget_run(run_id)
        self._workers.turns.forget_run(run_id)

    async def agent_spawn(
        self,
        agent_id: str,
        ctx: ToolContext,
        task: str | None = None,
        label: str | None = None,
        timeout_seconds: int | None = None,
    ) -> ToolOutput | ToolResult:
        """Start a sub-agent and, with a task, wait for its report or let it work in the background.

        The answer has its agent_key: keep it to go on with the same sub-agent by agent_send.

        Args:
            agent_id: Which one: an id from the list of available agent ids.
            task: The whole task. The sub-agent sees nothing else. Without one it waits for agent_send.
            label: A name of your choice for agent_send, unique among your sub-agents.
            timeout_seconds: How long to wait for the report: 30 if not given, 600 at most. 0 lets it work in the
                background; what takes longer than you wait goes on there too.
        """
        if (refusal := await ctx.resolver.refuse_child(ctx)) is not None:
            return error_answer(_limit_text(*refusal))
        entries = await self._catalog.load_entries()
        entry = entries.get(agent_name(agent_id.strip()) or "")
        if entry is None:
            return error_answer(f"Unknown agent_id: {agent_id}\nAvailable agent ids: {', '.join(entries) or 'none'}")
        label = (label or "").strip() or None
        if label is not None and (problem := self._label_refusal(label, ctx)):
            return error_answer(problem)
        unique = str(stable_id(ctx, "agent"))  # the same when the call is made again after its process ended
        key, session_id = f"agent:{entry.id}:{unique}", f"sub-{unique}"
        spawned = Spawned(key, entry.id, session_id, label, ctx.run.depth + 1, ctx.run.user_id)
        if task is None or not task.strip():
            return ToolOutput(f"{_head(spawned, True)}\nstatus: accepted", {SPAWNED: spawned})
        answer = await self._ask(entry, spawned, task, seconds_of(timeout_seconds), ctx, is_new=True)
        if label is not None and isinstance(answer, ToolResult) and answer.is_error():
            self.labels.release(label, ctx)
        return answer

    async def agent_send(
        self,
        message: str,
        ctx: ToolContext,
        agent_key: str | None = None,
        label: str | None = None,
        timeout_seconds: int | None = None,
    ) -> ToolOutput | ToolResult:
        """Send a sub-agent another message. It remembers its conversation with you. One that works in the background reads it
        at its next step, and the answer is only `status: delivered`; if it is busy otherwise, your message waits.

        Args:
            message: What to do or answer now.
            agent_key: The full agent_key from the answer of agent_spawn. Give this or the label.
            label: The label given in agent_spawn.
            timeout_seconds: How long to wait for the answer: 30 if not given, 600 at most. 0 lets it work in the
                background; what takes longer than you wait goes on there too.
        """
        found = self._find(agent_key, label, ctx, message)
        if isinstance(found, str):
            return error_answer(found)
        if (refusal := await ctx.resolver.refuse_child(ctx)) is not None:
            return error_answer(_limit_text(*refusal))
        with self._workers.turns.expected(found.session_id):
            entry = (await self._catalog.load_entries()).get(found.agent_id)
            if entry is None:
                return error_answer(f"The sub-agent {found.agent_id} of this key is not declared any more")
            if await self._workers.is_busy_elsewhere(found, ctx):
                return error_answer(_busy_elsewhere(found, "send your message"))
            if self._workers.deliver(found, message, ctx):
                return ToolOutput(f"{_head(found, False)}\nstatus: delivered")
            return await self._ask(entry, found, message, seconds_of(timeout_seconds), ctx)

    async def agent_list(self, ctx: ToolContext) -> str:
        """List the sub-agents you have spawned in this conversation and not closed."""
        known = spawned_of(ctx).values()
        if not known:
            return "No active subagents."
        lines = [f"Active subagents ({len(known)}):"]
        for spawned in known:
            lines += [f"- agent_key: {spawned.agent_key}", f"  agent_id: {spawned.agent_id}"]
            lines += [f"  label: {spawned.label}"] if spawned.label else []
            lines += [f"  spawn_depth: {spawned.depth}"]
        return "\n".join(lines)

    async def agent_close(
        self, ctx: ToolContext, agent_key: str | None = None, label: str | None = None
    ) -> ToolOutput | ToolResult:
        """Let a sub-agent go that you need no more. Its label is free again, and it takes no more messages.

        Args:
            agent_key: The full agent_key from the answer of agent_spawn. Give this or the label.
            label: The label given in agent_spawn.
        """
        found = self._find(agent_key, label, ctx)
        if isinstance(found, str):
            return error_answer(found)
        if self._workers.turns.is_held(found.session_id, ctx):
            return error_answer(f"{found.agent_key} waits for a decision: close it when it has gone on")
        if self._workers.turns.is_busy(found.session_id):
            return error_answer(f"{found.agent_key} is working on a message: wait for its answer first")
        if await self._workers.is_busy_elsewhere(found, ctx):
            return error_answer(_busy_elsewhere(found, "close it"))
        if found.label is not None:
            self.labels.release(found.label, ctx)
        self._workers.turns.close(found.session_id, ctx)
        gone = Spawned(found.agent_key, found.agent_id, found.session_id, user_id=found.user_id, closed=True)
        return ToolOutput(f"agent_key: {found.agent_key}\nstatus: closed", {SPAWNED: gone})

    def _label_refusal(self, label: str, ctx: ToolContext) -> str | None:
        if not LABEL.fullmatch(label):
            rule = "up to 64 letters, digits, spaces, '_', '-' or '.', and begins with a letter or digit"
            return f"Invalid label: a label is {rule}"
        taken = any((spawned.label or "").casefold() == label.casefold() for spawned in spawned_of(ctx).values())
        return f"Label already in use: {label}" if taken or not self.labels.claim(label, ctx) else None

    def _find(
        self, agent_key: str | None, label: str | None, ctx: ToolContext, message: str | None = None
    ) -> Spawned | str:
        """Return the named sub-agent, or the error text."""
        key, label = (agent_key or "").strip(), (label or "").strip()
        if key and label:
            return "Provide either agent_key or label, not both."
        if not key and not label:
            return "Either agent_key or label is required."
        if message is not None and not message.strip():
            return "message is required"
        closed = self._workers.turns.is_closed
        known = {key: spawned for key, spawned in spawned_of(ctx).items() if not closed(spawned.session_id)}
        if label:
            alike = [spawned for spawned in known.values() if (spawned.label or "").casefold() == label.casefold()]
            return alike[0] if alike else f"Unknown label: {label}\n{_LIST}"
        return known.get(key) or f"Unknown agent_key: {key}\n{_LIST}"

    async def _ask(
        self, entry: Entry, spawned: Spawned, text: str, seconds: int, ctx: ToolContext, *, is_new: bool = False
    ) -> ToolOutput | ToolResult:
        """Run a sub-agent on a message in its own conversation, and return the answer."""
        try:
            job = ChildJob.of(entry, await entry.agent(ctx), spawned, text, ctx)
            if seconds == 0:
                task_id, head = (await self._workers.start(job)).task_id, f"{_head(spawned, True)}\n" if is_new else ""
                return ToolOutput(f"{head}status: accepted\ntask_id: {task_id}\n{_ACCEPTED}", {SPAWNED: spawned})
            outcome = await self._workers.wait_for(job, seconds)
        except LimitReached as exc:
            return error_answer(exc.reason)
        except (ExecutionBackendError, TaskStoreError, FilesystemError) as exc:
            return error_answer(str(exc))
        if isinstance(outcome, TaskRecord):
            updates: dict[StateKey[Any, Any], Any] = {SPAWNED: spawned}
            if outcome.status.is_terminal:
                updates[ANNOUNCED] = {outcome.task_id: outcome.status.lower()}
                answer = _ended(outcome, await self._workers.repository.read_result(outcome))
            else:
                note = f"note: It did not end within {seconds} s and {_GOES_ON}"
                answer = f"status: timeout_promoted\ntask_id: {outcome.task_id}\n{note}"
            return with_receipt(ToolOutput(f"{_head(spawned, is_new)}\n{answer}", updates), outcome)
        if outcome.status.is_waiting:
            return answer_of(outcome, entry.id, ctx)
        # A call that continued after a wait has the sub-agent it began with.
        spawned = known_as(spawned, outcome.thread_id)
        metadata = {"child_run_id": outcome.run_id, "child_status": outcome.status.value, "steps": outcome.steps}
        own = None if entry.declaration is None else entry.declaration.timeout
        answer = describe_outcome(outcome, seconds if own is None else min(seconds, own))
        result = ToolResult(data=f"{_head(spawned, is_new)}\n{answer}", metadata=metadata)
        return ToolOutput(result, {SPAWNED: spawned})


def seconds_of(given: int | None) -> int:
    """Return the seconds to wait; 0 runs in the background."""
    if given is None:
        return DEFAULT_SECONDS
    return 0 if given <= 0 else min(given, MOST_SECONDS)


def known_as(spawned: Spawned, session_id: str) -> Spawned:
    """Return the same sub-agent under the session it really has."""
    if spawned.session_id == session_id:
        return spawned
    key = f"agent:{spawned.agent_id}:{session_id.removeprefix('sub-')}"
    return Spawned(key, spawned.agent_id, session_id, spawned.label, spawned.depth, spawned.user_id)


def describe_outcome(outcome: RunResult, seconds: float) -> str:
    """Return the lines that say how the work of a sub-agent ended."""
    if outcome.status is RunStatus.COMPLETED:
        text = (outcome.response or "") if outcome.output is None else to_json_text(outcome.output)
        text = text_beside_data(outcome) or text
        return f"status: ok\nreply:\n{text}"
    partial = f"\nreply so far:\n{outcome.response}" if outcome.response else ""
    if calls := finished_calls(outcome):
        partial += f"\n{calls}"
    if outcome.status is RunStatus.TIMEOUT:
        return f"status: timeout\nnote: it was stopped after {seconds:g} s; send it a smaller task{partial}"
    if outcome.status is RunStatus.CANCELLED:
        return f"status: cancelled{partial}"
    return f"status: error\nerror: {outcome.error or outcome.termination}{partial}"


def _ended(record: TaskRecord, result: str | None) -> str:
    """Return the lines that describe the end of an awaited task."""
    if record.status is TaskStatus.COMPLETED:
        return f"status: ok\nreply:\n{result or ''}"
    if record.status is TaskStatus.CANCELLED:
        return f"status: cancelled\ntask_id: {record.task_id}"
    return f"status: error\nerror: {record.error_message or 'unknown'}"


def _head(spawned: Spawned, is_new: bool) -> str:
    """Return the first lines of an answer."""
    more = f"\nagent_id: {spawned.agent_id}\nsession_id: {spawned.session_id}" if is_new else ""
    return f"agent_key: {spawned.agent_key}{more}"


def _busy_elsewhere(spawned: Spawned, advice: str) -> str:
    return (
        f"{spawned.agent_key} is busy: it works on an earlier message in another process, or waits there for a "
        f"decision. Look at its task with task_list(), and {advice} when that has ended."
    )


def _limit_text(limit: str, value: int) -> str:
    if limit == "depth":
        return f"Maximum spawn depth exceeded (max={value})"
    return f"This conversation may start {value} sub-agents, and has: go on with what you have"
