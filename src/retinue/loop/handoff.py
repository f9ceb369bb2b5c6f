"""Handoff: another agent continues the same run, on the same conversation and state."""

from __future__ import annotations

from ..core.errors import RetinueError
from ..core.events import Handoff
from ..core.messages import Message, Visibility
from ..core.rows import Private
from .execution import Execution

MAX_HANDOFFS = 8
MAX_SAME_HANDOFFS = 2


def hand_over(x: Execution) -> None:
    """Give the run to the agent that was asked for, or tell the present one why not."""
    asked = x.state.next_agent
    if asked is None:
        return
    try:
        problem = _loop(x, asked.to)
        equipment = None if problem else x.equip(x, asked.to)
    except RetinueError as exc:
        problem, equipment = str(exc), None
    if equipment is None:
        text = f"The handoff to {asked.to} was refused: {problem}. Go on yourself."
        message = Message.user(text, id=x.next_message_id(), visibility=Visibility.INTERNAL)
        private = Private(message=message, refused_handoff=True)
        x.tell(f"handoff to {asked.to!r} refused: {problem}", "handoff_refused", private)
        return
    x.emit(Handoff(to_agent=asked.to, reason=asked.reason))
    x.use(equipment)


def _loop(x: Execution, target: str) -> str | None:
    """Why one more handoff would go round in circles, or None."""
    handoffs, present = x.state.handoffs, x.agent.name
    if target == present:
        return "you are that agent"
    if len(handoffs) >= MAX_HANDOFFS:
        return f"there were {MAX_HANDOFFS} handoffs in this run already"
    pairs = list(zip((x.state.first_agent, *handoffs), handoffs, strict=False))
    if pairs.count((present, target)) >= MAX_SAME_HANDOFFS:
        return f"you handed over to {target} {MAX_SAME_HANDOFFS} times in this run already"
    return None
