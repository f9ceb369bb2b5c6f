"""The callers that wait for runs elsewhere."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ..core.context import CancellationToken


class Callers:
    """The tokens of the callers that wait for each run."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[CancellationToken]] = {}

    @contextmanager
    def waiting(self, run_id: str, token: CancellationToken) -> Generator[None]:
        """Note that a caller waits for a run."""
        waiting = self._tokens.setdefault(run_id, [])
        waiting.append(token)
        try:
            yield
        finally:
            waiting.remove(token)
            if not waiting:
                self._tokens.pop(run_id, None)

    def abort(self, run_id: str) -> None:
        """Set the tokens of all who wait for a run."""
        for token in self._tokens.get(run_id, ()):
            token.set("aborted")
