"""Events over WebSocket: many subscriptions on one socket, signs of life, and sockets that the server closes."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.requests import HTTPConnection

from retinue import Runtime
from retinue.server import create_app, sockets
from retinue.server.auth import NoAuth, User
from retinue.server.http import headers_of

from .. import inside
from .agents import Gate, speaker
from .serving import Socket, asking, listening, serving

RUNS, MANY = "/api/v1/runs", "/api/v1/events"


async def test_a_name_is_used_again_and_its_new_subscription_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.allow_subscriptions(monkeypatch, 2)
    gate = Gate()
    async with serving(Runtime([gate.agent()])) as site, site.socket(MANY) as socket:
        run_id = (await site.start("gated"))["run_id"]
        follow = {"run_id": run_id, "kinds": "text_delta"}
        gate.say("one")
        await socket.send(**{"subscribe": "x", **follow})
        got = await socket.news()
        for _ in range(3):
            await socket.send(**{"unsubscribe": "x", "subscribe": "x", **follow})
            assert await socket.news() == got
        assert (got["subscription"], got["event"]["delta"]) == ("x", "one")
        codes: list[str] = []
        for name in ("x", "y", "z"):
            await socket.send(**{"subscribe": name, **follow, "after": got["id"]})
            if name != "y":
                codes.append((await socket.news())["error"]["code"])
        assert codes == ["in_use", "too_many"]
        await socket.send(unsubscribe="x")
        for fields in ({}, {"fly": 1}):
            await socket.send(**fields)
            assert (await socket.news())["error"]["code"] == "invalid"
        gate.say("two", None)
        rest = [await socket.news() for _ in range(2)]
        assert [one["subscription"] for one in rest] == ["y", "y"]
        assert (rest[0]["event"]["delta"], rest[1]["ended"]) == ("two", True)


async def test_the_subscription_of_a_thread_is_resumed_by_its_ids() -> None:
    async with serving(Runtime([speaker("a", "b")])) as site, site.socket(MANY) as socket:
        for _ in range(2):
            await site.result((await site.start("speaker", thread_id="t1"))["run_id"])
        ids = [event.id for event in await site.all_events("/api/v1/threads/t1/events?until=idle")]
        follow = {"thread_id": "t1", "until": "idle"}
        await socket.send(**{"subscribe": "x", **follow})
        got = [await socket.news() for _ in ids]
        assert [one["id"] for one in got] == ids
        assert (await socket.news())["ended"]
        await socket.send(**{"subscribe": "x", **follow, "after": ids[2]})
        assert [(await socket.news())["id"] for _ in ids[3:]] == ids[3:]


async def test_a_socket_has_one_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    async with serving(Runtime([gate.agent()])) as site:
        run_id = (await site.start("gated"))["run_id"]
        async with site.socket(MANY) as socket:
            for name in ("x", "y"):
                await socket.send(subscribe=name, run_id=run_id, kinds="text_delta")
            gate.say("one")
            assert {(await socket.news())["subscription"] for _ in range(2)} == {"x", "y"}
            site.service.feeds.wake_all()
            await socket.send()
            assert (await socket.news())["error"]
            gate.say("two")
            assert {(await socket.news()).get("subscription") for _ in range(2)} == {"x", "y"}
        inside.beat_every(monkeypatch, 0.0)
        async with site.socket(MANY) as socket:
            assert [await socket.next() for _ in range(2)] == [{"beat": True}] * 2
        gate.say(None)


class Revocable:
    """Lets a user in until it is revoked."""

    user: User | None = User("ann")

    async def user_of(self, headers: Mapping[str, str]) -> User | None:
        return self.user


@pytest.mark.parametrize("left", [None, User("bob"), User("ann", frozenset({"run"}))])
async def test_a_revoked_token_ends_open_sockets(monkeypatch: pytest.MonkeyPatch, left: User | None) -> None:
    inside.beat_every(monkeypatch, 0.001)
    gate, auth = Gate(), Revocable()
    async with serving(Runtime([gate.agent()]), auth=auth) as site:
        run = await site.start("gated")
        paths = (f"{RUNS}/{run['run_id']}/events", f"/api/v1/threads/{run['thread_id']}/events", MANY)
        opened = [Socket(await site.session.ws_connect(path)) for path in paths]
        await opened[-1].send(subscribe="x", run_id=run["run_id"])
        for socket in opened:
            assert await socket.news()
        auth.user = left
        for socket in opened:
            await socket.all()
            assert socket.close_code == sockets.FORBIDDEN
        gate.say(None)


async def test_a_server_that_ends_closes_a_socket_of_many_once() -> None:
    gate, problems = Gate(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    async with serving(Runtime([gate.agent()])) as site:
        run_id = (await site.start("gated"))["run_id"]
        async with site.socket(MANY) as socket:
            for name in ("x", "y", "z"):
                await socket.send(subscribe=name, run_id=run_id, kinds="text_delta")
            gate.say("one")
            for _ in range(3):
                await socket.news()
            site.service.close()
            with pytest.raises(StopAsyncIteration):
                await socket.news()
            assert socket.close_code == sockets.RESTART
        gate.say(None)
    gc.collect()
    assert problems == []


@pytest.mark.parametrize("path", [f"{RUNS}/{{}}/events", MANY])
async def test_a_client_that_leaves_during_the_handshake_leaves_nothing_behind(path: str) -> None:
    gate = Gate()

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        raise OSError("the client has left")

    async with Runtime([gate.agent()]) as runtime:
        app = create_app(runtime, auth=NoAuth())
        async with listening(app) as url, asking(url, None) as site:
            named = path.format((await site.start("gated"))["run_id"])
            scope = {"type": "websocket", "path": named, "raw_path": named.encode(), "query_string": b"", "headers": []}
            await app(scope, receive, send)
            gc.collect()  # a coroutine that nobody awaited would warn
            gate.say(None)


@pytest.mark.parametrize("path", [f"{RUNS}/{{}}/events", MANY])
async def test_a_client_that_leaves_while_a_send_waits_is_no_error(path: str, caplog: pytest.LogCaptureFixture) -> None:
    gate, left = Gate(), asyncio.Event()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "websocket.send":
            gate.say("more")
            left.set()
            raise RuntimeError("Unexpected ASGI message 'websocket.send', after sending 'websocket.close'.")

    async with Runtime([gate.agent()]) as runtime:
        app = create_app(runtime, auth=NoAuth())
        async with listening(app) as url, asking(url, None) as site:
            run_id = (await site.start("gated"))["run_id"]
            asked: list[Any] = [
                {"type": "websocket.connect"},
                {"type": "websocket.receive", "text": json.dumps({"subscribe": "x", "run_id": run_id})},
            ]

            async def receive() -> dict[str, Any]:
                if asked:
                    return asked.pop(0)
                await left.wait()
                return {"type": "websocket.disconnect"}

            named = path.format(run_id)
            scope = {"type": "websocket", "path": named, "raw_path": named.encode(), "query_string": b"", "headers": []}
            gate.say("one")
            await app(scope, receive, send)
            gate.say(None)
    assert [one["type"] for one in sent[:2]] == ["websocket.accept", "websocket.send"]
    assert caplog.records == []


async def test_the_fields_of_a_subscription_are_bounded() -> None:
    gate = Gate()
    async with serving(Runtime([gate.agent()])) as site, site.socket(MANY) as socket:
        run_id = (await site.start("gated"))["run_id"]
        for name in ("subscribe", "unsubscribe"):
            await socket.send(**{name: "x" * 201, "run_id": run_id})
            answer = await socket.news()
            assert (answer["subscription"], answer["error"]["code"]) == (None, "invalid")
            assert name in answer["error"]["detail"]
        for name in ("run_id", "thread_id", "after", "ns", "kinds"):
            await socket.send(**{"subscribe": "x", name: "x" * 10_001})
            assert (await socket.news())["error"]["code"] == "invalid"
        await socket.send(subscribe="x" * 200, run_id=run_id)
        gate.say("one")
        assert (await socket.news())["subscription"] == "x" * 200
        gate.say(None)


def test_two_cookie_headers_are_one_list_of_cookies() -> None:
    given = [(b"cookie", b"a=1"), (b"cookie", b"retinue_session=x"), (b"x-user", b"ann"), (b"x-user", b"bob")]
    found = headers_of(HTTPConnection({"type": "http", "headers": given}))
    assert found == {"cookie": "a=1; retinue_session=x", "x-user": "ann, bob"}


async def test_a_message_that_is_no_request_names_the_fields_of_one() -> None:
    async with serving(Runtime([speaker("hi")])) as site, site.socket(MANY) as socket:
        await socket.send(subscribe="a", run="x")
        detail = (await socket.news())["error"]["detail"]
        assert detail.startswith("not a request: Object contains unknown field `run`; known here: after, ")
        assert ", run_id, subscribe, thread_id" in detail
