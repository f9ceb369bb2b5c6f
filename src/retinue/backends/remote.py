"""Runs on other servers: what the backends of all protocols share."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from ..core.backend import RunRequest
from ..core.context import CancellationToken
from ..core.errors import ExecutionBackendError
from ..core.runs import WAITING, RunStatus
from .http_client import Garbled

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
PATIENCE = 60.0
"""Seconds for which a server may be unreachable before a run there is given up on."""
SUBMIT_PATIENCE = 10.0
STOP_SECONDS = 2.0
"""Seconds in which a server should take a cancel, and again in which the task should have stopped."""
GARBLED_TRIES = 5
"""Answers in a row that cannot be read, after which a server is taken for one of another kind."""
DEADLINE = 7200.0
"""The default limit in seconds for a remote run."""
TERMINATION = {
    RunStatus.COMPLETED: "natural",
    RunStatus.CANCELLED: "cancelled",
    RunStatus.TIMEOUT: "timeout",
    **dict.fromkeys(WAITING, "suspended"),
}
"""The terminations of runs; those that are missing ended by an error."""


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
        """Set the tokens of all callers that wait for a run."""
        for token in self._tokens.get(run_id, ()):
            token.set("aborted")


class _Client(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=_Client)


class RemoteBackend(Generic[C]):
    """A backend that reaches its server through a client."""

    def __init__(self, client: C, patience: float | None) -> None:
        self.client, self._callers = client, Callers()
        self._patience = PATIENCE if patience is None else patience

    async def close(self) -> None:
        await self.client.close()

    async def abort(self, run_id: str) -> None:
        self._callers.abort(run_id)


def texts_to_send(request: RunRequest) -> list[str]:
    """Return the texts of a request to send to a server; raise if there are none."""
    texts = [message.text for message in request.remote_messages() if message.text]
    if not texts:
        name = request.identity.agent
        raise ExecutionBackendError(name, "there is no text to send: a remote agent reads user messages")
    return texts


def submit_patience(request: RunRequest, patience: float) -> float:
    """Return how many seconds to retry sending a run to a server: long for a background task, short for a call that
    waits."""
    return patience if request.detached else min(SUBMIT_PATIENCE, patience)


def seconds_for(request: RunRequest) -> float:
    return DEADLINE if request.timeout is None else request.timeout


def why_stopped(request: RunRequest) -> tuple[RunStatus, str]:
    """Return the status and the reason for a run that is no longer followed and has not ended."""
    token = request.cancellation
    if token.is_set():
        return RunStatus.CANCELLED, token.reason or "cancelled"
    return RunStatus.TIMEOUT, f"it took longer than {seconds_for(request):g} s"


async def retry(ask: Callable[[], Awaitable[T]], patience: float, token: CancellationToken) -> T:
    """Retry while the server cannot be reached, until patience ends or the token is set."""
    deadline, pause, garbled = time.monotonic() + patience, FIRST_PAUSE, 0
    while True:
        try:
            return await ask()
        except ConnectionError as exc:
            garbled += isinstance(exc, Garbled)
            if time.monotonic() >= deadline or token.is_set() or garbled == GARBLED_TRIES:
                raise
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 2, LONGEST_PAUSE)
