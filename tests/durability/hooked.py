"""Scenes of agents with plugins whose hooks count their calls and ask for everything there is to ask for."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from retinue import (
    Agent,
    Block,
    HookContext,
    Plugin,
    Registrar,
    SetResult,
    StateCommand,
    StateKey,
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.core.plugins import PHASES
from retinue.plugins import AddContextMessage, AddMessage, IncludeTools, StopRun, UseSummary
from retinue.testing import call, say

from ..waiting import let_others_run, until
from .scene import Model, Scene, Spot, turn_of, turns
from .solo import LAST, Keys, tools

COUNT: StateKey[int, int] = StateKey("hooked.count", int, update=int, reduce=lambda a, b: a + b, merge="commutative")
"""Not persistent, and of the run: only the journal knows it."""
NAME = StateKey("hooked.name", str, persistent=True)


class Mail(Struct, frozen=True):
    """Effect: something goes out."""

    text: str


class Bump(Struct, frozen=True):
    """Action: count one."""

    by: int


class Everything(Plugin):
    """A hook in every phase."""

    name = "everything"

    def __init__(self, spot: Spot) -> None:
        self._spot = spot

    def register(self, r: Registrar) -> None:
        r.key(COUNT)
        r.key(NAME)
        r.effect(Mail, self._send)
        r.action(Bump, self._bump)
        for phase in PHASES:
            r.hook(phase, self._count)
            r.hook(phase, self._rename, priority=101)
            r.hook(phase, self._rename_too, priority=102)

    async def _send(self, mail: Mail, ctx: HookContext) -> None:
        self._spot.did(f"mail {mail.text}")

    def _bump(self, bump: Bump, ctx: HookContext) -> StateCommand:
        self._spot.did("bump")
        return StateCommand().update(COUNT, 100 * bump.by)

    async def _count(self, ctx: HookContext) -> StateCommand:
        where = f"{ctx.phase} {ctx.call.id if ctx.call else ctx.step}"
        self._spot.did(where)
        command = StateCommand().update(COUNT, 1).event({"was": where}).emit(Mail(where))
        if ctx.phase == "step_start":
            command.schedule(AddContextMessage(f"context {ctx.step}"))
        if ctx.phase == "step_end":
            command.schedule(Bump(1)).schedule(AddMessage(f"said {ctx.step}"))
        await self._spot.point(f"hook:{where}")
        return command

    def _rename(self, ctx: HookContext) -> StateCommand:
        self._spot.did("rename")
        return StateCommand().update(NAME, f"{ctx.state(NAME)[-20:]}+{ctx.phase}")

    def _rename_too(self, ctx: HookContext) -> StateCommand:
        self._spot.did("rename too")
        return StateCommand().update(NAME, f"{ctx.state(NAME)[-20:]}-{ctx.phase}")


def everything(spot: Spot) -> Scene:
    """Two steps with calls under hooks in every phase; the model reads what they ask for."""

    def decide(request: Any) -> Any:
        turn = turn_of(request)
        assert any(message.text == f"context {turn}" for message in request.messages), request.messages
        assert sum(message.text.startswith("said ") for message in request.messages) == turn - 1
        match turn:
            case 1:
                return call("look", {"text": "a"}, id="c1")
            case 2:
                return call("work", {"text": "b"}, id="c2")
            case _:
                return say("It is done.")

    @tool(idempotent=True)
    async def look(text: str) -> ToolOutput:
        """Look."""
        spot.did(f"look {text}")
        await spot.point(f"look:{text}")
        return ToolOutput(f"looked {text}", {COUNT: 1000})

    work = tools(spot)[0]
    return Scene([Agent("solo", Model(spot, "m", decide), "You work.", [look, work], [Keys(), Everything(spot)])])


class Gate(Plugin):
    """Blocks one call, answers another, and lets only some tools be seen."""

    name = "gate"

    def __init__(self, spot: Spot) -> None:
        self._spot = spot

    def register(self, r: Registrar) -> None:
        r.hook("before_tool", self._gate)
        r.hook("before_inference", self._narrow)
        r.hook("step_end", self._stop)

    def _gate(self, ctx: HookContext) -> Any:
        assert ctx.call is not None
        self._spot.did(f"gate {ctx.call.id}")
        match ctx.call.args["text"]:
            case "no":
                return Block("not now")
            case "known":
                return SetResult(ToolResult.success("known already"))
        return None

    def _narrow(self, ctx: HookContext) -> StateCommand | None:
        self._spot.did(f"narrow {ctx.step}")
        if ctx.step == 2:
            return StateCommand().schedule(IncludeTools(("look",))).schedule(UseSummary(1, "In short: go"))
        return None

    def _stop(self, ctx: HookContext) -> StateCommand | None:
        return StateCommand().schedule(StopRun("enough", "three steps", completed=True)) if ctx.step == 3 else None


def gated(spot: Spot) -> Scene:
    """Calls that hooks intercept, a tool that was not offered, a summary, and a stop."""

    def decide(request: Any) -> Any:
        turn = turn_of(request)
        if turn >= 2:
            assert request.messages[1].text == "In short: go" or turn == 2
        match turn:
            case 1:
                return [
                    call("work", {"text": text}, id=f"c{number}")
                    for number, text in enumerate(["no", "known", "free"], start=1)
                ]
            case 2:
                return [call("work", {"text": "hidden"}, id="c4"), call("look", {"text": "seen"}, id="c5")]
            case _:
                return [say("I go on. "), call("look", {"text": "last"}, id="c6")]

    return Scene([Agent("solo", Model(spot, "m", decide), "You work.", tools(spot), [Keys(), Gate(spot)])])


class Tardy(Plugin):
    """Takes its time after the first call, so that the second is committed before it."""

    name = "tardy"

    def __init__(self, spot: Spot) -> None:
        self._spot = spot

    def register(self, r: Registrar) -> None:
        r.hook("after_tool", self._wait)

    async def _wait(self, ctx: HookContext) -> None:
        assert ctx.call is not None
        self._spot.did(f"after {ctx.call.id}")
        if ctx.call.id == "c1" and self._spot.done()["after c1"] == 1:
            await until(lambda: "after c2" in self._spot.done())
            await let_others_run()


def overtaken(spot: Spot) -> Scene:
    """Two calls write one exclusive key; the one that ends first is committed last."""

    @tool
    async def mark(text: str, after: str) -> ToolOutput:
        """Write the key, once something was done."""
        await until(lambda: not after or after in spot.done())
        spot.did(f"mark {text}")
        return ToolOutput(f"marked {text}", {LAST: text})

    marks = [
        call("mark", {"text": "x", "after": ""}, id="c1"),
        call("mark", {"text": "y", "after": "after c1"}, id="c2"),
    ]
    model = turns(spot, "m", marks, say("It is done."))
    return Scene([Agent("solo", model, "You work.", [mark], [Keys(), Tardy(spot)])])


class Signer(Plugin):
    """Signs every call in one exclusive key, so that the second to come is set aside; the first call comes second."""

    name = "signer"

    def __init__(self, spot: Spot) -> None:
        self._spot = spot

    def register(self, r: Registrar) -> None:
        r.key(NAME)
        r.hook("after_tool", self._sign)

    def _sign(self, ctx: HookContext) -> StateCommand:
        assert ctx.call is not None
        self._spot.did(f"sign {ctx.call.id}")
        return StateCommand().update(NAME, f"{ctx.state(NAME)} {ctx.call.id}")


def signed(spot: Spot) -> Scene:
    @tool
    async def rest(after: str) -> str:
        """Wait until something was done."""
        await until(lambda: not after or after in spot.done())
        await let_others_run()
        return "rested"

    rests = [call("rest", {"after": "sign c2"}, id="c1"), call("rest", {"after": ""}, id="c2")]
    model = turns(spot, "m", rests, say("It is done."))
    return Scene([Agent("solo", model, "You work.", [rest], [Signer(spot)])])


class Unsure(Plugin):
    """An effect that fails, and an optional hook that does."""

    name = "unsure"

    def __init__(self, spot: Spot) -> None:
        self._spot = spot

    def register(self, r: Registrar) -> None:
        r.effect(Mail, self._send)
        r.hook("step_end", self._ask)
        r.hook("step_start", self._break, optional=True)

    def _send(self, mail: Mail, ctx: HookContext) -> None:
        self._spot.did(f"mail {mail.text}")
        raise RuntimeError("no such address")

    def _ask(self, ctx: HookContext) -> StateCommand:
        return StateCommand().emit(Mail(f"step {ctx.step}"))

    def _break(self, ctx: HookContext) -> None:
        raise RuntimeError("always the same")


def unsure(spot: Spot) -> Scene:
    model = turns(spot, "m", call("look", {"text": "a"}, id="c1"), call("look", {"text": "b"}, id="c2"), say("Done."))
    return Scene([Agent("solo", model, "You work.", tools(spot), [Keys(), Unsure(spot)])])
