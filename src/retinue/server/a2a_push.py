"""A2A push notifications: what happens to a task is posted to an address of the client, with retries.

The addresses are stored beside the runs. One process at a time holds each address and renews its hold. If that process
ends, another continues after the last notification recorded as sent. So every notification arrives at least once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from a2a.types import a2a_pb2 as pb
from a2a.utils.errors import InvalidParamsError
from aiohttp.abc import AbstractResolver, ResolveResult
from google.protobuf.json_format import MessageToJson, Parse
from msgspec import Struct

from ..core.content import to_json_bytes
from ..core.errors import StoreError
from ..core.runs import unique
from ..storage.database import Link
from ..storage.sql import SqlStore
from ..wire.a2a import Json, TaskProjection
from .a2a_follow import follow_task, project_of
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


class PushRow(Struct, frozen=True):
    """An address of a task, and the number of the last event that was sent there."""

    run_id: str
    config_id: str
    body: str
    sent: int

    @property
    def key(self) -> tuple[str, str]:
        return self.run_id, self.config_id


class StoredPush:
    """Addresses in a database."""

    def __init__(self, store: SqlStore) -> None:
        self._database = store.database

    async def put(self, row: PushRow) -> None:
        def put(link: Link) -> None:
            link.run("DELETE FROM push_targets WHERE run_id = ? AND config_id = ?", *row.key)
            columns = "run_id, config_id, body, sent, is_open, held_until"
            values = (*row.key, row.body.encode(), row.sent, 1, 0.0)
            link.run(f"INSERT INTO push_targets ({columns}) VALUES (?, ?, ?, ?, ?, ?)", *values)

        await self._database.write(put)

    async def of(self, run_id: str) -> list[PushRow]:
        query = "SELECT run_id, config_id, body, sent FROM push_targets WHERE run_id = ? ORDER BY config_id"
        return _rows(await self._database.rows(query, run_id))

    async def remove(self, run_id: str, config_id: str) -> None:
        query = "DELETE FROM push_targets WHERE run_id = ? AND config_id = ?"
        await self._database.write(lambda link: link.run(query, run_id, config_id))

    async def claim(self, holder: str, seconds: float) -> list[PushRow]:
        """Renew the hold of a holder on its open addresses and claim those without a holder; return both."""

        def claim(link: Link) -> list[Any]:
            query = (
                "UPDATE push_targets SET holder = ?, held_until = wall_seconds() + ? WHERE is_open = 1 AND "
                "(holder = ? OR held_until < wall_seconds()) RETURNING run_id, config_id, body, sent"
            )
            return link.run(query, holder, seconds, holder)

        if not await self._database.rows("SELECT 1 FROM push_targets WHERE is_open = 1 LIMIT 1"):
            return []  # most of the time: nothing need be written
        return _rows(await self._database.write(claim))

    async def note(self, row: PushRow, sent: int, *, is_open: bool = True) -> None:
        query = "UPDATE push_targets SET sent = ?, is_open = ? WHERE run_id = ? AND config_id = ?"
        values = (sent, int(is_open), *row.key)
        await self._database.write(lambda link: link.run(query, *values))

    async def release(self, holder: str) -> None:
        query = "UPDATE push_targets SET held_until = 0 WHERE holder = ?"
        await self._database.write(lambda link: link.run(query, holder))


def _rows(found: Sequence[Any]) -> list[PushRow]:
    return [PushRow(run_id, config_id, bytes(body).decode(), sent) for run_id, config_id, body, sent in found]


class PushMemory:
    """Addresses in this process, for runs that are not stored either."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], PushRow] = {}
        self._open: set[tuple[str, str]] = set()

    async def put(self, row: PushRow) -> None:
        self._rows[row.key] = row
        self._open.add(row.key)

    async def of(self, run_id: str) -> list[PushRow]:
        return [row for row in self._rows.values() if row.run_id == run_id]

    async def remove(self, run_id: str, config_id: str) -> None:
        self._rows.pop((run_id, config_id), None)
        self._open.discard((run_id, config_id))

    async def claim(self, holder: str, seconds: float) -> list[PushRow]:
        return [self._rows[key] for key in self._open]

    async def note(self, row: PushRow, sent: int, *, is_open: bool = True) -> None:
        if not is_open:
            self._open.discard(row.key)

    async def release(self, holder: str) -> None:
        pass


