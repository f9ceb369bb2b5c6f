"""Children with a queue: workers of that queue execute them, and their parents hardly notice."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Decision, DecisionRefused, Limits, Run, RunStatus, Runtime
from retinue.core.backend import RunRequest
from retinue.core.stores import RunRecord
from retinue.log.state import LogState
from retinue.runtime.dispatch import Dispatcher
from retinue.runtime.placed import PlacedBackend, placed_id
from retinue.runtime.worker import Worker
from retinue.stores import SqlTaskRepository

from .. import inside
from ..waiting import until
from .placing import crew
from .team import Site, events_of


@asynccontextmanager
async def two_workers(site: Site, folder: Path | None = None, **more: Any) -> AsyncGenerator[tuple[Worker, Worker]]:
    """A worker of queue "default", and one of queue "gpu"."""
    async with (
        site.worker(crew(folder, **more)) as near,
        site.worker(crew(folder, **more), queues=["gpu"]) as far,
    ):
        yield near, far


def shape(events: list[Any]) -> list[Any]:
    return [(event.kind, event.ns, event.agent, getattr(event, "call_id", "")) for event in events]


async def child_of(run: Run[Any], client: Runtime) -> str:
    """The id of the first child, once it has begun."""
    async for event in client.events(run.run_id):
        if event.kind == "run_started" and event.ns:  # of a task, the parent may have ended before
            return event.run_id
    raise AssertionError("it has no child")


async def record_of(client: Runtime, run_id: str) -> Any:
    return await client.store.load_run(run_id)


async def test_a_placed_child_looks_like_one_in_place(site: Site) -> None:
    async with site.client() as client:
        async with site.worker(crew(), queues=["default", "gpu"], slots=1):
            here = client.stream("boss", "hello")
            assert (await here.result()).response == "echo: hello"
        async with two_workers(site) as (near, far):
            there = client.stream("boss", "hello")
            result = await there.result()
            assert (result.status, result.response) == (RunStatus.COMPLETED, "echo: hello")
            await until(lambda: not near.at_work)
            assert not far.at_work
        events = await events_of(client, there.run_id)
        assert shape(events) == shape(await events_of(client, here.run_id))
        child = next(event for event in events if event.kind == "child_started").child_run_id
        assert {event.run_id for event in events if event.ns} == {child}
        assert (await record_of(client, placed_id(child))).status == "completed"
        # Only the one that was placed has a log of its own, and nobody sees it in a list.
        inner = next(e for e in await events_of(client, here.run_id) if e.kind == "child_started").child_run_id
        assert await record_of(client, placed_id(inner)) is None
        assert [one.identity.run_id for one in await client.store.list_runs()] == [there.run_id, here.run_id]
        assert len(await client.store.list_threads()) == 2


async def test_a_call_id_of_the_run_above_is_replaced_and_the_answer_finds_its_call(site: Site) -> None:
    async with two_workers(site), site.client() as client:
        run = client.stream("namesake", "three coins")
        waiting = await run.result()
        ((name, ticket),) = waiting.suspended.items()
        (above, call_id), shown = ticket.path, name.split("/")
        assert (above, re.sub("_[0-9a-f]{8}$", "", call_id), shown) == ("pay_1", "pay_1", [above, call_id])
        assert call_id != "pay_1"
        result = await client.resume(run.run_id, {name: Decision.approve()})
        assert result.status is RunStatus.COMPLETED, result
        events = [event for event in await events_of(client, run.run_id) if event.ns == ("tools:pay_1",)]
        assert {getattr(event, "call_id", call_id) for event in events} == {call_id}
        told = [event.message.tool_call_id for event in events if event.kind == "tool_call_finished"]
        assert told == [call_id, call_id]  # it waited, then it ended


async def test_questions_surface_and_decisions_go_down(site: Site) -> None:
    async with two_workers(site), site.client() as client:
        run = client.stream("chief", "three coins")
        result = await run.result()
        assert (result.status, [*result.suspended]) == (RunStatus.SUSPENDED, ["task_1/pay_1"])
        assert result.suspended["task_1/pay_1"].path == ("task_1", "pay_1")
        child = await child_of(run, client)
        for name in ("pay_1", "pay_2"):
            with pytest.raises(DecisionRefused, match=f"does not wait for '{name}'; it waits for: task_1/pay_1"):
                await client.resume(run.run_id, {name: Decision.approve()})
        with pytest.raises(DecisionRefused, match="was placed for another run"):
            await client.resume(placed_id(child), {"pay_1": Decision.approve()})
        decision = Decision.approve()
        result = await client.resume(run.run_id, {"task_1/pay_1": decision})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "clerk: paid 3")
        assert (await client.resume(run.run_id, {"task_1/pay_1": decision})).response == "clerk: paid 3"
        assert [event.kind for event in await events_of(client, run.run_id)].count("run_finished") == 4


async def test_a_cancel_ends_a_child_that_waits_and_one_that_works(site: Site, tmp_path: Path) -> None:
    async with two_workers(site, tmp_path), site.client() as client:
        waiting = client.stream("chief", "three coins")
        await waiting.result()
        assert (await waiting.cancel()).status is RunStatus.CANCELLED
        child = await child_of(waiting, client)
        assert (await record_of(client, placed_id(child))).status == "cancelled"

        (tmp_path / "hold-1").touch()
        working = client.stream("guide", "3")
        await until((tmp_path / "step-1").exists)
        assert (await working.cancel("enough")).status is RunStatus.CANCELLED
        child = await child_of(working, client)
        assert (await record_of(client, placed_id(child))).result.error == "enough"
        assert not (tmp_path / "step-2").exists()


async def test_state_context_and_output_go_down_and_come_up(site: Site) -> None:
    async with two_workers(site), site.client() as client:
        result = await client.run("reader", "why", context={"tenant": "blue"})
        assert result.response == (
            "noted after ['above']; {'notes': ['above', 'why']}; Answer(number=7); {'tenant': 'blue'}"
        )


async def test_hooks_before_tools_hold_for_a_placed_child(site: Site) -> None:
    """The worker finds them by the name of the agent above; one without that agent says what to do."""
    (payer,) = next(agent for agent in crew() if agent.name == "watch").subagents
    assert isinstance(payer, Agent)
    async with site.client() as client:
        async with two_workers(site):
            result = await client.run("watch", "three coins")
            assert (result.status, result.response) == (RunStatus.COMPLETED, "clerk: blocked: no payments today")
        async with site.worker(crew()), site.worker([payer], queues=["gpu"]):
            result = await client.run("watch", "three coins")
            assert "hooks of agent 'watch' hold for agent 'far_payer'" in (result.response or "")
            assert "give this worker the agent 'watch' too, or set inherited=False" in (result.response or "")


async def test_inherited_permissions_hold_for_a_placed_child(site: Site) -> None:
    async with two_workers(site), site.client() as client:
        result = await client.run("guard", "three coins")
        assert (result.status, [*result.suspended]) == (RunStatus.SUSPENDED, ["task_1/pay_1"])
        result = await client.resume(result.run_id, {"task_1/pay_1": Decision.reject("no")})
        assert result.status is RunStatus.COMPLETED
        assert "paid" not in (result.response or "")


async def test_a_conversation_goes_on_where_it_was_placed(site: Site, tmp_path: Path) -> None:
    async with two_workers(site, workspace=tmp_path), site.client() as client:
        for said in ("one", "two", "three"):
            result = await client.run("talker", said, thread_id="talk")
            assert result.status is RunStatus.COMPLETED, result.error
        assert "one + two + three" in (result.response or "")


async def test_a_queue_that_nobody_serves_is_reported_under_the_child(site: Site) -> None:
    async with site.worker(crew()) as near, site.client() as client:
        inside.report_unserved_after(near, 0.0)
        run = client.stream("boss", "hello")
        await run.stored()
        async for event in client.events(run.run_id):
            if event.kind == "error":
                assert (event.code, event.ns, event.agent) == ("queue_unserved", ("tools:task_1",), "far_echo")
                assert "no worker serves queue 'gpu'" in event.message
                break
        async with site.worker(crew(), queues=["gpu"]):
            assert (await run.result()).response == "echo: hello"


async def test_a_worker_that_takes_over_finds_the_child_wherever_it_is(site: Site, tmp_path: Path) -> None:
    """The new worker serves both queues, and would have run the child in place; the last one serves one again."""
    (tmp_path / "hold-1").touch()
    async with site.client() as client, site.worker(crew(tmp_path), queues=["gpu"]):
        async with site.worker(crew(tmp_path)):
            run = client.stream("guide", "3")
            await until((tmp_path / "step-1").exists)
        async with site.worker(crew(tmp_path), queues=["default", "gpu"]):
            await until(lambda: client.store.owner_of(run.run_id))  # type: ignore[attr-defined]
            (tmp_path / "hold-1").unlink()
            assert (await run.result()).response == "3 steps"
        assert {path.name: len(path.read_text().split()) for path in tmp_path.glob("step-*")} == {
            "step-0": 1, "step-1": 1, "step-2": 1,
        }  # fmt: skip


async def test_a_child_that_began_in_place_stays_there(site: Site, tmp_path: Path) -> None:
    (tmp_path / "hold-1").touch()
    async with site.client() as client:
        async with site.worker(crew(tmp_path), queues=["default", "gpu"], grace=0.0):
            run = client.stream("guide", "3")
            await until((tmp_path / "step-1").exists)
        (tmp_path / "hold-1").unlink()
        async with two_workers(site, tmp_path):
            assert (await run.result()).status is RunStatus.COMPLETED
        assert await record_of(client, placed_id(await child_of(run, client))) is None


async def test_the_limits_of_a_tree_hold_for_placed_children(site: Site) -> None:
    async def spend(client: Runtime, agent: str, limits: Limits) -> tuple[int, int]:
        result = await client.run(agent, "go", limits=limits)
        assert result.status is RunStatus.COMPLETED, result.error
        return result.usage.requests, result.usage.tokens

    budgets = [Limits(tokens=2_000), Limits(steps=15)]
    async with site.client() as client:
        async with site.worker(crew(), queues=["default", "gpu"]):
            in_place = [await spend(client, "solo", limits) for limits in budgets]
        async with two_workers(site):
            assert [await spend(client, "solo", limits) for limits in budgets] == in_place
            # Two that work at once each hold a part of what is left: they may use less, and never more.
            for limits in budgets:
                requests, tokens = await spend(client, "pair", limits)
                assert 10 <= requests <= (limits.steps or requests)
                assert tokens <= (limits.tokens or tokens)


async def test_placed_children_share_the_number_of_children(site: Site) -> None:
    async with two_workers(site), site.client() as client:
        run = client.stream("herd", "40", limits=Limits(children=42))
        result = await run.result()
        assert result.status is RunStatus.COMPLETED, result.error
        started = [event for event in await events_of(client, run.run_id) if event.kind == "child_started"]
        assert len(started) == 42
        assert sum(int(said.split()[0]) for said in (result.response or "").split(" | ")) == 40


async def test_depth_counts_across_logs(site: Site) -> None:
    async with two_workers(site), site.client() as client:
        result = await client.run("herd", "1", limits=Limits(depth=1))
        assert result.response == "0 of 1 | 0 of 1"


async def test_a_background_task_is_placed_and_outlives_its_run(site: Site, tmp_path: Path) -> None:
    marks, work = tmp_path / "marks", tmp_path / "work"
    marks.mkdir()
    (marks / "hold-1").touch()
    async with SqlTaskRepository(site.url) as tasks, two_workers(site, marks, workspace=work, tasks=tasks):
        async with site.client() as client:
            run = client.stream("sender", "far_walker 3", thread_id="talk")
            assert (await run.result()).response == "begun"
            await until((marks / "step-1").exists)
            (marks / "hold-1").unlink()
            events = await events_of(client, run.run_id)
            assert [e.status for e in events if e.kind == "task_updated"] == ["PENDING", "RUNNING", "COMPLETED"]
            child = await child_of(run, client)
            assert (await record_of(client, placed_id(child))).status == "completed"
            assert (await record_of(client, child)).log_id == run.run_id
            news = await client.run("sender", "far_walker 3", thread_id="talk")
            assert "3 steps" in (news.response or "")


async def test_a_background_task_that_asks_is_answered_by_the_id_of_its_run(site: Site, tmp_path: Path) -> None:
    async with SqlTaskRepository(site.url) as tasks, two_workers(site, workspace=tmp_path, tasks=tasks):
        async with site.client() as client:
            run = client.stream("sender", "far_clerk coins", thread_id="talk")
            await run.result()
            child = await child_of(run, client)
            await until(lambda: _is_suspended(client, child))
            result = await client.resume(child, {"pay_1": Decision.approve()})
            assert (result.status, result.response) == (RunStatus.COMPLETED, "clerk: paid 3")


async def test_a_background_task_that_starts_as_its_run_ends_is_not_given_up(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a run cancels the placed children that no call waits for; a task need not be waited for."""
    place, stop_abandoned = Dispatcher.place, PlacedBackend.stop_abandoned
    is_stored, has_ended = asyncio.Event(), asyncio.Event()

    async def place_slowly(self: Dispatcher, request: RunRequest, run_id: str) -> None:
        await place(self, request, run_id)
        is_stored.set()
        await has_ended.wait()

    async def stop_later(self: PlacedBackend, tree: LogState) -> None:
        await is_stored.wait()
        await stop_abandoned(self, tree)

    monkeypatch.setattr(Dispatcher, "place", place_slowly)
    monkeypatch.setattr(PlacedBackend, "stop_abandoned", stop_later)
    async with SqlTaskRepository(site.url) as tasks, two_workers(site, workspace=tmp_path, tasks=tasks):
        async with site.client() as client:
            run = client.stream("sender", "far_clerk coins", thread_id="talk")
            await run.result()
            has_ended.set()
            child = await child_of(run, client)
            record = await until(lambda: _with_result(client, child))
            assert record.status == "suspended"
            result = await client.resume(child, {"pay_1": Decision.approve()})
            assert (result.status, result.response) == (RunStatus.COMPLETED, "clerk: paid 3")


