"""Runs on other servers: what the backends of all protocols share."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from ..core.backend import BackendProfile, RunRequest
from ..core.concurrency import Backoff, CancellationToken, Cause, supervise, until_stopped
from ..core.errors import ExecutionBackendError
from ..core.events import Custom, ErrorRaised, Event, TextDelta
from ..core.messages import Message
from ..core.runs import REMOTE_KEY, WAITING, RunResult, RunStatus
from ..core.state import PersistedState
from .http_client import Garbled, NotSent, ServerClient

T = TypeVar("T")
C = TypeVar("C", bound=ServerClient)

PATIENCE = 60.0
"""Seconds for which a server may be unreachable before a run there is given up on."""
SUBMIT_PATIENCE = 10.0
CONNECT_PATIENCE = 1.0
"""Seconds for which a call tries to reach a server that accepts no connection, before it sends a new run there."""
STOP_SECONDS = 2.0
"""Seconds in which a server should take a cancel or a run that was just sent, and again in which the task should have
stopped."""
GARBLED_TRIES = 5
"""Answers in a row that cannot be read, after which a server is taken for one of another kind."""
DEADLINE = 7200.0
"""The default limit in seconds for a remote run."""
MOST_WORDS = 20_000
"""Characters of a question or of an error."""
_TERMINATION = {
    RunStatus.COMPLETED: "natural",
    RunStatus.CANCELLED: "cancelled",
    RunStatus.TIMEOUT: "timeout",
    **dict.fromkeys(WAITING, "suspended"),
}
"""The terminations of runs; those that are missing ended by an error."""

Outcome = tuple[RunStatus, str | None]
"""The status of a run that is no longer followed, and its error."""


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


class Streamed:
    """The text that was emitted so far. To add a piece, or to see that a text is too short to continue it, costs nothing."""

    def __init__(self, text: str) -> None:
        self._pieces, self.size = [text], len(text)

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self.size += len(text)

    @property
    def text(self) -> str:
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def rest_of(self, full: str) -> str | None:
        """Return what a text has after the emitted text; None if it does not continue that."""
        if len(full) < self.size or not full.startswith(self.text):
            return None
        return full[self.size :]


class Follower(ABC, Generic[C]):
    """One run and its counterpart on a server. A subclass speaks the protocol of the server."""

    def __init__(self, backend: RemoteBackend[C], request: RunRequest) -> None:
        self._client, self._agent, self._patience = backend.client, backend.agent, backend.patience
        self.request, self._token = request, request.cancellation
        self.run_id, self._name = request.identity.run_id, request.identity.agent
        self.noted: Mapping[str, Any] = request.remote if request.is_dispatched else {}
        """What was stored of the run there, perhaps by another process."""
        self.accepted = asyncio.Event()
        if request.is_dispatched:
            self.accepted.set()
        self.refused: str | None = None
        """Why the server refused an answer."""
        self._streamed = Streamed(request.streamed)

    async def submit(self) -> None:
        """Send a new run. If this raises, the server has not accepted it. A protocol that sends and follows with one
        request does so in `follow`."""
        return

    async def withdraw(self) -> None:
        """Have the server stop a run that it may have got while `submit` was cancelled."""
        return

    @abstractmethod
    async def follow(self) -> Outcome:
        """Wait until the run has ended or waits. Short outages of the server are retried.

        Raise ExecutionBackendError if the server refuses, and ConnectionError if it is away for too long."""

    @abstractmethod
    async def stop(self, work: asyncio.Task[Outcome]) -> str | None:
        """Ask the server to stop the run and wait a limited time for its end. Return a problem, if there is one.

        `work` is `follow`, which still runs."""

    @property
    def has_ended(self) -> bool:
        """True if the server is known to have ended the run."""
        return False

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """True if the run there has ended as it should."""

    @abstractmethod
    def ids(self) -> dict[str, Any]:
        """Return the ids of the run there, in their stored form."""

    @abstractmethod
    def result(self, status: RunStatus, error: str | None) -> RunResult:
        """Return the result of the run."""

    def accept(self) -> None:
        """Report, once, that the server has the run."""
        if not self.accepted.is_set():
            self.accepted.set()
            if self.request.accepted is not None:
                self.request.accepted()

    def release(self) -> None:
        """Note that the run is no longer followed."""
        return

    def _make_result(
        self, status: RunStatus, error: str | None, response: str | None, answer: Message | None = None, **more: Any
    ) -> RunResult:
        identity = self.request.identity
        if answer is None and response:
            answer = Message.assistant(response)
        return RunResult(
            status=status,
            run_id=identity.run_id,
            thread_id=identity.thread_id,
            response=response,
            state=PersistedState(extensions={REMOTE_KEY: self.ids()}),
            error=error,
            termination=more.pop("termination", "") or _TERMINATION.get(status, "error"),
            messages=self.request.messages if answer is None else (*self.request.messages, answer),
            **more,
        )

    async def _retry(self, ask: Callable[[], Awaitable[T]], patience: float | None = None) -> T:
        return await retry(ask, self._patience if patience is None else patience, self._token, self._connect_patience)

    @property
    def _connect_patience(self) -> float:
        """The seconds in which a server may refuse connections: short only for a call that waits for a new run."""
        is_new = not (self.accepted.is_set() or self.request.detached)
        return min(CONNECT_PATIENCE, self._patience) if is_new else self._patience

    @property
    def _submit_patience(self) -> float:
        """The seconds in which sending the run is retried: long for a background task, short for a call that waits."""
        return self._patience if self.request.detached else min(SUBMIT_PATIENCE, self._patience)

    def _texts_to_send(self) -> list[str]:
        texts = [message.text for message in self.request.remote_messages() if message.text]
        if not texts:
            raise ExecutionBackendError(self._name, "there is no text to send: a remote agent reads user messages")
        return texts

    def _emit(self, event: Event) -> None:
        if self.request.emit is not None:
            self.request.emit(event)

    def _emit_text(self, text: str) -> None:
        self._streamed.add(text)
        self._emit(TextDelta(delta=text))

    def _report(self, status: str, **more: str) -> None:
        """Report the status of the run there."""
        self._emit(Custom(data={"type": "remote_task", **more, "status": status}))

    def _refuse(self, reason: str) -> None:
        """Report that an answer was refused; the question stays open."""
        self.refused = reason
        self._emit(ErrorRaised(message=reason, code="decision_refused"))

    def _note(self) -> None:
        """Store the ids of the run there."""
        if self.request.note_remote is not None:
            self.request.note_remote(self.ids())


class RemoteBackend(ABC, Generic[C]):
    """A backend that reaches its server through a client. `agent` is the name of the agent there, for protocols that send
    one."""

    capabilities = BackendProfile(
        cancellation="remote_abort",
        continuation="remote",
        decisions="durable",
        persistence="stored",
        waits="input",
        transcript="user_messages",
    )

    def __init__(self, client: C, agent: str = "", *, patience: float | None = None) -> None:
        self.client, self.agent, self._callers = client, agent, Callers()
        self.patience = PATIENCE if patience is None else patience
        self.tasks: dict[str, str] = {}
        """The runs at work, by the ids of their tasks there, for protocols whose servers choose those ids."""

    def profile(self) -> BackendProfile:
        return self.capabilities

    @property
    def host(self) -> str:
        """The server, as receipts name it."""
        return urlsplit(self.client.url).netloc.rpartition("@")[2] or self.client.url

    async def close(self) -> None:
        await self.client.close()

    async def abort(self, run_id: str) -> None:
        self._callers.abort(run_id)

    @abstractmethod
    def follower(self, request: RunRequest) -> Follower[C]:
        """Return the follower of a run."""

    async def run(self, request: RunRequest) -> RunResult:
        if not request.is_dispatched and request.cancellation.is_set():
            raise ExecutionBackendError(request.identity.agent, "it was cancelled before it was sent")
        follower = self.follower(request)
        if request.is_dispatched and request.accepted is not None:
            request.accepted()
        with self._callers.waiting(request.identity.run_id, request.cancellation):
            try:
                if not request.is_dispatched:
                    await self._submit(follower)
                status, error = await self._attend(follower)
            except ConnectionError as exc:  # before the server has accepted it
                raise ExecutionBackendError(request.identity.agent, str(exc)) from exc
            finally:
                follower.release()
        return follower.result(status, error)

    async def _submit(self, follower: Follower[C]) -> None:
        """Send a new run. If the request is cancelled before the server has accepted it, raise ExecutionBackendError."""

        def stop(work: asyncio.Task[None], cause: Cause) -> None:
            if cause == "cancelled":
                work.cancel()  # else it may still arrive: a cancel that overtakes the run would stop nothing

        token = follower.request.cancellation
        end = await supervise(follower.submit(), token=token, grace=STOP_SECONDS, stop=stop)
        if not end.has_no_outcome:
            return end.result()
        if not follower.accepted.is_set():
            with suppress(ConnectionError, ExecutionBackendError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await follower.withdraw()
            raise self._not_accepted(follower)

    def _not_accepted(self, follower: Follower[C], problem: str | None = None) -> ExecutionBackendError:
        reason = f"{self.client.url} had not accepted it when it was stopped ({follower.request.cancellation.reason})"
        return ExecutionBackendError(follower.request.identity.agent, f"{reason}; {problem}" if problem else reason)

    async def _attend(self, follower: Follower[C]) -> Outcome:
        """Follow the run until it ends or waits; stop it if the request is cancelled or its time is over."""
        request, token = follower.request, follower.request.cancellation
        seconds = DEADLINE if request.timeout is None else request.timeout
        async with until_stopped(follower.follow(), token.wait(), seconds) as work:
            if work.done() and (not token.is_set() or follower.has_ended):
                try:
                    return work.result()
                except (ConnectionError, ExecutionBackendError) as exc:
                    if not follower.accepted.is_set():
                        raise
                    return RunStatus.FAILED, reason_of(exc)
            status, reason = RunStatus.TIMEOUT, f"it took longer than {seconds:g} s"
            if token.is_set():
                status, reason = RunStatus.CANCELLED, token.reason or "cancelled"
            problem = await follower.stop(work)
        if not follower.accepted.is_set():
            raise self._not_accepted(follower, problem)
        if follower.is_complete:
            return RunStatus.COMPLETED, None
        return status, f"{reason}; {problem}" if problem else reason


def reason_of(exc: Exception) -> str:
    return exc.reason if isinstance(exc, ExecutionBackendError) else str(exc)


async def retry(
    ask: Callable[[], Awaitable[T]], patience: float, token: CancellationToken, connect_patience: float = inf
) -> T:
    """Retry while the server cannot be reached, until patience ends or the token is set."""
    backoff, garbled, connecting_until = Backoff(patience=patience), 0, time.monotonic() + connect_patience
    while True:
        try:
            return await ask()
        except ConnectionError as exc:
            garbled += isinstance(exc, Garbled)
            is_refused = isinstance(exc, NotSent) and time.monotonic() >= connecting_until
            if token.is_set() or garbled == GARBLED_TRIES or is_refused:
                raise
            await backoff.wait(exc)
