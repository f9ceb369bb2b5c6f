"""Stores by URL, and the store in memory."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from msgspec import Struct

from ..core.budgets import BudgetTable
from ..core.errors import ConfigurationError, ThreadBusy
from ..core.gate import GateTable, LocalGateTable
from ..core.runs import Usage
from ..core.stores import (
    IDLE,
    OPEN,
    STATUSES,
    Durability,
    Place,
    RunRecord,
    Store,
    ThreadRecord,
    ThreadSummary,
    title_of,
)
from .budgets import LocalBudgetTable

if TYPE_CHECKING:
    from .sql import SqlStore

_FORMS = (
    "'memory:', 'sqlite:///app.db' (relative), 'sqlite:////data/app.db' (absolute) or "
    "'postgresql://user:password@host/database'"
)


class MemoryStore:
    """Threads and runs in dictionaries. Past `max_runs`, the oldest finished runs are dropped."""

    def __init__(self, max_runs: int = 1_000) -> None:
        self._threads: dict[str, ThreadRecord] = {}
        self._runs: dict[str, RunRecord] = {}
        self._uses: dict[str, int] = {}
        """The number of runs on each thread."""
        self._made: dict[str, float] = {}
        """When threads were created by themselves."""
        self._titles: dict[str, str] = {}
        self._max_runs = max_runs
        self._gates = LocalGateTable()
        self._budgets = LocalBudgetTable()

    def gate_table(self) -> GateTable:
        """Return the rows that the gates of provider accounts share."""
        return self._gates

    def budget_table(self) -> BudgetTable:
        """Return the accounts of budgets."""
        return self._budgets

    async def load_thread(self, thread_id: str) -> ThreadRecord | None:
        return self._threads.get(thread_id)

    async def save_thread(self, record: ThreadRecord) -> None:
        self._threads[record.thread_id] = record

    async def load_run(self, run_id: str) -> RunRecord | None:
        return self._runs.get(run_id)

    async def save_run(self, record: RunRecord) -> None:
        identity, is_known = record.identity, record.identity.run_id in self._runs
        self._runs[identity.run_id] = record
        if is_known:
            return
        if record.title:
            self._titles.setdefault(identity.thread_id, record.title)
        self._uses[identity.thread_id] = self._uses.get(identity.thread_id, 0) + 1
        while len(self._runs) > self._max_runs:
            oldest = next((key for key, run in self._runs.items() if run.result is not None), None)
            if oldest is None:
                return
            self._release_thread(self._runs.pop(oldest))

    def _release_thread(self, record: RunRecord) -> None:
        """Drop the conversation of a run that was started without a thread, unless another run continued it."""
        thread_id, run_id = record.identity.thread_id, record.identity.run_id
        self._uses[thread_id] -= 1
        if not self._uses[thread_id]:
            del self._uses[thread_id]
            if thread_id.removeprefix("thread_") == run_id.removeprefix("run_"):
                self._threads.pop(thread_id, None)
                self._titles.pop(thread_id, None)

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
        found = [
            run
            for run in self._runs.values()
            if run.log_id in ("", run.identity.run_id)
            and thread_id in (None, run.identity.thread_id)
            and _is_of(run.identity.user_id, user_id, unowned)
            and status in (None, run.status)
            and (before is None or (run.started_at, run.identity.run_id) < before)
        ]
        if before is not None:
            found.sort(key=lambda run: (run.started_at, run.identity.run_id))
        return found[::-1][:limit]

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
        users: dict[str, str | None] = {key: self._threads[key].user_id for key in self._made}
        runs: defaultdict[str, list[RunRecord]] = defaultdict(list)
        for run in self._runs.values():
            if run.log_id in ("", run.identity.run_id):
                users.setdefault(run.identity.thread_id, run.identity.user_id)
                runs[run.identity.thread_id].append(run)
        threads = [
            self._summary(key, user, runs[key])
            for key, user in users.items()
            if thread_id in (None, key) and _is_of(user, user_id, unowned)
        ]
        found = [
            thread
            for thread in threads
            if status in (None, thread.status)
            and (search is None or search.casefold() in thread.title.casefold())
            and (before is None or (thread.used_at, thread.thread_id) < before)
        ]
        return sorted(found, key=lambda thread: (thread.used_at, thread.thread_id), reverse=True)[:limit]

    def _summary(self, thread_id: str, user_id: str | None, runs: list[RunRecord]) -> ThreadSummary:
        runs = sorted(runs, key=lambda run: (run.started_at, run.identity.run_id))
        stands = [run.summary.status for run in runs]
        is_open = [status for status in STATUSES[:OPEN] if status in stands]
        return ThreadSummary(
            thread_id=thread_id,
            user_id=user_id,
            used_at=max([self._made.get(thread_id, 0.0), *[run.started_at for run in runs]]),
            title=self._titles.get(thread_id, ""),
            status=(*is_open, *stands[-1:], IDLE)[0],
            questions=sum(run.summary.questions for run in runs),
            children=sum(run.summary.children for run in runs),
            usage=sum((run.summary.usage for run in runs), Usage()),
        )

    async def name_thread(self, thread_id: str, title: str) -> bool:
        if await self.user_of_thread(thread_id) is None:
            return False
        self._titles[thread_id] = title
        return True

    async def create_thread(self, record: ThreadRecord, *, is_listed: bool = True) -> bool:
        if await self.user_of_thread(record.thread_id) is not None:
            return False
        self._threads[record.thread_id] = record
        if is_listed:
            self._made[record.thread_id] = time.time()
        if title := title_of(record.messages):
            self._titles[record.thread_id] = title
        return True

    async def delete_thread(self, thread_id: str) -> bool:
        runs = [run for run in self._runs.values() if run.identity.thread_id == thread_id]
        busy = next((run for run in runs if not run.has_ended), None)
        if busy is not None:
            raise ThreadBusy(thread_id, busy.identity.run_id)
        for run in runs:
            del self._runs[run.identity.run_id]
        self._uses.pop(thread_id, None)
        self._titles.pop(thread_id, None)
        was_made = self._made.pop(thread_id, None) is not None
        return self._threads.pop(thread_id, None) is not None or was_made or bool(runs)

    async def user_of_thread(self, thread_id: str) -> tuple[str | None] | None:
        if (thread := self._threads.get(thread_id)) is not None:
            return (thread.user_id,)
        return next(
            ((run.identity.user_id,) for run in self._runs.values() if run.identity.thread_id == thread_id), None
        )


def _is_of(user: str | None, wanted: str | None, unowned: bool) -> bool:
    return wanted is None or user == wanted or (unowned and user is None)


def open_store(url: str, durability: Durability = "process") -> Store:
    """Return the store at a URL. No file or server is touched before the first use.

    Writes survive `kill -9`; with `durability="full"` a file also survives a power loss. A PostgreSQL server has its
    own setting for that, which is left as it is.
    """
    if url == "memory:":
        return MemoryStore()
    if durability not in ("process", "full"):
        raise ConfigurationError(f"durability is 'process' or 'full', not {durability!r}")
    scheme, _, rest = url.partition("://")
    path = rest.removeprefix("/")
    if scheme == "sqlite" and rest.startswith("/") and path:
        from .sqlite import SqliteStore

        return SqliteStore(path, durability)
    if scheme in ("postgresql", "postgres"):
        try:
            from .postgres import PostgresStore
        except ImportError as exc:
            raise ConfigurationError("PostgreSQL storage needs: pip install 'retinue[postgres]'") from exc
        return PostgresStore(url, durability)
    raise ConfigurationError(f"not the URL of a store: {without_secrets(url)!r}; use {_FORMS}")


def sql_store(given: str | Store, purpose: str = "this command") -> SqlStore:
    """Return a store, or the one at a URL, if it is in a database. It is not opened yet."""
    from .sql import SqlStore

    store = open_store(given) if isinstance(given, str) else given
    if not isinstance(store, SqlStore):
        named = repr(without_secrets(given) if isinstance(given, str) else given)
        raise ConfigurationError(f"{purpose} needs a database, not {named}: use such as 'sqlite:///app.db'")
    return store


class Migrated(Struct, frozen=True, kw_only=True):
    """The version of a schema before and after a migration; 0 if there was none."""

    place: str
    before: int
    after: int


async def migrate(url: str, *, dry_run: bool = False) -> Migrated:
    """Bring a database to the newest schema, or create it. Opening a store does this too."""
    from .schema import newest_version

    store = sql_store(url)
    try:
        before = await store.database.version()
        if not dry_run:
            await store.open()
    finally:
        await store.close()
    return Migrated(place=store.place, before=before, after=newest_version())


def without_secrets(url: str) -> str:
    """Return a URL with everything hidden that may be a secret."""
    hidden = re.sub(r":(?!//).*@", ":***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)((?:password|passwd|pwd|secret|token|key)[^=&]*=)[^&]*", r"\1***", hidden)
