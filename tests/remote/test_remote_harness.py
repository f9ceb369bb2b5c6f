"""Remote sub-agents of a harness: questions, answers, cancels and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, ConfigurationError, Decision, HarnessAgent, RunStatus, Runtime, SubagentDeclaration
from retinue.backends.tasks_http import TaskFollower
from retinue.plugins import Permissions
from retinue.tasks import TaskScope
from retinue.testing import ScriptedModel, call, say
from tests.remote.server import TaskServer
from tests.remote.test_remote_events import check_copy, far, helper, remote_log, researcher

from ..waiting import until


def asking() -> Agent:
    return researcher(helper(plugins=[Permissions(ask=["look"])]))


def boss(url: str, folder: Path, seconds: int = 30) -> HarnessAgent:
    def turn(request: Any) -> Any:
        if request.messages[-1].role != "user" or "ended" in request.messages[-1].text:
            return say("Done.")
        return call("agent_spawn", {"agent_id": "researcher", "task": "look", "timeout_seconds": seconds}, id="spawn_1")

    declared = SubagentDeclaration("researcher", "Researches", url=url)
    return HarnessAgent("boss", ScriptedModel(turn), workspace=folder, subagents=[declared], general_purpose=False)


async def test_a_question_suspends_the_call_that_waits(tmp_path: Path) -> None:
    async with far(asking()) as server:
        agent = boss(server.url, tmp_path)
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            waiting = await run.result()
            assert waiting.status is RunStatus.SUSPENDED
            assert waiting.suspended["spawn_1/task_r/look_1"].path == ("spawn_1", "task_r", "look_1")
            result = await runtime.resume(run.run_id, {"spawn_1/task_r/look_1": Decision.approve()})
            events = [event async for event in runtime.events(run.run_id)]
        assert result.status is RunStatus.COMPLETED
        told = next(message.text for message in result.messages if message.role == "tool")
        assert told.endswith("status: ok\nreply:\nReport: I have looked.")
        check_copy(events, await remote_log(server))


async def test_another_process_answers_and_the_events_go_on_where_they_were(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    async with far(asking()) as server:
        async with Runtime.open(url, [boss(server.url, tmp_path)]) as first:
            run = first.stream("boss", "go", thread_id="t1")
            assert (await run.result()).status is RunStatus.SUSPENDED
        async with Runtime.open(url, [boss(server.url, tmp_path)]) as second:
            result = await second.resume(run.run_id, {"spawn_1/task_r/look_1": Decision.approve()})
            events = [event async for event in second.events(run.run_id)]
        assert result.status is RunStatus.COMPLETED
        check_copy(events, await remote_log(server))
        assert len(server.submissions) == 1


@pytest.mark.parametrize("restarts", [False, True])
async def test_cancelling_a_run_that_waits_stops_the_remote_run(tmp_path: Path, restarts: bool) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    async with far(asking()) as server:
        async with Runtime.open(url, [boss(server.url, tmp_path)]) as first:
            run = first.stream("boss", "go", thread_id="t1")
            assert (await run.result()).status is RunStatus.SUSPENDED
            if not restarts:
                assert (await run.cancel()).status is RunStatus.CANCELLED
        async with Runtime.open(url, [boss(server.url, tmp_path)]) as second:
            assert (await second.cancel(run.run_id)).status is RunStatus.CANCELLED
        (remote,) = server.runs.values()
        ended = await server.runtime.result(remote.run_id)
        assert ended.status is RunStatus.CANCELLED


async def test_a_background_question_is_answered_by_the_id_of_the_child(tmp_path: Path) -> None:
    async with far(asking()) as server:
        agent = boss(server.url, tmp_path, 0)
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            await run.result()
            record = await until(lambda: waiting_task(agent))
            result = await runtime.resume(record.run_id, {"task_r/look_1": Decision.approve()})
            assert (result.status, result.response) == (RunStatus.COMPLETED, "Report: I have looked.")
            events = [event async for event in runtime.events(run.run_id)]
        check_copy(
            [event for event in events if event.kind != "task_updated"], await remote_log(server), numbered=False
        )


async def test_a_background_question_that_is_given_up_stops_the_remote_run(tmp_path: Path) -> None:
    async with far(asking()) as server:
        agent = boss(server.url, tmp_path, 0)
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            await run.result()
            await until(lambda: waiting_task(agent))
            await runtime.cancel(run.run_id, tasks=True)
        (remote,) = server.runs.values()
        assert (await server.runtime.result(remote.run_id)).status is RunStatus.CANCELLED


async def test_a_process_without_the_log_leaves_a_waiting_task_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.subagents.work.LOOK_EVERY", 0.01)
    async with far(asking()) as server:
        first = boss(server.url, tmp_path, 0)
        async with Runtime([first]) as runtime:
            await runtime.run(first, "go", thread_id="t1")
            record = await until(lambda: waiting_task(first))
            path = tmp_path / "agents/boss/tasks/t1.json"
            frozen = path.read_bytes()
            monkeypatch.setattr(TaskFollower, "stop", never)  # it dies without a word to the server
            await runtime.close(grace=0)
        path.write_bytes(frozen)
        (remote,) = server.runs.values()
        turns = [call("task_output", {"task_id": record.task_id, "block": False}), say("Done.")]
        again = boss(server.url, tmp_path, 0)
        object.__setattr__(again, "model", ScriptedModel(turns))
        async with Runtime([again]) as runtime:
            result = await runtime.run(again, "go on", thread_id="t1")
            told = next(message.text for message in result.messages if message.role == "tool")
            assert "running" in told.lower()
            assert "FAILED" not in path.read_text()
            assert (await server.runtime.result(remote.run_id)).status is RunStatus.SUSPENDED


async def never(self: Any, work: Any) -> str:
    return "nobody was asked"


async def waiting_task(agent: HarnessAgent) -> Any:
    assert agent.task_repository is not None
    records = await agent.task_repository.list(TaskScope("boss", "t1"))
    return next((record for record in records if record.awaiting), None)


async def test_a_run_with_a_question_on_a_server_cannot_be_forked_there(tmp_path: Path) -> None:
    async with far(asking()) as server:
        agent = boss(server.url, tmp_path)
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            await run.result()
            last = [event.seq async for event in run.follow()][-1]
            with pytest.raises(ConfigurationError, match="cannot be forked"):
                await runtime.fork(run.run_id, at=last, decisions={"look_1": Decision.approve()})
            await run.cancel()


async def test_a_call_that_takes_too_long_becomes_a_task_and_its_events_go_on(tmp_path: Path) -> None:
    async with far(researcher(helper())) as server:
        server.holds.clear()
        agent = boss(server.url, tmp_path, 1)
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            result = await run.result()
            told = next(message.text for message in result.messages if message.role == "tool")
            assert "status: timeout_promoted\ntask_id: task_" in told
            server.holds.set()
            events = [event async for event in runtime.events(run.run_id)]
        check_copy(
            [event for event in events if event.kind != "task_updated"], await remote_log(server), numbered=False
        )
        assert [event.status for event in events if event.kind == "task_updated"][-1] == "COMPLETED"


async def test_two_levels_of_servers(tmp_path: Path) -> None:
    """An approval three levels down, on the third machine, is answered at the root of the first."""
    async with far(asking()) as third:
        async with Runtime([boss(third.url, tmp_path / "b")]) as middle, TaskServer(middle, has_events=True) as second:
            declared = SubagentDeclaration("boss", "Has others research", url=second.url)
            model = ScriptedModel([call("agent_spawn", {"agent_id": "boss", "task": "go"}, id="top_1"), say("Done.")])
            top = HarnessAgent("top", model, workspace=tmp_path / "a", subagents=[declared], general_purpose=False)
            async with Runtime([top]) as runtime:
                run = runtime.stream(top, "go", thread_id="t1")
                waiting = await run.result()
                ((name, ticket),) = waiting.suspended.items()
                assert (name, ticket.path) == ("top_1/spawn_1/task_r/look_1", tuple(name.split("/")))
                result = await runtime.resume(run.run_id, {name: Decision.approve()})
                events = [event async for event in runtime.events(run.run_id)]
            assert result.status is RunStatus.COMPLETED
            check_copy(events, await remote_log(second))
            assert {event.ns for event in events if event.agent == "helper"} == {
                ("tools:top_1", "tools:spawn_1", "tools:task_r")
            }
            assert result.usage.requests == 2 + 2 + 2 + 2
