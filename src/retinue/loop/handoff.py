"""Handoff: another agent goes on with the same run, on the same conversation and state."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from ..core.agents import Agent, Toolbox
from ..core.errors import RetinueError
from ..core.events import Handoff
from ..core.messages import Message, Visibility
from ..core.model import Model
from .phases import HookTable
from .scope import RunScope

MAX_HANDOFFS = 8
MAX_SAME_HANDOFFS = 2

Equip = Callable[["RunScope", str], "Equipment"]


class Equipment(Struct, frozen=True, gc=False):
    """What an agent brings to a run."""

    agent: Agent
    model: Model
    toolbox: Toolbox
    hooks: HookTable


def hand_over(run: RunScope) -> None:
    """Give the run to the agent that was asked for, or tell the present one why not."""
    asked, run.next_agent = run.next_agent, None
    if asked is None:
        return
    try:
        problem = _loop(run, asked.to)
        equipment = None if problem else run.equip(run, asked.to)
    except RetinueError as exc:
        problem, equipment = str(exc), None
    if equipment is None:
        text = f"The handoff to {asked.to} was refused: {problem}. Go on yourself."
        run.conversation.append(Message.user(text, id=run.next_message_id(), visibility=Visibility.INTERNAL))
        run.tell(f"handoff to {asked.to!r} refused: {problem}", "handoff_refused")
        return
    run.emit(Handoff(to_agent=asked.to, reason=asked.reason))
    run.handoffs = (*run.handoffs, f"{run.agent.name} → {asked.to}")
    run.agent, run.model = equipment.agent, equipment.model
    run.toolbox, run.hooks, run.has_hooks = equipment.toolbox, equipment.hooks, equipment.hooks.has_any
    run.descriptors, run.system = equipment.toolbox.descriptors, equipment.agent.system
    run.identity = replace(run.identity, agent=equipment.agent.name)


def _loop(run: RunScope, target: str) -> str | None:
    """Why one more handoff would go round in circles, or None."""
    if target == run.agent.name:
        return "you are that agent"
    if len(run.handoffs) >= MAX_HANDOFFS:
        return f"there were {MAX_HANDOFFS} handoffs in this run already"
    if run.handoffs.count(f"{run.agent.name} → {target}") >= MAX_SAME_HANDOFFS:
        return f"you handed over to {target} {MAX_SAME_HANDOFFS} times in this run already"
    return None
