"""Messages for a run at work outlive its process: each that was accepted is read once, in order, wherever the run stood."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Message, RunStatus, Runtime, tool
from retinue.errors import RunElsewhere
from retinue.events import MessageAdded
from retinue.log.fold import fold_all
from retinue.testing import ScriptedModel, call, say

from .. import inside
from ..prepared import PYTHON
from ..waiting import expire_lease, until

PROJECT = Path(__file__).parents[2]


async def nothing() -> None:
    """Send nothing."""


def desk(folder: Path | None = None, tell: Callable[[], Awaitable[None]] = nothing) -> Agent:
    """It works three times, then says what its user has said, and again if that is more by then. Whenever its model or
    its tool works, it is told something."""

    @tool(idempotent=True)
    async def work() -> str:
        """Wait for a file."""
        await tell()
        if folder is not None:
            (folder / "begun").touch()
            await until((folder / "gate").exists)
        return "worked"

    async def model(request: Any) -> Any:
        await tell()
        worked = sum(message.role == "tool" for message in request.messages)
        heard = [message.text for message in request.messages if message.role == "user"]
        return call("work", id=f"w{worked}") if worked < 3 else say(f"heard {' '.join(heard)}")

    return Agent("desk", ScriptedModel(model), tools=[work])


async def test_every_prefix_of_the_log_has_the_messages_at_the_same_places() -> None:
    left = [Message.user(f"m{number}", id=f"m{number}") for number in range(7)]

    async def tell() -> None:
        if left:
            await runtime.send(run.run_id, left.pop(0))

    async with Runtime([desk(tell=tell)]) as runtime:
        run = runtime.stream("desk", "go")
        result = await run.result()
        assert not left
        assert result.response == "heard go m0 m1 m2 m3 m4 m5 m6"
        rows = (await inside.log_of(run)).rows()
    whole = fold_all(rows).runs[run.run_id]
    for end in range(1, len(rows)):
        tree = fold_all(rows[:end])
        state = tree.runs[run.run_id]
        given = [row.event.message for row in rows[:end] if isinstance(row.event, MessageAdded)]
        read = [message for message in state.messages if message in given]
        assert [*read, *state.queued] == given, end
        assert state.messages == whole.messages[: len(state.messages)], end
        if state.is_over or state.ending is not None:
            continue
        async with Runtime([desk()]) as runtime:
            log = await inside.continue_in_memory(runtime, rows[:end], tree, run.run_id)
            await until(lambda log=log: run.run_id in log.results)
            said = [message for message in log.tree.runs[run.run_id].messages if message.role == "user"]
            assert said[1:] == given, end


PROCESS = """
import asyncio, sys
from pathlib import Path
from retinue import Runtime
from tests.durability.test_steering import desk
async def main():
    folder = Path(sys.argv[2])
    async with Runtime.open(sys.argv[1], [desk(folder)]) as runtime:
        run = runtime.stream("desk", "go")
        await run.stored()
        print(run.run_id, flush=True)
        await run.result()
asyncio.run(main())
"""


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_message_outlives_the_process_that_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """kill -9 after the owner has accepted it, and before it has read its inbox."""
    url = f"sqlite:///{tmp_path}/app.db"
    process = subprocess.Popen(
        [PYTHON, "-c", PROCESS, url, str(tmp_path)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        run_id = (await asyncio.to_thread(process.stdout.readline)).strip()
        await until((tmp_path / "begun").exists)
        async with Runtime.open(url, [desk()], recover=False) as here:
            if is_read:
                await here.send(run_id, Message.user("from there", id="mine"))
            else:
                inside.set_patience(monkeypatch, 0.0)
                os.kill(process.pid, signal.SIGSTOP)
                with pytest.raises(RunElsewhere):
                    await here.send(run_id, Message.user("from there", id="mine"))
            process.kill()
            await asyncio.to_thread(process.wait)
            await expire_lease(here.store, run_id)
            (continued,) = await here.recover()
            inside.set_patience(monkeypatch, 30.0)
            if (await _added(here, run_id)) == ["mine"]:  # the next owner has read the inbox before the run ends
                await here.send(run_id, Message.user("from there", id="mine"))
            result = await continued.result()
            assert (result.status, result.response) == (RunStatus.COMPLETED, "heard go from there")
            assert await _added(here, run_id) == ["mine"]
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


async def _added(runtime: Runtime, run_id: str) -> list[str | None]:
    events = await runtime.log(run_id).so_far()
    return [event.message.id for event in events if isinstance(event, MessageAdded)]
