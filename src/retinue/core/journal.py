"""Port: the journal. Whatever a run learns from outside goes through it, so that it can be told again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")

Kind = Literal["model", "tool", "child", "effect"]


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

    def bind(self, run: Any) -> None:
        """Tell the journal which run it is of, once there is one."""
        ...

    keeps: bool
    """Whether it outlives this process. One that does not is never asked for what follows."""

    async def caught_up(self) -> None:
        """Return when what was recorded before has been told again, as far as the run had come."""
        ...

    def recall(self, key: str) -> bytes | None:
        """What was noted under a key."""
        ...

    def note(self, key: str, body: bytes, *, with_next: bool = False) -> None:
        """Note something that nobody waits for: it is kept before anything that is told or recorded after it.

        With `with_next` only together with the next thing recorded of this run, for what may as well be done again.
        """
        ...
