"""Port: what is kept of threads and runs after they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct, field

from .events import Event
from .messages import Message
from .runs import RunIdentity, RunResult
from .state import PersistedState

Durability = Literal["process", "full"]
"""What a commit survives: the end of the process, however sudden, or also that of the machine."""


class ThreadRecord(Struct, kw_only=True):
    """A conversation and the thread-scoped state that its runs share."""

    thread_id: str
    user_id: str | None = None
    messages: tuple[Message, ...] = ()
    state: PersistedState = field(default_factory=PersistedState)


class RunRecord(Struct, kw_only=True):
    """One run, while it goes on (no result) and after."""

    identity: RunIdentity
    started_at: float
    result: RunResult | None = None


class EventStore(Protocol):
    """Contract: events of a log are read in order, each once, by any process, after `append_events` has returned."""

    async def append_events(self, log_id: str, events: Sequence[Event], *, ended: bool = False) -> None:
        """Add events to a log; with `ended`, say that nothing more will come."""
        ...

    async def read_events(self, log_id: str, after: int = 0, limit: int = 1000) -> tuple[Sequence[Event], bool] | None:
        """The next events of a log, and whether those are the last it will have; None where there is no such log."""
        ...


class Store(Protocol):
    """Contract: what was saved is read back equal, by any reader, after `save` has returned."""

    async def load_thread(self, thread_id: str) -> ThreadRecord | None: ...

    async def save_thread(self, record: ThreadRecord) -> None: ...

    async def load_run(self, run_id: str) -> RunRecord | None: ...

    async def save_run(self, record: RunRecord) -> None: ...

    async def list_runs(self, thread_id: str | None = None) -> list[RunRecord]:
        """Newest first."""
        ...


class DurableStore(Store, EventStore, Protocol):
    """A store outside this process. A runtime opens it when it is entered, and closes it with itself."""

    async def open(self) -> None:
        """Make sure that it can be used; raises StoreError where not."""
        ...

    async def close(self) -> None: ...