class Push:
    """Stores the addresses of tasks, and posts notifications to them."""

    def __init__(self, service: Service, *, private: bool) -> None:
        """`private`: addresses of this machine and its network are allowed, too."""
        self._service, self._private = service, private
        store = service.runtime.store
        self._store = StoredPush(store) if isinstance(store, SqlStore) else PushMemory()
        self._holder = f"push_{unique()}"
        self._jobs: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._closed: set[tuple[str, str]] = set()
        """Addresses that were closed while a claim was under way, which may still return them."""
        self._new = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    # --- addresses

    def check(self, config: pb.TaskPushNotificationConfig) -> None:
        """Raise InvalidParamsError if nothing may be sent to an address."""
        try:
            parts = urlsplit(config.url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            host, parts = None, urlsplit("")
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise InvalidParamsError("the url of a push notification is http://… or https://…, without a user")
        if not self._private and (host == "localhost" or host.endswith(".localhost") or _is_private(host)):
            raise InvalidParamsError("push notifications to this machine and its network are not allowed here")
        if len(config.id) > 200 or not (config.token + config.authentication.credentials).isprintable():
            raise InvalidParamsError("the id, token or credentials of the push notification cannot be used")

    async def add(
        self, run_id: str, config: pb.TaskPushNotificationConfig, sent: int = 0
    ) -> pb.TaskPushNotificationConfig:
        """Store an address; what happens after event number `sent` is posted there."""
        stored = pb.TaskPushNotificationConfig()
        stored.CopyFrom(config)
        stored.task_id, stored.id = run_id, config.id or f"push_{unique()}"
        known = [row.config_id for row in await self._store.of(run_id)]
        if stored.id not in known and len(known) >= _MOST_CONFIGS:
            raise InvalidParamsError(f"a task has at most {_MOST_CONFIGS} push notification configs")
        await self.remove(run_id, stored.id)
        await self._store.put(PushRow(run_id, stored.id, MessageToJson(stored), sent))
        self.start()
        self._new.set()
        return stored

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
        connector = aiohttp.TCPConnector(resolver=_Resolver(private=self._private), use_dns_cache=False)
        async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session:
            while not self._service.closing.is_set():
                self._new.clear()
                try:
                    rows = await self._store.claim(self._holder, HOLD)
                    self._closed &= {row.key for row in rows}
                    for row in rows:
                        if row.key not in self._jobs.keys() | self._closed:
                            self._begin(session, row)
                except StoreError as exc:
                    _log.warning("push notifications cannot be sent now: %s", exc)
                await self._service.unless_closing(self._new.wait(), _LOOK)
            jobs = list(self._jobs.values())
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
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
        """Post past and new changes of a task until it has ended."""
        record = await self._service.runtime.store.load_run(row.run_id)
        if record is None:
            await self._store.remove(*row.key)
            return
        projection, config, sent, state = project_of(record), _config(row), row.sent, ""
        async with contextlib.aclosing(follow_task(self._service, record, projection)) as events:
            async for seq, updates in events:
                due, state = _notifications(updates, projection, state)
                if not due or 0 < seq <= row.sent:
                    continue
                for notification in due:
                    if not await self._post(session, config, notification):
                        _log.warning("push notifications of task %s are given up: nobody takes them", row.run_id)
                        await self._close(row, sent)
                        return
                sent = max(sent, seq)
                await self._store.note(row, sent)
                if projection.has_ended:
                    break
        if projection.has_ended:
            await self._close(row, sent)

    async def _close(self, row: PushRow, sent: int) -> None:
        self._closed.add(row.key)
        await self._store.note(row, sent, is_open=False)

    async def _post(self, session: aiohttp.ClientSession, config: pb.TaskPushNotificationConfig, given: Json) -> bool:
        """Post a notification with retries; return False if all attempts failed."""
        headers = {"content-type": "application/json"}
        if config.token:
            headers["x-a2a-notification-token"] = config.token
        if config.authentication.scheme and config.authentication.credentials:
            headers["authorization"] = f"{config.authentication.scheme} {config.authentication.credentials}"
        body = to_json_bytes(given)
        for pause in (*PAUSES, None):
            try:
                async with session.post(config.url, data=body, headers=headers, allow_redirects=False) as answer:
                    if answer.status < 300:
                        return True
                    problem = f"status {answer.status}"
                    if answer.status < 500 and answer.status not in _TRY_LATER:
                        _log.warning("a push notification of task %s was refused: %s", config.task_id, problem)
                        return True
            except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                problem = type(exc).__name__
            _log.info("a push notification of task %s failed: %s", config.task_id, problem)
            if pause is not None:
                await asyncio.sleep(pause)
        return False


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


def _config(row: PushRow) -> pb.TaskPushNotificationConfig:
    return Parse(row.body, pb.TaskPushNotificationConfig(), ignore_unknown_fields=True)


def _is_private(host: str) -> bool:
    """Return whether a host is an address that is not on the open internet."""
    try:
        address = ip_address(host.strip("[]").split("%")[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return not address.is_global or address.is_multicast


class _Resolver(AbstractResolver):
    """Finds the addresses of a name, without those that nothing may be sent to."""

    def __init__(self, *, private: bool) -> None:
        self._private, self._inner = private, aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        allowed = [one for one in found if self._private or not _is_private(one["host"])]
        if not allowed:
            raise OSError(None, f"{host} has no address that push notifications may go to")
        return allowed

    async def close(self) -> None:
        await self._inner.close()
