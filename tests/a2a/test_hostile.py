"""A2A servers that lie, flood and steal: what they send is refused or bounded, and nothing leaks."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from retinue import A2AAgent, Decision, DecisionRefused, Runtime
from retinue.backends.a2a_client import A2AClient

from .. import inside
from ..runners import AppRunner
from .test_children import boss, of_child

pytestmark = pytest.mark.usefixtures("short_pauses")

SECRET = "s3cr3t-token-0123456789"
HEADERS = {"Authorization": f"Bearer {SECRET}"}
Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Hostile:
    """Answers as it is told. `requests` has method, path and headers of all requests."""

    def __init__(self, handler: Handler | None) -> None:
        self._handler = handler
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.url = ""
        self.card: Any = None
        self.raw_card: web.Response | None = None

    def interface(self, url: str) -> dict[str, str]:
        return {"url": url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}

    async def show_card(self, request: web.Request) -> web.Response:
        self._note(request)
        if self.raw_card is not None:
            return self.raw_card
        card = {
            "name": "x" * 100,
            "description": "d",
            "version": "1",
            "capabilities": {"streaming": True},
            "supportedInterfaces": [self.interface(f"{self.url}/rpc")],
        }
        return web.json_response({**card, **(self.card or {})})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        assert self._handler is not None
        return await self._handler(request, await request.json())

    def _note(self, request: web.Request) -> None:
        self.requests.append((request.method, request.path, dict(request.headers)))


@asynccontextmanager
async def hostile(handler: Handler | None = None) -> AsyncIterator[Hostile]:
    server = Hostile(handler)
    app = web.Application()
    app.add_routes([web.get("/.well-known/agent-card.json", server.show_card), web.post("/rpc", server.answer)])
    runner = AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def told(server: Hostile, **options: Any) -> tuple[str, list[Any]]:
    """Return what the model of the parent reads about a child there, and the events."""
    agent = boss(A2AAgent("far", server.url, headers=HEADERS, **options), "echo hello")
    async with Runtime([agent]) as runtime:
        run = runtime.stream(agent, "go")
        result = await run.result()
        return result.response or "", [event async for event in runtime.events(run.run_id)]


def answer(body: dict[str, Any], result: Any) -> web.Response:
    return web.json_response({"jsonrpc": "2.0", "id": body["id"], "result": result})


def task(state: str = "WORKING", task_id: str = "t1", **more: Any) -> dict[str, Any]:
    return {"id": task_id, "contextId": "c1", "status": {"state": f"TASK_STATE_{state}"}, **more}


async def begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


async def push(response: web.StreamResponse, body: dict[str, Any], result: Any) -> None:
    data = json.dumps({"jsonrpc": "2.0", "id": body["id"], "result": result})
    await response.write(f"data: {data}\n\n".encode())


def streams(*results: Any, then: Callable[[dict[str, Any]], Any] | None = None) -> Handler:
    """Answer a message with these events, and other requests with what `then` says."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["method"] != "SendStreamingMessage":
            return answer(body, task("CANCELED") if then is None else then(body))
        response = await begin(request)
        for result in results:
            await push(response, body, result)
        return response

    return handle


def text_artifact(text: str, artifact_id: str = "a", task_id: str = "t1", append: bool = True) -> dict[str, Any]:
    artifact = {"artifactId": artifact_id, "parts": [{"text": text}]}
    return {"artifactUpdate": {"taskId": task_id, "contextId": "c1", "artifact": artifact, "append": append}}


def status(state: str, text: str = "", task_id: str = "t1") -> dict[str, Any]:
    said = {"message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": text}]}} if text else {}
    return {"statusUpdate": {"taskId": task_id, "contextId": "c1", "status": {"state": f"TASK_STATE_{state}", **said}}}


async def test_a_redirect_is_not_followed() -> None:
    async with hostile() as thief, hostile() as server:
        server.raw_card = web.Response(status=302, headers={"location": f"{thief.url}/.well-known/agent-card.json"})
        said, events = await told(server)
        assert "a redirect, which is not followed" in said
        assert not of_child(events)
        assert thief.requests == []


