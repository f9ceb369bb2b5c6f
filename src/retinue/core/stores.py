"""Port: stores of threads, runs and logs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from msgspec import Struct, field

from .events import Event
from .messages import Message, Role
from .probation import Losses
from .rows import LogRow
from .runs import RunIdentity, RunResult, RunStatus, Usage
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


class Conversation(Struct, frozen=True, kw_only=True):
    """A thread as the runs that have ended left it, and the runs on it that have not ended."""

    thread: ThreadRecord | None = None
    requests: Sequence[tuple[str, bytes]] = ()
    """The ids of these runs, in the order of their turns, each with the request with which it was stored."""


Place = tuple[float, str]
"""A place in a list that is sorted by time, then by id."""


STATUSES = ("waiting", "running", "queued", "failed", "completed")
"""The statuses of a log in lists of threads, the most urgent first. A cancelled run counts as completed."""
OPEN = 3
"""The number of statuses, from the first one, of logs that have not ended."""
IDLE = "idle"
"""The status of a thread without a run."""
TITLE = 200
"""The most characters of the title of a thread."""
_NOT_IN_TITLES = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")


def title_of(messages: Iterable[Message]) -> str:
    """Return the title of a conversation: the beginning of the first text that its user has sent, as one line."""
    for message in messages:
        if message.role is Role.USER:
            line = " ".join(_NOT_IN_TITLES.sub(" ", message.text[: 8 * TITLE]).split())
            if line:
                return line[:TITLE]
    return ""


class LogSummary(Struct, frozen=True, kw_only=True, gc=False):
    """A root run and everything under it, as the lists of threads count it."""

    status: str = "running"
    """One of STATUSES."""
    questions: int = 0
    """The questions that nobody has answered yet, at any depth."""
    children: int = 0
    """The runs under it that have not ended."""
    usage: Usage = Usage()


class ThreadSummary(Struct, frozen=True, kw_only=True):
    """A thread as lists show it. Status, questions and children are those of all its logs that have not ended."""

    thread_id: str
    user_id: str | None = None
    used_at: float
    """The start of its newest run, or the time at which it was created."""
    title: str = ""
    """The first text of its user, or the title that was given to it."""
    status: str = IDLE
    """The most urgent status of its logs that have not ended; else that of its newest run."""
    questions: int = 0
    children: int = 0
    usage: Usage = Usage()
    """The usage of all its runs so far, also of those that were pruned."""
    changed_at: float = 0.0
    """When any of this changed, by the store's clock; 0 in a store that keeps nothing."""


class RunRecord(Struct, kw_only=True, gc=False):
    """One run; it has no result while it runs."""

    identity: RunIdentity
    started_at: float
    result: RunResult | None = None
    queued: bool = False
    """True if it waits for its thread."""
    log_id: str = ""
    """The log it is in: its own id if it is a root."""
    lost: int = 0
    """How often a process died that worked on it, since it last made progress."""
    title: str = ""
    """Of a new root run: the title for its thread, if that has none."""
    summary: LogSummary = LogSummary()
    """Of a root run, in a store that keeps nothing: how its log stands."""

    @property
    def has_ended(self) -> bool:
        return self.result is not None and self.result.status.is_terminal

    @property
    def status(self) -> str:
        if self.result is not None:
            return self.result.status.value
        return "queued" if self.queued else RunStatus.RUNNING.value


class ThreadUpdate(Struct, frozen=True):
    """A thread at the end of a run."""

    record: ThreadRecord
    keep: int = 0
    """The number of messages that are stored already and stay as they are."""


class Reply(Struct, frozen=True):
    """The owner's answer to a wish."""

    wish_id: str
    body: bytes


class SummaryUpdate(Struct, frozen=True):
    """The status of a log, for the lists of the thread of its root run."""

    thread_id: str
    user_id: str | None
    summary: LogSummary


class LogBatch(Struct, kw_only=True):
    """Everything that the owner of a log writes in one transaction."""

    log_id: str
    epoch: int
    """Fences the write: it fails as a whole if the log has another owner now, or none."""
    rows: Sequence[LogRow] = ()
    runs: Sequence[RunRecord] = ()
    """Runs of the log whose status has changed: its root, and background children."""
    threads: Sequence[ThreadUpdate] = ()
    summary: SummaryUpdate | None = None
    replies: Sequence[Reply] = ()
    losses: Losses | None = None
    """What the owner has found of the deaths before it. The epoch in it is not written."""
    left: Sequence[str] = ()
    """Held threads to release: no child of the log needs them any more."""
    released: bool = False
    """The owner releases the log: another process is to continue it, with its open tasks, unless it `rests`."""
    ended: bool = False
    """The root has ended and no task is open. Implies `released`; the log cannot be claimed again."""
    rests: bool = False
    """With `released`: its run waits for a human, so there is no work until a wish is put into the inbox."""


