"""Child runs: what a tool says when it starts another agent."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from .messages import Message
from .runs import Limits

if TYPE_CHECKING:
    from .context import ToolContext


class ParentContext(Struct, frozen=True, kw_only=True, gc=False):
    """The lineage of a child. Without one, the run is the root of its own log."""

    parent_run_id: str | None = None
    parent_thread_id: str | None = None
    parent_tool_call_id: str | None = None
    user_id: str | None = None
    depth: int = 0
    context: Mapping[str, Any] = {}

    @classmethod
    def of(cls, ctx: ToolContext) -> ParentContext:
        """The lineage of a child that this call starts."""
        return cls(
            parent_run_id=ctx.run.run_id,
            parent_thread_id=ctx.run.thread_id,
            parent_tool_call_id=ctx.call_id,
            user_id=ctx.run.user_id,
            depth=ctx.run.depth + 1,
            context=ctx.context,
        )


class Child(Struct, frozen=True):
    """One of several children to start together."""

    agent: Any
    """An agent or its name."""
    input: str | Message | tuple[Message, ...]
    seed: Any = None
    timeout: float | None = None
    limits: Limits | None = None


class ChildErrorForwarding(StrEnum):
    """The ways in which a passthrough sink treats a child's errors."""

    WRAP = "wrap"
    """Show them as diagnostics in the call's output."""
    RAW = "raw"
    """Pass them on as error events, for an audience that knows they do not end the parent."""
    DROP = "drop"
