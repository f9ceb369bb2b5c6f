"""What only a client has: addresses, tokens, options that cannot be sent, broken connections, sync use."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from retinue import ConfigurationError, Decision, Message, RunStatus, Runtime, UnknownRun
from retinue.client import Client
from retinue.errors import RunEnded, ServerError, StoreError
from retinue.events import AnyEvent
from retinue.server import create_app

from ..remote.proxy import Proxy
from ..runners import AppRunner
from ..server.agents import Gate, boss, speaker
from ..server.serving import TOKEN, listening, serving
from ..waiting import until

FAULTS = ("cut", "truncate", "delay")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def answering(handle: Handler) -> AsyncIterator[str]:
    """A server that answers everything with one function."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", None])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="http://localhost:8000"):
        Client(url)


@pytest.mark.parametrize("token", ["a\nb", " ", 5])
def test_a_wrong_token_is_refused(token: Any) -> None:
    with pytest.raises(ConfigurationError, match="token"):
        Client("http://localhost", token=token)


async def test_what_cannot_be_sent_is_refused() -> None:
    client = Client("http://localhost")
    for option, match in (("model", "server's agent"), ("user_id", "user of the token"), ("run_id", "chooses it")):
        with pytest.raises(ConfigurationError, match=f"cannot send {option}: .*{match}"):
            client.stream("a", "b", **{option: "x"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="cannot send sinks"):
        await client.run("a", "b", sinks=[print])
    with pytest.raises(ConfigurationError, match="cannot be sent to a server: .*object"):
        client.stream("a", "b", context={"x": object()})
    with pytest.raises(ConfigurationError, match="tool calls and their results"):
        client.stream("a", [Message.tool("x", tool_call_id="c")])
    with pytest.raises(ConfigurationError, match="StateKey objects"):
        await client.run("a", "b", state={"x": 1})  # pyright: ignore[reportArgumentType]


async def test_refusals_say_what_to_do() -> None:
    async with serving(Runtime(agents=[speaker("a")])) as site:
        with pytest.raises(ServerError, match="401 .*give the client a valid token") as refused:
            await Client(site.url, token="wrong-token").run("speaker", "go")
        assert (refused.value.status, refused.value.code) == (401, "unauthorized")
        assert "wrong-token" not in str(refused.value)
    with pytest.raises(ServerError, match="cannot be reached .*check the url, or give the client more patience"):
        await Client(site.url, patience=0).run("speaker", "go")


@pytest.mark.parametrize("status", [200, 302])
async def test_another_server_is_recognised(status: int) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="<html>", headers={"location": "http://elsewhere.example"})

    async with answering(handle) as url:
        with pytest.raises(ServerError, match="this is no Retinue server: correct the url"):
            await Client(url).run("a", "b")
        with pytest.raises(ServerError, match="this is no Retinue server"):
            await anext(Client(url).events("run_1"))


async def test_an_overloaded_server_is_asked_again_until_patience_ends() -> None:
    seen: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["idempotency-key"])
        return web.json_response({"detail": "the disk is full", "code": "store_unavailable"}, status=503)

    async with answering(handle) as url:
        with pytest.raises(StoreError, match="disk is full"):
            await Client(url, patience=0.2).run("a", "b")
    assert len(seen) > 1
    assert len(set(seen)) == 1


async def test_a_start_whose_answer_is_lost_starts_one_run() -> None:
    """The connection is cut after the server has taken the request and before the client has the answer."""
    async with serving(Runtime(agents=[speaker("a")])) as site:
        cuts: list[web.Request] = []

        async def handle(request: web.Request) -> web.StreamResponse:
            headers = {name: request.headers[name] for name in ("Authorization", "Idempotency-Key")}
            answer = await site.ask("POST", request.path, data=await request.read(), headers=headers)
            if len(cuts) < 3:
                cuts.append(request)
                assert request.transport is not None
                request.transport.abort()
            return web.json_response(answer.body, status=answer.status)

        async with answering(handle) as url:
            run = Client(url, token=TOKEN).stream("speaker", "go")
            await run.stored()
        assert len(cuts) == 3
        assert [one["run_id"] for one in (await site.get("/api/v1/runs")).body["items"]] == [run.run_id]


async def test_a_key_belongs_to_its_user() -> None:
    async with serving(Runtime(agents=[speaker("a")])) as site:
        body = {"agent": "speaker", "input": "go"}
        made = [(await site.post("/api/v1/runs", body, headers={"idempotency-key": key})).body for key in "aab"]
        assert made[0]["run_id"] == made[1]["run_id"] != made[2]["run_id"]
        assert made[0]["thread_id"] == made[1]["thread_id"]
        long = await site.post("/api/v1/runs", body, headers={"idempotency-key": "x" * 201})
        assert (long.status, long.body["code"]) == (422, "invalid")


