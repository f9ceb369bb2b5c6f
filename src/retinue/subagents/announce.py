"""Announcements: a session is told of its background tasks that have ended, once, at its next step."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.hooks import HookContext
from ..core.plugins import AddMessage
from ..core.state import StateCommand, StateKey
from ..tasks.repository import TaskRepository
from ..tasks.task import TaskRecord, TaskStatus

MOST_TASKS = 10
"""Announced at once; the others follow in the next step."""
MOST_CHARACTERS = 4000
"""Of one result; the rest is there for task_output."""


_ENDS = frozenset({status.lower() for status in TaskStatus if status.is_terminal})


def _note(told: dict[str, str], news: dict[str, str]) -> dict[str, str]:
    return {**told, **news}


TOLD: StateKey[dict[str, str], dict[str, str]] = StateKey(
    "retinue.tasks_told",
    dict[str, str],
    reduce=_note,
    merge="commutative",
    scope="thread",
    default=dict[str, str],
    sure=True,
)
"""The ends of tasks that the session knows. Stored with the conversation, so that neither exists without the other."""


class Announcer:
    """Tells a session the news of its tasks."""

    def __init__(self, repository: TaskRepository) -> None:
        self._repository = repository

    async def announce(self, ctx: HookContext, records: Sequence[TaskRecord]) -> StateCommand | None:
        """The command that tells the session, and remembers that it was told; None where there is no news."""
        told = ctx.snapshot[TOLD]
        open_news = [record for record in records if told.get(record.task_id) not in _ENDS]
        news = [record for record in open_news if _news(record, told) is not None]
        if not news:
            return None
        news.sort(key=lambda record: record.last_updated_at)
        running = sum(not record.status.is_terminal for record in records)
        shown = news[:MOST_TASKS]
        text = await self._text(shown, len(news) - len(shown), running)
        known = {record.task_id: _news(record, told) or "" for record in shown}
        event = {"type": "tasks_announced", "tasks": known}
        return StateCommand().update(TOLD, known).schedule(AddMessage(text)).event(event)

    async def _text(self, shown: Sequence[TaskRecord], more: int, running: int) -> str:
        parts = ["News of your background tasks. The user has not seen this."]
        for record in shown:
            head = f"task_id: {record.task_id}\nagent_id: {record.sub_agent_id}\nstatus: {_state(record)}"
            parts.append(f"{head}\n{await self._body(record)}")
        if more:
            parts.append(f"{more} more have ended; they are announced next, or use task_list().")
        parts.append(f"Still running: {running}.")
        return "<task-notification>\n" + "\n\n".join(parts) + "\n</task-notification>"

    async def _body(self, record: TaskRecord) -> str:
        if not record.status.is_terminal:
            return f"question: {record.awaiting}\nnote: It goes on when a human has answered."
        error = f"error: {record.error_message or 'unknown'}"
        if record.status is TaskStatus.CANCELLED:
            return error if record.error_message else "note: It was stopped."
        result = await self._repository.read_result(record) or ""
        if len(result) > MOST_CHARACTERS:
            left = len(result) - MOST_CHARACTERS
            result = f'{result[:MOST_CHARACTERS]}\n[{left:,} more characters: task_output("{record.task_id}")]'
        if record.status is TaskStatus.FAILED:
            return f"{error}\nwhat it had by then:\n{result}" if result else error
        return f"result:\n{result}" if result else "note: It gave no result."


def _news(record: TaskRecord, told: dict[str, str]) -> str | None:
    """Return the news of a task: its end, or its question; None if the session knows it."""
    state = _state(record)
    news = f"waiting: {record.awaiting}" if state == "waiting" else state
    return None if news == told.get(record.task_id) else news


def _state(record: TaskRecord) -> str | None:
    return record.status.lower() if record.status.is_terminal else "waiting" if record.awaiting else None