async def test_a_redirect_of_a_message_is_not_followed() -> None:
    async with hostile() as thief:

        async def redirect(request: web.Request, body: dict[str, Any]) -> web.Response:
            return web.Response(status=307, headers={"location": f"{thief.url}/rpc"})

        async with hostile(redirect) as server:
            said, _ = await told(server)
        assert "a redirect, which is not followed" in said
        assert thief.requests == []


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON", "GRPC"])
async def test_interfaces_at_other_addresses_are_not_used(binding: str) -> None:
    async with hostile(streams()) as thief, hostile() as server:
        place = thief.url.removeprefix("http://") if binding == "GRPC" else f"{thief.url}/rpc"
        server.card = {"supportedInterfaces": [{**server.interface(place), "protocolBinding": binding}]}
        said, _ = await told(server)
        assert "names no interface at its own address" in said
        assert "origins=[" in said
        assert thief.requests == []


async def test_an_interface_elsewhere_is_passed_over_and_may_be_allowed() -> None:
    good = streams({"task": task()}, text_artifact("hello"), status("COMPLETED"))
    async with hostile(good) as other, hostile(good) as server:
        server.card = {"supportedInterfaces": [server.interface(f"{one}/rpc") for one in (other.url, server.url)]}
        assert (await told(server))[0] == "Done: hello"
        assert other.requests == []
        server.card = {"supportedInterfaces": [server.interface(f"{other.url}/rpc")]}
        assert (await told(server, origins=[other.url]))[0] == "Done: hello"
        assert {path for _, path, _ in other.requests} == {"/rpc"}


