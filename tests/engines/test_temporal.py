"""The Temporal engine: what its workflows do, and what workers find when Temporal and the store disagree."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.client import WorkflowUpdateFailedError as UpdateFailed
from temporalio.exceptions import CancelledError
from temporalio.service import RPCError
from temporalio.worker import Worker as TemporalWorker

from retinue import Agent, Decision, Plugin, Registrar, RunStatus, Runtime, StateKey, ToolContext, ToolOutput, tool
from retinue.core.errors import EngineError
from retinue.core.model import ModelRequest
from retinue.core.stores import Placement, Wish
from retinue.engines import temporal_sweeper
from retinue.engines.temporal_workflow import LEG, WORKFLOW, RetinueRun
from retinue.storage.legs import PlacedLogs
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from .. import inside
from ..waiting import until
from .crew import Gate, crew, results
from .processes import start_worker
from .team import Site
from .temporal import TemporalServer, temporal_server
from .workflows import (
    CANCELED,
    COMPLETED,
    RUNNING,
    closed,
    engine_of,
    has_no_activity,
    order,
    workflow_of,
)


@pytest.fixture
def site(postgres_url: str, temporal: TemporalServer) -> Site:
    """An empty database and task queues that nobody else has."""
    return Site(postgres_url, temporal.engine())


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers look all the time."""
    for name in ("SWEEP_EVERY", "RECONCILE_EVERY"):
        monkeypatch.setattr(temporal_sweeper, name, 0.02)
    monkeypatch.setattr(temporal_sweeper, "UNREAD", 0.0)


# --- questions and answers


def clerks(tmp: Any = None) -> list[Agent]:
    """A boss with two clerks, each of whom needs an approval."""

    def turn(request: ModelRequest) -> ScriptedTurn:
        said = results(request)
        if len(said) == 2:
            return say(" and ".join(said))
        return [call("task", {"subagent_type": "clerk", "description": f"{n}"}, id=f"task_{n}") for n in (1, 2)]

    clerk = next(agent for agent in crew() if agent.name == "clerk")
    return [Agent("boss", ScriptedModel(turn), subagents=[clerk])]


async def test_nested_questions_outlive_every_worker(site: Site) -> None:
    async with site.client() as client:
        async with site.worker(clerks()):
            run = client.stream("boss", "go")
            waiting = await run.result()
            assert (waiting.status, sorted(waiting.suspended)) == (
                RunStatus.SUSPENDED,
                ["task_1/pay_1", "task_2/pay_1"],
            )
        first = {"task_1/pay_1": Decision.approve()}
        answering = asyncio.create_task(client.resume(run.run_id, first))
        async with site.worker(clerks()):
            again = await answering
            assert (again.status, list(again.suspended)) == (RunStatus.SUSPENDED, ["task_2/pay_1"])
        async with site.worker(clerks()):
            assert (await client.resume(run.run_id, first)).status is RunStatus.SUSPENDED  # said before: no change
            workflow = workflow_of(client, run.run_id)
            assert (await workflow.describe()).status is RUNNING
            result = await client.resume(run.run_id, {"task_2/pay_1": Decision.approve()})
            assert result.response == "clerk: paid 3 and clerk: paid 3"
            assert await closed(client, run.run_id) is COMPLETED


async def test_answers_can_come_through_temporal(site: Site) -> None:
    """An update puts decisions into the inbox; one that does not fit fails, and the workflow lives."""
    async with site.worker(slots=1), site.client() as client:
        run = client.stream("boss", "go")
        assert (await run.result()).status is RunStatus.SUSPENDED
        workflow = workflow_of(client, run.run_id)
        for wrong, reason in (
            ({"pay_7": {"action": "approve"}}, "does not wait for 'pay_7'"),
            ({"pay_1": {"action": "shrug"}}, "Invalid enum value 'shrug'"),
            ({}, "no decision was given"),
            ("yes", "Failed decoding arguments"),
        ):
            with pytest.raises(UpdateFailed) as failed:
                await workflow.execute_update("answer", wrong)
            assert reason in str(failed.value.cause)
        right = {"pay_1": {"action": "approve"}}
        await workflow.execute_update("answer", right, id="same")
        assert (await client.result(run.run_id)).response == "boss: clerk: paid 3"
        assert await closed(client, run.run_id) is COMPLETED
        with pytest.raises(RPCError, match="completed"):
            await workflow.execute_update("answer", {"pay_1": {"action": "reject"}})


async def test_an_answer_starts_a_workflow_that_was_lost(site: Site) -> None:
    async with site.worker(), site.client() as client:
        run = client.stream("clerk", "go")
        await run.result()
        await workflow_of(client, run.run_id).terminate("lost")
        result = await client.resume(run.run_id, {"pay_1": Decision.approve()})
        assert result.response == "clerk: paid 3"
        assert await closed(client, run.run_id) is COMPLETED


