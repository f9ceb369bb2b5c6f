"""Port: the journal. Whatever a run learns from outside goes through it, so that it can be told again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")

Kind = Literal["model", "tool", "child"]


class Journal(Protocol):
    """Contract: a key is recorded once. Asked again for a recorded key, the journal gives the recorded value and
    does not do the work; `about` says what the work was asked for, so that a different question can be noticed."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def new_id(self, prefix: str) -> str:
        """A fresh id that starts with `prefix`."""
        ...

    async def record(
        self,
        kind: Kind,
        key: str,
        about: Any,
        work: Callable[..., Awaitable[T]],
        *args: Any,
        instead: Callable[[], T] | None = None,
    ) -> T:
        """Do the work and remember what came of it, or give what is remembered. Errors are not remembered.

        With `instead` the work may not be done twice: where it was begun and nobody knows what came of it, that is
        what came of it.
        """
        ...

    def child(self, run_id: str) -> Journal:
        """The journal of a child of this run."""
        ...
