"""A live owner keeps its run, and an owner that lost its run leaves it alone."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, RunStatus, Runtime, ToolContext, tool
from retinue.testing import ScriptedModel, call, say

from .. import inside
from ..logs import ends_of, whole_log
from ..waiting import expire_lease, until
from .nodes import Node, node


class Gate:
    """An agent whose tool waits until the test opens the gate."""

    def __init__(self, name: str) -> None:
        self.name, self.entered, self.open = name, 0, asyncio.Event()

    def agent(self) -> Agent:
        @tool(idempotent=True)
        async def work(ctx: ToolContext) -> str:
            """Wait for the gate."""
            self.entered += 1
            await self.open.wait()
            return self.name

        def turn(request: Any) -> Any:
            last = request.messages[-1]
            return say(f"by {last.text}") if last.role == "tool" else call("work", {})

        return Agent("a", ScriptedModel(turn), tools=[work])


async def begun(first: Node) -> str:
    """Return the id of the run of an `owner` when its tool waits."""
    run_id = (await asyncio.to_thread(first.line)).split()[1]
    await asyncio.to_thread(first.expect, f"entered {run_id}")
    return run_id


async def test_a_node_that_wakes_after_its_lease_leaves_the_run_to_the_new_owner(url: str, tmp_path: Path) -> None:
    """The old owner wakes while the new one works: it says what the new owner stored."""
    gate = Gate("second")
    with node("owner", url, tmp_path, "first", 30.0) as first:
        run_id = await begun(first)
        first.stop()
        async with Runtime.open(url, recover=False) as looking:
            await expire_lease(looking.store, run_id)
        async with Runtime.open(url, [gate.agent()]) as second:
            await until(lambda: gate.entered)
            first.wake()
            (tmp_path / "gate").touch()  # the tool of the first ends: that must not count
            gate.open.set()
            result = await second.result(run_id)
            assert (result.status, result.response, result.error) == (RunStatus.COMPLETED, "by second", None)
            assert ends_of(await whole_log(second, run_id)) == {run_id: ["completed"]}
        await asyncio.to_thread(first.expect, "ended completed by second")
        first.tell()
        await asyncio.to_thread(first.wait)
    async with Runtime.open(url, recover=False) as reader:
        assert (await reader.result(run_id)) == result
        assert ends_of(await whole_log(reader, run_id)) == {run_id: ["completed"]}
    assert gate.entered == 1


def namespace() -> list[str]:
    """The command that gives a program a pid namespace of its own; skips where that is not allowed."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("a pid namespace needs `unshare --pid` and the right to use it")
    return command


async def stays_with_its_owner(url: str, folder: Path, prefix: list[str], ahead: float) -> None:
    """A second node that looks at the store does not take the run of the first, which lives."""
    with node("owner", url, folder, "first", 30.0, prefix=prefix) as first:
        run_id = await begun(first)
        with node("looker", url, folder, "second", ahead, prefix=prefix) as second:
            await asyncio.to_thread(second.expect, "open")
            (folder / "gate").touch()
            ended = await asyncio.to_thread(first.line)
            second.tell()
            await asyncio.to_thread(second.wait)
            assert second.is_quiet, "the second node ran the tool of a run that the first was working on"
        first.tell()
        await asyncio.to_thread(first.wait)
    assert ended == "ended completed by first"
    async with Runtime.open(url, recover=False) as reader:
        assert (await reader.result(run_id)).response == "by first"
        assert ends_of(await whole_log(reader, run_id)) == {run_id: ["completed"]}


async def test_nodes_with_one_host_name_and_two_pid_namespaces_leave_each_other_alone(url: str, tmp_path: Path) -> None:
    """As containers on the host's network, or machines made from one image."""
    await stays_with_its_owner(url, tmp_path, namespace(), 0)


async def test_a_node_whose_clock_is_ahead_does_not_take_a_live_run(url: str, tmp_path: Path) -> None:
    """Its clock is 60 s ahead and the lease lasts 30."""
    await stays_with_its_owner(url, tmp_path, [], 60)


async def test_the_heartbeat_survives_an_unexpected_error(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of the owners is the test's: a third of a lease passes, and another."""
    inside.set_clock_of_owners(monkeypatch, lambda: now)
    now, one, two, tried = 0.0, Gate("one"), Gate("two"), list[float]()
    async with Runtime.open(url, [one.agent()]) as first, Runtime.open(url, [two.agent()]) as second:
        renew = type(first.store).renew  # type: ignore[attr-defined]

        async def unlucky(store: Any, *args: Any, **more: Any) -> Any:
            if store is first.store:
                tried.append(now)
                if len(tried) == 1:
                    raise RuntimeError("nobody expects this")
            return await renew(store, *args, **more)

        monkeypatch.setattr(type(first.store), "renew", unlucky)
        run = first.stream("a", "go", thread_id="t")
        await until(lambda: one.entered)
        now = 11.0
        await until(lambda: len(tried) > 1)
        assert await second.recover() == []
        assert two.entered == 0, "the run was taken from a node that lives"
        one.open.set()
        two.open.set()
        assert (await run.result()).response == "by one"
        assert ends_of(await whole_log(second, run.run_id)) == {run.run_id: ["completed"]}
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("nobody expects this" in text for text in said) or any(
        record.exc_info and "nobody expects this" in str(record.exc_info[1]) for record in caplog.records
    )