# --- cancels


async def test_a_cancel_in_temporal_ends_a_run_at_work(site: Site) -> None:
    gate = Gate()
    async with site.worker([gate.agent()]) as worker, site.client() as client:
        run = client.stream("held", "go")
        await gate.entered.wait()
        await workflow_of(client, run.run_id).cancel()
        result = await run.result()
        assert (result.status, result.error) == (RunStatus.CANCELLED, "cancelled in Temporal")
        assert await closed(client, run.run_id) is CANCELED
        assert not worker.at_work


async def test_a_cancel_in_temporal_ends_a_run_that_waits(site: Site) -> None:
    async with site.worker(), site.client() as client:
        run = client.stream("boss", "go")
        assert (await run.result()).status is RunStatus.SUSPENDED
        workflow = workflow_of(client, run.run_id)
        await workflow.cancel()
        with pytest.raises(WorkflowFailureError) as failed:
            await workflow.result()
        assert isinstance(failed.value.cause, CancelledError)
        assert (await client.result(run.run_id)).status is RunStatus.CANCELLED
        ended = [event.run_id async for event in client.events(run.run_id) if event.kind == "run_finished"]
        started = {event.run_id async for event in client.events(run.run_id) if event.kind == "run_started"}
        assert started <= set(ended)


async def test_a_cancel_that_comes_while_a_leg_ends_is_not_lost(temporal: TemporalServer) -> None:
    begun, gate, asked = asyncio.Event(), asyncio.Event(), list[bool]()

    @activity.defn(name=LEG)
    async def leg(order: dict[str, Any]) -> dict[str, Any]:
        asked.append(order["cancel"])
        shown = {"agent": "a", "step": 1, "questions": []}
        if order["cancel"]:
            return {"end": "ended", "status": "cancelled", **shown}
        begun.set()
        await gate.wait()
        return {"end": "waits", "status": "suspended", **shown}

    client = await Client.connect(temporal.address)
    async with TemporalWorker(client, task_queue="ends", workflows=[RetinueRun], activities=[leg]):
        run = await client.start_workflow(WORKFLOW, {"agent": "a"}, id="ends", task_queue="ends")
        await begun.wait()
        await run.cancel()

        async def is_told() -> bool:
            kinds = [event.event_type async for event in run.fetch_history_events()]
            return EventType.EVENT_TYPE_ACTIVITY_TASK_CANCEL_REQUESTED in kinds

        await until(is_told)
        gate.set()
        with pytest.raises(WorkflowFailureError) as failed:
            await run.result()
        assert isinstance(failed.value.cause, CancelledError)
    assert asked == [False, True]


@pytest.mark.parametrize("state", ["delayed", "waiting", "working"])
async def test_a_cancelled_run_closes_its_workflow(site: Site, state: str) -> None:
    gate = Gate()
    async with site.worker([*crew(), gate.agent()]), site.client() as client:
        agent = {"delayed": "echo", "waiting": "clerk", "working": "held"}[state]
        run = client.stream(agent, "go", delay=3600.0 if state == "delayed" else 0.0)
        await run.stored()
        if state == "waiting":
            await run.result()
        elif state == "working":
            await gate.entered.wait()
        assert (await run.cancel()).status is RunStatus.CANCELLED
        assert await closed(client, run.run_id) is CANCELED
        ends = [event.status async for event in client.events(run.run_id) if event.kind == "run_finished"]
        assert ends.count(RunStatus.CANCELLED) == 1


async def test_a_run_waits_for_its_delay(site: Site) -> None:
    async with site.worker(), site.client() as client:
        run = client.stream("echo", "later", delay=3600.0)
        await run.stored()
        described = await workflow_of(client, run.run_id).describe()
        info = described.raw_description.workflow_execution_info
        assert info.execution_time.ToSeconds() - info.start_time.ToSeconds() == 3600
        assert await PlacedLogs(client.store, "temporal").at_work() == []  # type: ignore[arg-type]
        assert (await run.cancel()).status is RunStatus.CANCELLED


# --- what Temporal shows


async def test_temporal_shows_where_a_run_stands(site: Site) -> None:
    gate = Gate()
    async with site.worker([*crew(), gate.agent()]), site.client() as client:
        run = client.stream("boss", "go")
        await run.result()
        workflow = workflow_of(client, run.run_id)

        async def shown() -> Any:
            described = await workflow.describe()
            return (await described.memo()).get("questions") and described

        described = await until(shown)
        assert await described.memo() == {"agent": "boss", "step": 1, "questions": ["pay_1"]}
        attributes = {pair.key.name: pair.value for pair in described.typed_search_attributes}
        assert attributes.pop("BuildIds")
        assert attributes == {"RetinueAgent": "boss", "RetinueStep": 1, "RetinueQuestions": ["pay_1"]}
        assert await described.static_summary() == "boss"
        held = client.stream("held", "go")
        await gate.entered.wait()

        async def beating() -> Any:
            pending = (await workflow_of(client, held.run_id).describe()).raw_description.pending_activities
            found = [payload.data for one in pending for payload in one.heartbeat_details.payloads]
            return found and json.loads(found[0])  # the first one has nothing to tell yet

        assert await until(beating) == {"agent": "held", "step": 1, "questions": []}
        gate.go.set()
        await held.result()


