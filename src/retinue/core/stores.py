"""Port: stores of threads, runs and logs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from msgspec import Struct, field

from .events import Event
from .lifecycle import RunStatus
from .messages import Message
from .rows import LogRow
from .runs import RunIdentity, RunResult
from .state import PersistedState

Durability = Literal["process", "full"]
"""A commit survives the end of the process, or also that of the machine."""

WhenBusy = Literal["reject", "enqueue", "interrupt"]
"""A run on a busy thread is refused, waits its turn, or cancels the runs before it."""


class ThreadRecord(Struct, kw_only=True, gc=False):
    """A conversation and the thread-scoped state that its runs share."""

    thread_id: str
    user_id: str | None = None
    messages: tuple[Message, ...] = ()
    state: PersistedState = field(default_factory=PersistedState)


class RunRecord(Struct, kw_only=True, gc=False):
    """One run, while it goes on (no result) and after."""

    identity: RunIdentity
    started_at: float
    result: RunResult | None = None
    queued: bool = False
    """True if it waits for its thread."""
    log_id: str = ""
    """The log it is in: its own id where it is a root."""

    @property
    def has_ended(self) -> bool:
        return self.result is not None and self.result.status.is_terminal

    @property
    def status(self) -> str:
        if self.result is not None:
            return self.result.status.value
        return "queued" if self.queued else RunStatus.RUNNING.value


class ThreadUpdate(Struct, frozen=True):
    """A thread as a run leaves it."""

    record: ThreadRecord
    keep: int = 0
    """The number of messages that are stored already and stay as they are."""


class Reply(Struct, frozen=True):
    """The owner's answer to a wish."""

    wish_id: str
    body: bytes


class LogBatch(Struct, kw_only=True):
    """Everything that the owner of a log writes in one transaction."""

    log_id: str
    epoch: int
    """Fences the write: it fails as a whole where the log has had another owner since, or has none."""
    rows: Sequence[LogRow] = ()
    runs: Sequence[RunRecord] = ()
    """Runs of the log whose status has changed: its root, and background children."""
    threads: Sequence[ThreadUpdate] = ()
    replies: Sequence[Reply] = ()
    released: bool = False
    """The owner gives the log up: it waits for a human, or is left to another process."""
    ended: bool = False
    """Nothing more will come: the root has ended and no task is open. Implies `released`; nobody can claim it again."""


class StoredLog(Struct, kw_only=True):
    """A log as it is read to continue it: every row but those of deltas, which are for watching only."""

    rows: Sequence[LogRow] = ()
    seq: int = 0
    sub: int = 0
    """The last row of the log, deltas included."""
    ended: bool = False
    thinned: bool = False
    """Retention has dropped private parts, so that the log can be read but not folded."""


