"""Decisions: what a human answers to a suspended call."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from .ids import unique


class Decision(Struct, frozen=True, kw_only=True):
    """Resume a suspended call with a payload, or cancel it. The same `id` twice is one decision."""

    id: str
    action: Literal["resume", "cancel"]
    payload: Any = None
    reason: str | None = None

    @classmethod
    def resume(cls, payload: Any = None, *, id: str | None = None) -> Decision:
        """Go on, with what the human gave."""
        return cls(id=id or _new_id(), action="resume", payload=payload)

    @classmethod
    def cancel(cls, reason: str | None = None, *, id: str | None = None) -> Decision:
        """Do not go on; the model is told why."""
        return cls(id=id or _new_id(), action="cancel", reason=reason)


def _new_id() -> str:
    return f"decision_{unique()}"
