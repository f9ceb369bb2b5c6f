"""Port: a server somewhere that executes tasks."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class RemoteState(Struct, frozen=True):
    """How a remote task stands: pending, running, success, error or cancelled."""

    status: str
    result: str | None = None
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ("success", "error", "cancelled")


class TaskClient(Protocol):
    """Contract: `submit` may be repeated with the same id. A refusal for good raises ExecutionBackendError; what may
    pass raises ConnectionError, and the caller tries again. No message shows a header."""

    async def submit(self, task_id: str, agent_id: str, text: str, context: dict[str, str]) -> None: ...

    async def state(self, task_id: str) -> RemoteState: ...

    async def wait(self, task_id: str, seconds: float) -> RemoteState:
        """As `state`, but the server may keep the answer back for so long, until the task has ended."""
        ...

    async def cancel(self, task_id: str) -> None: ...

    async def close(self) -> None: ...
