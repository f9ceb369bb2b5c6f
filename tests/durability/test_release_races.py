"""A run that is given up because it waits can be answered at any moment of that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from retinue import Agent, Decision, RunStatus, Runtime, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say

from ..prefix.program import Call, World
from ..prefix.scenes import below, boss, look, work
from ..prefix.tape import Tasks, a_store
from ..waiting import let_others_run, until
from .scene import is_free


class Gate:
    """Holds back the next write of a kind, if not told otherwise the one that gives a log up."""

    def __init__(self, store: Any, holds: Callable[[Any], bool] = lambda batch: batch.released) -> None:
        self._write, self._holds = store.write, holds
        self.reached, self.open, self.armed = asyncio.Event(), asyncio.Event(), True
        store.write = self.write

    def write(self, batch: Any) -> asyncio.Future[None]:
        if not (self.armed and self._holds(batch)):
            return self._write(batch)
        self.armed = False
        self.reached.set()
        return asyncio.create_task(self._later(batch))  # type: ignore[return-value]

    async def _later(self, batch: Any) -> None:
        await self.open.wait()
        await self._write(batch)


def asking() -> Agent:
    @tool
    async def pay(ctx: ToolContext) -> Any:
        """Pay, if a human agrees."""
        return ToolResult.suspended("pay?") if ctx.resume_input is None else "paid"

    return Agent("a", ScriptedModel([call("pay", id="c1"), say("done")]), tools=[pay])


async def test_an_answer_that_comes_while_the_log_is_given_up_counts() -> None:
    async with a_store() as store:
        gate = Gate(store)
        async with Runtime([asking()], store=store) as runtime:
            run = runtime.stream("a", "go")
            await gate.reached.wait()  # it waits, and this is being stored
            answered = asyncio.create_task(runtime.resume(run.run_id, {"c1": Decision.resume("yes")}))
            await let_others_run()
            gate.open.set()
            result = await asyncio.wait_for(answered, 90)
            assert (result.status, result.response) == (RunStatus.COMPLETED, "done")
            record = await store.load_run(run.run_id)
            assert record is not None
            assert record.status == "completed"


async def test_a_cancel_that_comes_while_the_log_is_given_up_counts() -> None:
    async with a_store() as store:
        gate = Gate(store)
        async with Runtime([asking()], store=store) as runtime:
            run = runtime.stream("a", "go")
            await gate.reached.wait()
            cancelled = asyncio.create_task(runtime.cancel(run.run_id))
            await let_others_run()
            gate.open.set()
            result = await asyncio.wait_for(cancelled, 90)
            assert result.status is RunStatus.CANCELLED
            assert (await store.read_log(run.run_id)).ended


async def test_an_answer_that_comes_as_the_last_task_ends_counts() -> None:
    plan = boss((Call(key="do B", does="background", children=(below("B", (look("b1"),)),)), work("a1", waits=1)))
    async with a_store() as store:
        tasks = Tasks()
        world, gate = World(plan, tasks), Gate(store)
        held, may_end = asyncio.Event(), asyncio.Event()

        async def on_run(key: str) -> None:
            if key == "b1":
                held.set()
                await may_end.wait()

        world.on_run = on_run
        async with Runtime(world.agents(), store=store) as runtime:
            run = runtime.stream("boss", "do A")
            waiting = await run.result()
            assert waiting.status is RunStatus.SUSPENDED
            await held.wait()
            may_end.set()
            await gate.reached.wait()  # the task has ended: the log is given up
            answer = {"c-a1": Decision.resume({"key": "a1", "n": 1})}
            answered = asyncio.create_task(runtime.resume(run.run_id, answer))
            await let_others_run()
            gate.open.set()
            result = await asyncio.wait_for(answered, 90)
            assert (result.status, result.response) == (RunStatus.COMPLETED, "all done")
            assert [event.kind async for event in runtime.events(run.run_id)][-1] == "run_finished"
            assert (await store.read_log(run.run_id)).ended


async def test_a_log_ends_whose_last_task_ends_while_the_end_of_its_run_is_stored() -> None:
    background = Call(key="do B", does="background", children=(below("B"),))
    plan = boss((background,), (work("a1"),))
    async with a_store() as store:
        world = World(plan, Tasks())
        of_boss = Gate(store, lambda batch: any(run.identity.agent == "boss" and run.result for run in batch.runs))
        of_child = Gate(store, lambda batch: any(run.identity.agent == "helper" for run in batch.runs))

        async def on_run(key: str) -> None:
            await of_child.reached.wait()

        world.on_run = on_run
        async with Runtime(world.agents(), store=store) as runtime, asyncio.timeout(90):
            run = runtime.stream("boss", "do A")
            async for event in run.follow():
                if event.kind == "run_finished" and event.agent == "boss":
                    of_child.open.set()  # the end of the run waits for that of the child to be stored
                if event.kind == "task_updated" and event.status == "COMPLETED":  # type: ignore[attr-defined]
                    await asyncio.sleep(0)
                    of_boss.open.set()
            assert (await run.result()).status is RunStatus.COMPLETED
            await until(lambda: is_free(store, run.run_id))
            assert (await store.read_log(run.run_id)).ended
