"""Remote sub-agents: a real server on loopback, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from aiohttp import web

from retinue import (
    Agent,
    CancellationToken,
    ConfigurationError,
    ExecutionBackendError,
    HarnessAgent,
    Limits,
    Message,
    RunStatus,
    Runtime,
    SubagentDeclaration,
    ToolContext,
    tool,
)
from retinue.core.processes import process_identity
from retinue.messages import Visibility
from retinue.subagents import RemoteSubagentStub
from retinue.tasks import TaskScope, TaskStatus
from retinue.testing import ScriptedModel, call, say
from tests.remote.server import TaskServer

from .. import inside
from ..waiting import let_others_run, until

pytestmark = pytest.mark.usefixtures("short_pauses")

SECRET = "s3cret-token"
GONE = f"{process_identity().rpartition('/')[0]}/0"
"""The identity of a process that has ended: its id was given to this one later."""


async def answer(request: Any) -> Any:
    text = request.messages[-1].text
    if "slow" in text:
        await asyncio.sleep(0.5)
    if "never" in text:
        await asyncio.sleep(60)
    if "fail" in text:
        raise RuntimeError("it broke there")
    return say(f"remote says: {text} ({sum(m.role == 'user' for m in request.messages)} messages)")


def far_runtime() -> Runtime:
    return Runtime([Agent("researcher", ScriptedModel(answer))])


def orchestrator(url: str, workspace: Path, turn: Callable[[list[str]], Any], **options: Any) -> HarnessAgent:
    """An agent whose turns are a function of the tool results so far."""
    declared = SubagentDeclaration(
        "researcher", "Researches elsewhere", url=url, headers={"Authorization": f"Bearer {SECRET}"}, **options
    )

    def model(request: Any) -> Any:
        return turn([message.text for message in request.messages if message.role == "tool"])

    return HarnessAgent("orch", ScriptedModel(model), workspace=workspace, subagents=[declared], general_purpose=False)


def spawn(task: str, **more: Any) -> Any:
    return call("agent_spawn", {"agent_id": "researcher", "task": task, **more})


async def told_by(agent: HarnessAgent) -> list[str]:
    """Run an agent in a runtime of its own; what its tools answered."""
    async with Runtime([agent]) as runtime:
        result = await runtime.run(agent, "go", thread_id="t1")
    return [message.text for message in result.messages if message.role == "tool"]


def body(answer: str, lines: int = 3) -> str:
    """An answer without its first lines, which have fresh ids."""
    return "\n".join(answer.split("\n")[lines:])


def task_id(answer: str) -> str:
    return answer.split("task_id: ")[1].split()[0]


async def test_a_synchronous_spawn_waits_for_the_server(tmp_path: Path) -> None:
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(server.url, tmp_path, lambda told: spawn("slow look around") if not told else say("done"))
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1", user_id="u1")
            result = await run.result()
            events = [event async for event in runtime.events(run.run_id)]
        assert result.status is RunStatus.COMPLETED
        told = [message.text for message in result.messages if message.role == "tool"]
        assert body(told[0]) == "status: ok\nreply:\nremote says: slow look around (1 messages)"
        submission = server.submissions[0]
        assert (submission.agent_id, submission.input) == ("researcher", "slow look around")
        session = told[0].split("session_id: ")[1].split()[0]
        assert submission.context == {"user_id": "u1", "session_id": session, "parent_session_id": "t1"}
    child = [event for event in events if event.ns]
    assert [event.kind for event in child] == ["run_started", "custom", "custom", "text_delta", "run_finished"]
    assert {event.ns for event in child} == {(f"tools:{events_call(events)}",)}
    assert submission.task_id == next(event.run_id for event in child if event.kind == "run_started")
    assert SECRET not in repr(events)


def events_call(events: list[Any]) -> str:
    return next(event.call_id for event in events if event.kind == "child_started")


async def test_headers_come_from_the_declaration_and_a_refusal_says_so(tmp_path: Path) -> None:
    async with far_runtime() as far, TaskServer(far, "another token") as server:
        agent = orchestrator(server.url, tmp_path, lambda told: spawn("look") if not told else say("done"))
        (told,) = await told_by(agent)
        assert told.startswith("Error: ")
        assert "401" in told
        assert "check the headers of the declaration" in told
        assert SECRET not in told


async def test_in_the_background_and_announced(tmp_path: Path) -> None:
    def turn(told: list[str]) -> Any:
        if not told:
            return spawn("slow work", timeout_seconds=0)
        if len(told) == 1:
            return call("task_output", {"task_id": task_id(told[0])})
        return say("done")

    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(server.url, tmp_path, turn)
        told = await told_by(agent)
        assert body(told[0]).startswith("status: accepted\ntask_id: task_")
        assert told[1].endswith("\n\nResult:\nremote says: slow work (1 messages)")


async def test_a_timeout_leaves_the_remote_task_running(tmp_path: Path) -> None:
    def turn(told: list[str]) -> Any:
        if not told:
            return spawn("never", timeout_seconds=1)
        if len(told) == 1:
            return call("task_cancel", {"task_id": task_id(told[0])})
        return say("done")

    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(server.url, tmp_path, turn)
        told = await told_by(agent)
        assert body(told[0]).startswith("status: timeout_promoted\ntask_id: task_")
        assert body(told[1], 1) == "status: cancelled\nCancellation requested successfully."
        (remote,) = server.runs.values()
        assert (await remote.result()).status is RunStatus.CANCELLED


async def test_cancelling_the_parent_cancels_the_remote_run(tmp_path: Path) -> None:
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(server.url, tmp_path, lambda told: spawn("never", timeout_seconds=60))
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            await server.has_work.wait()
            assert (await run.cancel()).status is RunStatus.CANCELLED
            (remote,) = server.runs.values()
            assert (await asyncio.wait_for(remote.result(), 90)).status is RunStatus.CANCELLED


class Hesitant(TaskServer):
    """A server that reads a task and takes it when it is told to."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.was_asked, self.may_take = asyncio.Event(), asyncio.Event()

    async def _submit(self, request: web.Request) -> web.Response:
        await request.read()
        self.was_asked.set()
        await self.may_take.wait()
        return await super()._submit(request)


