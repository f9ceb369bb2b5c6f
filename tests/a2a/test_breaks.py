"""A2A children when connections break, the server dies, or the process of the parent is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
from a2a.types import a2a_pb2 as pb

from retinue import A2AAgent, Agent, CancellationToken, Decision, DecisionRefused, Permissions, RunStatus, Runtime, tool
from retinue.backends.a2a import A2ABackend, A2AFollower
from retinue.core.backend import RunRequest
from retinue.core.runs import RunIdentity
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say
from tests.effort import share
from tests.prepared import PYTHON
from tests.remote.nodes import ROOT
from tests.remote.proxy import Proxy
from tests.remote.server import TaskServer
from tests.remote.test_remote_events import helper, researcher
from tests.waiting import until

from .. import inside
from .processes import Sample, sample
from .test_children import TRANSPORTS, boss, of_child, remote, text_of

pytestmark = pytest.mark.usefixtures("short_pauses")


class LosingProxy(Proxy):
    """Loses the answer to the request with this number, which the server has read."""

    def __init__(self, target: int, loses: int) -> None:
        super().__init__(target)
        self.loses, self.count = loses, 0

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        if self.count == self.loses:
            there, out = await asyncio.open_connection("127.0.0.1", self.target)
            passing = asyncio.create_task(self._pass(reader, out))
            await there.read(1)
            passing.cancel()
            writer.transport.abort()
            out.transport.abort()
            return
        await super()._connect(reader, writer)


@pytest.mark.parametrize("transports", TRANSPORTS[:2], ids=str)
async def test_a_stream_that_is_cut_goes_on_without_repeating_anything(tmp_path: Path, transports: list[str]) -> None:
    server = Sample(tmp_path / "s", transports=transports)
    async with Proxy(server.port) as proxy:
        server.settings["url"] = proxy.url
        await server.start()
        try:
            agent = boss(A2AAgent("far", proxy.url), "pieces one two three four")
            async with Runtime([agent]) as runtime:
                run = runtime.stream(agent, "go")
                await until_text(runtime, run, "one")
                proxy.cut()
                (server.folder / "go").touch()
                result = await run.result()
                events: list[Any] = [event async for event in runtime.events(run.run_id)]
        finally:
            server.kill()
    assert result.response == "Done: onetwothreefour"
    assert text_of(events) == "onetwothreefour"
    assert len(server.asked()) == 1


async def until_text(runtime: Runtime, run: Any, text: str, call_id: str = "task_1") -> None:
    """Return when a child has streamed this text."""
    streamed = ""
    async for event in runtime.events(run.run_id):
        if event.kind == "text_delta" and event.ns == (f"tools:{call_id}",):
            streamed += event.delta
            if streamed == text:
                return


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_message_whose_answer_is_lost_is_not_sent_twice(tmp_path: Path, streaming: bool) -> None:
    server = Sample(tmp_path / "s", streaming=streaming)
    async with LosingProxy(server.port, 2) as proxy:
        server.settings["url"] = proxy.url
        await server.start()
        try:
            agent = boss(A2AAgent("far", proxy.url), "slow hello")
            async with Runtime([agent]) as runtime:
                result = await runtime.run(agent, "go")
        finally:
            server.kill()
    assert result.response == "Done: hello"
    assert len(server.asked()) == 1


async def test_an_answer_whose_reply_is_lost_is_not_given_twice(tmp_path: Path) -> None:
    server = Sample(tmp_path / "s")
    proxy = LosingProxy(server.port, -1)
    async with proxy:
        server.settings["url"] = proxy.url
        await server.start()
        try:
            agent = boss(A2AAgent("far", proxy.url), "ask Which?")
            async with Runtime([agent]) as runtime:
                run = runtime.stream(agent, "go")
                assert (await run.result()).suspended
                proxy.loses = proxy.count + 2  # it looks, then it answers
                result = await runtime.resume(run.run_id, {"task_1/input_1": Decision.resume("b")})
        finally:
            server.kill()
    assert result.response == "Done: You said b."
    assert len(server.asked()) == 2


async def test_spoiled_traffic_starts_no_second_task_and_gives_no_wrong_answer(tmp_path: Path) -> None:
    """The proxy delays, cuts, truncates and duplicates. A message that may be lost is not sent again."""
    server = Sample(tmp_path / "s")
    async with Proxy(server.port) as proxy:
        server.settings["url"] = proxy.url
        await server.start()
        (server.folder / "go").touch()
        try:
            for seed in range(share(60, 4)):
                proxy._random = Random(seed)
                for text, expected in [("pieces one two three", "onetwothree"), ("ask Which?", "You said b.")]:
                    asked, proxy.left = len(server.asked()), 6
                    agent = boss(A2AAgent("far", proxy.url), text)
                    async with Runtime([agent]) as runtime:
                        run = runtime.stream(agent, "go")
                        result = await run.result()
                        while result.suspended:
                            (name,) = result.suspended
                            try:
                                result = await runtime.resume(run.run_id, {name: Decision.resume("b")})
                            except DecisionRefused:  # it could not be sent
                                result = await runtime.result(run.run_id)
                    tasks = {said["task_id"] for said in server.asked()[asked:]}
                    assert len(tasks) <= 1, (seed, proxy.done)
                    if result.response != f"Done: {expected}":
                        assert "not known whether" in (result.response or ""), (seed, proxy.done, result)
                        assert not tasks
        finally:
            server.kill()


async def test_a_server_that_dies_fails_the_child_with_the_text_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.backends.remote.PATIENCE", 0.2)
    async with sample(tmp_path / "s") as server:
        agent = boss(remote(server), "pieces one two")
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go")
            await until_text(runtime, run, "one")
            server.kill()
            result = await run.result()
    assert "did not complete: failed" in (result.response or "")
    assert "cannot be reached" in (result.response or "")
    assert "What it had by then:\none" in (result.response or "")


async def test_a_server_that_forgot_the_task_fails_the_child(tmp_path: Path) -> None:
    async with sample(tmp_path / "s") as server:
        agent = boss(remote(server), "pieces one two")
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go")
            await until_text(runtime, run, "one")
            server.kill()
            await server.start()
            result = await run.result()
        assert "does not know the task any more" in (result.response or "")
        assert len(server.asked()) == 1


# --- a parent that is killed


async def start(database: str, url: str, text: str) -> None:
    async with Runtime.open(database, [boss(A2AAgent("far", url), text)], lease=1.0) as runtime:
        run = runtime.stream("boss", "go")
        sys.stdout.write(f"{run.run_id}\n")
        sys.stdout.flush()
        await run.result()
        await asyncio.Event().wait()


async def killed_parent(database: str, url: str, text: str, has_happened: Any) -> str:
    """Start a parent in a process, kill that once something has happened, and return the id of its run."""
    code = f"import asyncio; from tests.a2a.test_breaks import start; asyncio.run(start(*{(database, url, text)!r}))"
    process = subprocess.Popen([PYTHON, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        run_id = (await asyncio.to_thread(process.stdout.readline)).strip()
        async with Runtime.open(database, recover=False) as looking:
            store: Any = looking.store

            async def has_events() -> bool:
                found = await store.read_events(run_id, 0, 1000)
                return found is not None and has_happened(found[0])

            await until(has_events)
        return run_id
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("has_ended", [False, True])
async def test_the_next_process_follows_the_same_task(tmp_path: Path, has_ended: bool) -> None:
    database = f"sqlite:///{tmp_path}/app.db"
    async with sample(tmp_path / "s") as server:
        run_id = await killed_parent(database, server.url, "pieces one two", lambda events: text_of(events) == "one")
        (server.folder / "go").touch()
        if has_ended:
            await until(lambda: server.asked("end"))
        async with Runtime.open(database, [boss(remote(server), "pieces one two")]) as runtime:
            result = await runtime.result(run_id)
            events: list[Any] = [event async for event in runtime.events(run_id)]
        assert result.response == "Done: onetwo"
        assert text_of(events) == "onetwo"
        assert [event.kind for event in of_child(events) if event.kind.startswith("run_")] == [
            "run_started",
            "run_finished",
        ]
        assert len(server.asked()) == 1


class HoldingProxy(Proxy):
    """Passes everything on but, while `holds`, the answers to messages."""

    holds = True

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection("127.0.0.1", self.target)
        first = await reader.read(65_536)
        out.write(first)
        ways = [asyncio.create_task(self._pass(reader, out))]
        if not (self.holds and first.startswith(b"POST")):
            ways.append(asyncio.create_task(self._pass(there, writer)))
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for one in (writer, out):
                one.close()


async def test_a_process_that_is_killed_as_it_sends_does_not_send_twice(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/app.db"
    server = Sample(tmp_path / "s")
    proxy = HoldingProxy(server.port)
    async with proxy:
        server.settings["url"] = proxy.url
        await server.start()
        try:
            run_id = await killed_parent(database, proxy.url, "pieces one two", lambda events: server.asked())
            proxy.holds = False
            (server.folder / "go").touch()
            async with Runtime.open(database, [boss(A2AAgent("far", proxy.url), "pieces one two")]) as runtime:
                result = await runtime.result(run_id)
                events: list[Any] = [event async for event in runtime.events(run_id)]
        finally:
            server.kill()
    assert result.response == "Done: onetwo"
    assert text_of(events) == "onetwo"
    assert len(server.asked()) == 1


async def test_a_task_is_found_where_the_server_has_chosen_its_context() -> None:
    class Client:
        url = "http://127.0.0.1:9"
        asked: ClassVar[list[str]] = []

        async def tasks(self, context_id: str) -> pb.ListTasksResponse:
            self.asked.append(context_id)
            other = pb.Task(id="t8", context_id="c8", history=[pb.Message(message_id="another")])
            ours = pb.Task(id="t9", context_id="c9", history=[pb.Message(message_id="run_1")])
            return pb.ListTasksResponse(tasks=[] if context_id else [other, ours])

    client: Any = Client()
    request = RunRequest(
        agent=Agent("far", ScriptedModel([])),
        identity=RunIdentity("run_1", "thread_1", "far"),
        messages=(),
        cancellation=CancellationToken(),
    )
    follower = A2AFollower(A2ABackend(client, patience=1.0), request)
    assert await inside.find_task(follower, "run_1")
    assert (follower.view.task_id, follower.view.context_id, client.asked) == ("t9", "c9", ["thread_1", ""])
    assert not await inside.find_task(follower, "run_2")


async def test_the_next_process_answers_a_question(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/app.db"
    async with sample(tmp_path / "s") as server:

        def waits(events: list[Any]) -> bool:
            return any(event.kind == "run_finished" and not event.ns for event in events)

        run_id = await killed_parent(database, server.url, "ask Which?", waits)
        async with Runtime.open(database, [boss(remote(server), "ask Which?")]) as runtime:
            result = await runtime.resume(run_id, {"task_1/input_1": Decision.resume("b")})
        assert result.response == "Done: You said b."
        assert len(server.asked()) == 2


# --- one tree with every kind of child


async def test_a_tree_with_a_local_a_task_and_an_a2a_child_over_a_cut_network(tmp_path: Path) -> None:
    @tool
    def count(n: int) -> str:
        """Count."""
        return f"counted {n}"

    def local_turn(request: Any) -> Any:
        return say("Local.") if request.messages[-1].role == "tool" else call("count", {"n": 3}, id="count_1")

    local = Agent("near", ScriptedModel(local_turn), tools=[count])
    asker = researcher(helper(plugins=[Permissions(ask=["look"])]))
    server = Sample(tmp_path / "s")
    async with (
        Runtime([asker]) as far,
        TaskServer(far, has_events=True) as tasks,
        Proxy(int(tasks.url.rstrip("/").rpartition(":")[2])) as task_proxy,
        Proxy(server.port) as proxy,
    ):
        server.settings["url"] = proxy.url
        await server.start()
        try:
            children = [
                local,
                RemoteSubagentStub("researcher", url=task_proxy.url),
                A2AAgent("far", proxy.url),
            ]
            asked = {"near": "count", "researcher": "Find it.", "far": "pieces one two three"}
            calls = [
                call("task", {"subagent_type": name, "description": text}, id=f"task_{name}")
                for name, text in asked.items()
            ]

            def turn(request: Any) -> Any:
                told = [message.text for message in request.messages if message.role == "tool"]
                return say(" / ".join(told)) if told else calls

            agent = Agent("boss", ScriptedModel(turn), subagents=children)
            async with Runtime.open(f"sqlite:///{tmp_path}/app.db", [agent]) as runtime:
                run = runtime.stream(agent, "go")
                await until_text(runtime, run, "one", "task_far")
                proxy.cut()
                task_proxy.cut()
                (server.folder / "go").touch()
                waiting = await run.result()
                assert waiting.status is RunStatus.SUSPENDED
                (name,) = waiting.suspended
                assert name == "task_researcher/task_r/look_1"
                task_proxy.cut()
                result = await runtime.resume(run.run_id, {name: Decision.approve()})
                events: list[Any] = [event async for event in runtime.events(run.run_id)]
        finally:
            server.kill()
    assert result.response == "Local. / Report: I have looked. / onetwothree"
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    for name, text in {"near": "Local.", "researcher": "Report: I have looked.", "far": "onetwothree"}.items():
        own = [event for event in events if event.ns == (f"tools:task_{name}",)]
        assert (own[0].kind, own[-1].kind) == ("run_started", "run_finished")
        assert "".join([event.delta for event in own if event.kind == "text_delta"]) == text
        assert own[-1].response == text
    assert len(server.asked()) == 1
