"""Sub-agents on a server that speaks LangGraph's HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from retinue import Agent, Decision, HarnessAgent, RunStatus, Runtime, SubagentDeclaration
from retinue.backends.http_client import HttpClient
from retinue.backends.langgraph import LangGraphBackend
from retinue.core.backend import Backend
from retinue.core.errors import DecisionRefused
from retinue.events import Custom, RunFinished, TextDelta
from retinue.subagents import RemoteSubagentStub
from retinue.testing import BackendSuite, ScriptedModel, call, say
from tests.waiting import until

from ..runners import AppRunner
from .langgraph_server import ASSISTANT, GraphServer
from .proxy import Proxy

pytestmark = pytest.mark.usefixtures("short_pauses")


class Harness:
    def __init__(self, server: GraphServer) -> None:
        self._server = server
        self.backend: Backend = LangGraphBackend(HttpClient(server.url), ASSISTANT)
        self.broken: Backend = LangGraphBackend(HttpClient("http://127.0.0.1:9"), ASSISTANT, patience=0.1)

    def starts(self, run_id: str) -> int:
        return len(self._server.of(run_id))

    def is_at_work(self, run_id: str) -> bool:
        return any(run["status"] == "running" for run in self._server.of(run_id))

    def sent(self, run_id: str) -> Sequence[str]:
        return [one["content"] for run in self._server.of(run_id) for one in run["body"]["input"]["messages"]]


@pytest.mark.parametrize("check", BackendSuite.names())
async def test_contract(check: str) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[Harness]:
        async with GraphServer() as server:
            harness = Harness(server)
            try:
                yield harness
            finally:
                for backend in (harness.backend, harness.broken):
                    closing: Any = backend
                    await closing.close()

    await getattr(BackendSuite(make), check)()


def boss(server: GraphServer, text: str, name: str = ASSISTANT, **options: Any) -> Agent:
    far = RemoteSubagentStub(name, url=server.url, protocol="langgraph", **options)

    def turn(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(f"Done: {request.messages[-1].text}")
        return call("task", {"subagent_type": name, "description": text}, id="c1")

    return Agent("boss", ScriptedModel(turn), subagents=[far])


def text_of(events: list[Any]) -> str:
    return "".join([event.delta for event in events if isinstance(event, TextDelta) and event.ns])


@pytest.mark.parametrize("cut_after", [0, 1, 3])
async def test_its_words_arrive_live_and_once(cut_after: int) -> None:
    async with GraphServer() as server:
        server.cut_after = cut_after
        async with Runtime([boss(server, "say one two wait three")]) as runtime:
            run = runtime.stream("boss", "go")
            async for event in run:
                if isinstance(event, TextDelta) and event.delta.endswith("two") and event.ns:
                    server.go.set()
            events = [event async for event in runtime.events(run.run_id)]
            result = await run.result()
    assert result.response == "Done: one two wait three"
    assert text_of(events) == "one two wait three"
    assert (result.usage.input_tokens, result.usage.output_tokens) == (9, 3)
    (ended,) = [event for event in events if isinstance(event, RunFinished) and event.ns]
    assert (ended.status, ended.steps) == (RunStatus.COMPLETED, 1)
    reported = [event.data for event in events if isinstance(event, Custom) and event.ns]
    assert reported[-1]["status"] == "success"


async def test_a_start_whose_answer_is_lost_is_not_made_twice() -> None:
    async with GraphServer() as server:
        server.lose_answer = 1
        async with Runtime([boss(server, "echo hello")]) as runtime:
            result = await runtime.run("boss", "go")
        assert result.response == "Done: hello"
        assert len(server.runs) == 1


async def test_questions_are_answered_at_the_root(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    async with GraphServer() as server:
        async with Runtime.open(url, [boss(server, "ask Which one?|How many?")]) as runtime:
            run = runtime.stream("boss", "go")
            waiting = await run.result()
            assert waiting.status is RunStatus.SUSPENDED
            assert [ticket.parameters for ticket in waiting.suspended.values()] == [
                {"question": "Which one?"},
                {"question": "How many?"},
            ]
            first, second = waiting.suspended
        async with Runtime.open(url, [boss(server, "ask Which one?|How many?")]) as runtime:
            answers = {first: Decision.resume("the red one"), second: Decision.resume({"count": 3})}
            result = await runtime.resume(run.run_id, answers)
        assert result.response == 'Done: You chose {"i0": "the red one", "i1": {"count": 3}}.'
        assert [run["metadata"]["retinue_question"] for run in server.runs.values()] == [0, 1]


async def test_a_decision_may_end_it() -> None:
    async with GraphServer() as server:
        async with Runtime([boss(server, "ask Which one?")]) as runtime:
            run = runtime.stream("boss", "go")
            (ticket,) = (await run.result()).suspended
            with pytest.raises(DecisionRefused, match="needs an answer"):
                await runtime.resume(run.run_id, {ticket: Decision.resume()})
            result = await runtime.resume(run.run_id, {ticket: Decision.cancel("not needed")})
        assert "not needed" in (result.response or "")
        assert len(server.runs) == 1


async def test_a_cancel_reaches_the_server() -> None:
    async with GraphServer() as server:
        async with Runtime([boss(server, "say one wait")]) as runtime:
            run = runtime.stream("boss", "go")
            await until(lambda: server.runs)
            await runtime.cancel(run.run_id)
            assert (await run.result()).status is RunStatus.CANCELLED
        (there,) = server.runs.values()
        assert server.cancels == [there["run_id"]]
        assert there["status"] == "interrupted"


async def test_another_process_continues_without_repeating_words(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    async with GraphServer() as server:
        async with Runtime.open(url, [boss(server, "say one two wait three")], on_close="leave") as runtime:
            run = runtime.stream("boss", "go")
            async for event in run:
                if isinstance(event, TextDelta) and event.delta.endswith("two") and event.ns:
                    break
        server.go.set()
        async with Runtime.open(url, [boss(server, "say one two wait three")]) as runtime:
            again = await runtime.load(run.run_id)
            assert again is not None
            result = await again.result()
            events = [event async for event in runtime.events(run.run_id)]
        assert result.response == "Done: one two wait three"
        assert text_of(events) == "one two wait three"
        assert len(server.runs) == 1


async def test_a_conversation_is_one_thread(tmp_path: Path) -> None:
    async with GraphServer() as server:
        declared = SubagentDeclaration(ASSISTANT, "Works.", url=server.url, protocol="langgraph")

        def turn(request: Any) -> Any:
            told = [message.text for message in request.messages if message.role == "tool"]
            if not told:
                return call("agent_spawn", {"agent_id": ASSISTANT, "task": "echo one", "label": "w"})
            if len(told) == 1:
                return call("agent_send", {"label": "w", "message": "echo two"})
            return say(told[-1])

        lead = HarnessAgent("lead", ScriptedModel(turn), workspace=tmp_path, subagents=[declared])
        async with Runtime([lead]) as runtime:
            result = await runtime.run("lead", "go")
        assert "two" in (result.response or "")
        ((_, thread),) = server.threads.items()
        assert [one["content"] for one in thread["messages"]] == ["echo one", "one", "echo two", "two"]


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [("fail it broke", ASSISTANT, "it broke"), ("echo x", "nobody", "Invalid assistant: 'nobody'")],
)
async def test_failures_say_why(text: str, name: str, says: str) -> None:
    async with GraphServer() as server, Runtime([boss(server, text, name)]) as runtime:
        result = await runtime.run("boss", "go")
    assert says in (result.response or "")


async def test_credentials_are_redacted() -> None:
    headers = {"x-api-key": "key-of-the-test-1234"}
    async with GraphServer() as server, Runtime([boss(server, "say key-of-the-test-1234", headers=headers)]) as runtime:
        run = runtime.stream("boss", "go")
        events = [event async for event in run]
        result = await run.result()
        assert server.headers[0]["x-api-key"] == "key-of-the-test-1234"
    assert result.response == "Done: [redacted]"
    assert text_of(events) == "[redacted]"


@pytest.mark.parametrize("seed", [0, 2, 19, 57])
async def test_a_bad_connection_costs_only_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.backends.http_client.SILENCE_SECONDS", 1.0)
    text = " ".join(f"word{number}" for number in range(60))
    async with GraphServer() as server, Proxy(int(server.url.rpartition(":")[2]), seed, faults=8) as proxy:
        server.url = proxy.url
        async with Runtime([boss(server, f"say {text}")]) as runtime:
            run = runtime.stream("boss", "go")
            events = [event async for event in run]
            result = await run.result()
        assert result.response == f"Done: {text}"
        assert text_of(events) == text, "what a break has hidden is read again, once"
        assert len(server.runs) == 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"<html>", "did not answer as a LangGraph server"),
        (b'{"run_id": 3}', "did not answer as a LangGraph server"),
        (b'{"run_id": "../x", "status": "success"}', "an id that cannot be used"),
    ],
)
async def test_what_is_no_langgraph_server_is_refused(answer: bytes, says: str) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake = GraphServer()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with Runtime([boss(fake, "echo x")]) as runtime:
            result = await runtime.run("boss", "go")
    finally:
        await runner.cleanup()
    assert says in (result.response or "")


async def test_a_run_that_is_gone_has_failed() -> None:
    async with GraphServer() as server, Runtime([boss(server, "say one wait two")]) as runtime:
        run = runtime.stream("boss", "go")
        async for event in run:
            if isinstance(event, TextDelta) and event.ns:
                break
        server.cut_after = 1
        (there,) = server.runs.values()
        server.runs.clear()
        server.go.set()
        await until(lambda: there["status"] == "success")
        result = await run.result()
    assert "the server does not know the run any more" in (result.response or "")
