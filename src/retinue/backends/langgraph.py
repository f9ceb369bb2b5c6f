"""Runs on servers that speak LangGraph's HTTP API: a run here is one or more runs on a thread there."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar
from uuid import UUID, uuid5

from ..core.backend import BackendProfile, RunRequest
from ..core.content import to_json_text
from ..core.errors import ExecutionBackendError
from ..core.events import Custom, ErrorRaised, TextDelta
from ..core.messages import Message
from ..core.results import SuspendTicket
from ..core.runs import REMOTE_KEY, RunResult, RunStatus
from ..core.state import PersistedState
from ..core.together import until_stopped
from ..wire.langgraph import (
    QUESTION,
    RUN_ID,
    GraphRun,
    GraphState,
    decode_run,
    decode_runs,
    decode_state,
    error_in,
    run_body,
    said_in,
)
from ..wire.sse import EventDecoder, read_event
from .http_client import MOST_BYTES, NOT_OFFERED, EventsNotOffered, Garbled, HttpClient
from .remote import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STOP_SECONDS,
    TERMINATION,
    RemoteBackend,
    retry,
    seconds_for,
    submit_patience,
    texts_to_send,
    why_stopped,
)

T = TypeVar("T")

_THREADS = UUID("3f7d9a52-2f0f-4b5e-9c1d-6f0a4f3f5b11")
"""The namespace of the ids of threads."""
_ID = re.compile("[A-Za-z0-9-]{1,64}")
_FROM_START = "-1"
_TRIES = 5
"""Streams in a row that break before their first new event, after which the words of a run that has ended are given up."""
_MOST_WORDS = 20_000
_STATUS = {
    "success": RunStatus.COMPLETED,
    "error": RunStatus.FAILED,
    "timeout": RunStatus.TIMEOUT,
    "interrupted": RunStatus.CANCELLED,
}


class LangGraphBackend(RemoteBackend[HttpClient]):
    """Executes runs on a LangGraph server. The name of the agent is that of a graph or assistant there."""

    def __init__(self, client: HttpClient, assistant: str, *, patience: float | None = None) -> None:
        super().__init__(client, patience)
        self._assistant = assistant

    def profile(self) -> BackendProfile:
        return BackendProfile(
            cancellation="remote_abort",
            continuation="remote",
            decisions="durable",
            waits="input",
            transcript="user_messages",
            output="text_and_artifacts",
        )

    async def run(self, request: RunRequest) -> RunResult:
        follower = GraphFollower(self.client, self._assistant, request, self._patience)
        with self._callers.waiting(request.identity.run_id, request.cancellation):
            if not request.is_dispatched:
                await follower.submit()
            if request.accepted is not None:
                request.accepted()
            follower.note()
            status, error = await self._attend(follower, request)
        return _result(request, follower, status, error)

    async def _attend(self, follower: GraphFollower, request: RunRequest) -> tuple[RunStatus, str | None]:
        """Follow the run until it ends or waits; stop it if the request is cancelled or its time is over."""
        token = request.cancellation
        async with until_stopped(follower.follow(), token.wait(), seconds_for(request)) as work:
            if work.done() and not token.is_set():
                try:
                    return work.result()
                except ExecutionBackendError as exc:
                    return RunStatus.FAILED, exc.reason
                except ConnectionError as exc:
                    return RunStatus.FAILED, str(exc)
        status, reason = why_stopped(request)
        problem = await follower.stop()
        if follower.status == "success" and not follower.state.interrupts:
            return RunStatus.COMPLETED, None
        return status, f"{reason}; {problem}" if problem else reason


class GraphFollower:
    """One run and its counterpart on the server: a thread, and the last run on it.

    The thread id is derived from the first run of a conversation. Each run there has the id of the run here in its metadata.
    So a run whose answer was lost is found again, and none is started twice.
    """

    def __init__(self, client: HttpClient, assistant: str, request: RunRequest, patience: float) -> None:
        self._client, self._assistant, self._request, self._patience = client, assistant, request, patience
        self._token, self._own_id = request.cancellation, request.identity.run_id
        noted = request.remote
        self.thread_id = str(noted.get("context_id") or uuid5(_THREADS, self._own_id))
        self._remote_id = str(noted.get("task_id", "")) if request.is_dispatched else ""
        self._questions = int(noted.get("questions", 0)) if request.is_dispatched else 0
        self._asked: dict[str, str] = dict(noted.get("asked", {})) if request.is_dispatched else {}
        self._text_from = int(noted.get("text_from", 0)) if request.is_dispatched else 0
        """The length of the text before that of the last run there."""
        self._expected = request.streamed[self._text_from :]
        """Text that is in the log already and comes again when a stream is read from its start."""
        self._streamed, self._is_in_step = [request.streamed], True
        self._error, self._size = "", len(request.streamed)
        self._event, self._events = _FROM_START, set[str]()
        """The id of the last event of the run there, and those of all that were read."""
        self.status = str(noted.get("status", "")) if request.is_dispatched else ""
        self.state = GraphState()
        self.refused: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._streamed)

    def ids(self) -> dict[str, Any]:
        """The ids of the run there, in their stored form."""
        known = {"protocol": "langgraph", "task_id": self._remote_id, "context_id": self.thread_id}
        kept = {"status": self.status, "questions": self._questions, "asked": self._asked}
        return {**known, **kept, "text_from": self._text_from}

    def note(self) -> None:
        if self._request.note_remote is not None:
            self._request.note_remote(self.ids())

    # --- the first message, and the answers

    async def submit(self) -> None:
        """Start the run there. If this raises, the server has not accepted it."""
        name = self._request.identity.agent
        texts = texts_to_send(self._request)
        if self._token.is_set():
            raise ExecutionBackendError(name, "it was cancelled before it was sent")
        body = run_body(self._assistant, self._own_id, texts=texts)
        try:
            await self._start(
                body, submit_patience(self._request, self._patience), look_first=self._request.may_be_sent
            )
        except ConnectionError as exc:
            raise ExecutionBackendError(name, str(exc)) from exc

    async def _start(self, body: bytes, patience: float, *, look_first: bool) -> None:
        """Start a run on the thread, unless it exists: the answer to an earlier request may have been lost."""
        may_be_there = look_first

        async def start() -> GraphRun:
            nonlocal may_be_there
            if may_be_there and (found := await self._find()) is not None:
                return found
            may_be_there = True
            status, data = await self._client.ask("POST", f"/threads/{self.thread_id}/runs", body)
            if status >= 400:
                raise self._client.refused(status, data, "did not take the run")
            return self._read(decode_run, data)

        run = await retry(start, patience, self._token)
        if not _ID.fullmatch(run.run_id):
            raise ExecutionBackendError(self._client.name, f"{self._client.url} gave the run an id that cannot be used")
        self._remote_id, self.status = run.run_id, run.status
        self._event, self._events = _FROM_START, set[str]()

    async def _find(self) -> GraphRun | None:
        """Return the run there that has the id of this one and answers the same question."""
        status, data = await self._client.ask("GET", f"/threads/{self.thread_id}/runs?limit=100", None)
        if status in NOT_OFFERED:
            return None
        if status >= 400:
            raise self._client.refused(status, data, "did not list its runs")
        wanted = (self._own_id, self._questions)
        found = self._read(decode_runs, data)
        return next((one for one in found if (one.metadata.get(RUN_ID), one.metadata.get(QUESTION)) == wanted), None)

    async def _decide(self) -> str | None:
        """Pass answers on; if a human ends the run instead, return the reason."""
        decisions = self._request.decisions
        for decision in decisions.values():
            if decision.action == "cancel":
                return decision.reason or "cancelled by a decision"
        answers = {self._asked.get(path, ""): one.payload for path, one in decisions.items() if one.payload is not None}
        if not answers:
            self.refused = "the question needs an answer: write Decision.resume(value)"
            return None
        body = run_body(self._assistant, self._own_id, answers=answers, question=self._questions)
        try:
            await self._start(body, self._patience, look_first=True)
        except (ConnectionError, ExecutionBackendError) as exc:
            reason = exc.reason if isinstance(exc, ExecutionBackendError) else str(exc)
            self.refused = f"the answer could not be sent: {reason}"
            if self._request.emit is not None:
                self._request.emit(ErrorRaised(message=self.refused, code="decision_refused"))
            return None
        self._text_from, self._expected = len(self.text), ""
        self.note()
        return None

    # --- what happens to the run

    async def follow(self) -> tuple[RunStatus, str | None]:
        """Wait until the run has ended or waits, and return its status. Short outages of the server are retried."""
        if not self._remote_id:  # its process died before the id there was stored
            found = await retry(self._find, self._patience, self._token)
            if found is None:
                raise ConnectionError(f"{self._client.url} does not know the run any more")
            self._remote_id = found.run_id
        if self._request.decisions and not self._token.is_set():
            reason = await self._decide()
            if reason is not None:
                return RunStatus.CANCELLED, reason
            if self.refused is not None:
                self.state = await retry(self._load_state, self._patience, self._token)
                return RunStatus.WAITING_INPUT, self.refused
        pause, in_vain = FIRST_PAUSE, 0
        while True:
            event = self._event
            is_whole = await self._read_events()
            run = await retry(self._load_run, self._patience, self._token)
            self._report(run.status)
            in_vain = 0 if self._event != event else in_vain + 1
            if run.has_ended and (is_whole or in_vain == _TRIES):
                break
            pause = min(pause * 2, LONGEST_PAUSE) if in_vain else FIRST_PAUSE
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        self.state = await retry(self._load_state, self._patience, self._token)
        return self._outcome()

    async def stop(self) -> str | None:
        """Ask the server to stop the run; return a problem, if there is one."""
        path = f"/threads/{self.thread_id}/runs/{self._remote_id}/cancel?wait=1&action=interrupt"
        try:
            async with asyncio.timeout(STOP_SECONDS):
                status, data = await self._client.ask("POST", path, b"")
                if status >= 400 and status not in (404, 409):
                    raise self._client.refused(status, data, "did not stop the run")
        except TimeoutError:
            return "the server has not stopped it yet"
        except (ConnectionError, ExecutionBackendError) as exc:
            return f"the server could not be reached ({exc})"
        with suppress(ConnectionError, ExecutionBackendError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                self._report((await self._load_run()).status)
                self.state = await self._load_state()
        return None

    def _outcome(self) -> tuple[RunStatus, str | None]:
        status, interrupts = _STATUS.get(self.status, RunStatus.FAILED), self.state.interrupts
        if interrupts and self.status in ("success", "interrupted"):
            self._questions += 1
            self._asked = {f"input_{self._questions}_{n}": one.id for n, one in enumerate(interrupts, 1)}
            return RunStatus.WAITING_INPUT, None
        if status is RunStatus.FAILED:
            errors = [self._error, *[task.error or "" for task in self.state.tasks]]
            return status, next((one for one in errors if one), "the server gave no reason")[:_MOST_WORDS]
        reasons = {RunStatus.CANCELLED: "it was stopped at the server", RunStatus.TIMEOUT: "it took too long there"}
        return status, reasons.get(status)

    async def _read_events(self) -> bool:
        """Emit the text of the graph, from where the last stream broke; return whether the stream is complete."""
        path = f"/threads/{self.thread_id}/runs/{self._remote_id}/stream?stream_mode=messages-tuple"
        decoder = EventDecoder(MOST_BYTES)
        chunks = self._client.stream(path, {"last-event-id": self._event})
        try:
            async with aclosing(chunks):
                async for data in chunks:
                    for block in decoder.split(data):
                        name, event_id, given = read_event(self._client.without_secrets(block))
                        if event_id and event_id in self._events:  # a proxy may repeat a piece
                            continue
                        if given and name == "messages":
                            self._say(said_in(given))
                        elif given and name == "error":
                            self._error = error_in(given)
                        if event_id:
                            self._event = event_id
                            self._events.add(event_id)
        except EventsNotOffered:
            return True
        except (ConnectionError, ValueError):
            return False  # the status of the run decides
        return True

    def _say(self, text: str) -> None:
        """Emit text, without the part that an earlier process has emitted; nothing if that was another text."""
        if self._expected:
            self._is_in_step = self._is_in_step and (self._expected.startswith(text) or text.startswith(self._expected))
            text, self._expected = text[len(self._expected) :], self._expected[len(text) :]
        if text and self._is_in_step:
            self._size += len(text)
            if self._size > MOST_BYTES:
                raise ExecutionBackendError(
                    self._client.name, f"{self._client.url} sent more than {MOST_BYTES:,} bytes"
                )
            self._streamed.append(text)
            if self._request.emit is not None:
                self._request.emit(TextDelta(delta=text))

    def _report(self, status: str) -> None:
        """Report the status whenever it changes."""
        if status != self.status and self._request.emit is not None:
            ids = {"task_id": self._remote_id, "context_id": self.thread_id}
            self._request.emit(Custom(data={"type": "remote_task", **ids, "status": status}))
        self.status = status

    async def _load_run(self) -> GraphRun:
        return await self._ask(decode_run, f"/threads/{self.thread_id}/runs/{self._remote_id}")

    async def _load_state(self) -> GraphState:
        return await self._ask(decode_state, f"/threads/{self.thread_id}/state")

    async def _ask(self, decode: Callable[[bytes], T], path: str) -> T:
        status, data = await self._client.ask("GET", path, None)
        if status == 404:
            raise ExecutionBackendError(self._client.name, "the server does not know the run any more")
        if status >= 400:
            raise self._client.refused(status, data, "did not say how the run stands")
        return self._read(decode, data)

    def _read(self, decode: Callable[[bytes], T], data: bytes) -> T:
        try:
            return decode(self._client.without_secrets(data))
        except ValueError as exc:
            said = self._client.words(str(exc))
            raise Garbled(f"{self._client.url} did not answer as a LangGraph server ({said}): check the url") from None

    def tickets(self) -> dict[str, SuspendTicket]:
        """Return the questions of the graph, by path."""
        found: dict[str, SuspendTicket] = {}
        for path, one in zip(self._asked, self.state.interrupts, strict=False):
            message = one.value if isinstance(one.value, str) else to_json_text(one.value)
            ticket_id = f"{self._own_id}-{path}"
            asked = SuspendTicket(ticket_id, "langgraph:interrupt", message[:_MOST_WORDS], one.value, path=(path,))
            found[path] = asked
        return found


def _result(request: RunRequest, follower: GraphFollower, status: RunStatus, error: str | None) -> RunResult:
    identity, state = request.identity, follower.state
    is_complete = status is RunStatus.COMPLETED
    response = None if status.is_waiting else (state.answer(identity.run_id) if is_complete else follower.text) or None
    usage, steps = state.usage(identity.run_id)
    return RunResult(
        status=status,
        run_id=identity.run_id,
        thread_id=identity.thread_id,
        response=response,
        output=state.output() if is_complete else None,
        steps=steps,
        usage=usage,
        state=PersistedState(extensions={REMOTE_KEY: follower.ids()}),
        error=error,
        termination=TERMINATION.get(status, "error"),
        messages=(*request.messages, *([Message.assistant(response)] if response else [])),
        suspended=follower.tickets() if status.is_waiting else {},
    )
