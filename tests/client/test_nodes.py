"""Two servers on one database: started on one, followed, answered and cancelled on the other."""

from __future__ import annotations

import asyncio
from pathlib import Path

from retinue import Decision, RunStatus, Runtime
from retinue.client import Client

from ..server.agents import Gate, boss
from ..server.serving import TOKEN, serving


async def test_a_run_is_followed_and_cancelled_through_another_node(tmp_path: Path) -> None:
    gates = [Gate(), Gate()]
    first, second = [Runtime.open(f"sqlite:///{tmp_path}/runs.db", [gate.agent()]) for gate in gates]
    async with (
        serving(first) as here,
        serving(second) as there,
        Client(here.url, token=TOKEN) as one,
        Client(there.url, token=TOKEN) as two,
    ):
        run = one.stream("gated", "go")
        gates[0].say("a", "b")
        await run.stored()
        events = two.events(run.run_id)
        seen = [await anext(events)]
        while sum(event.kind == "text_delta" for event in seen) < 2:
            seen.append(await anext(events))
        cancelled = await two.cancel(run.run_id, reason="enough")
        assert (cancelled.status, (await run.result()).error) == (RunStatus.CANCELLED, "enough")
        seen += [event async for event in events]
        assert seen == [event async for event in run]


async def test_a_run_is_answered_through_another_node(tmp_path: Path) -> None:
    first, second = [Runtime.open(f"sqlite:///{tmp_path}/runs.db", [boss()]) for _ in range(2)]
    async with (
        serving(first) as here,
        serving(second) as there,
        Client(here.url, token=TOKEN) as one,
        Client(there.url, token=TOKEN) as two,
    ):
        run = one.stream("boss", "go")
        before = [event async for event in run]
        answered = two.stream_resume(run.run_id, {"pay_1": Decision.approve(id="d1")})
        after = [event async for event in answered]
        assert (await answered.result()).response == "boss: clerk: paid 3"
        assert before + after == [event async for event in one.events(run.run_id)]
        # The same answer again, also after the end and on the other node, is the same answer.
        again = await asyncio.gather(
            *[node.resume(run.run_id, {"pay_1": Decision.approve(id="d1")}) for node in (one, two)]
        )
        assert [result.response for result in again] == ["boss: clerk: paid 3"] * 2
