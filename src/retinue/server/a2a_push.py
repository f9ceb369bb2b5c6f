"""A2A push notifications: what happens to a task is posted to an address of the client, with retries.

The addresses are stored beside the runs. One process at a time holds each address and renews its hold. If that process
ends, another continues after the last notification recorded as sent. So every notification arrives at least once.

An address is open until its task has ended and all of it was posted, or until as many attempts have failed in a row as
`PAUSES` allows. Failed attempts are stored: they count whatever the reason, and also after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import aiohttp
from a2a.types import a2a_pb2 as pb
from a2a.utils.errors import InvalidParamsError
from google.protobuf.json_format import MessageToJson, Parse
from msgspec import Struct
from msgspec.structs import replace

from ..core.concurrency import cancel_all
from ..core.content import to_json_bytes
from ..core.errors import StoreError
from ..core.runs import unique
from ..core.stores import RunRecord
from ..storage.database import Link
from ..storage.sql import SqlStore
from ..wire.a2a import Json, TaskProjection
from .a2a_follow import follow_task, project_of
from .outbound import Outbound
from .service import Service

_log = logging.getLogger(__name__)

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Seconds between attempts. After the last one the address is given up."""
HOLD = 30.0
"""Seconds after which the addresses of a process that has gone are taken over."""
_LOOK = 5.0
_TIMEOUT = aiohttp.ClientTimeout(total=15)
_MOST_CONFIGS = 20
"""Addresses of one task."""
_TRY_LATER = frozenset({408, 425, 429})
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of RFC 9110."""


class NotTaken(Exception):
    """An attempt to post a notification failed."""


class PushRow(Struct, frozen=True):
    """An address of a task, the number of the last event that was sent there, and how many attempts have failed since."""

    run_id: str
    config_id: str
    body: str
    sent: int
    tries: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.run_id, self.config_id


class StoredPush:
    """Addresses in a database."""

    def __init__(self, store: SqlStore) -> None:
        self._database = store.database

    async def put(self, row: PushRow, holder: str, seconds: float) -> None:
        def put(link: Link) -> None:
            link.run("DELETE FROM push_targets WHERE run_id = ? AND config_id = ?", *row.key)
            columns = "run_id, config_id, body, sent, tries, is_open, holder, held_until"
            values = (*row.key, row.body.encode(), row.sent, row.tries, 1, holder, seconds)
            link.run(f"INSERT INTO push_targets ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, wall_seconds() + ?)", *values)

        await self._database.write(put)

    async def of(self, run_id: str) -> list[PushRow]:
        query = f"SELECT {_COLUMNS} FROM push_targets WHERE run_id = ? ORDER BY config_id"
        return _rows(await self._database.rows(query, run_id))

    async def remove(self, run_id: str, config_id: str) -> None:
        query = "DELETE FROM push_targets WHERE run_id = ? AND config_id = ?"
        await self._database.write(lambda link: link.run(query, run_id, config_id))

    async def claim(self, holder: str, seconds: float) -> list[PushRow]:
        """Renew the hold of a holder on its open addresses and claim those without a holder; return both."""

        def claim(link: Link) -> list[Any]:
            query = (
                "UPDATE push_targets SET holder = ?, held_until = wall_seconds() + ? WHERE is_open = 1 AND "
                f"(holder = ? OR held_until < wall_seconds()) RETURNING {_COLUMNS}"
            )
            return link.run(query, holder, seconds, holder)

        if not await self._database.rows("SELECT 1 FROM push_targets WHERE is_open = 1 LIMIT 1"):
            return []  # most of the time: nothing need be written
        return _rows(await self._database.write(claim))

    async def note(self, row: PushRow, *, is_open: bool = True) -> None:
        query = "UPDATE push_targets SET sent = ?, tries = ?, is_open = ? WHERE run_id = ? AND config_id = ?"
        values = (row.sent, row.tries, int(is_open), *row.key)
        await self._database.write(lambda link: link.run(query, *values))

    async def release(self, holder: str) -> None:
        query = "UPDATE push_targets SET held_until = 0 WHERE holder = ?"
        await self._database.write(lambda link: link.run(query, holder))


_COLUMNS = "run_id, config_id, body, sent, tries"


def _rows(found: Sequence[Any]) -> list[PushRow]:
    return [PushRow(run_id, config_id, bytes(body).decode(), *counts) for run_id, config_id, body, *counts in found]


class PushMemory:
    """Addresses in this process, for runs that are not stored either."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], PushRow] = {}
        self._open: set[tuple[str, str]] = set()

    async def put(self, row: PushRow, holder: str, seconds: float) -> None:
        self._rows[row.key] = row
        self._open.add(row.key)

    async def of(self, run_id: str) -> list[PushRow]:
        return [row for row in self._rows.values() if row.run_id == run_id]

    async def remove(self, run_id: str, config_id: str) -> None:
        self._rows.pop((run_id, config_id), None)
        self._open.discard((run_id, config_id))

    async def claim(self, holder: str, seconds: float) -> list[PushRow]:
        return [self._rows[key] for key in self._open]

    async def note(self, row: PushRow, *, is_open: bool = True) -> None:
        if row.key in self._rows:
            self._rows[row.key] = row
        if not is_open:
            self._open.discard(row.key)

    async def release(self, holder: str) -> None:
        pass