class StoredLog(Struct, kw_only=True):
    """A log that is read to continue it: every row except deltas."""

    rows: Sequence[LogRow] = ()
    seq: int = 0
    sub: int = 0
    """The last row of the log, deltas included."""
    ended: bool = False
    thinned: bool = False
    """True if retention has dropped private parts: the log can be read but not folded."""
    losses: Losses = Losses()


class Retention(Struct, frozen=True, kw_only=True):
    """The time that ended runs are kept. None is for ever."""

    days: float | None = None
    """Days until the run, its log and its tasks are deleted; its conversation stays."""
    deltas_days: float | None = None
    """Days until deltas, most of a log, and private parts are deleted; whole texts and calls stay."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"Retention.{name} must be a number of days, 0 or more, got {value}")


class OpenLog(Struct, frozen=True):
    """A log with an owner, or a log without one whose run should be at work."""

    log_id: str
    owner: str | None
    epoch: int
    lease_until: float
    expired: bool | None
    """True if the lease has expired; None if it was measured by a clock that cannot be compared with ours."""
    engine: str | None = None
    """The engine that schedules it: only its workers claim it."""
    lost: int = 0
    """How often its owners died before the present one, since it last made progress."""


class Placement(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine that schedules a run, and how."""

    engine: str
    queue: str = "default"
    priority: int = 0
    """Runs of a higher one come first."""
    delay: float = 0.0
    """Seconds before its first leg."""
    above: str | None = None
    """The log of the parent of a placed child."""


class RunFacts(Struct, frozen=True):
    """A run, with the owner and the engine of its log."""

    record: RunRecord
    owner: str | None = None
    engine: str | None = None
    """The engine that schedules the log: only its workers claim it."""


WishKind = Literal["decide", "cancel", "cancel_run", "cancel_task", "grant", "message"]


class Wish(Struct, frozen=True, kw_only=True):
    """A request to the owner of a log. Any process may put one into its inbox; only the owner acts on it."""

    log_id: str
    wish_id: str
    run_id: str
    """The root of the log, a run below it, or a task."""
    kind: WishKind
    body: bytes = b""


class Store(Protocol):
    """Contract: after `save` has returned, every reader reads an equal record."""

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
        before: Place | None = None,
        unowned: bool = False,
    ) -> list[RunRecord]:
        """Return root runs, newest first; with `before`, those that started before that place in the list. Runs that were
        placed for another run are not among them. Their results may have no messages.

        With `unowned`, runs without a user count as those of `user_id`.
        """
        ...

    async def list_threads(
        self,
        user_id: str | None = None,
        *,
        thread_id: str | None = None,
        status: str | None = None,
        search: str | None = None,
        changed_after: float | None = None,
        limit: int | None = None,
        before: Place | None = None,
        unowned: bool = False,
    ) -> list[ThreadSummary]:
        """Return the threads that were created or carry root runs, the one used last first; `thread_id`: only that one.

        `search`: only those with this text in their titles, in upper or lower case. `changed_after`: only those whose
        summaries have changed since that time of the store's clock; a store that keeps nothing returns all.
        """
        ...

    async def name_thread(self, thread_id: str, title: str) -> bool:
        """Set the title of a thread; return False if there is none."""
        ...

    async def create_thread(self, record: ThreadRecord, *, is_listed: bool = True) -> bool:
        """Store a new thread; return False, and change nothing, if there is one.

        Without `is_listed` the thread is in no list until a root run begins on it.
        """
        ...

    async def delete_thread(self, thread_id: str) -> bool:
        """Delete a thread with its runs and their logs; return False if there is none.

        Raises ThreadBusy if a log of it has not ended.
        """
        ...

    async def user_of_thread(self, thread_id: str) -> tuple[str | None] | None:
        """Return the user of a thread, in a tuple; None if there is no such thread."""
        ...


class Watch(Protocol):
    """Waits for changes since the last `wait`, or since it was made."""

    async def wait(self, seconds: float) -> None:
        """Return after a change, or a possible one, or after `seconds`."""
        ...


WISHES = "wishes"
"""The topic of all inboxes."""
THREADS = "threads of "
"""With the id of a user: the topic of the summaries of this user's threads."""
LEGS = "legs"
"""The topic of legs that wait for a worker, or for any process if no engine schedules them."""


PAGE_BYTES = 262_144
"""Bytes of stored events that are read at once."""


class EventStore(Protocol):
    """Contract: events of a log are read in order, each once, by any process, after `write` has returned."""

    async def read_events(
        self, log_id: str, after: int = 0, limit: int = 1000, most_bytes: int = PAGE_BYTES
    ) -> tuple[Sequence[Event], bool] | None:
        """Return the next events of a log, and True if the log ends with them; None if there is no such log.

        It returns at least one if there is one. It may return fewer than `limit`, to stay within so many bytes.
        """
        ...

    async def read_deltas(self, log_id: str, after: int, upto: int) -> Sequence[Event]:
        """Return the deltas of a log after one number, up to another, without the events between them."""
        ...

    async def last_event(self, log_id: str) -> int:
        """Return the number of the last event of a log; 0 if it has none."""
        ...

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        """Watch a log or a thread, by its id, or all inboxes (`WISHES`). A reply counts as a change of its log, the end
        of a run as one of its thread."""
        ...


