"""Threads and schedules on every engine: one run at a time, who comes next, and what starts by itself."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from retinue import Run, RunStatus, Runtime
from retinue.core.errors import ThreadBusy

from ..waiting import until
from .crew import Gate, crew
from .processes import command
from .team import Site


async def test_a_busy_thread(site: Site) -> None:
    gate = Gate()
    async with site.worker([*crew(), gate.agent()]), site.client() as client:
        first = client.stream("held", "go", thread_id="talk")
        await gate.entered.wait()
        with pytest.raises(ThreadBusy):
            await client.stream("echo", "no", thread_id="talk").result()
        queued = [client.stream("echo", f"{number}", thread_id="talk", when_busy="enqueue") for number in range(3)]
        for run in queued:
            await run.stored()
        gate.go.set()
        assert (await first.result()).response == "let go"
        assert [(await run.result()).response for run in queued] == ["echo: 0", "echo: 1", "echo: 2"]
        said = [message.text for message in await client.messages("talk") if message.text.startswith("echo")]
        assert said == ["echo: 0", "echo: 1", "echo: 2"]


async def test_queued_runs_hold_no_slot(site: Site) -> None:
    gate = Gate()
    async with site.worker([*crew(), gate.agent()], slots=2), site.client() as client:
        first = client.stream("held", "go", thread_id="talk")
        await gate.entered.wait()
        queued = [client.stream("echo", "x", thread_id="talk", when_busy="enqueue") for _ in range(3)]
        assert (await client.run("echo", "another")).response == "echo: another"
        gate.go.set()
        assert (await first.result()).status is RunStatus.COMPLETED
        assert {(await run.result()).status for run in queued} == {RunStatus.COMPLETED}


async def test_a_newer_run_interrupts(site: Site) -> None:
    gate = Gate()
    async with site.worker([*crew(), gate.agent()]), site.client() as client:
        first = client.stream("held", "go", thread_id="talk")
        await gate.entered.wait()
        assert (await client.run("echo", "now", thread_id="talk", when_busy="interrupt")).response == "echo: now"
        assert (await first.result()).status is RunStatus.CANCELLED


async def test_a_client_whose_clock_is_ahead_changes_no_order(site: Site) -> None:
    gate, ahead = Gate(), Runtime.open(site.url, engine=site.engine, clock=lambda: time.time() + 60)
    async with site.worker([*crew(), gate.agent()]), site.client() as client, ahead:
        first = ahead.stream("held", "go", thread_id="talk")
        await gate.entered.wait()
        queued: list[Run[Any]] = []
        for number, one in enumerate([ahead, client, ahead, client]):
            queued.append(one.stream("echo", f"{number}", thread_id="talk", when_busy="enqueue"))
            await queued[-1].stored()
        gate.go.set()
        for run in (first, *queued):
            assert (await run.result()).status is RunStatus.COMPLETED
        said = [message.text for message in await client.messages("talk") if message.text.startswith("echo")]
        assert said == ["echo: 0", "echo: 1", "echo: 2", "echo: 3"]


async def test_a_clock_that_is_ahead_protects_no_run_from_an_interrupt(site: Site) -> None:
    gate, ahead = Gate(), Runtime.open(site.url, engine=site.engine, clock=lambda: time.time() + 60)
    async with site.worker([*crew(), gate.agent()]), site.client() as client, ahead:
        first = ahead.stream("held", "go", thread_id="talk")
        await gate.entered.wait()
        assert (await client.run("echo", "now", thread_id="talk", when_busy="interrupt")).response == "echo: now"
        assert (await first.result()).status is RunStatus.CANCELLED


# --- schedules


async def test_an_overdue_time_starts_once(site: Site) -> None:
    async with site.client() as client:
        past = datetime.now(UTC) - timedelta(hours=1)
        made = await client.schedule("echo", "nightly", at=past, thread_id="talk", user_id="ann")
        (known,) = await client.schedules()
        assert (known.id, known.agent, known.thread_id, known.user_id) == (made, "echo", "talk", "ann")
        async with site.worker(), site.worker():
            (run,) = await until(lambda: client.store.list_runs("talk"))
            assert (await client.result(run.identity.run_id)).response == "echo: nightly"
            assert run.identity.user_id == "ann"
            assert await client.schedules() == []
        assert len(await client.store.list_runs("talk")) == 1


async def test_a_cron_schedule_stays(site: Site) -> None:
    async with site.client() as client:
        made = await client.schedule("echo", "nightly", cron="0 3 * * *", queue="night")
        (known,) = await client.schedules()
        at = datetime.fromtimestamp(known.next_at, UTC)
        assert (at.hour, at.minute, known.cron, known.queue) == (3, 0, "0 3 * * *", "night")
        assert at > datetime.now(UTC)
        _, said = await command("queues", "--db", site.url, "--json")
        (shown,) = json.loads(said)["schedules"]
        assert (shown["id"], shown["queue"], shown["skipped"]) == (made, "night", 0)
        assert datetime.fromisoformat(shown["next_at"]) == at
        assert await client.unschedule(made)
        assert not await client.unschedule(made)
        assert await client.schedules() == []


async def test_a_schedule_has_one_run_at_a_time(site: Site) -> None:
    """Its run waits for a human, then for its thread: no other is started meanwhile."""
    async with site.worker(), site.client() as client:
        database = client.store.database  # type: ignore[attr-defined]
        await client.schedule("clerk", "pay", cron="0 3 * * *", thread_id="talk")

        async def come() -> list[str]:
            """Let its time come; return the runs that it has started."""
            await database.write(lambda link: link.run("UPDATE schedules SET next_at = 1000"))

            async def has_come() -> bool:
                return (await client.schedules())[0].next_at > 1000

            await until(has_come)
            return [record.identity.run_id for record in await client.store.list_runs("talk")]

        (first,) = await come()
        waiting = await client.result(first)
        assert waiting.status is RunStatus.SUSPENDED
        for number in (1, 2):
            assert await come() == [first]
            (known,) = await client.schedules()
            assert (known.last_run, known.skipped) == (first, number)
        _, said = await command("queues", "--db", site.url)
        assert f"2 times left out, as run {first} had not ended" in said
        await client.cancel(first)
        second, _ = await come()
        assert (await client.schedules())[0].skipped == 0
        assert (await client.result(second)).status is RunStatus.SUSPENDED
