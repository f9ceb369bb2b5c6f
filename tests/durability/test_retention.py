"""What is left of old runs goes by itself where that is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from retinue import Agent, ConfigurationError, Runtime
from retinue.stores import MemoryStore, Retention
from retinue.testing import ScriptedModel, say


async def test_a_runtime_drops_what_is_left_of_old_runs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    agent = Agent("a", ScriptedModel([say("done", chunks=["do", "ne"])]))
    async with Runtime.open(url, [agent]) as runtime:
        run_id = (await runtime.run("a", "hi", thread_id="t")).run_id
    async with Runtime.open(url, [agent], retention=Retention(deltas_days=0)) as runtime:
        async with asyncio.timeout(90):
            while any([event.kind == "text_delta" async for event in runtime.events(run_id)]):  # noqa: ASYNC110 nor here
                await asyncio.sleep(0.02)
        assert [event.kind async for event in runtime.events(run_id)][-1] == "run_finished"
    async with Runtime.open(url, [agent], retention=Retention(days=0)) as runtime:
        async with asyncio.timeout(90):
            while await runtime.store.load_run(run_id) is not None:  # noqa: ASYNC110 nobody tells
                await asyncio.sleep(0.02)
        thread = await runtime.store.load_thread("t")
        assert thread is not None
        assert [message.text for message in thread.messages] == ["hi", "done"]


async def test_what_is_in_memory_needs_no_retention() -> None:
    async with Runtime([Agent("a")], store=MemoryStore(), retention=Retention(days=1)):
        pass
    with pytest.raises(ValueError, match="days"):
        Retention(days=-1)
    with pytest.raises(ConfigurationError):
        Runtime.open("nowhere://x")
