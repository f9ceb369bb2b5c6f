"""Port: what the tools that start background work need of the runtime they are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..core.agents import Agent
from ..core.context import CancellationToken, ToolContext
from ..core.runs import RunResult
from .repository import TaskRepository
from .service import TaskReporter, TaskService
from .task import TaskRecord


class Background(Protocol):
    """Contract: a child that was detached lives until it ends, its token is set, or the runtime is closed."""

    def service(self, repository: TaskRepository) -> TaskService:
        """The service for a repository; one for each in a runtime."""
        ...

    def reporter(self, ctx: ToolContext, record: TaskRecord, service: TaskService) -> TaskReporter:
        """Return what reports a task in the log of the run that started it, which stays open until the task has ended."""
        ...

    def log_id(self, ctx: ToolContext) -> str | None:
        """The stored log that a call is in; None where nothing is stored."""
        ...

    def is_recovered(self, ctx: ToolContext) -> bool:
        """Return whether the call belongs to a run that continues after its process ended."""
        ...

    def announce_child(self, ctx: ToolContext, agent: Agent, text: str, run_id: str, thread_id: str) -> None:
        """Tell that a child was started which begins later, perhaps when its parent has ended."""
        ...

    def close_task(self, ctx: ToolContext, record: TaskRecord, reason: str) -> None:
        """Report the end of a task whose process ended before it could, and end its child where nobody continues it."""
        ...

    def give_slot_back(self, ctx: ToolContext) -> None:
        """Let other calls run in place of this one, for good: it is going to wait for a child."""
        ...

    def detach(self, run_id: str) -> None:
        """Let a child outlive its call."""
        ...

    async def next_leg(
        self, ctx: ToolContext, run_id: str, token: CancellationToken, answered: Callable[[], None]
    ) -> bool:
        """Wait until somebody answers a detached child that waits, and call back; False where the token was set."""
        ...

    async def give_up(self, ctx: ToolContext, agent: Agent, run_id: str, reason: str) -> RunResult:
        """End a detached child that waits for an answer which will not come; its conversation stays."""
        ...
