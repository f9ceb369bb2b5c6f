"""The handle of an answered run shows the whole run, wherever its log is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Decision, RunStatus, Runtime, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say


@tool
async def ask(ctx: ToolContext) -> Any:
    """Ask a human."""
    return ToolResult.suspended("?") if ctx.resume_input is None else "answered"


def team() -> list[Agent]:
    child = Agent("child", ScriptedModel(lambda r: say("ok") if len(r.messages) > 1 else call("ask")), tools=[ask])
    task = call("task", {"subagent_type": "child", "description": "go"}, id="c1")
    boss = Agent("boss", ScriptedModel(lambda r: say("done") if len(r.messages) > 1 else task), subagents=[child])
    return [boss]


@pytest.mark.parametrize("place", ["memory:", "sqlite:///{}/app.db"])
@pytest.mark.parametrize("waits_first", [True, False])
async def test_it_has_the_children_the_text_and_the_events(place: str, waits_first: bool, tmp_path: Path) -> None:
    async with Runtime.open(place.format(tmp_path), team()) as runtime:
        waiting = await runtime.run("boss", "go")
        run = runtime.stream_resume(waiting.run_id, {next(iter(waiting.suspended)): Decision.resume(True)})
        if waits_first:
            await run.result()
        children = [child async for child in run.children]
        assert [(child.name, child.call_id) for child in children] == [("child", "c1")]
        assert (await children[0].result()).status is RunStatus.COMPLETED
        assert (await children[0].text, await run.text) == ("ok", "done")
        ends = [event.status async for event in run.events if event.kind == "run_finished"]
        assert ends == [RunStatus.SUSPENDED, RunStatus.COMPLETED]
