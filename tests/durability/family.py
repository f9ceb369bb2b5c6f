"""Scenes of agents with children."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct

from retinue import (
    Agent,
    Child,
    HarnessAgent,
    Limits,
    RunStatus,
    ToolContext,
    ToolResult,
    Usage,
    run_streaming_subagent,
    tool,
)
from retinue.testing import call, say

from ..waiting import until
from .scene import Model, Scene, Spot, turn_of, turns
from .solo import Keys, tools

USED = Usage(requests=1, input_tokens=100, output_tokens=7)


def asked(request: Any) -> str:
    return next(m.text for m in request.messages if m.role == "user").split()[-1]


def helper(spot: Spot, name: str = "helper", **options: Any) -> Agent:
    """Looks, works and looks again at what it is asked for, and says so."""

    def decide(request: Any) -> Any:
        label, turn = asked(request), turn_of(request)
        spent = say("", chunks=(), usage=USED)
        match turn:
            case 1:
                return [spent, call("look", {"text": f"{label}1"}, id=f"k{label}1")]
            case 2:
                return [spent, call("look", {"text": f"{label}2"}, id=f"k{label}2")]
            case _:
                return say(f"{label} is done", chunks=[label, " is", " done"], usage=USED)

    return Agent(name, Model(spot, name, decide), "You help.", tools(spot), [Keys()], **options)


def tasks(spot: Spot) -> Scene:
    """Three helpers at once by the task tool; one has ended when the others are at their second look."""
    boss = turns(
        spot,
        "boss",
        [call("task", {"subagent_type": "helper", "description": f"do {label}"}, id=f"t{label}") for label in "ABC"],
        say("All done.", usage=USED),
    )
    return Scene([Agent("boss", boss, "You lead.", subagents=[helper(spot)])])


def one_task(spot: Spot) -> Scene:
    boss = turns(
        spot,
        "boss",
        call("task", {"subagent_type": "helper", "description": "do A"}, id="tA"),
        call("task", {"subagent_type": "helper", "description": "do B"}, id="tB"),
        say("All done.", usage=USED),
    )
    return Scene([Agent("boss", boss, "You lead.", subagents=[helper(spot)])])


def narrow(spot: Spot) -> Scene:
    """As `tasks`, where one call at a time may run."""
    scene = tasks(spot)
    return Scene(scene.agents, options={"limits": Limits(parallel=1)})


def in_time(spot: Spot) -> Scene:
    """A child that may take an hour: it takes nearly all of it, and then never ends."""

    @tool(idempotent=True)
    async def rest(seconds: int) -> str:
        """Take some seconds, or for ever."""
        spot.pass_time(3599.9)
        await spot.point(f"rest:{seconds}")
        await asyncio.sleep(0 if seconds else 3600)
        return "rested"

    @tool(idempotent=True)
    async def delegate(ctx: ToolContext) -> str:
        """Have somebody rest."""
        return f"{(await ctx.run_child('sleeper', 'do A', timeout=3600)).status}"

    rests = [call("rest", {"seconds": seconds}, id=f"k{seconds}") for seconds in (3599, 0)]
    sleeper = turns(spot, "sleeper", *rests, say("I have slept"))
    boss = turns(spot, "boss", call("delegate", id="tA"), say("All done."))
    return Scene([Agent("boss", boss, "You lead.", [delegate]), Agent("sleeper", sleeper, "You sleep.", [rest])])


def as_tool(spot: Spot) -> Scene:
    boss = turns(
        spot,
        "boss",
        call("agent_run_helper", {"prompt": "do A"}, id="tA"),
        say("All done.", usage=USED),
    )
    return Scene([Agent("boss", boss, "You lead.", [helper(spot).as_tool()])])


def spawned(spot: Spot) -> Scene:
    boss = turns(
        spot,
        "boss",
        [
            call("agent_spawn", {"agent_id": "helper", "task": f"do {label}", "timeout_seconds": 60}, id=f"t{label}")
            for label in "AB"
        ],
        say("All done.", usage=USED),
    )
    (spot.folder / "ws").mkdir(exist_ok=True)
    leads = HarnessAgent(
        "boss", boss, "You lead.", subagents=[helper(spot)], workspace=spot.folder / "ws", general_purpose=False
    )
    return Scene([leads])


def background(spot: Spot) -> Scene:
    """A task that goes on after the run has ended."""
    boss = turns(
        spot,
        "boss",
        call("agent_spawn", {"agent_id": "helper", "task": "do A", "timeout_seconds": 0}, id="tA"),
        say("It is under way."),
        say("Still there."),
    )

    @tool(idempotent=True)
    async def look(text: str) -> str:
        """Work while the run ends."""
        await until(lambda: "boss:2" in spot.done())
        spot.did(f"look {text}")
        await spot.point(f"look:{text}")
        return f"looked {text}"

    worker = turns(
        spot, "helper", call("look", {"text": "A1"}, id="kA1"), call("look", {"text": "A2"}, id="kA2"), say("A is done")
    )
    (spot.folder / "ws").mkdir(exist_ok=True)
    leads = HarnessAgent(
        "boss",
        boss,
        "You lead.",
        subagents=[Agent("helper", worker, "You help.", [look])],
        workspace=spot.folder / "ws",
        general_purpose=False,
    )
    return Scene([leads])


def _by_hand(spot: Spot, idempotent: bool) -> Scene:
    helps = helper(spot)

    @tool(idempotent=idempotent)
    async def delegate(ctx: ToolContext) -> str:
        """Have a helper do it."""
        spot.did("delegate")
        outcome = await ctx.run_child("helper", "do A")
        assert outcome.status is RunStatus.COMPLETED
        await spot.point("delegated")
        return f"the helper said: {outcome.response}"

    boss = turns(spot, "boss", call("delegate", id="tA"), say("All done.", usage=USED))
    return Scene([Agent("boss", boss, "You lead.", [delegate]), helps])


def by_hand_once(spot: Spot) -> Scene:
    return _by_hand(spot, False)


def by_hand_again(spot: Spot) -> Scene:
    return _by_hand(spot, True)


def several(spot: Spot) -> Scene:
    """Three children of one call, of which the first is quick."""
    helps = helper(spot)

    @tool(idempotent=True)
    async def delegate(ctx: ToolContext) -> str:
        """Have three helpers do it."""
        outcomes = await ctx.run_children([Child("helper", f"do {label}") for label in "ABC"])
        return ", ".join([str(outcome.response) for outcome in outcomes])

    boss = turns(spot, "boss", call("delegate", id="tA"), say("All done.", usage=USED))
    return Scene([Agent("boss", boss, "You lead.", [delegate]), helps])


def streamed(spot: Spot) -> Scene:
    """A child whose text is the output of its call."""

    @tool(idempotent=True)
    async def delegate(ctx: ToolContext) -> str:
        """Stream a helper."""
        child = await run_streaming_subagent(ctx, "helper", "do A")
        await spot.point("streamed")
        return f"{child.content} in {child.steps}"

    worker = turns(
        spot,
        "helper",
        [say("First. ", chunks=["Fir", "st. "]), call("look", {"text": "A1"}, id="kA1")],
        [say("Second. ", chunks=["Sec", "ond. "]), call("look", {"text": "A2"}, id="kA2")],
        say("Third.", chunks=["Thi", "rd."]),
    )
    helps = Agent("helper", worker, "You help.", tools(spot), [Keys()])
    boss = turns(spot, "boss", call("delegate", id="tA"), say("All done."))
    return Scene([Agent("boss", boss, "You lead.", [delegate]), helps])


def overtaking(spot: Spot) -> Scene:
    """Two tasks, of which the second ends first, where one call at a time may run."""
    rests = {"A": 0.15, "B": 0.0}

    @tool(idempotent=True)
    async def rest(who: str) -> str:
        """Take time."""
        await asyncio.sleep(rests[who])
        return f"rested {who}"

    def decide(request: Any) -> Any:
        label = asked(request)
        return say(f"{label} is done") if turn_of(request) == 2 else call("rest", {"who": label}, id=f"k{label}")

    helps = Agent("helper", Model(spot, "helper", decide), "You help.", [rest])
    asks = [call("task", {"subagent_type": "helper", "description": f"do {label}"}, id=f"t{label}") for label in "AB"]
    boss = Agent("boss", turns(spot, "boss", asks, say("All done.")), "You lead.", subagents=[helps])
    return Scene([boss], options={"limits": Limits(parallel=1)})


def shuffled(spot: Spot) -> Scene:
    """Two children of one call that are asked in another order when it runs again."""
    helps = helper(spot)

    @tool(idempotent=True)
    async def delegate(ctx: ToolContext) -> str:
        """Have two helpers do it, in any order."""
        spot.did("delegate")
        pauses = (0.0, 0.03) if spot.done()["delegate"] == 1 else (0.03, 0.0)

        async def one(label: str, pause: float) -> str:
            await asyncio.sleep(pause)
            return str((await ctx.run_child("helper", f"do {label}")).response)

        said = await asyncio.gather(one("A", pauses[0]), one("B", pauses[1]))
        await spot.point("delegated")
        return ", ".join(said)

    boss = turns(spot, "boss", call("delegate", id="tA"), say("All done.", usage=USED))
    return Scene([Agent("boss", boss, "You lead.", [delegate]), helps])


def patient(spot: Spot) -> Scene:
    """Two helpers that each ask a human, one by the task tool and one in the background of nobody; then more work."""

    @tool
    async def ask(text: str, ctx: ToolContext) -> ToolResult:
        """Ask a human first."""
        spot.did(f"ask {text}")
        if ctx.resume_input is None:
            return ToolResult.suspended(f"may I {text}?")
        await spot.point(f"ask:{text}")
        return ToolResult.success(f"{text}: {ctx.resume_input}")

    def decide(request: Any) -> Any:
        label = asked(request)
        match turn_of(request):
            case 1:
                return call("ask", {"text": label}, id=f"k{label}")
            case 2:
                return call("look", {"text": label}, id=f"l{label}")
            case _:
                return say(f"{label} is done", usage=USED)

    helps = Agent("helper", Model(spot, "helper", decide), "You help.", [ask, *tools(spot)], [Keys()])
    asks = [call("task", {"subagent_type": "helper", "description": f"do {label}"}, id=f"t{label}") for label in "AB"]
    boss = turns(spot, "boss", [*asks, call("ask", {"text": "C"}, id="tC")], say("All done.", usage=USED))
    return Scene([Agent("boss", boss, "You lead.", [ask], subagents=[helps])], answers=True)


def fickle(spot: Spot) -> Scene:
    """A call that wants a child the first time only."""
    helps = helper(spot)

    @tool(idempotent=True)
    async def delegate(ctx: ToolContext) -> str:
        """Have a helper do it, or not."""
        spot.did("delegate")
        return "by myself" if spot.done()["delegate"] > 1 else str(await ctx.run_child("helper", "do A"))

    boss = turns(spot, "boss", call("delegate", id="tA"), say("All done.", usage=USED))
    return Scene([Agent("boss", boss, "You lead.", [delegate]), helps])


class Count(Struct):
    number: int


def typed(spot: Spot) -> Scene:
    """A child whose answer has a type, used by a call that does something else afterwards."""
    worker = turns(spot, "counter", call("look", {"text": "A1"}, id="kA1"), say('{"number": 3}'))
    counter = Agent("counter", worker, "You count.", tools(spot), [Keys()], output=Count)

    @tool(idempotent=True)
    async def count(ctx: ToolContext) -> str:
        """Have somebody count."""
        outcome = await ctx.run_child("counter", "do A")
        await spot.point("counted")
        assert isinstance(outcome.output, Count), outcome.output
        return f"counted {outcome.output.number}"

    boss = turns(spot, "boss", call("count", id="tA"), say('{"number": 4}'))
    return Scene([Agent("boss", boss, "You lead.", [count], output=Count), counter])


def frugal(spot: Spot) -> Scene:
    """A boss that always wants another helper, with a limit on what the tree may do."""

    def more(request: Any) -> Any:
        last, turn = request.messages[-1].text, turn_of(request)
        if "limit" in last or "may start" in last:
            return say("Enough.", usage=USED)
        return call("task", {"subagent_type": "helper", "description": f"do {turn}"}, id=f"t{turn}")

    return Scene([Agent("boss", Model(spot, "boss", more), "You lead.", subagents=[helper(spot)])])


def few_children(spot: Spot) -> Scene:
    return Scene(frugal(spot).agents, options={"limits": Limits(children=2)})


def few_tokens(spot: Spot) -> Scene:
    return Scene(frugal(spot).agents, options={"limits": Limits(tokens=600)})


def few_steps(spot: Spot) -> Scene:
    return Scene(frugal(spot).agents, options={"limits": Limits(steps=9)})