@pytest.mark.parametrize(
    "card",
    [b"", b"{", b"[]", b"7", b'{"supportedInterfaces": 7}', b"[" * 100_000, b"\xff\xfe", b'{"skills": [1]}', b"<html>"],
    ids=repr,
)
async def test_what_is_no_card_is_refused(card: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.backends.remote.GARBLED_TRIES", 1)
    async with hostile() as server:
        server.raw_card = web.Response(body=card, content_type="application/json")
        said, _ = await told(server)
    assert "card" in said


async def test_a_card_of_other_needs_is_refused() -> None:
    async with hostile() as server:
        server.card = {"capabilities": {"extensions": [{"uri": "urn:x", "required": True}]}}
        assert "requires extensions: urn:x" in (await told(server))[0]
        server.card = {"supportedInterfaces": [{**server.interface(server.url), "protocolBinding": "SMOKE"}]}
        assert "offers no transport that is known here" in (await told(server))[0]


async def test_a_huge_card_is_not_read() -> None:
    async with hostile() as server:
        server.card = {"description": "x" * 2_000_000}
        assert "more than" in (await told(server))[0]


async def test_compressed_data_is_refused() -> None:
    async def bomb(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(body=gzip.compress(b"0" * 10_000_000), headers={"content-encoding": "gzip"})

    async with hostile(bomb) as server:
        assert "compressed data" in (await told(server))[0]


async def test_100_mb_are_not_read() -> None:
    sent = 0

    async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal sent
        if body["method"] == "CancelTask":
            return answer(body, task("CANCELED"))
        response = await begin(request)
        await push(response, body, {"task": task()})
        await response.write(b'data: {"result": {"artifactUpdate": "')
        for _ in range(100):
            await response.write(b"x" * 1_000_000)
            sent += 1
        return response

    async with hostile(flood) as server:
        said, _ = await told(server)
    assert "sent more than 20,000,000 bytes" in said
    assert sent < 60


async def test_artifacts_of_many_megabytes_are_given_up_and_the_task_is_stopped() -> None:
    asked: list[str] = []

    def then(body: dict[str, Any]) -> Any:
        asked.append(body["method"])
        return task("CANCELED")

    pieces = [text_artifact("x" * 1_000_000, append=number > 0) for number in range(25)]
    async with hostile(streams({"task": task()}, *pieces, then=then)) as server:
        said, _ = await told(server)
    assert "artifacts of more than 20,000,000 bytes" in said
    assert asked == ["CancelTask"]


@pytest.mark.parametrize("update", [status("WORKING", "busy"), status("WORKING"), text_artifact("")], ids=str)
async def test_an_endless_stream_is_bounded(update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.backends.a2a_client.MOST_STREAM_BYTES", 30_000)
    monkeypatch.setattr("retinue.backends.a2a.MOST_REPORTS", 20)
    monkeypatch.setattr("retinue.backends.a2a.STOP_SECONDS", 3600.0)
    stopped = False

    async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal stopped
        if body["method"] == "CancelTask":
            stopped = True
            return answer(body, task("CANCELED"))
        response = await begin(request)
        await push(response, body, {"task": task()})
        number = 0
        while True:
            number += 1
            await push(response, body, json.loads(json.dumps(update).replace("busy", f"busy {number}")))

    async with hostile(flood) as server:
        said, events = await told(server)
    assert "sent more than 30,000 bytes" in said
    assert stopped
    assert len(of_child(events)) < 30


@pytest.mark.parametrize("task_id", ["", "../../admin", "a/b", "a?b", "..", "x" * 1000, "a\nb", "é"])
async def test_ids_that_are_no_plain_ids_are_refused(task_id: str) -> None:
    async with hostile(streams({"task": task(task_id=task_id)})) as server:
        said, events = await told(server)
    assert "an id that cannot be used" in said
    assert not of_child(events)


async def test_the_task_of_another_run_is_refused() -> None:
    """The second child gets the id of the first, which is still at work."""
    agents: list[Any] = []

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["method"] != "SendStreamingMessage":
            return answer(body, task("CANCELED"))
        response = await begin(request)
        await push(response, body, {"task": task()})
        agents.append(response)
        while len(agents) < 2 or response is not agents[0]:
            await push(response, body, status("WORKING"))
            await asyncio.sleep(0.01)
        await push(response, body, text_artifact("mine"))
        await push(response, body, status("COMPLETED"))
        return response

    from retinue import Agent
    from retinue.testing import ScriptedModel, call, say

    async with hostile(handle) as server:
        far = A2AAgent("far", server.url)
        calls = [
            call("task", {"subagent_type": "far", "description": "echo"}, id=f"task_{number}") for number in (1, 2)
        ]

        def turn(request: Any) -> Any:
            said = [message.text for message in request.messages if message.role == "tool"]
            return say(" / ".join(said)) if said else calls

        async with Runtime([Agent("boss", ScriptedModel(turn), subagents=[far])]) as runtime:
            result = await runtime.run("boss", "go")
    assert "mine" in (result.response or "")
    assert "the id of another run's" in (result.response or "")


async def test_events_of_other_tasks_are_ignored() -> None:
    events = [text_artifact("evil", task_id="t2"), status("FAILED", "evil", task_id="t2"), text_artifact("good")]
    async with hostile(streams({"task": task()}, *events, status("COMPLETED"))) as server:
        said, seen = await told(server)
    assert said == "Done: good"
    assert "evil" not in str(seen)


async def test_an_answer_about_another_task_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.backends.remote.PATIENCE", 0.2)
    async with hostile(streams({"task": task()}, then=lambda body: task("COMPLETED", "t9"))) as server:
        assert "answered about another task" in (await told(server))[0]


async def test_replaced_artifacts_are_not_joined() -> None:
    updates = [text_artifact("draft", append=False), text_artifact("final", append=False), status("COMPLETED")]
    async with hostile(streams({"task": task()}, *updates)) as server:
        said, _ = await told(server)
    assert said == "Done: final"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"result": 7}', b'{"jsonrpc": "2.0"}', b'{"result": {"task": {"id": []}}}', b"\xff"],
    ids=repr,
)
@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_garbage_is_an_error_that_says_where(body: bytes, content_type: str) -> None:
    async def junk(request: web.Request, asked: dict[str, Any]) -> web.Response:
        data = b"data: " + body + b"\n\n" if content_type == "text/event-stream" else body
        return web.Response(body=data, content_type=content_type)

    async with hostile(junk) as server:
        said, events = await told(server)
        assert server.url in said
    assert not of_child(events)


async def test_a_stream_that_the_card_promised_and_the_server_has_not() -> None:
    async def handle(request: web.Request, body: dict[str, Any]) -> web.Response:
        if body["method"] in ("SendStreamingMessage", "SubscribeToTask"):
            error = {"code": -32601, "message": "Method not found"}
            return web.json_response({"jsonrpc": "2.0", "id": body["id"], "error": error})
        if body["method"] == "SendMessage":
            return answer(body, {"task": task()})
        return answer(body, task("COMPLETED", artifacts=[{"artifactId": "a", "parts": [{"text": "hello"}]}]))

    async with hostile(handle) as server:
        assert (await told(server))[0] == "Done: hello"


async def test_credentials_are_redacted_in_everything_and_cookies_are_not_kept() -> None:
    async def echo(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "set-cookie": "a=b"})
        await response.prepare(request)
        await push(response, body, {"task": task()})
        await push(response, body, status("WORKING", f"I saw {SECRET}"))
        data = {"artifactId": "d", "parts": [{"data": {"k": SECRET}}, {"text": f"token {SECRET}"}]}
        await push(response, body, {"artifactUpdate": {"taskId": "t1", "contextId": "c1", "artifact": data}})
        await push(response, body, status("FAILED", f"because of {SECRET}"))
        return response

    async with hostile(echo) as server:
        said, events = await told(server)
        again, _ = await told(server)
        assert all("cookie" not in {name.lower() for name in headers} for _, _, headers in server.requests)
        assert all(headers["Authorization"] == f"Bearer {SECRET}" for _, _, headers in server.requests)
    assert "because of [redacted]" in said
    assert "token [redacted]" in again
    assert SECRET not in str(events)