async def test_a_cancel_does_not_overtake_the_task(tmp_path: Path) -> None:
    async with far_runtime() as far, Hesitant(far) as server:
        agent = orchestrator(server.url, tmp_path, lambda told: spawn("never", timeout_seconds=60))
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            await server.was_asked.wait()
            cancelling = asyncio.create_task(run.cancel())
            await let_others_run()
            server.may_take.set()
            assert (await cancelling).status is RunStatus.CANCELLED
        (remote,) = server.runs.values()
        assert (await remote.result()).status is RunStatus.CANCELLED
        assert [path.rpartition("/")[2] for method, path in server.requests if method == "POST"] == ["tasks", "cancel"]


async def test_a_cancelled_call_whose_task_nobody_took_leaves_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("retinue.backends.remote.STOP_SECONDS", 0.1)
    async with far_runtime() as far, Hesitant(far) as server:
        agent = orchestrator(server.url, tmp_path, lambda told: spawn("never", timeout_seconds=60))
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            await server.was_asked.wait()
            assert (await run.cancel()).status is RunStatus.CANCELLED
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("statuses", [[503], [500, 502, 429], [503] * 4])
async def test_transient_errors_are_survived(tmp_path: Path, statuses: list[int]) -> None:
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        server.faults = [*statuses]
        agent = orchestrator(server.url, tmp_path, lambda told: spawn("slow") if not told else say("done"))
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            await server.has_work.wait()
            server.faults = [*statuses]
            result = await run.result()
        told = next(message.text for message in result.messages if message.role == "tool")
        assert body(told) == "status: ok\nreply:\nremote says: slow (1 messages)"
        assert len(server.runs) == 1


async def test_a_failed_remote_run_is_a_failure_here(tmp_path: Path) -> None:
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(server.url, tmp_path, lambda told: spawn("fail") if not told else say("done"))
        (told,) = await told_by(agent)
        assert body(told) == "status: error\nerror: RuntimeError: it broke there"