class Retention(Struct, frozen=True, kw_only=True):
    """For how long what is left of runs is kept once they have ended. None is for ever."""

    days: float | None = None
    """After so long everything goes: the run, its log and its tasks; its conversation stays."""
    deltas_days: float | None = None
    """After so long the deltas go, which are most of a log, and all private parts: texts and calls stay as wholes."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"Retention.{name} must be a number of days, 0 or more, got {value}")


class OpenLog(Struct, frozen=True):
    """A log that is owned, or that nobody owns though its run neither waits nor has ended."""

    log_id: str
    owner: str | None
    epoch: int
    lease_until: float
    expired: bool | None
    """True if the lease has expired; None if it was measured by a clock that cannot be compared with ours."""


class Wish(Struct, frozen=True, kw_only=True):
    """A request to the owner of a log. Anyone may put one in its inbox; only the owner makes facts of them."""

    log_id: str
    wish_id: str
    run_id: str
    """The root of the log, or a run below it."""
    kind: Literal["decide", "cancel"]
    body: bytes = b""


class Store(Protocol):
    """Contract: what was saved is read back equal, by any reader, after `save` has returned."""

    async def load_thread(self, thread_id: str) -> ThreadRecord | None: ...

    async def save_thread(self, record: ThreadRecord) -> None: ...

    async def load_run(self, run_id: str) -> RunRecord | None: ...

    async def save_run(self, record: RunRecord) -> None: ...

    async def list_runs(
        self,
        thread_id: str | None = None,
        *,
        user_id: str | None = None,
        status: str | None = None,
        limit: int | None = None,
    ) -> list[RunRecord]:
        """Root runs, newest first."""
        ...


class Watch(Protocol):
    """Tells when something may have changed since it was last asked, or since it was made."""

    async def wait(self, seconds: float) -> None:
        """Return when there was a change, or may have been, or after so long."""
        ...


WISHES = "wishes"
"""The topic of what is put into inboxes."""


class EventStore(Protocol):
    """Contract: events of a log are read in order, each once, by any process, after `write` has returned."""

    async def read_events(self, log_id: str, after: int = 0, limit: int = 1000) -> tuple[Sequence[Event], bool] | None:
        """Return the next events of a log, and whether the log has ended with them; None where there is no such log."""
        ...

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        """Watch a log, by its id, or what is put into inboxes (`WISHES`). A reply counts as a change of its log."""
        ...


class DurableStore(Store, EventStore, Protocol):
    """A store outside this process. A runtime opens it when it is entered, and closes it with itself.

    Contract: a log has one owner at a time, known by the epoch it was given; a thread carries one run at a time.
    A StoreError that is `transient` may be tried again: nothing is done twice, even where a connection broke so that
    nobody knows whether the first try succeeded. A terminal run is never changed.
    """

    place: str
    """The address, for people."""

    async def open(self) -> None:
        """Make sure that it can be used; raises StoreError where not."""
        ...

    async def close(self) -> None: ...

    async def begin_run(
        self, record: RunRecord, request: bytes, owner: str, lease: float, when_busy: WhenBusy = "reject"
    ) -> str | None:
        """Store a new run and what was asked of it, own its log at epoch 1 and take its thread, in one transaction.

        Return the run that has the thread, or stands before this one, where it cannot be taken. Then with "reject"
        nothing is stored; otherwise the run is queued, and with "interrupt" a cancel is put into the inbox of the
        run that has the thread and of every run that waits for it.
        """
        ...

    async def take_thread(self, run_id: str) -> str | None:
        """Take the thread of a queued run, which then runs, if it is its turn; else return the run that comes before
        it. A run that has its thread already keeps it."""
        ...

    def write(self, batch: LogBatch) -> asyncio.Future[None]:
        """Write a batch, whole or not at all; OwnershipLost where its epoch is over. Written in the order of the calls.

        Begins when it is called, whether or not the future is awaited.
        """
        ...

    async def read_log(self, log_id: str) -> StoredLog | None:
        """Read a log with its private parts, to fold it; None where there is none. LogUnreadable names what is wrong."""
        ...

    async def read_request(self, run_id: str) -> bytes | None:
        """Return the request of a run, as it was begun."""
        ...

    async def claim(
        self, log_id: str, owner: str, lease: float, *, gone: str | None = None, seen: float | None = None
    ) -> int | None:
        """Become the owner of a log that has not ended and has no owner, whose lease is over, or whose owner is `gone`
        (and, with `seen`, whose lease still ends then). Return the new epoch; None where it cannot be had."""
        ...

    async def owner_of(self, log_id: str) -> str | None: ...

    async def log_of(self, run_id: str) -> str | None:
        """The log that a run is in, of a root or a background child."""
        ...

    async def renew(self, owner: str, lease: float) -> set[str]:
        """Renew every lease of an owner; return the logs it still has."""
        ...

    async def open_logs(self) -> list[OpenLog]: ...

    async def put_wish(self, wish: Wish) -> None:
        """Put a wish into the inbox of its log, once for each `wish_id`."""
        ...

    async def wishes(self, owner: str) -> list[Wish]:
        """The wishes without a reply for all logs of an owner, oldest first."""
        ...

    async def wishes_for(self, log_id: str) -> list[Wish]:
        """The wishes without a reply for one log, oldest first."""
        ...

    async def reply_to(self, log_id: str, wish_id: str) -> bytes | None: ...