class Push:
    """Stores the addresses of tasks, and posts notifications to them."""

    def __init__(self, service: Service, *, private: bool) -> None:
        """`private`: addresses of this machine and its network are allowed, too."""
        self._service, self._outbound = service, Outbound(private=private)
        store = service.runtime.store
        self._store = StoredPush(store) if isinstance(store, SqlStore) else PushMemory()
        self._holder = f"push_{unique()}"
        self._jobs: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._closed: set[tuple[str, str]] = set()
        """Addresses that were closed while a claim was under way, which may still return them."""
        self._beginning: set[str] = set()
        """Runs whose address is stored, and which are not stored yet."""
        self._new = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    # --- addresses

    def check(self, config: pb.TaskPushNotificationConfig) -> None:
        """Raise InvalidParamsError if nothing may be sent to an address."""
        try:
            self._outbound.read_url(config.url)
        except ValueError as exc:
            raise InvalidParamsError(f"the url of a push notification cannot be used: {exc}") from None
        scheme, credentials = config.authentication.scheme, config.authentication.credentials
        if config.HasField("authentication") and not _TOKEN.fullmatch(scheme):
            raise InvalidParamsError("the scheme of the push notification is a word such as Bearer")
        if len(config.id) > 200 or not (config.token + credentials).isprintable():
            raise InvalidParamsError("the id, token or credentials of the push notification cannot be used")

    async def add(
        self, run_id: str, config: pb.TaskPushNotificationConfig, sent: int = 0
    ) -> pb.TaskPushNotificationConfig:
        """Store an address; what happens after event number `sent` is posted there."""
        row = _row(run_id, config, sent)
        await self._put(row)
        self.start()
        self._new.set()
        return _config(row)

    @contextlib.asynccontextmanager
    async def added(self, run_id: str, config: pb.TaskPushNotificationConfig | None) -> AsyncGenerator[None]:
        """Store an address before its run is started or answered, which then cannot happen without it. If that fails, the
        address is as it was before."""
        if config is None:
            yield
            return
        row = _row(run_id, config, 0)
        self._beginning.add(run_id)
        try:
            replaced = await self._put(row)
            try:
                yield
            except BaseException:
                with contextlib.suppress(StoreError):
                    await self.remove(*row.key)
                    if replaced is not None:
                        await self._put(replaced)
                raise
        finally:
            self._beginning.discard(run_id)
        self.start()
        self._new.set()

    async def _put(self, row: PushRow) -> PushRow | None:
        """Store an address, held by this process; return the one that it replaces."""
        known = {one.key: one for one in await self._store.of(row.run_id)}
        if row.key not in known and len(known) >= _MOST_CONFIGS:
            raise InvalidParamsError(f"a task has at most {_MOST_CONFIGS} push notification configs")
        await self.remove(*row.key)
        await self._store.put(row, self._holder, HOLD)
        return known.get(row.key)

    async def configs(self, run_id: str) -> list[pb.TaskPushNotificationConfig]:
        return [_config(row) for row in await self._store.of(run_id)]

    async def remove(self, run_id: str, config_id: str) -> None:
        await self._store.remove(run_id, config_id)
        self._closed.discard((run_id, config_id))
        if (job := self._jobs.pop((run_id, config_id), None)) is not None:
            job.cancel()

    # --- sending

    def start(self) -> None:
        """Start sending, also for addresses that another process has left."""
        if self._worker is None or self._worker.done():
            self._worker = self._service.spawn(self._work())

    async def _work(self) -> None:
        async with self._outbound.session(_TIMEOUT) as session:
            while not self._service.closing.is_set():
                self._new.clear()
                try:
                    rows = await self._store.claim(self._holder, HOLD)
                    self._closed &= {row.key for row in rows}
                    for row in rows:
                        if row.key not in self._jobs.keys() | self._closed and row.run_id not in self._beginning:
                            self._begin(session, row)
                except StoreError as exc:
                    _log.warning("push notifications cannot be sent now: %s", exc)
                await self._service.unless_closing(self._new.wait(), _LOOK)
            await cancel_all(self._jobs.values())
        with contextlib.suppress(StoreError):
            await self._store.release(self._holder)

    def _begin(self, session: aiohttp.ClientSession, row: PushRow) -> None:
        job = self._jobs[row.key] = asyncio.create_task(self._deliver(session, row))

        def forget(done: asyncio.Task[None]) -> None:
            if self._jobs.get(row.key) is done:
                del self._jobs[row.key]
            if not done.cancelled() and (problem := done.exception()) is not None:
                _log.warning("push notifications of task %s stopped for now: %s", row.run_id, problem)

        job.add_done_callback(forget)

    async def _deliver(self, session: aiohttp.ClientSession, row: PushRow) -> None:
        """Post past and new changes of a task until it has ended, or until the last attempt has failed."""
        record = await self._service.runtime.store.load_run(row.run_id)
        if record is None:
            await self._store.remove(*row.key)
            return
        delivery = _Delivery(self._service, self._store, row)
        while True:
            try:
                if await delivery.post_changes(record, session, self._outbound):
                    await self._close(delivery.row)
                return
            except Exception as exc:
                _log_attempt(row.run_id, exc)
                failed = replace(delivery.row, tries=delivery.row.tries + 1)
            if failed.tries > len(PAUSES):
                _log.warning("push notifications of task %s are given up: nobody takes them", row.run_id)
                await self._close(failed)
                return
            await delivery.note(failed)  # if the store fails, the attempt does not count, and this ends for now
            await asyncio.sleep(PAUSES[failed.tries - 1])

    async def _close(self, row: PushRow) -> None:
        self._closed.add(row.key)
        await self._store.note(row, is_open=False)


