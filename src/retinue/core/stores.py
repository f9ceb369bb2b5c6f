"""Port: what is kept of threads and runs, while they go on and after they end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from msgspec import Struct, field

from .events import Event
from .lifecycle import RunStatus
from .messages import Message
from .runs import RunIdentity, RunResult
from .state import PersistedState

Durability = Literal["process", "full"]
"""What a commit survives: the end of the process, however sudden, or also that of the machine."""

WhenBusy = Literal["reject", "enqueue", "interrupt"]
"""What becomes of a run whose thread carries another: it is refused, it waits its turn, or the other is cancelled."""


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
    queued: bool = False
    """Whether it waits for its thread."""
    decided: tuple[tuple[str, str], ...] = ()
    """The decisions that were taken in: what each was on, and its id."""

    @property
    def status(self) -> str:
        if self.result is not None:
            return self.result.status.value
        return "queued" if self.queued else RunStatus.RUNNING.value


class JournalEntry(Struct, frozen=True, gc=False):
    """One thing a run learned, or was about to do."""

    run_id: str
    key: str
    kind: str
    body: bytes = b""


class LogBatch(Struct, kw_only=True):
    """What is written of a log in one transaction, by who has it."""

    log_id: str
    epoch: int
    """Which of its owners writes: one that was followed by another is refused."""
    events: Sequence[Event] = ()
    entries: Sequence[JournalEntry] = ()
    first_entry: int = 0
    """How many entries the journal has before these."""
    thread: ThreadRecord | None = None
    thread_from: int = 0
    """How many messages of the thread are stored and stay as they are."""
    run: RunRecord | None = None
    ended: bool = False
    """Whether nothing more will come, as far as can be told: who follows the log need not wait."""
    released: bool = False
    """Whether its owner lets go of it."""
    done: bool = False
    """Whether the run has ended for good, so that its journal is not needed any more."""


class Retention(Struct, frozen=True, kw_only=True):
    """For how long what is left of runs is kept once they have ended. None is for ever."""

    days: float | None = None
    """After so long everything goes: the run, its events and its journal; its conversation stays."""
    deltas_days: float | None = None
    """After so long the deltas go, which are most of a log: texts and calls stay as wholes."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"Retention.{name} must be a number of days, 0 or more, got {value}")


class OwnedLog(Struct, frozen=True):
    """A log that some process works on."""

    log_id: str
    owner: str
    expired: bool
    """Whether its owner has not been heard of for longer than it said."""


class Asked(Struct, frozen=True):
    """Decisions on a run, for the process that works on it."""

    ask_id: str
    run_id: str
    """A run of a log, or a background child under one."""
    body: bytes


class AskStatus(Struct, frozen=True):
    """What became of what was asked."""

    taker: str | None
    """The owner that does it, if any has begun to."""
    reply: bytes | None


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
        """Newest first."""
        ...


class Watch(Protocol):
    """Tells when something may have changed since it was last asked, or since it was made."""

    async def wait(self, seconds: float) -> None:
        """Return when there was a change, or may have been, or after so long."""
        ...


REQUESTS = "requests"
"""The topic of what is asked of the owners of logs."""


class EventStore(Protocol):
    """Contract: events of a log are read in order, each once, by any process, after `write` has returned."""

    async def read_events(self, log_id: str, after: int = 0, limit: int = 1000) -> tuple[Sequence[Event], bool] | None:
        """The next events of a log, and whether those are the last it will have; None where there is no such log."""
        ...

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        """Watch a log, by its id, what is asked of owners (`REQUESTS`), or the reply to it, by the id of the ask."""
        ...


class DurableStore(Store, EventStore, Protocol):
    """A store outside this process. A runtime opens it when it is entered, and closes it with itself.

    Contract: a log has one owner at a time, known by the epoch it was given; a thread carries one run at a time.
    What failed with a StoreError that `passes` may be tried again: nothing is then done twice, even where a connection
    broke so that nobody knows whether the first try went well.
    """

    place: str
    """Where it is, for people."""

    async def open(self) -> None:
        """Make sure that it can be used; raises StoreError where not."""
        ...

    async def close(self) -> None: ...

    async def begin_run(self, record: RunRecord, request: JournalEntry, owner: str, lease: float) -> str | None:
        """Write down that a run begins and what was asked of it, own its log at epoch 1 and take its thread; the run
        that has the thread where that is another. Then nothing was written, except of a queued run, which waits."""
        ...

    async def take_thread(self, record: RunRecord) -> str | None:
        """Take the thread of a queued run if it is its turn; else the run that comes before it."""
        ...

    async def write(self, batch: LogBatch) -> None:
        """Write a batch, whole or not at all; OwnershipLost where its epoch is over."""
        ...

    async def read_journal(self, log_id: str) -> list[JournalEntry]: ...

    async def claim(self, log_id: str, owner: str, lease: float, *, after: str | None = None) -> int | None:
        """Become the owner of a log that has none, whose owner's lease is over, or who is `after`, which is known to
        be gone; the new epoch, or None where somebody has it."""
        ...

    async def owner_of(self, log_id: str) -> str | None: ...

    async def epoch_of(self, log_id: str) -> int | None: ...

    async def renew(self, owner: str, lease: float) -> set[str]:
        """Prolong every lease of an owner; the logs it still has."""
        ...

    async def cancels(self, owner: str) -> dict[str, str]:
        """The logs of an owner that somebody wants cancelled, and why."""
        ...

    async def owned_logs(self) -> list[OwnedLog]: ...

    async def ask_cancel(self, log_id: str, reason: str) -> None:
        """Have the owner of a log cancel its run."""
        ...

    async def ask(self, asked: Asked) -> None:
        """Have whoever works on a run take decisions in."""
        ...

    async def asked(self) -> list[Asked]:
        """What was asked within the last minute and nobody does yet, oldest first."""
        ...

    async def take_ask(self, ask_id: str, owner: str) -> bool:
        """Do what was asked, where nobody else does."""
        ...

    async def reply(self, ask_id: str, body: bytes) -> None: ...

    async def ask_status(self, ask_id: str) -> AskStatus | None:
        """None where it was withdrawn."""
        ...

    async def withdraw(self, ask_id: str) -> bool:
        """Ask no longer, where nobody has begun to do it; whether that is so."""
        ...

    async def forget_ask(self, ask_id: str) -> None:
        """Keep nothing of what was asked."""
        ...