async def test_search_attributes_are_left_out_where_they_are_not_registered(postgres_url: str) -> None:
    with temporal_server(indexed=False) as server:
        site = Site(postgres_url, server.engine())
        async with site.worker(), site.client() as client:
            run = client.stream("clerk", "go")
            await run.result()
            assert (await client.resume(run.run_id, {"pay_1": Decision.approve()})).response == "clerk: paid 3"
            described = await workflow_of(client, run.run_id).describe()
            assert [pair.key.name for pair in described.typed_search_attributes] == ["BuildIds"]


notes = StateKey("notes", list[str], update=str, reduce=lambda old, new: [*old, new], persistent=True)


class Notes(Plugin):
    def register(self, r: Registrar) -> None:
        r.key(notes)


async def test_a_long_run_has_a_short_history(site: Site) -> None:
    """A history has ids only: neither steps nor state nor a large result make it longer."""
    large = "x" * 5_000_000

    @tool
    async def note(step: int, ctx: ToolContext) -> ToolOutput:
        """Note."""
        return ToolOutput(f"step {step}", update={notes: f"step {step}"})

    def turn(request: ModelRequest) -> ScriptedTurn:
        done = len(results(request))
        return say(large) if done >= 40 else call("note", {"step": done}, id=f"note_{done}")

    agent = Agent("writer", ScriptedModel(turn), tools=[note], max_steps=100, plugins=[Notes()])
    async with site.worker([agent]), site.client() as client:
        run = client.stream("writer", "go", state={notes: ["seed"]})
        result = await run.result()
        assert result.response == large
        assert result.state[notes] == ["seed", *[f"step {number}" for number in range(40)]]
        assert await closed(client, run.run_id) is COMPLETED
        history = await workflow_of(client, run.run_id).fetch_history()
        assert len(history.events) < 20
        assert sum(event.ByteSize() for event in history.events) < 5_000


# --- what workers find


async def test_a_run_without_a_workflow_gets_one(site: Site, hasty: None) -> None:
    gate = Gate()
    async with site.client() as client:
        async with site.worker([gate.agent()], grace=0.0):
            run = client.stream("held", "go")
            await gate.entered.wait()
        await workflow_of(client, run.run_id).terminate("lost")
        gate.go.set()
        async with site.worker([gate.agent()]):
            assert (await run.result()).status is RunStatus.COMPLETED


async def test_a_workflow_whose_run_has_ended_is_closed(site: Site, hasty: None) -> None:
    async with site.client() as client:
        async with site.worker():
            run = client.stream("clerk", "go")
            await run.result()
            await until(lambda: has_no_activity(client, run.run_id))
        engine = engine_of(client)
        engine.cancel = lambda log_id: asyncio.sleep(0)  # type: ignore[method-assign]  # it cannot be reached
        assert (await run.cancel()).status is RunStatus.CANCELLED
        assert (await workflow_of(client, run.run_id).describe()).status is RUNNING
        async with site.worker():
            assert await closed(client, run.run_id) is COMPLETED


async def test_a_wish_that_nobody_was_told_of_is_read(site: Site, hasty: None) -> None:
    async with site.client() as client, site.worker():
        run = client.stream("clerk", "go")
        await run.result()
        wish = Wish(log_id=run.run_id, wish_id="w1", run_id=run.run_id, kind="cancel", body=b'"by hand"')
        await client.store.put_wish(wish)  # type: ignore[attr-defined]
        result = await until(lambda: ended(client, run.run_id))
        assert (result.status, result.error) == (RunStatus.CANCELLED, "by hand")


async def ended(client: Runtime, run_id: str) -> Any:
    record = await client.store.load_run(run_id)
    return record is not None and record.has_ended and record.result


