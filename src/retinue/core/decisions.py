"""Decisions: the answers of humans to suspended calls."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from .errors import ConfigurationError
from .runs import unique


class Decision(Struct, frozen=True, kw_only=True):
    """The answer to a suspended call. The same `id` twice is one decision."""

    id: str
    action: Literal["resume", "cancel", "answer", "approve", "reject"]
    """The log has "resume" for an approval and a rejection."""
    payload: Any = None
    reason: str | None = None
    by: str | None = None
    """The user who decided, as the boundary stamps it that took the decision: `local` where that is this process, `link`
    for the holder of a link. What a caller writes here is replaced."""

    @classmethod
    def approve(cls, args: Mapping[str, Any] | None = None, *, id: str | None = None) -> Decision:
        """Allow a call that waits for permission. `args` replaces its arguments; wrong ones are refused."""
        given: Any = args
        if given is not None and not isinstance(given, Mapping):
            raise ConfigurationError(
                f"args is a dict of new arguments, not {short_repr(given)}: write Decision.approve()"
            )
        payload = {"approved": True} if args is None else {"approved": True, "args": dict(args)}
        return cls(id=id or _new_id(), action="approve", payload=payload)

    @classmethod
    def reject(cls, message: str | None = None, *, id: str | None = None) -> Decision:
        """Refuse a call that waits for permission; the model reads `message`."""
        payload = {"approved": False} if message is None else {"approved": False, "message": message}
        return cls(id=id or _new_id(), action="reject", payload=payload)

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


LOCAL_USER = "local"
"""The user of a decision that was made in this process."""


def stamped(given: Mapping[str, Decision], by: str) -> Mapping[str, Decision]:
    """Return decisions as those of a user. What is no decision is left as it is, for the check that refuses it."""
    pairs: Any = given.items() if isinstance(given, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if pairs is None:
        return given
    return {name: replace(one, by=by) if isinstance(one, Decision) else one for name, one in pairs}


def _new_id() -> str:
    return f"decision_{unique()}"
