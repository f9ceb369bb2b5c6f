"""Background tasks as a model sees them: its tools, the summary in its prompt, and the message when a task ends.

The docstrings of the tools' methods are what the model reads."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

from ..core.context import ToolContext
from ..core.errors import FilesystemError, TaskStoreError
from ..core.functions import FunctionTool
from ..core.hooks import HookContext
from ..core.messages import ReceiptPart
from ..core.plugins import AddMessage
from ..core.receipts import escape_frames, is_shown
from ..core.results import ToolOutput, ToolResult
from ..core.state import StateCommand, StateKey
from ..core.tools import Tool
from ..tasks.repository import TaskRepository
from ..tasks.task import TaskRecord, TaskStatus
from .work import Workers

DEFAULT_MILLISECONDS = 30_000
MOST_MILLISECONDS = 600_000
_OPEN = {TaskStatus.PENDING, TaskStatus.RUNNING}
FILTERS = ("running", "completed", "failed", "cancelled", "pending", "all")


class TaskTools:
    """`task_output`, `task_cancel` and `task_list` over one repository."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._repository = workers, workers.repository

    def tools(self) -> tuple[Tool, ...]:
        functions = (self.task_output, self.task_cancel, self.task_list)
        return tuple([FunctionTool(_answering(one), category="subagents", idempotent=True) for one in functions])

    async def task_output(
        self, task_id: str, ctx: ToolContext, block: bool = True, timeout: int = DEFAULT_MILLISECONDS
    ) -> ToolOutput | ToolResult:
        """Get the state of a background task, and its result once it has one.

        Do not call it right after the task was started, and never in a loop: you are told when a task has ended.

        Args:
            task_id: The task_id from the answer of agent_spawn or agent_send.
            block: Whether to wait for the task to end. Use false to look how it stands.
            timeout: How many milliseconds to wait at most: 30000 if not given, 600000 at most.
        """
        task_id = task_id.strip()
        if not task_id:
            return error_answer("task_id is required")
        service, scope = self._workers.service(ctx), self._workers.scope(ctx)
        seconds = min(max(timeout, 0), MOST_MILLISECONDS) / 1000 if block else 0
        before = await self._repository.get(scope, task_id)
        if before is not None:
            await self._workers.watch_remote_task(before, ctx.resolver)
        record = before and await service.wait(scope, task_id, seconds)
        if record is None:
            return _unknown(task_id)
        if not record.status.is_terminal and block:
            note = "Task is running (possibly on another node). Use task_output(block=false) to poll."
            return _note(task_id, "running", _awaiting(record) or note)
        text = await self._detail(service.as_shown(record))
        if not record.status.is_terminal:
            return ToolOutput(text)
        return with_receipt(ToolOutput(text, {ANNOUNCED: {task_id: record.status.lower()}}), record)

    async def task_cancel(self, task_id: str, ctx: ToolContext) -> ToolOutput | ToolResult:
        """Stop a background task. What it has done until then stays done.

        Args:
            task_id: The task_id from the answer of agent_spawn or agent_send.
        """
        task_id = task_id.strip()
        if not task_id:
            return error_answer("task_id is required")
        service, scope = self._workers.service(ctx), self._workers.scope(ctx)
        before = await self._repository.get(scope, task_id)
        if before is None:
            return _unknown(task_id)
        if before.status.is_terminal:
            return _note(task_id, before.status.lower(), "Task already in terminal state, cannot cancel.")
        await self._workers.watch_remote_task(before, ctx.resolver)
        after = await service.cancel(scope, task_id) or before
        if not after.status.is_terminal:
            return _note(task_id, "cancelling", "Cancellation requested; the task has not stopped yet.")
        if after.status is not TaskStatus.CANCELLED:
            return _note(task_id, after.status.lower(), "It ended before it could be cancelled; see task_output.")
        text = f"task_id: {task_id}\nstatus: cancelled\nCancellation requested successfully."
        return ToolOutput(text, {ANNOUNCED: {task_id: after.status.lower()}})

    async def task_list(self, ctx: ToolContext, status_filter: str | None = None) -> str | ToolResult:
        """List the background tasks of this conversation, whatever was forgotten of it.

        Args:
            status_filter: Only these: running, completed, failed, cancelled, pending, or all. Those that are pending
                begin at once, and count as running too.
        """
        wanted = (status_filter or "all").strip().lower()
        if wanted not in FILTERS:
            return error_answer(f"Unknown status_filter: {status_filter}. Use one of: {', '.join(FILTERS)}.")
        service = self._workers.service(ctx)
        known = [service.as_shown(record) for record in await self._repository.list(self._workers.scope(ctx))]
        for record in known:
            await self._workers.watch_remote_task(record, ctx.resolver)
        shown = {"all": {*TaskStatus}, "running": _OPEN}.get(wanted) or {TaskStatus(wanted.upper())}
        records = [record for record in known if record.status in shown]
        if not records:
            return "No background tasks tracked" + ("." if wanted == "all" else f" with status '{wanted}'.")
        lines = [_list_line(one, one.status.lower(), f"created: {_moment(one.created_at)}") for one in records]
        return "\n".join([f"{len(records)} tracked task(s):", *lines])

    async def _detail(self, record: TaskRecord) -> str:
        failed = f"Failed: {record.error_message}" if record.status is TaskStatus.FAILED else None
        lines = [
            f"task_id: {record.task_id}",
            f"agent_id: {record.sub_agent_id}",
            f"status: {failed or record.status.capitalize()}",
            f"created_at: {_moment(record.created_at)}",
            "",
        ]
        result = await self._repository.read_result(record)
        if record.status is TaskStatus.FAILED:
            lines += ["Error:", record.error_message or "unknown"]
            lines += ["What it had by then:", result] if result else []
        elif not record.status.is_terminal:
            lines.append(_awaiting(record) or "Task still running...")
        elif result:
            lines += ["Result:", result]
        else:
            lines.append("Task completed with no result." if record.status is TaskStatus.COMPLETED else "No result.")
        return "\n".join(lines)