async def test_a_run_started_while_temporal_is_away_begins_later(
    site: Site, temporal: TemporalServer, hasty: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The legs at work go on, too: they need the database only."""
    gate = Gate()
    async with site.client() as client, site.worker([*crew(), gate.agent()]):
        first = client.stream("held", "go")
        await gate.entered.wait()
        temporal.kill()
        engine_of(client).start = away  # type: ignore[method-assign]  # the SDK would try for a while
        run = client.stream("echo", "later")
        await run.stored()
        gate.go.set()
        assert (await first.result()).response == "let go"
        temporal.start()
        assert (await run.result()).response == "echo: later"
        assert await closed(client, first.run_id) is COMPLETED
    assert f"run {run.run_id} is stored, and begins when its engine can be reached again" in caplog.text


async def away(run_id: str, placement: Placement) -> None:
    raise EngineError("temporal://here", "no connection")


async def test_an_unknown_run_is_tried_elsewhere_before_its_workflow_is_closed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with another database must not close it at once."""
    inside.look_for_unknown_runs(monkeypatch, times=3, every=0.01)
    async with site.worker(), site.client() as client:
        engine = engine_of(client)
        started = await engine.client.start_workflow(
            "RetinueRun", {"run_id": "gone", "agent": "echo"}, id="gone", task_queue=engine.task_queue("default")
        )
        assert (await started.result())["status"] == "unknown"
        events = (await started.fetch_history()).events
        attempts = [event.activity_task_started_event_attributes.attempt for event in events]
        assert max(attempts) == 4


async def test_a_long_history_is_continued_by_a_new_workflow(site: Site) -> None:
    """While the run waits: the new workflow waits too, and takes the answer."""
    async with site.worker(clerks()), site.client() as client:
        async with order(client, {"agent": "boss", "input": "go", "longest": 14, "indexed": True}, "long") as workflow:
            first = engine_of(client).client.get_workflow_handle("long", run_id=workflow.first_execution_run_id)

            async def is_over() -> bool:
                return (await first.describe()).status is WorkflowExecutionStatus.CONTINUED_AS_NEW

            await until(is_over)
            now = await workflow.describe()
            assert (now.status, await now.memo()) == (
                RUNNING,
                {"agent": "boss", "step": 1, "questions": ["task_1/pay_1", "task_2/pay_1"]},
            )
            assert {pair.key.name for pair in now.typed_search_attributes} >= {"RetinueAgent", "RetinueQuestions"}
            await client.resume("long", {"task_1/pay_1": Decision.approve()})
            await client.resume("long", {"task_2/pay_1": Decision.approve()})
            assert (await workflow.result())["response"] == "clerk: paid 3 and clerk: paid 3"


async def test_a_run_whose_worker_was_killed_comes_before_those_that_have_not_begun(site: Site, tmp_path: Path) -> None:
    """Also the next task of its workflow, which else waits behind those of all that were started since."""
    (tmp_path / "hold-1").touch()
    options: Any = {"engine": site.engine}
    worker = await start_worker(site.url, tmp_path, **options)
    async with site.client() as client:
        run = client.stream("walker", "2", priority=-2)
        await until(lambda: (tmp_path / "step-1").exists())
        workflow = workflow_of(client, run.run_id)
        before = (await workflow.describe()).raw_description.workflow_execution_info.priority
        await worker.end()
        (tmp_path / "hold-1").unlink()
        worker = await start_worker(site.url, tmp_path, **options)
        try:
            assert (await run.result()).status is RunStatus.COMPLETED
        finally:
            await worker.end()
        after = (await workflow.describe()).raw_description.workflow_execution_info.priority
        assert (before.priority_key, after.priority_key) == (5, 1)
        assert after.fairness_key == before.fairness_key != ""


@pytest.mark.parametrize("is_missed", [False, True], ids=["at once", "after its lease"])
async def test_a_new_worker_begins_with_the_run_that_lost_its_worker(
    site: Site, tmp_path: Path, is_missed: bool
) -> None:
    """Also if Temporal has missed the heartbeat, and the leg is in its queue behind those of new runs."""
    (tmp_path / "hold-1").touch()
    options: Any = {"engine": site.engine}
    alone = ("--slots", "1", "--lease", "1" if is_missed else "60")
    worker = await start_worker(site.url, tmp_path, *alone, **options)
    async with site.client() as client:
        run = client.stream("walker", "2")
        await until(lambda: (tmp_path / "step-1").exists())
        later = [client.stream("echo", f"{number}") for number in range(5)]

        async def state_of(run_id: str) -> Any:
            described = await workflow_of(client, run_id).describe()
            return [one.state for one in described.raw_description.pending_activities]

        for one in later:
            await one.stored()
            await until(lambda one=one: state_of(one.run_id))
        await worker.end()
        (tmp_path / "hold-1").unlink()
        if is_missed:

            async def is_queued() -> bool:
                return await state_of(run.run_id) == [temporal_sweeper.SCHEDULED]

            await until(is_queued)
        worker = await start_worker(site.url, tmp_path, *alone, **options)
        try:
            for one in (run, *later):
                assert (await one.result()).status is RunStatus.COMPLETED
        finally:
            await worker.end()
        ids = [run.run_id, *[one.run_id for one in later]]
        ends = await client.store.ends_of(ids)  # type: ignore[attr-defined]
        assert min(ends, key=lambda run_id: ends[run_id]) == run.run_id
