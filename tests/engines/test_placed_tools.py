"""Tools with a queue: workers of that queue make their calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue import ConfigurationError, Decision, ImagePart, RunStatus, Runtime, tool
from retinue.runtime.placed import placed_id
from retinue.runtime.placed_calls import call_run_id

from .. import inside
from ..waiting import until
from .team import Site, events_of
from .toolbox import team


@asynccontextmanager
async def two_workers(site: Site, folder: Path | None = None, workspace: Path | None = None) -> AsyncGenerator[Runtime]:
    async with (
        site.worker(team("near", folder, workspace)),
        site.worker(team("far", folder, workspace), queues=["gpu"]),
        site.client() as client,
    ):
        yield client


async def record_of(client: Runtime, run_id: str, call_id: str = "call_1", resumes: int = 0) -> Any:
    return await client.store.load_run(placed_id(call_run_id(run_id, call_id, resumes)))


def shape(events: list[Any]) -> list[Any]:
    plain = [event for event in events if event.kind != "text_delta"]
    return [(event.kind, event.ns, event.agent, getattr(event, "call_id", "")) for event in plain]


async def test_a_placed_call_looks_like_one_in_place(site: Site) -> None:
    async with site.client() as client:
        async with site.worker(team("both"), queues=["default", "gpu"]):
            here = await client.run("user", "add number=3", context={"tenant": "blue"})
            assert here.response == "both adds 3 to 0 for user of blue"
            assert await record_of(client, here.run_id) is None
        async with two_workers(site):
            there = await client.run("user", "add number=3", context={"tenant": "blue"})
            assert there.response == "far adds 3 to 0 for user of blue"
            assert there.state.extensions == here.state.extensions == {"total": 3}
            placed = await record_of(client, there.run_id)
            assert placed.status == "completed"
        events = await events_of(client, there.run_id)
        assert shape(events) == shape(await events_of(client, here.run_id))
        assert [event.delta for event in events if event.kind == "tool_call_stream_delta"] == ["adding 3"]
        assert [run.identity.run_id for run in await client.store.list_runs()] == [there.run_id, here.run_id]


async def test_state_is_read_there_and_committed_here(site: Site) -> None:
    async with two_workers(site) as client:
        await client.run("user", "add number=3", thread_id="t")
        result = await client.run("user", "add number=4; add number=5; add number=6", thread_id="u")
        assert result.state.extensions == {"total": 15}
        assert result.response == " | ".join(f"far adds {n} to 0 for user of None" for n in (4, 5, 6))


async def test_failures_retries_and_timeouts_are_as_in_place(site: Site) -> None:
    said: dict[str, str | None] = {}
    for label, queues in (("both", ["default", "gpu"]), ("near", ["default"])):
        async with site.worker(team(label), queues=queues), site.worker(team("far"), queues=["gpu"]):
            async with site.client() as client:
                words = "refuse kind=denied; refuse kind=broken; stumble times=2; linger; refuse; paint"
                result = await client.run("user", words)
                said[label] = (result.response or "").replace(label, "far")
                images = [part for m in result.messages for part in m.parts if isinstance(part, ImagePart)]
                assert [image.data for image in images] == ["aGVsbG8="]
                assert (await record_of(client, result.run_id, "call_5")) is None  # its arguments were wrong
    assert said["near"] == said["both"]
    assert "denied: not you" in (said["near"] or "")
    assert "far worked at try 3" in (said["near"] or "")


async def test_a_question_of_a_placed_call_is_answered_at_the_run(site: Site) -> None:
    async with two_workers(site) as client:
        result = await client.run("user", "question")
        assert (result.status, [*result.suspended]) == (RunStatus.SUSPENDED, ["call_1"])
        result = await client.resume(result.run_id, {"call_1": Decision.resume("yes")})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "far heard yes")
        assert (await record_of(client, result.run_id, resumes=1)).status == "completed"


async def test_hooks_are_with_the_run(site: Site) -> None:
    async with two_workers(site) as client:
        result = await client.run("careful", "paint")
        assert (result.status, [*result.suspended]) == (RunStatus.SUSPENDED, ["call_1"])
        assert await record_of(client, result.run_id) is None
        result = await client.resume(result.run_id, {"call_1": Decision.approve()})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "a picture")


async def test_a_placed_call_cannot_start_children_and_says_so(site: Site) -> None:
    async with two_workers(site) as client:
        result = await client.run("user", "breed")
        assert "a tool with a queue works apart from its run, and cannot start children" in (result.response or "")


async def test_a_cancel_reaches_the_call(site: Site, tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    async with two_workers(site, tmp_path) as client:
        run = client.stream("user", "once")
        await until((tmp_path / "made").exists)
        assert (await run.cancel("enough")).status is RunStatus.CANCELLED
        assert (await record_of(client, run.run_id)).result.error == "enough"


async def test_a_call_that_was_given_up_is_told(site: Site, tmp_path: Path) -> None:
    """The worker of the run is gone, and nobody but the client is there to cancel the run."""
    (tmp_path / "hold").touch()
    async with site.client() as client, site.worker(team("far", tmp_path), queues=["gpu"]):
        async with site.worker(team("near", tmp_path), grace=0.0):
            run = client.stream("user", "once")
            await until((tmp_path / "made").exists)
        assert (await run.cancel()).status is RunStatus.CANCELLED
        await until(lambda: _is_cancelled(client, run.run_id))


async def _is_cancelled(client: Runtime, run_id: str) -> bool:
    return (await record_of(client, run_id)).status == "cancelled"


async def test_the_next_owner_of_the_run_finds_the_call(site: Site, tmp_path: Path) -> None:
    """It serves both queues, and would have made the call itself."""
    (tmp_path / "hold").touch()
    async with site.client() as client, site.worker(team("far", tmp_path), queues=["gpu"]):
        async with site.worker(team("near", tmp_path)):
            run = client.stream("user", "once")
            await until((tmp_path / "made").exists)
            await until(lambda: _has_streamed(client, run.run_id))
        async with site.worker(team("both", tmp_path), queues=["default", "gpu"]):
            (tmp_path / "hold").unlink()
            assert (await run.result()).response == "held"
        assert len((tmp_path / "made").read_text().split()) == 1
        events = await events_of(client, run.run_id)
        deltas = [event.delta for event in events if event.kind == "tool_call_stream_delta"]
        assert deltas == ["one ", "two"]


async def _has_streamed(client: Runtime, run_id: str) -> bool:
    found = await client.store.read_events(run_id)  # type: ignore[attr-defined]
    return found is not None and any(event.kind == "tool_call_stream_delta" for event in found[0])


async def test_a_sub_agent_that_inherits_the_tool_has_it_made_there(site: Site, tmp_path: Path) -> None:
    async with two_workers(site, workspace=tmp_path) as client:
        result = await client.run("boss", "stumble times=0")
        assert "far worked at try 1" in (result.response or "")


async def test_a_queue_that_nobody_serves_is_reported(site: Site) -> None:
    async with site.worker(team()) as near, site.client() as client:
        inside.report_unserved_after(near, 0.0)
        run = client.stream("user", "add number=1")
        await run.stored()
        async for event in client.events(run.run_id):
            if event.kind == "error":
                assert (event.code, event.agent) == ("queue_unserved", "user")
                break
        async with site.worker(team("far"), queues=["gpu"]):
            assert "far adds 1" in ((await run.result()).response or "")


async def test_without_an_engine_a_queue_is_ignored() -> None:
    async with Runtime(team("here")) as runtime:
        assert "here adds 2" in ((await runtime.run("user", "add number=2")).response or "")


def test_a_name_that_cannot_be_a_queue_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="@tool: a queue is named with letters"):

        @tool(queue="no queue")
        def work() -> str:
            """Work."""
            return ""