def _answering(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a tool, so that it answers with an error if the records cannot be read or written."""

    @functools.wraps(function)
    async def answer(*args: Any, **kwargs: Any) -> Any:
        try:
            return await function(*args, **kwargs)
        except (TaskStoreError, FilesystemError) as exc:
            return error_answer(str(exc))

    return answer


def _list_line(record: TaskRecord, status: str, time: str) -> str:
    return f"- task_id: {record.task_id}  agent: {record.sub_agent_id}  status: {status}  {time}"


def _moment(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def task_summary(records: Iterable[TaskRecord], most: int = 10) -> str:
    """Return the tasks of a session for the prompt: open ones first, then the newest. The records are oldest first."""
    newest = list(records)[::-1]
    if not newest:
        return ""
    shown = [record for record in newest if not record.status.is_terminal][:most]
    shown += islice((record for record in newest if record.status.is_terminal), most - len(shown))
    lines = [_list_line(one, _state(one), f"started: {one.created_at.strftime('%H:%MZ')}") for one in shown]
    if len(newest) > most:
        lines.append(f"- ... ({len(newest) - most} more - use task_list() to see all)")
    return "\n".join(["# Async tasks (current session)", "", *lines, "", "What was said of them earlier may be old."])


def _state(record: TaskRecord) -> str:
    return f"{record.status.lower()} (waits for a human)" if record.awaiting else record.status.lower()


def _awaiting(record: TaskRecord) -> str | None:
    return f"It waits for a human: {record.awaiting}" if record.awaiting else None


def _unknown(task_id: str) -> ToolResult:
    advice = "Use task_list() to see all known tasks for this session."
    return error_answer(f"No background task found with ID: {task_id}. {advice}")


def _note(task_id: str, status: str, note: str) -> ToolOutput:
    return ToolOutput(f"task_id: {task_id}\nstatus: {status}\nnote: {note}")


def with_receipt(output: ToolOutput, record: TaskRecord) -> ToolOutput:
    """Return the output with the receipt of an ended task, if its record has one."""
    if record.receipt is not None:
        output.receipts = (ReceiptPart(record.receipt),)
    return output


def error_answer(text: str) -> ToolResult:
    """Return the answer of a tool that was refused."""
    return ToolResult.error(f"Error: {text}")


MOST_TASKS = 10
"""The tasks announced at once; the others follow in the next step."""
MOST_CHARACTERS = 4000
"""The characters of a result in an announcement; task_output has the rest."""
_ENDS = frozenset({status.lower() for status in TaskStatus if status.is_terminal})


ANNOUNCED: StateKey[dict[str, str], dict[str, str]] = StateKey(
    "retinue.tasks_told",
    dict[str, str],
    reduce=lambda announced, news: {**announced, **news},
    merge="commutative",
    scope="thread",
    default=dict[str, str],
    sure=True,
)
"""The news of each task that the session has read. Stored with the conversation, so that they agree."""


def untold_ends(records: Iterable[TaskRecord], announced: Mapping[str, str]) -> list[str]:
    """Return the tasks that have completed or failed and were not announced. One that was cancelled is known to be."""
    ended = (TaskStatus.COMPLETED, TaskStatus.FAILED)
    return [one.task_id for one in records if one.status in ended and announced.get(one.task_id) not in _ENDS]


async def announce(ctx: HookContext, records: Sequence[TaskRecord], repository: TaskRepository) -> StateCommand | None:
    """Announce the ends and questions of tasks to their session, each once; None if there is no news."""
    announced, news = ctx.snapshot[ANNOUNCED], list[tuple[TaskRecord, str]]()
    for record in records:
        state = record.status.lower() if record.status.is_terminal else f"waiting: {record.awaiting}"
        before = announced.get(record.task_id)
        if (record.status.is_terminal or record.awaiting) and before != state and before not in _ENDS:
            news.append((record, state))
    if not news:
        return None
    news.sort(key=lambda one: one[0].last_updated_at)
    receipts: list[ReceiptPart] = []
    parts = ["News of your background tasks. The user has not seen this."]
    for record, state in news[:MOST_TASKS]:
        head = f"task_id: {record.task_id}\nagent_id: {record.sub_agent_id}\nstatus: {state.partition(':')[0]}"
        parts.append(f"{head}\n{escape_frames(await _announcement(record, repository))}")
        if record.status.is_terminal and record.receipt is not None and is_shown(record.receipt, ctx.agent.receipts):
            receipts.append(ReceiptPart(record.receipt, record.task_id))
    if (more := len(news) - MOST_TASKS) > 0:
        parts.append(f"{more} more have ended; they are announced next, or use task_list().")
    parts.append(f"Still running: {sum(not record.status.is_terminal for record in records)}.")
    text = "<task-notification>\n" + "\n\n".join(parts) + "\n</task-notification>"
    known = {record.task_id: state for record, state in news[:MOST_TASKS]}
    event = {"type": "tasks_announced", "tasks": known}
    return StateCommand().update(ANNOUNCED, known).schedule(AddMessage(text, tuple(receipts))).event(event)


async def _announcement(record: TaskRecord, repository: TaskRepository) -> str:
    if not record.status.is_terminal:
        return f"question: {record.awaiting}\nnote: It goes on when a human has answered."
    error = f"error: {record.error_message or 'unknown'}"
    if record.status is TaskStatus.CANCELLED:
        return error if record.error_message else "note: It was stopped."
    result = await repository.read_result(record) or ""
    if len(result) > MOST_CHARACTERS:
        left = len(result) - MOST_CHARACTERS
        result = f'{result[:MOST_CHARACTERS]}\n[{left:,} more characters: task_output("{record.task_id}")]'
    if record.status is TaskStatus.FAILED:
        return f"{error}\nwhat it had by then:\n{result}" if result else error
    return f"result:\n{result}" if result else "note: It gave no result."