async def test_an_error_that_repeats_credentials_is_redacted() -> None:
    async def deny(request: web.Request, body: dict[str, Any]) -> web.Response:
        error = {"code": -32603, "message": f"bad {SECRET}"}
        return web.json_response({"jsonrpc": "2.0", "id": body["id"], "error": error})

    async with hostile(deny) as server:
        said, _ = await told(server)
    assert "bad [redacted]" in said


async def test_the_transport_itself_reaches_no_other_origin() -> None:
    async with hostile() as thief, hostile() as server:
        client = A2AClient(server.url)
        with pytest.raises(Exception, match="another server"):
            await inside.http_of(client).get(thief.url)
        await client.close()
        assert thief.requests == []


# --- servers that mean well


async def test_times_without_a_zone_are_read() -> None:
    """The SDK reads none of them, and a public server sends them; data of the same shape stays as it is."""
    when = {"timestamp": "2026-11-16T14:11:57.635934"}
    begun, data = task(), {"state": "x", **when}
    begun["status"].update(when)
    artifact = {"artifactId": "a", "parts": [{"data": data}]}
    ended = task("COMPLETED", artifacts=[artifact])
    ended["status"].update(when)
    async with hostile(streams({"task": begun}, then=lambda body: ended)) as server:
        said, _ = await told(server)
    assert json.loads(said.removeprefix("Done: ")) == data


async def test_a_stream_of_states_alone_is_completed_by_a_look_at_the_task() -> None:
    done = task("COMPLETED", artifacts=[{"artifactId": "a", "parts": [{"text": "hello"}]}])
    async with hostile(streams({"task": task()}, status("COMPLETED"), then=lambda body: done)) as server:
        assert (await told(server))[0] == "Done: hello"


async def test_a_server_that_makes_another_task_of_an_answer_refuses_it() -> None:
    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["method"] != "SendStreamingMessage":
            return answer(body, task("INPUT_REQUIRED"))
        response = await begin(request)
        is_answer = bool(body["params"]["message"].get("taskId"))
        await push(response, body, {"task": task("COMPLETED", "t2") if is_answer else task("INPUT_REQUIRED")})
        return response

    async with hostile(handle) as server:
        agent = boss(A2AAgent("far", server.url), "echo hello")
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go")
            assert list((await run.result()).suspended) == ["task_1/input_1"]
            with pytest.raises(DecisionRefused, match="cannot continue one"):
                await runtime.resume(run.run_id, {"task_1/input_1": Decision.resume("b")})
            assert list((await runtime.result(run.run_id)).suspended) == ["task_1/input_1"]


async def test_an_event_that_comes_twice_is_not_in_the_result_twice() -> None:
    done = task("COMPLETED", artifacts=[{"artifactId": "a", "parts": [{"text": "hello"}]}])
    twice = [text_artifact("hello"), text_artifact("hello"), status("COMPLETED")]
    async with hostile(streams({"task": task()}, *twice, then=lambda body: done)) as server:
        assert (await told(server))[0] == "Done: hello"


async def test_the_server_is_asked_to_close_each_connection() -> None:
    """Else it would answer a request that the network repeats, and start a second task."""
    async with hostile(streams({"task": task()}, text_artifact("hello"), status("COMPLETED"))) as server:
        await told(server)
        assert {headers["Connection"] for _, _, headers in server.requests} == {"close"}
