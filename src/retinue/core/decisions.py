"""Decisions: the answers of humans to suspended calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from .ids import unique


class Decision(Struct, frozen=True, kw_only=True):
    """The answer to a suspended call. The same `id` twice is one decision."""

    id: str
    action: Literal["resume", "cancel", "answer"]
    payload: Any = None
    reason: str | None = None

    @classmethod
    def approve(cls, args: Mapping[str, Any] | None = None, *, id: str | None = None) -> Decision:
        """Allow a call that `Permissions(ask=…)` stopped. `args` replaces its arguments, which are checked again."""
        return cls.resume({"approved": True} if args is None else {"approved": True, "args": dict(args)}, id=id)

    @classmethod
    def reject(cls, message: str | None = None, *, id: str | None = None) -> Decision:
        """Refuse a call that `Permissions(ask=…)` stopped; the model reads `message`."""
        return cls.resume({"approved": False} if message is None else {"approved": False, "message": message}, id=id)

    @classmethod
    def answer(cls, value: Any, *, id: str | None = None) -> Decision:
        """Use `value` as the result of the call; the tool does not run."""
        return cls(id=id or _new_id(), action="answer", payload=value)

    @classmethod
    def resume(cls, payload: Any = None, *, id: str | None = None) -> Decision:
        """Continue the call with a payload, as the resume mode of its ticket says."""
        return cls(id=id or _new_id(), action="resume", payload=payload)

    @classmethod
    def cancel(cls, reason: str | None = None, *, id: str | None = None) -> Decision:
        """Cancel the call; the model reads the reason."""
        return cls(id=id or _new_id(), action="cancel", reason=reason)


def _new_id() -> str:
    return f"decision_{unique()}"