async def test_a_fork_is_sent_once() -> None:
    seen: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with answering(handle) as url:
        with pytest.raises(ServerError, match="look at the runs of the server before you ask again"):
            await Client(url).fork("run_1", at=3)
    assert len(seen) == 1


async def test_every_break_of_the_connection_is_bridged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy cuts, delays and truncates what passes."""
    monkeypatch.setattr("retinue.core.concurrency.LONGEST_PAUSE", 0.05)
    words = [f"w{number} " for number in range(300)]
    async with serving(Runtime(agents=[speaker(*words)])) as site:
        async with Proxy(int(site.url.rpartition(":")[2]), seed=7, faults=40, kinds=FAULTS) as proxy:
            async with Client(proxy.url, token=TOKEN) as client:
                for _ in range(3):
                    run = client.stream("speaker", "go")
                    events = [event async for event in run]
                    assert [event.seq for event in events] == list(range(1, len(events) + 1))
                    assert (await run.result()).response == "".join(words)
        assert {"cut", "truncate"} <= set(proxy.done)
        assert len((await site.get("/api/v1/runs")).body["items"]) == 3


async def test_a_server_that_closes_its_streams_is_asked_again() -> None:
    gate = Gate()
    async with Runtime(agents=[gate.agent()]) as runtime:
        first = create_app(runtime, auth=TOKEN)
        async with listening(first) as url, Client(url, token=TOKEN) as client:
            run = client.stream("gated", "go")
            events = aiter(run)
            gate.say("a")
            seen = [await anext(events)]
            while seen[-1].kind != "text_delta":
                seen.append(await anext(events))
            service = first.state.service
            service.close()  # streams end with a hint to connect again, which fails in the same way
            service.closing.clear()
            gate.say("b", None)
            seen += [event async for event in events]
            assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
            assert (await run.result()).response == "ab"


def sse(*seqs: int) -> bytes:
    made = b'{"kind": "step_started", "step": 1, "seq": %d, "at": 0, "run_id": "r", "agent": "a", "ns": []}'
    return b"".join(b"id: %d\ndata: %b\n\n" % (seq, made % seq) for seq in seqs)


END = (
    b'data: {"kind": "run_finished", "status": "completed", "seq": 9, "at": 0, "run_id": "r", "agent": "a", '
    b'"ns": [], "response": null, "steps": 1, "usage": {}, "termination": "natural"}\n\n'
)


async def stream_of(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(data)
    return response


async def test_repeated_and_missing_events_are_noticed() -> None:
    asked: list[str] = []
    answers: Iterator[bytes] = iter([sse(1, 2, 2, 4), sse(2, 3, 4, 6), sse(6, 8) + END])

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.query["after"])
        return await stream_of(request, next(answers))

    async with answering(handle) as url:
        events = [event.seq async for event in Client(url).events("r")]
    assert events == [1, 2, 3, 4, 6, 8, 9]  # 5 and 7 are not there any more
    assert asked == ["0", "2", "4"]


async def test_an_unreadable_event_ends_the_stream_with_a_sentence() -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.query["after"])
        return await stream_of(request, sse(1) + b"data: {\n\n")

    async with answering(handle) as url:
        with pytest.raises(ServerError, match="event after number 1 that cannot be read"):
            async for _ in Client(url).events("r"):
                pass
    assert len(asked) == 5


async def test_cancelling_the_caller_cancels_the_run() -> None:
    gate = Gate()
    async with serving(Runtime(agents=[gate.agent()])) as site, Client(site.url, token=TOKEN) as client:
        await site.post("/api/v1/threads", {"thread_id": "t1"})
        caller = asyncio.create_task(client.run("gated", "go", thread_id="t1"))
        gate.say("x")
        events = site.events("/api/v1/threads/t1/events?kinds=text_delta,run_finished")
        assert (await anext(events)).event == "text_delta"
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert (await anext(events)).data["status"] == "cancelled"
        await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]


async def read_all(events: AsyncIterator[AnyEvent]) -> list[AnyEvent]:
    return [event async for event in events]


async def test_closing_the_client_ends_what_waits() -> None:
    gate = Gate()
    async with serving(Runtime(agents=[gate.agent()])) as site:
        async with Client(site.url, token=TOKEN) as client:
            run = client.stream("gated", "go")
            gate.say("x")
            events = aiter(run)
            while (await anext(events)).kind != "text_delta":
                pass
            waiting = asyncio.create_task(run.result())
            reading = asyncio.create_task(read_all(events))
            await asyncio.sleep(0)
        for ended in (waiting, reading):
            with pytest.raises(ServerError, match="the client was closed"):
                await ended
        with pytest.raises(ConfigurationError, match="this client is closed"):
            await client.run("gated", "go")
        gate.say(None)
        assert (await site.result(run.run_id))["response"] == "x"
        await until(lambda: not site.service.metrics.streams)


async def test_the_connection_of_a_stream_is_closed_when_nobody_reads() -> None:
    gate = Gate()
    async with serving(Runtime(agents=[gate.agent()])) as site, Client(site.url, token=TOKEN) as client:
        run_id = (await site.start("gated"))["run_id"]
        gate.say("x")
        events = client.events(run_id)
        while (await anext(events)).kind != "text_delta":
            pass
        assert site.service.metrics.streams == 1
        await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        await until(lambda: not site.service.metrics.streams)
        gate.say(None)
        assert (await client.result(run_id)).response == "x"


async def test_a_child_that_waits_is_cancelled_alone() -> None:
    async with serving(Runtime(agents=[boss()])) as site, Client(site.url, token=TOKEN) as client:
        run = client.stream("boss", "go")
        assert (await run.result()).status is RunStatus.SUSPENDED
        (child,) = [child async for child in run.children]
        ended = await child.cancel("too dear")
        assert (ended.status, ended.error) == (RunStatus.CANCELLED, "too dear")
        assert (await client.result(run.run_id)).status is RunStatus.COMPLETED
        with pytest.raises(UnknownRun):
            await client.cancel(run.run_id, ns="tools:nothing")
        again = await client.cancel(run.run_id, ns=child.ns, reason="another")
        assert (again.status, again.error) == (RunStatus.CANCELLED, "too dear")


async def test_the_agents_of_the_server() -> None:
    async with serving(Runtime(agents=[boss()])) as site, Client(site.url, token=TOKEN) as client:
        agents = await client.agents()
        assert sorted(agents) == ["boss", "clerk"]
        assert agents["boss"].subagents == ("clerk",)
        assert agents["clerk"].tools[0]["name"] == "pay"


class ServerThread:
    """A server in a thread, for callers that block."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.url, self.gate = "", gate
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        agents = [boss(), speaker("a", "b"), *([] if self.gate is None else [self.gate.agent()])]
        async with serving(Runtime(agents=agents)) as site:
            self.url = site.url
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> ServerThread:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def test_sync() -> None:
    with ServerThread() as server:
        with Client(server.url, token=TOKEN) as client:
            result = client.run_sync("speaker", "go")
            assert (result.status, result.response) == (RunStatus.COMPLETED, "ab")
            events = list(client.stream_sync("boss", "go"))
            assert events[-1].kind == "run_finished"
            answered = client.resume_sync(events[0].run_id, {"pay_1": Decision.approve()})
            assert answered.response == "boss: clerk: paid 3"
            with pytest.raises(UnknownRun):
                client.resume_sync("run_nope", {})
        with pytest.raises(ConfigurationError, match="closed"):
            client.run_sync("speaker", "go")