class _Delivery:
    """The notifications of one task that were posted to one address."""

    def __init__(self, service: Service, store: StoredPush | PushMemory, row: PushRow) -> None:
        self._service, self._store, self.row = service, store, row
        self._posted = 0
        """How many notifications of the first event after `row.sent` were posted."""

    async def note(self, row: PushRow) -> None:
        self.row = row
        await self._store.note(row)

    async def post_changes(self, record: RunRecord, session: aiohttp.ClientSession, outbound: Outbound) -> bool:
        """Post what was not posted before; return True at the end of the task, False if the server ends."""
        config, projection, state = _config(self.row), project_of(record), ""
        url, headers = outbound.read_url(config.url), _headers(config)
        async with contextlib.aclosing(follow_task(self._service, record, projection)) as events:
            async for seq, updates in events:
                due, state = _notifications(updates, projection, state)
                if due and not 0 < seq <= self.row.sent:
                    for notification in due[self._posted :]:
                        async with session.post(
                            url, data=to_json_bytes(notification), headers=headers, allow_redirects=False
                        ) as answer:
                            _check_taken(answer.status, config.task_id)
                        self._posted += 1
                    await self.note(replace(self.row, sent=max(self.row.sent, seq), tries=0))
                    self._posted = 0
                if projection.has_ended:
                    return True
        if not projection.has_ended and not self._service.closing.is_set():
            raise NotTaken("the log of the task has ended without the end of the task")
        return projection.has_ended


def _headers(config: pb.TaskPushNotificationConfig) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if config.token:
        headers["x-a2a-notification-token"] = config.token
    if config.authentication.scheme and config.authentication.credentials:
        headers["authorization"] = f"{config.authentication.scheme} {config.authentication.credentials}"
    return headers


def _check_taken(status: int, task_id: str) -> None:
    """Raise NotTaken if a notification is to be posted again. What is refused for good is not."""
    if status >= 500 or status in _TRY_LATER:
        raise NotTaken(f"status {status}")
    if status >= 300:
        _log.warning("a push notification of task %s was refused: status %d", task_id, status)


def _log_attempt(task_id: str, exc: Exception) -> None:
    is_usual = isinstance(exc, NotTaken | StoreError | aiohttp.ClientError | TimeoutError | OSError)
    problem = exc if isinstance(exc, NotTaken | StoreError) else type(exc).__name__
    _log.log(
        logging.INFO if is_usual else logging.WARNING,
        "a push notification of task %s failed: %s",
        task_id,
        problem,
        exc_info=None if is_usual else exc,
    )


def _notifications(updates: list[Json], projection: TaskProjection, state: str) -> tuple[list[Json], str]:
    """Return the notifications for a change (new states and whole artifacts), and the state after it."""
    found: list[Json] = []
    for update in updates:
        if "statusUpdate" in update:
            new = update["statusUpdate"]["status"]["state"]
            if new != state:
                found.append(update)
            state = new
        elif "artifactUpdate" in update and update["artifactUpdate"]["lastChunk"]:
            body = update["artifactUpdate"]
            whole = projection.artifact(body["artifact"]["artifactId"])
            found.append({"artifactUpdate": {**body, "append": False, "artifact": whole}})
    return found, state


def _row(run_id: str, config: pb.TaskPushNotificationConfig, sent: int) -> PushRow:
    stored = pb.TaskPushNotificationConfig()
    stored.CopyFrom(config)
    stored.task_id, stored.id = run_id, config.id or f"push_{unique()}"
    return PushRow(run_id, stored.id, MessageToJson(stored), sent)


def _config(row: PushRow) -> pb.TaskPushNotificationConfig:
    return Parse(row.body, pb.TaskPushNotificationConfig(), ignore_unknown_fields=True)