async def test_a_failed_remote_task_is_a_failure_here(tmp_path: Path) -> None:
    def turn(told: list[str]) -> Any:
        if not told:
            return spawn("fail", timeout_seconds=0)
        return call("task_output", {"task_id": task_id(told[0])}) if len(told) == 1 else say("done")

    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(server.url, tmp_path, turn)
        told = await told_by(agent)
        assert "RuntimeError: it broke there" in told[1]
        assert agent.task_repository is not None
        (record,) = await agent.task_repository.list(TaskScope("orch", "t1"))
        assert (record.status, record.transport_type) == (TaskStatus.FAILED, "task-protocol")
        written = (tmp_path / "agents/orch/tasks/t1.json").read_text()
        assert SECRET not in written
        assert server.url not in written


async def test_a_server_that_tells_results_only_to_those_who_wait(tmp_path: Path) -> None:
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        server.results_only_when_waiting = True
        agent = orchestrator(server.url, tmp_path, lambda told: spawn("look") if not told else say("done"))
        (told,) = await told_by(agent)
        assert body(told) == "status: ok\nreply:\nremote says: look (1 messages)"


async def test_the_declared_timeout_is_an_overall_deadline(tmp_path: Path) -> None:
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(
            server.url, tmp_path, lambda told: spawn("never") if not told else say("done"), timeout=0.3
        )
        (told,) = await told_by(agent)
        assert body(told) == "status: timeout\nnote: it was stopped after 0.3 s; send it a smaller task"
        (remote,) = server.runs.values()
        assert (await remote.result()).status is RunStatus.CANCELLED


async def test_a_declared_limit_on_time_stops_the_task(tmp_path: Path) -> None:
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        limits = Limits(seconds=0.3)
        agent = orchestrator(
            server.url, tmp_path, lambda told: spawn("never") if not told else say("done"), limits=limits
        )
        (told,) = await told_by(agent)
        assert "the limit on seconds is reached" in body(told)
        (remote,) = server.runs.values()
        assert (await remote.result()).status is RunStatus.CANCELLED


async def test_agent_send_goes_on_in_the_same_session_there(tmp_path: Path) -> None:
    def turn(told: list[str]) -> Any:
        if not told:
            return spawn("one", label="r")
        if len(told) == 1:
            return call("agent_send", {"label": "r", "message": "two"})
        return say("done")

    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(server.url, tmp_path, turn)
        told = await told_by(agent)
        assert body(told[1], 1) == "status: ok\nreply:\nremote says: two (2 messages)"


async def running(path: Path) -> None:
    """Return when the file of a session says that its task runs."""
    await until(lambda: '"RUNNING"' in path.read_text())


async def test_another_process_goes_on_watching_and_submits_nothing_again(tmp_path: Path) -> None:
    """The first runtime is closed without a word to the server, as if it had died."""
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(
            server.url, tmp_path, lambda told: spawn("slow", timeout_seconds=0) if not told else say("done")
        )
        first = Runtime([agent])
        result = await first.run(agent, "go", thread_id="t1")
        told = next(message.text for message in result.messages if message.role == "tool")
        await server.has_work.wait()
        path = tmp_path / "agents/orch/tasks/t1.json"
        await asyncio.wait_for(running(path), 90)
        frozen = path.read_bytes()
        await first.close()
        path.write_bytes(frozen)

        again = orchestrator(
            server.url,
            tmp_path,
            lambda told_there: call("task_output", {"task_id": task_id(told)}) if not told_there else say("done"),
        )
        for run in server.runs.values():
            await run.result()
        async with Runtime([again]) as second:
            result = await second.run(again, "go", thread_id="t1")
        there = next(message.text for message in result.messages if message.role == "tool")
        assert "status: " in there
        assert len(server.submissions) == 1
        (record,) = json.loads(path.read_text()).values()
        assert record["status"] in ("COMPLETED", "CANCELLED")


