"""Background tasks in lines of text."""

from __future__ import annotations

from ..core.events import Event, Namespace, RunFinished, TaskUpdated
from ..tasks.task import TaskStatus
from .text import headline


class TaskLines:
    """The ends of background tasks, in one line each."""

    def __init__(self) -> None:
        self._said: dict[Namespace, str] = {}

    def take(self, event: Event) -> str | None:
        if type(event) is RunFinished:
            self._said[event.ns] = event.response or event.error or ""
        if type(event) is not TaskUpdated or not TaskStatus(event.status).is_terminal:
            return None
        said = headline(self._said[event.ns], 160) if self._said.get(event.ns) else ""
        return f"background task of {event.agent} {event.status.lower()}" + (f": {said}" if said else "")