async def _with_result(client: Runtime, run_id: str) -> RunRecord | None:
    record = await record_of(client, run_id)
    return None if record is None or record.result is None else record


async def _is_suspended(client: Runtime, run_id: str) -> bool:
    record = await record_of(client, run_id)
    return record is not None and record.status == "suspended"


async def test_deleting_a_thread_deletes_the_logs_of_placed_children(site: Site) -> None:
    async with two_workers(site), site.client() as client:
        run = client.stream("boss", "hello", thread_id="talk")
        await run.result()
        child = await child_of(run, client)
        await until(lambda: _has_ended(client, run.run_id))
        assert await client.store.delete_thread("talk")
        assert await record_of(client, placed_id(child)) is None


async def _has_ended(client: Runtime, run_id: str) -> bool:
    return await client.store.owner_of(run_id) is None  # type: ignore[attr-defined]


async def test_a_tool_that_gave_its_child_up_stops_it(site: Site, tmp_path: Path) -> None:
    """A call that may not run twice has lost its worker: its child is given up, and is told."""
    (tmp_path / "hold-0").touch()
    async with site.client() as client, site.worker(crew(tmp_path), queues=["gpu"]):
        async with site.worker(crew(tmp_path), grace=0.0):
            run = client.stream("once", "3")
            await until((tmp_path / "step-0").exists)
        async with site.worker(crew(tmp_path)):
            result = await run.result()
            assert "outcome unknown" in (result.response or "")
            child = await child_of(run, client)
            await until(lambda: _is_cancelled(client, placed_id(child)))