@pytest.mark.parametrize("is_later", [False, True])
async def test_a_new_process_watches_a_remote_task_without_being_asked(tmp_path: Path, is_later: bool) -> None:
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(
            server.url, tmp_path, lambda told: spawn("slow", timeout_seconds=0) if not told else say("done")
        )
        first = Runtime([agent])
        await first.run(agent, "go", thread_id="t1")
        await server.has_work.wait()
        path = tmp_path / "agents/orch/tasks/t1.json"
        await running(path)
        (record,) = json.loads(path.read_text()).values()
        await first.close()
        gone = {**record, "node": f"{record['node'].partition('@')[0]}@{GONE}"}
        path.write_text(json.dumps({record["taskId"]: gone}))

        again = orchestrator(server.url, tmp_path, lambda told: say("done"))
        async with Runtime([again]) as second:
            if is_later:  # after its first sweep, with the next one far away
                path.unlink()
                await second.run(again, "go", thread_id="t1")
                service = inside.task_service(second)
                await until(lambda: inside.next_sweep(service) > monotonic() + 200)
                path.write_text(json.dumps({record["taskId"]: gone}))
            await second.run(again, "go", thread_id="t1")
            await until(lambda: '"RUNNING"' not in path.read_text())
            result = await second.run(again, "go", thread_id="t1")
        assert len(server.submissions) == 1
        assert result.messages[1].text.startswith("<task-notification>")


async def test_only_visible_user_messages_go_to_the_server_and_the_run_id_is_local(tmp_path: Path) -> None:
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        stub = RemoteSubagentStub("researcher", url=server.url, headers={"Authorization": f"Bearer {SECRET}"})
        outcomes: list[Any] = []

        @tool
        async def delegate(ctx: ToolContext) -> str:
            """Delegate."""
            said = [
                Message.system("secret rules"),
                Message.user("hidden", visibility=Visibility.INTERNAL),
                Message.user("what is new?"),
            ]
            outcomes.append(await ctx.run_child(stub, said))
            return "ok"

        agent = Agent("parent", ScriptedModel([call("delegate", {}), say("done")]), tools=[delegate])
        async with Runtime([agent]) as runtime:
            await runtime.run(agent, "go")
        assert server.submissions[0].input == "what is new?"
        assert outcomes[0].response == "remote says: what is new? (1 messages)"
        assert outcomes[0].run_id == server.submissions[0].task_id
        assert outcomes[0].state.extensions["retinue.remote"]["status"] == "success"


async def test_a_seed_for_a_remote_agent_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        stub = RemoteSubagentStub("researcher", url=server.url)
        raised: list[Exception] = []

        @tool
        async def delegate(ctx: ToolContext) -> str:
            """Delegate."""
            from retinue import StateKey

            try:
                await ctx.run_child(stub, "hello", seed={StateKey("k", str): "v"})
            except ExecutionBackendError as exc:
                raised.append(exc)
            return "ok"

        agent = Agent("parent", ScriptedModel([call("delegate", {}), say("done")]), tools=[delegate])
        async with Runtime([agent]) as runtime:
            await runtime.run(agent, "go")
        assert "not local and takes no state seed" in str(raised[0])
        assert server.requests == []


async def test_a_server_that_is_not_there_never_accepted_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.backends.remote.PATIENCE", 0.2)
    agent = orchestrator("http://127.0.0.1:9", tmp_path, lambda told: spawn("look") if not told else say("done"))
    async with Runtime([agent]) as runtime:
        result = await runtime.run(agent, "go", thread_id="t1")
    told = next(message.text for message in result.messages if message.role == "tool")
    assert told.startswith("Error: ")
    assert "http://127.0.0.1:9 cannot be reached" in told
    assert SECRET not in told


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://example.invalid", "http://"])
def test_a_stub_needs_the_address_of_a_server(url: str) -> None:
    with pytest.raises(ConfigurationError, match="url must begin with http"):
        RemoteSubagentStub("researcher", url=url)


async def test_the_stub_run_here_only_says_where_it_runs() -> None:
    stub = RemoteSubagentStub("researcher", url="http://example.invalid")
    async with Runtime([stub]) as runtime:
        result = await runtime.run(stub, "hello")
    assert result.response == "This sub-agent runs on a server: spawn it with agent_spawn, it cannot be run here."


