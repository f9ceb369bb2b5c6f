"""A run that has ended is freed at once: it leaves no cycles for the garbage collector."""

from __future__ import annotations

import gc

from retinue import Agent, Runtime, tool
from retinue.log.state import RunState
from retinue.loop.execution import Execution
from retinue.testing import ScriptedModel, call, say


@tool
async def look(q: str) -> str:
    """Look something up."""
    return q


async def test_children_leave_no_cycles() -> None:
    model = ScriptedModel([call("look", {"q": "x"}), say("found"), call("look", {"q": "y"}), say("found too")])
    child = Agent("tidy-child", model, tools=[look])
    tasks = [call("task", {"subagent_type": "tidy-child", "description": name}) for name in ("one", "two")]
    runtime = Runtime([Agent("tidy-parent", ScriptedModel([tasks, say("done")]), subagents=[child])])
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert (await runtime.run("tidy-parent", "go")).status == "completed"
        gc.collect()
        # Other tests' runs may come to be garbage just now: only this one's count.
        left = [type(each).__name__ for each in gc.garbage if _agent_of(each) in ("tidy-child", "tidy-parent")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []


def _agent_of(each: object) -> str | None:
    """The agent of a run, where it is one."""
    if isinstance(each, RunState):
        return each.identity.agent
    return each.request.agent.name if isinstance(each, Execution) else None
