"""Push notifications: where they may go, how long they are tried, and that none is lost."""

from __future__ import annotations

import signal
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from a2a.types import a2a_pb2 as pb
from aiohttp import web
from google.protobuf.json_format import ParseDict

from retinue import Runtime
from retinue.errors import StoreError
from retinue.server import A2AOptions, a2a_push
from retinue.server.a2a_push import StoredPush
from retinue.storage.sql import SqlStore

from .. import inside
from ..runners import AppRunner
from ..server.agents import boss, speaker
from ..server.processes import TOKEN as SERVED
from ..server.processes import served
from ..waiting import until
from .calling import NEW, A2AError, Place, a2a_serving, calling, task_of, text_of


@asynccontextmanager
async def webhook(*statuses: int) -> AsyncIterator[tuple[str, list[tuple[Any, Any]]]]:
    """A server that notes what is posted to it, and answers with these statuses first."""
    left, got = list(statuses), list[tuple[Any, Any]]()

    async def take(request: web.Request) -> web.Response:
        got.append((await request.json(), request.headers))
        return web.Response(status=left.pop(0) if left else 200)

    app = web.Application()
    app.router.add_post("/hook", take)
    runner = AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/hook", got  # type: ignore[union-attr]
    finally:
        await runner.cleanup()


def ended(got: list[tuple[Any, Any]]) -> bool:
    return any(body.get("statusUpdate", {}).get("status", {}).get("state") == "TASK_STATE_COMPLETED" for body, _ in got)


@pytest.mark.parametrize("transport", NEW)
@pytest.mark.parametrize("database", [True, False])
async def test_notifications_are_sent_again_until_they_are_taken(
    transport: str, database: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a2a_push, "PAUSES", (0.0,) * 5)
    agents = [speaker("Good ", "day")]
    runtime = Runtime.open(f"sqlite:///{tmp_path}/a.db", agents) if database else Runtime(agents)
    async with webhook(503, 500, 429) as (url, got), a2a_serving(runtime) as place:
        async with place.caller(transport, "speaker", streaming=False) as caller:
            config = {
                "id": "c1",
                "url": url,
                "token": "known",
                "authentication": {"scheme": "Bearer", "credentials": "k"},
            }
            updates = await caller.send("hello", configuration={"taskPushNotificationConfig": config})
            await until(lambda: ended(got))
            task_id = task_of(updates)
            bodies = [body for body, _ in got[3:]]
            kinds = [next(iter(body)) for body in bodies]
            assert kinds == ["statusUpdate", "artifactUpdate", "statusUpdate"]
            assert text_of(bodies[1]["artifactUpdate"]["artifact"]) == "Good day"
            assert [body for body, _ in got[:3]] == [bodies[0]] * 3
            headers = got[-1][1]
            assert (headers["authorization"], headers["x-a2a-notification-token"]) == ("Bearer k", "known")

            requests = {"task_id": task_id, "id": "c1"}
            known = await caller.client.get_task_push_notification_config(
                pb.GetTaskPushNotificationConfigRequest(**requests), context=caller.context
            )
            assert known.url == url
            listing = pb.ListTaskPushNotificationConfigsRequest(task_id=task_id)
            listed = await caller.client.list_task_push_notification_configs(listing, context=caller.context)
            assert [one.id for one in listed.configs] == ["c1"]
            if database:  # the address goes with the run
                assert await runtime.store.delete_thread((await caller.get(task_id))["contextId"])
                assert isinstance(runtime.store, SqlStore)
                assert await StoredPush(runtime.store).of(task_id) == []
                return
            for _ in range(2):
                await caller.client.delete_task_push_notification_config(
                    pb.DeleteTaskPushNotificationConfigRequest(**requests), context=caller.context
                )
            with pytest.raises(A2AError):
                await caller.client.get_task_push_notification_config(
                    pb.GetTaskPushNotificationConfigRequest(**requests), context=caller.context
                )