def test_leaving_a_synchronous_iteration_cancels_the_run() -> None:
    gate = Gate()
    with ServerThread(gate) as server:
        client = Client(server.url, token=TOKEN).__enter__()
        server.loop.call_soon_threadsafe(gate.say, "x")
        events = client.stream_sync("gated", "go")
        run_id = next(event for event in events if event.kind == "text_delta").run_id
        events.close()  # pyright: ignore[reportAttributeAccessIssue]
        client.__exit__()

        async def result() -> RunStatus:
            return (await Client(server.url, token=TOKEN).result(run_id)).status

        assert asyncio.run(result()) is RunStatus.CANCELLED


def test_without_with_there_is_nothing_to_close(tmp_path: Path) -> None:
    code = (
        "import logging, sys; logging.getLogger('asyncio').setLevel('ERROR')\n"  # not how long a callback takes
        "from retinue.client import Client; client = Client(sys.argv[1], token=sys.argv[2])\n"
        "print(client.run_sync('speaker', 'go').response, [e.kind for e in client.stream_sync('speaker', 'go')][-1])"
    )
    with ServerThread() as server:
        command = [sys.executable, "-W", "error", "-X", "dev", "-c", code, server.url, TOKEN]
        out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (out.stdout, out.stderr) == ("ab run_finished\n", "")


def test_importing_retinue_does_not_import_the_client() -> None:
    code = "import sys, retinue; print('retinue.client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


async def test_a_message_reaches_a_run_at_work_and_is_refused_after_it() -> None:
    gate = Gate()
    async with serving(Runtime(agents=[gate.agent()])) as site, Client(site.url, token=TOKEN) as client:
        run = client.stream("gated", "go")
        gate.say("first")
        async for event in run:
            if event.kind == "text_delta":
                break
        message_id = await run.send("and this")
        for _ in range(2):
            await client.send(run.run_id, Message.user("and that", id="mine"))
        with pytest.raises(UnknownRun):
            await client.send(run.run_id, "x", ns=("tools:none",))
        gate.say(None, "second", None)
        result = await run.result()
        assert (result.status, result.response, result.steps) == (RunStatus.COMPLETED, "second", 2)
        added = [event async for event in client.events(run.run_id) if event.kind == "message_added"]
        assert [event.message.id for event in added] == [message_id, "mine"]  # type: ignore[attr-defined]
        with pytest.raises(RunEnded, match="takes no message"):
            await run.send("too late")