async def _is_cancelled(client: Runtime, run_id: str) -> bool:
    record = await record_of(client, run_id)
    return record is not None and record.status == "cancelled"


async def test_without_an_engine_a_queue_is_ignored() -> None:
    async with Runtime(crew()) as runtime:
        run = runtime.stream("boss", "hello")
        assert (await run.result()).response == "echo: hello"
        assert [child.agent async for child in run.children] == ["far_echo"]


async def test_a_placed_child_is_cancelled_alone(site: Site, tmp_path: Path) -> None:
    """One that works and one that waits for a human; it ends in its own log too, and its parent continues."""
    (tmp_path / "hold-1").touch()
    async with two_workers(site, tmp_path), site.client() as client:
        for boss, task, is_there in (("guide", "3", (tmp_path / "step-1").exists), ("chief", "3 coins", None)):
            run = client.stream(boss, task)
            child = await child_of(run, client)
            await (until(is_there) if is_there else run.result())
            ended = await client.cancel(run.run_id, ns=("tools:task_1",), reason="not needed")
            assert (ended.status, ended.error) == (RunStatus.CANCELLED, "not needed"), boss
            result = await client.result(run.run_id)
            assert result.status is RunStatus.COMPLETED
            assert "not needed" in (result.response or "")
            await until(partial(_is_cancelled, client, placed_id(child)))
