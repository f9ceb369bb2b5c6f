"""The plugin of a program: its state keys, effects and actions, and hooks in every phase that do what plans say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from retinue import (
    Block,
    HookContext,
    Plugin,
    Registrar,
    SetResult,
    StateCommand,
    StateKey,
    Suspend,
    SuspendTicket,
    ToolResult,
)
from retinue.core.plugins import PHASES
from retinue.plugins import (
    AddContextMessage,
    AddMessage,
    AddSystemText,
    ExcludeTools,
    StopRun,
    TransferTo,
    UseSummary,
)

if TYPE_CHECKING:
    from .program import World


def _add(one: int, other: int) -> int:
    return one + other


def _join(one: tuple[str, ...], other: str) -> tuple[str, ...]:
    return tuple(sorted({*one, other}))


COUNT: StateKey[int, int] = StateKey("p.count", int, reduce=_add, merge="commutative", persistent=True)
HIDDEN: StateKey[int, int] = StateKey("p.hidden", int, reduce=_add, merge="commutative")
OWNER: StateKey[str, str] = StateKey("p.owner", str, persistent=True)
BEFORE: StateKey[int, int] = StateKey("p.before", int, reduce=_add, merge="commutative", persistent=True)
"""How often hooks ran before a tool whose call was committed."""
AFTER: StateKey[int, int] = StateKey("p.after", int, reduce=_add, merge="commutative")
THREAD: StateKey[tuple[str, ...], str] = StateKey(
    "p.thread",
    tuple[str, ...],
    update=str,
    reduce=_join,
    merge="commutative",
    scope="thread",
    persistent=True,
    default=tuple[str, ...],
)
KEYS = (COUNT, HIDDEN, OWNER, BEFORE, AFTER, THREAD)


class Mail(Struct, frozen=True):
    """Effect: something goes out."""

    key: str


class Bump(Struct, frozen=True):
    """Action: count, and send a mail; the first one leads to a second."""

    key: str
    again: bool = True


ACTIONS: dict[str, Callable[[str], Any]] = {
    "add": lambda key: AddMessage(f"added {key}"),
    "context": lambda key: AddContextMessage(f"context {key}"),
    "system": lambda key: AddSystemText(f"system {key}"),
    "exclude": lambda key: ExcludeTools(("look",)),
    "stop": lambda key: StopRun("enough", f"stopped by {key}", completed=True),
    "fail": lambda key: StopRun("enough", f"failed by {key}"),
    "handoff": lambda key: TransferTo("second", key),
}


class Follows(Plugin):
    """Does what the program says in each phase."""

    name = "follows"

    def __init__(self, world: World) -> None:
        self._world = world

    def register(self, r: Registrar) -> None:
        for key in KEYS:
            r.key(key)
        r.effect(Mail, self._send)
        r.action(Bump, self._bump)
        acting = {act.phase for plan in self._world.plans.values() for act in plan.acts}
        hooked = any(call.hook for call in self._world.calls.values())
        for phase in PHASES:
            if phase == "before_tool":
                if hooked or phase in acting:
                    r.hook(phase, self._before)
            elif phase == "after_tool":
                if phase in acting:
                    r.hook(phase, self._after)
            elif phase in acting:
                r.hook(phase, self._act)

    async def _send(self, mail: Mail, ctx: HookContext) -> None:
        self._world.did[f"mail {mail.key}"] += 1
        if mail.key.startswith("dead"):
            raise RuntimeError("no such address")

    def _bump(self, bump: Bump, ctx: HookContext) -> StateCommand:
        self._world.did[f"bump {bump.key} {bump.again}"] += 1
        command = StateCommand().update(COUNT, 100)
        return command.schedule(Bump(bump.key, False)).emit(Mail(f"bumped {bump.key}")) if bump.again else command

    def _before(self, ctx: HookContext) -> Any:
        assert ctx.call is not None
        call = self._world.calls.get(ctx.call.args.get("key", ""))
        match call.hook if call is not None else "":
            case "block":
                return Block(f"{ctx.call.args['key']} is forbidden")
            case "end":
                return Block(f"{ctx.call.args['key']} ends it", end_run=True)
            case "set":
                return SetResult(ToolResult.success(f"{ctx.call.args['key']} is set"))
            case "suspend" if ctx.decision is None:
                key = ctx.call.args["key"]
                return Suspend(SuspendTicket(f"h-{key}", "ask", f"may {key}?", {"key": key, "n": -1}))
            case _:
                return StateCommand().update(BEFORE, 1)

    def _after(self, ctx: HookContext) -> Any:
        assert ctx.call is not None
        command = StateCommand().update(AFTER, 1)
        label = self._world.label_of.get(ctx.call.args.get("key", ""))
        acts = self._world.plans[label].acts if label else ()
        for act in acts:
            if act.phase == "after_tool" and act.step == ctx.step:
                self._do(command, act.what, f"{label}/after/{ctx.call.args['key']}", ctx)
        return command

    def _act(self, ctx: HookContext) -> StateCommand | None:
        plan, _, _ = self._world.decide(ctx.messages)
        acts = [act for act in plan.acts if act.phase == ctx.phase and act.step == ctx.step]
        if not acts:
            return None
        command = StateCommand()
        for act in acts:
            self._do(command, act.what, f"{plan.label}/{ctx.phase}/{ctx.step}", ctx)
        return command

    def _do(self, command: StateCommand, what: str, key: str, ctx: HookContext) -> None:
        from .program import ask

        match what:
            case "count":
                command.update(COUNT, 10)
            case "hidden":
                command.update(HIDDEN, 10)
            case "owner":
                command.update(OWNER, key)
            case "compact":
                plan, step, _ = self._world.decide(ctx.messages)
                command.schedule(UseSummary(len(ctx.messages), f"do {plan.label} +{step}"))
            case _:
                ask(command, what, key)
