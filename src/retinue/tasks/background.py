"""Port: what the tools that start background work need of the runtime they are in."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from ..core.context import CancellationToken, ToolContext
from ..core.runs import RunResult
from .repository import TaskRepository
from .service import TaskService, Voice
from .task import TaskRecord


class Background(Protocol):
    """Contract: a child that was detached lives until it ends, its token is set, or the runtime is closed."""

    def service(self, repository: TaskRepository) -> TaskService:
        """The service for a repository; one for each in a runtime."""
        ...

    def voice(self, ctx: ToolContext, record: TaskRecord, service: TaskService) -> Voice:
        """Tells of a task in the log of the run that started it, which stays open until the task has ended."""
        ...

    def is_recovered(self, ctx: ToolContext) -> bool:
        """Whether the call is one of a run that goes on after its process ended."""
        ...

    def close_children(self, ctx: ToolContext, reason: str) -> None:
        """Tell the end of children of a call that nobody will go on with."""
        ...

    def give_slot_back(self, ctx: ToolContext) -> None:
        """Let other calls run in place of this one, for good: it is going to wait for a child."""
        ...

    def detach(self, run_id: str) -> None:
        """Let a child outlive its call."""
        ...

    def next_leg(
        self, run_id: str, token: CancellationToken, answered: Callable[[], None]
    ) -> Coroutine[Any, Any, RunResult]:
        """How a detached child went on that waited for a human, once somebody has answered, which is told at once."""
        ...