class DurableStore(Store, EventStore, Protocol):
    """A store outside this process. A runtime opens it when it is entered, and closes it with itself.

    Contract: a log has one owner at a time, known by its epoch. A thread has one run at a time: a root run, or a child
    that continues a conversation, for which its log holds the thread. Calls are idempotent: after a `transient`
    StoreError a call may be repeated, even if it succeeded and a broken connection hid that. A terminal run is never
    changed.
    """

    place: str
    """The address, for people."""

    async def open(self) -> None:
        """Make the store ready; raise StoreError if it cannot be used."""
        ...

    async def close(self) -> None: ...

    def begin_run(
        self,
        record: RunRecord,
        request: bytes,
        owner: str | None,
        lease: float,
        when_busy: WhenBusy = "reject",
        placement: Placement | None = None,
        saved_at: float | None = None,
    ) -> asyncio.Future[str | None]:
        """Store a new run and its request, own its log at epoch 1 and claim its thread, in one transaction.

        With a placement, workers of that engine claim the log. Without an owner it is free from the start, at epoch 0.

        If the thread is busy, return the run that holds it or is queued before this one. Then "reject" stores nothing.
        Otherwise the run is queued, and "interrupt" puts a cancel into the inbox of every run before it.

        `saved_at` is an earlier result of the method `saved_at`: if the thread was saved since, return "" and store nothing.

        Runs of one thread are queued in the order in which the database stores them, and one process stores them in the
        order of the calls. As with `write`, the work starts at the call, so later writes to the log come after it, unless
        another run of the thread is being stored.
        """
        ...

    async def load_conversation(self, thread_id: str) -> Conversation:
        """Return a thread and the runs on it that have not ended, as they were at one moment."""
        ...

    async def saved_at(self, thread_id: str) -> float:
        """Return when a thread was saved last; 0 if it was not."""
        ...

    async def take_thread(self, run_id: str) -> str | None:
        """Claim the thread of a queued run if it is its turn; else return the run before it. A run keeps its thread."""
        ...

    async def hold_thread(self, log_id: str, epoch: int, thread_id: str, user_id: str | None) -> str | None:
        """Hold a thread for a child until its log releases it or ends; if another run has it, return that run.

        Raises OwnershipLost as `write` does. Idempotent for the same log.
        """
        ...

    async def holder_of(self, thread_id: str) -> str | None:
        """Return the root run that has a thread, or whose child has it; None if it is free."""
        ...

    def write(self, batch: LogBatch) -> asyncio.Future[None]:
        """Write a batch in one transaction, in the order of the calls; raise OwnershipLost if its epoch is stale.

        The write begins at the call, even if the future is not awaited.
        """
        ...

    async def read_log(self, log_id: str) -> StoredLog | None:
        """Read a log with its private parts, to fold it; None if there is none. Raise LogUnreadable if it is damaged."""
        ...

    async def read_request(self, run_id: str) -> bytes | None:
        """Return the request with which a run was stored."""
        ...

    async def claim(
        self, log_id: str, owner: str, lease: float, *, gone: str | None = None, seen: float | None = None
    ) -> int | None:
        """Become the owner of a log and return the new epoch; None if that is not possible.

        The log must not have ended. It must have no owner, an expired lease, or `gone` as its owner (and, with `seen`, a
        lease that still ends then). If it had another owner, that owner has died: the claim counts it in the log's
        `Losses`, and among the deaths."""
        ...

    async def deaths(self, seconds: float) -> dict[str, float]:
        """Return the owners that died with a log within so many seconds, each with the seconds since that was found."""
        ...

    async def owner_of(self, log_id: str) -> str | None: ...

    async def facts_of(self, run_id: str) -> RunFacts | None:
        """Return a run, with who owns and who schedules its log, as they are at one moment; None if there is no such run."""
        ...

    async def renew(self, owner: str, lease: float) -> set[str]:
        """Renew every lease of an owner; return the logs it still owns."""
        ...

    async def open_logs(self, log_id: str | None = None) -> list[OpenLog]:
        """Return the logs that have an owner or need one; with an id, only that log."""
        ...

    async def left_logs(self) -> list[OpenLog]:
        """Return the logs that their owners have released for another process, and that no engine schedules."""
        ...

    async def put_wish(self, wish: Wish) -> None:
        """Put a wish into the inbox of its log, once for each `wish_id`."""
        ...

    async def wishes(self, owner: str) -> list[Wish]:
        """Return the wishes without a reply for all logs of an owner, oldest first."""
        ...

    async def wishes_for(self, log_id: str) -> list[Wish]:
        """Return the wishes without a reply for one log, oldest first."""
        ...

    async def reply_to(self, log_id: str, wish_id: str) -> bytes | None: ...
