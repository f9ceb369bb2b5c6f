"""Nothing starts before what it depends on is stored."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from retinue import Runtime

from ..logs import ends_of, whole_log
from ..payers import Effects, lookers
from .nodes import node


@pytest.mark.parametrize("calls", [1, 2, 3])
async def test_the_answer_of_the_model_is_stored_before_its_calls_start(
    url: str, tmp_path: Path, effects: Effects, calls: int
) -> None:
    """A process dies the moment a tool begins. The next one does not ask the model for that answer again."""
    with node("dies_in_tool", url, tmp_path, calls) as first:
        run_id = (await asyncio.to_thread(first.line)).split()[1]
        await asyncio.to_thread(first.wait)
    assert effects.lines[:2] == ["model 1", "look"]
    async with Runtime.open(url, [lookers(effects, calls)]) as runtime, asyncio.timeout(90):
        result = await runtime.result(run_id)
        assert ends_of(await whole_log(runtime, run_id)) == {run_id: ["completed"]}
    assert result.response == f"looked {calls} times"
    assert [line for line in effects.lines if line.startswith("model")] == ["model 1", "model 2"]
