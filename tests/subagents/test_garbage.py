"""A run that has ended is freed at once: it leaves no cycles for the garbage collector."""

from __future__ import annotations

import gc

from retinue import Agent, Runtime, tool
from retinue.testing import ScriptedModel, call, say


@tool
async def look(q: str) -> str:
    """Look something up."""
    return q


async def test_children_leave_no_cycles() -> None:
    model = ScriptedModel([call("look", {"q": "x"}), say("found"), call("look", {"q": "y"}), say("found too")])
    child = Agent("child", model, tools=[look])
    tasks = [call("task", {"subagent_type": "child", "description": name}) for name in ("one", "two")]
    runtime = Runtime([Agent("parent", ScriptedModel([tasks, say("done")]), subagents=[child])])
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert (await runtime.run("parent", "go")).status == "completed"
        gc.collect()
        left = [type(each).__name__ for each in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not {"RunScope", "LocalRun", "StateStore", "CallGroup", "OpenCall"}.intersection(left)