LOOPBACK = (
    "http://127.0.0.1:{}/hook", "http://localhost:{}/hook", "http://localhost.:{}/hook", "http://１２７.0.0.1:{}/hook",
    "http://①②⑦.0.0.1:{}/hook", "http://127。0。0。1:{}/hook", "http://[::1]:{}/hook", "http://[::ffff:127.0.0.1]:{}/hook",
    "http://[::127.0.0.1]:{}/hook", "http://[64:ff9b::7f00:1]:{}/hook", "http://[2002:7f00:1::]:{}/hook",
    "http://[fe80::1%25lo]:{}/hook",
)  # fmt: skip


async def test_nothing_is_sent_to_private_addresses_unless_allowed() -> None:
    async with webhook() as (url, got), a2a_serving(Runtime([speaker("hi")]), a2a=A2AOptions()) as place:
        port = url.split(":")[-1].partition("/")[0]
        elsewhere = ("http://10.0.0.1/x", "http://169.254.169.254/", "http://１６９.254.169.254/", "file:///etc/passwd")
        no_urls = (
            "ftp://example.com",
            "http://user@example.com",
            "http://:x@example.com",
            "http://a:99999/",
            "http://",
            "x",
        )
        async with place.caller("JSONRPC", "speaker", streaming=False) as caller:
            for bad in (*(one.format(port) for one in LOOPBACK), *elsewhere, *no_urls):
                with pytest.raises(A2AError):
                    await caller.send("hello", configuration={"taskPushNotificationConfig": {"url": bad}})
            assert await place.service.runtime.store.list_runs() == []
        assert got == []


