"""Todos: a list that the model keeps of its own work, and that people see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from ..core.errors import InvalidArguments
from ..core.functions import tool
from ..core.hooks import HookContext, Registrar
from ..core.messages import Role
from ..core.plugins import AddContextMessage, Plugin
from ..core.results import ToolOutput
from ..core.state import StateCommand, StateKey

MOST_ITEMS = 200
MOST_CHARACTERS = 1000

_MARKS = {"pending": " ", "in_progress": ">", "completed": "x"}


@dataclass(frozen=True)
class TodoItem:
    """One thing to do."""

    text: str
    status: Literal["pending", "in_progress", "completed"] = "pending"

    @property
    def line(self) -> str:
        return f"[{_MARKS[self.status]}] {self.text}"


def _last(_: tuple[TodoItem, ...], written: tuple[TodoItem, ...]) -> tuple[TodoItem, ...]:
    return written


TODOS: StateKey[tuple[TodoItem, ...], tuple[TodoItem, ...]] = StateKey(
    "retinue.todos",
    tuple[TodoItem, ...],
    reduce=_last,
    merge="commutative",
    scope="thread",
    persistent=True,
    default=tuple[TodoItem, ...],
)
"""The todos of a conversation. The last list that is written counts."""


@tool(idempotent=True)
def todo_write(items: list[TodoItem]) -> ToolOutput:
    """Write the list of what you have to do, whole: it replaces the list before.

    Use it for work of three steps or more. Write the list before you begin, have one item in_progress at a time, and write
    the list again as soon as an item is completed or something new turns up. The user sees the list.

    Args:
        items: All items in the order of the work, the completed ones too. An empty list clears it.
    """
    if len(items) > MOST_ITEMS:
        raise InvalidArguments(f"there are {len(items)} items, at most {MOST_ITEMS} may be: put small ones together")
    for number, item in enumerate(items, 1):
        if not item.text.strip():
            raise InvalidArguments(f"item {number} has no text: say what is to do")
        if len(item.text) > MOST_CHARACTERS:
            advice = "say it shorter, and write the details to a file"
            raise InvalidArguments(
                f"item {number} has {len(item.text):,} characters, at most {MOST_CHARACTERS:,}: {advice}"
            )
    counts = [(status, sum(item.status == status for item in items)) for status in _MARKS]
    said = ", ".join([f"{count} {status.replace('_', ' ')}" for status, count in counts if count])
    return ToolOutput(f"{len(items)} todos: {said}" if items else "no todos", {TODOS: tuple(items)})


class Todo(Plugin):
    """Gives the model the tool `todo_write`, and shows it the list while something is open.

    Each conversation has a list of its own, also that of a sub-agent. The list comes after the conversation in a request,
    so that it does not break the provider's cache.
    """

    name = "todo"
    inherited = True

    def register(self, r: Registrar) -> None:
        r.key(TODOS)
        r.tool(todo_write)
        r.hook("step_start", self._show, priority=90)

    def _show(self, ctx: HookContext) -> StateCommand | None:
        items = ctx.state(TODOS)
        if all(item.status == "completed" for item in items):
            return None
        results = takewhile(lambda said: said.role is Role.TOOL, reversed(ctx.messages))
        if any(one.name == todo_write.name for one in results):  # it has just written the list
            return None
        return StateCommand().schedule(AddContextMessage(render_todos(items)))


def render_todos(items: Iterable[TodoItem]) -> str:
    """Return the list for the model."""
    lines = "\n".join([f"- {item.line}" for item in items])
    return f"# Todos\n\n{lines}\n\nKeep the list true with todo_write. The user has not seen this message."