async def test_the_stub_never_thinks_here_whatever_model_is_given() -> None:
    stub, model = RemoteSubagentStub("researcher", url="http://example.invalid"), ScriptedModel([say("here")])
    async with Runtime([stub]) as runtime:
        result = await runtime.run(stub, "hello", model=model)
        with runtime.override(model=model):
            again = await runtime.run(stub, "hello")
    assert {result.response, again.response} == {
        "This sub-agent runs on a server: spawn it with agent_spawn, it cannot be run here."
    }
    assert model.requests == []


async def test_two_servers_may_have_agents_of_one_name(tmp_path: Path) -> None:
    def speaker(text: str) -> Runtime:
        return Runtime([Agent("assistant", ScriptedModel(lambda request: say(text)))])

    async with speaker("one") as one, speaker("two") as two, TaskServer(one) as first, TaskServer(two) as second:
        declared = [
            SubagentDeclaration(name, "d", url=server.url, agent="assistant")
            for name, server in (("north", first), ("south", second))
        ]
        turns = [[call("agent_spawn", {"agent_id": name, "task": "go"}) for name in ("north", "south")], say("end")]
        told = await told_by(HarnessAgent("orch", ScriptedModel(turns), workspace=tmp_path, subagents=declared))
    assert [text.rpartition("\n")[2] for text in told] == ["one", "two"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"agent": "x"}, "agent is the name of one on a url, and there is none"),
        ({"url": "http://x.example", "agent": " "}, "agent is the name of the agent on its server, not ' '"),
        ({"url": "http://x.example", "agent": "x", "protocol": "a2a"}, "agent has no effect with A2A"),
        ({"url": "http://x.example", "headers": {"a": 5}}, "header 'a' and its value must be text"),
    ],
)
def test_a_bad_name_or_header_for_a_server_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        SubagentDeclaration("far", "d", **given)


@pytest.mark.parametrize(("seconds", "has_ended"), [(0.3, True), (60.0, False)])
async def test_the_end_of_a_cancelled_run_is_waited_for(
    seconds: float, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.backends.tasks_http.STOP_SECONDS", 1.0)
    async with far_runtime() as far, TaskServer(far) as server:
        server.stops_after = seconds
        stub = RemoteSubagentStub("researcher", url=server.url)
        outcomes: list[Any] = []

        @tool
        async def delegate(ctx: ToolContext) -> str:
            """Delegate."""
            token = CancellationToken()
            running = asyncio.create_task(ctx.run_child(stub, "never", cancellation=token))
            await server.has_work.wait()
            token.set("not wanted")
            outcomes.append(await running)
            return "ok"

        agent = Agent("parent", ScriptedModel([call("delegate", {}), say("done")]), tools=[delegate])
        async with Runtime([agent]) as runtime:
            await runtime.run(agent, "go")
        (remote,) = server.runs.values()
        assert remote.ended is has_ended
        late = "" if has_ended else "; the server has not stopped it yet"
        assert (outcomes[0].status, outcomes[0].error) == (RunStatus.CANCELLED, f"not wanted{late}")
        await remote.cancel()


async def test_a_remote_task_of_a_killed_process_ends_in_its_log(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    async with far_runtime() as far, TaskServer(far, SECRET) as server:
        agent = orchestrator(
            server.url, tmp_path, lambda told: spawn("slow", timeout_seconds=0) if not told else say("done")
        )
        first = Runtime.open(url, [agent], on_close="leave")
        async with first:
            result = await first.run(agent, "go", thread_id="t1")
            await server.has_work.wait()
            await asyncio.wait_for(running(tmp_path / "agents/orch/tasks/t1.json"), 90)
        again = orchestrator(server.url, tmp_path, lambda told: say("done"))
        async with Runtime.open(url, [again]) as second, asyncio.timeout(90):
            events: list[Any] = [event async for event in second.events(result.run_id)]
        child = [event for event in events if event.ns and event.kind != "task_updated"]
        assert [child[0].kind, child[-1].kind] == ["run_started", "run_finished"]
        assert child[-1].response == "remote says: slow (1 messages)"
        assert [event.status for event in events if event.kind == "task_updated"][-1] == "COMPLETED"
        assert len(server.submissions) == 1