async def test_a_name_that_leads_to_this_machine_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is that of the connection, at every attempt: a name may have led elsewhere when it was given."""
    monkeypatch.setattr(a2a_push, "PAUSES", (0.0,) * 3)
    asked: list[str] = []

    async def resolve(self: Any, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        asked.append(host)
        return [{"hostname": host, "host": "127.0.0.1", "port": port, "family": socket.AF_INET, "proto": 6, "flags": 0}]

    for name in ("ThreadedResolver", "AsyncResolver"):
        monkeypatch.setattr(f"aiohttp.resolver.{name}.resolve", resolve)
    async with webhook() as (url, got), a2a_serving(Runtime([speaker("hi")]), a2a=A2AOptions()) as place:
        async with place.caller("JSONRPC", "speaker", streaming=False) as caller:
            config = {"url": url.replace("127.0.0.1", "rebound.example")}
            await caller.send("hello", configuration={"taskPushNotificationConfig": config})
            await until(lambda: not inside.is_pushing(place.tasks.push) and asked)
    assert (got, asked) == ([], ["rebound.example"] * 4)


@pytest.mark.parametrize("scheme", ["Bearer\r\nX: 1", "Bearer x", "", "Bär"])
async def test_a_scheme_is_one_word(scheme: str) -> None:
    config = {"url": "http://example.com/", "authentication": {"scheme": scheme, "credentials": "k"}}
    async with a2a_serving(Runtime([speaker("hi")])) as place, place.caller("JSONRPC", "speaker") as caller:
        with pytest.raises(A2AError, match="scheme|Validation"):
            await caller.send("hello", configuration={"taskPushNotificationConfig": config})


def rows(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path / "app.db")) as database:
        return database.execute("SELECT tries, is_open FROM push_targets").fetchall()


async def push_of(place: Place, path: Path, url: str, **fields: Any) -> None:
    """Run a task that is pushed to an address, which is not checked."""
    made = ParseDict({"url": url, **fields}, pb.TaskPushNotificationConfig())
    run = place.service.runtime.stream("speaker", "hello")
    await run.result()
    await place.tasks.push.add(run.run_id, made)


@pytest.mark.parametrize("case", ["scheme", "error", "log"])
async def test_what_cannot_be_sent_is_given_up(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2a_push, "PAUSES", (0.0,) * 3)
    runtime = Runtime.open(f"sqlite:///{tmp_path}/app.db", [speaker("hi")])
    tried: list[Any] = []

    def broken(*args: Any) -> Any:
        tried.append(args)
        raise KeyError("what nobody expects")

    if case == "error":
        inside.replace_push_reader(monkeypatch, broken)
    elif case == "log":
        monkeypatch.setattr(a2a_push, "project_of", broken)
    async with webhook() as (url, got), a2a_serving(runtime) as place:
        wrong = {"scheme": "Bearer\r\nX: 1", "credentials": "k"} if case == "scheme" else {}
        await push_of(place, tmp_path, url, authentication=wrong)
        await until(lambda: rows(tmp_path) == [(4, 0)])
        assert await inside.push_store(place.tasks.push).claim("another", 30.0) == []
    assert got == []
    assert len(tried) == (0 if case == "scheme" else 4)


async def test_attempts_count_also_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2a_push, "PAUSES", (0.0, 3600.0))
    async with webhook(*[503] * 10) as (url, got):
        for left in ([(2, 1)], [(3, 0)], [(3, 0)]):
            runtime = Runtime.open(f"sqlite:///{tmp_path}/app.db", [speaker("hi")])
            async with a2a_serving(runtime) as place:
                if not got:
                    await push_of(place, tmp_path, url)
                place.tasks.push.start()
                await until(lambda: rows(tmp_path) == left)  # noqa: B023 - it is awaited here
            with closing(sqlite3.connect(tmp_path / "app.db")) as database:
                database.execute("UPDATE push_targets SET held_until = 0")
                database.commit()
    assert len(got) == 3


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_a_message_starts_nothing_if_its_address_cannot_be_stored(
    store: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/app.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    runtime = Runtime.open(url, [speaker("hi"), boss()])

    async def fail(*args: Any) -> None:
        raise StoreError("here", "it is full", transient=True)

    async with a2a_serving(runtime) as place, place.caller("JSONRPC", "boss", streaming=False) as caller:
        address = {"url": "http://127.0.0.1:9/", "id": "c"}
        for bad in ({**address, "id": "a\0b"}, {**address, "taskId": "a\0b"}):
            with pytest.raises(A2AError, match="no text"):
                await caller.send("pay", configuration={"taskPushNotificationConfig": bad})
        with pytest.raises(A2AError, match="empty"):
            await caller.send(" ", configuration={"taskPushNotificationConfig": address})
        waiting = task_of(await caller.send("pay"))
        with monkeypatch.context() as patched:
            patched.setattr(StoredPush, "put", fail)
            for more in ({}, {"contextId": "mine"}, {"taskId": waiting}):
                with pytest.raises(Exception, match="503"):
                    await caller.send({"approved": True}, configuration={"taskPushNotificationConfig": address}, **more)
        assert [one.identity.run_id for one in await runtime.store.list_runs() if one.identity.depth == 0] == [waiting]
        assert await runtime.store.user_of_thread("mine") is None
        assert (await caller.get(waiting))["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
        with pytest.raises(A2AError, match="data part"):  # an answer that is refused changes no address
            await caller.send("hm", taskId=waiting, configuration={"taskPushNotificationConfig": address})
        assert isinstance(runtime.store, SqlStore)
        assert await runtime.store.database.rows("SELECT * FROM push_targets") == []


async def test_a_task_of_another_process_is_pushed_on_after_its_death(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    async with webhook() as (address, got):
        options = ("--db", url, "--push-private")
        async with served("tests.server.served:runtime", *options, folder=tmp_path) as first:
            async with calling(first.site.url, "JSONRPC", "waiter", SERVED, streaming=False) as caller:
                config = {"taskPushNotificationConfig": {"url": address}, "returnImmediately": True}
                await caller.send("it", configuration=config)
            await until(lambda: (tmp_path / "it.pids").exists() and got)
            await first.end(signal.SIGKILL)
        with closing(sqlite3.connect(tmp_path / "app.db")) as database:  # as if the hold of the dead were over
            database.execute("UPDATE push_targets SET held_until = 0")
            database.commit()
        async with served("tests.server.served:runtime", *options, folder=tmp_path):
            (tmp_path / "it").touch()
            await until(lambda: ended(got))
        kept = [body["statusUpdate"]["status"]["state"] for body, _ in got if "statusUpdate" in body]
        assert list(dict.fromkeys(kept)) == ["TASK_STATE_WORKING", "TASK_STATE_COMPLETED"]  # the first may come twice
