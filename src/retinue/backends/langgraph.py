"""Runs on servers that speak LangGraph's HTTP API: a run here is one or more runs on a thread there."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar
from uuid import UUID, uuid5

from ..core.backend import RunRequest
from ..core.concurrency import Backoff, cancel_all
from ..core.content import to_json_text
from ..core.errors import ExecutionBackendError
from ..core.results import SuspendTicket
from ..core.runs import RunResult, RunStatus
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
from .http_client import MOST_BYTES, NOT_OFFERED, HttpClient, NotOffered
from .remote import MOST_WORDS, STOP_SECONDS, Follower, Outcome, RemoteBackend, reason_of

T = TypeVar("T")

_THREADS = UUID("3f7d9a52-2f0f-4b5e-9c1d-6f0a4f3f5b11")
"""The namespace of the ids of threads."""
_ID = re.compile("[A-Za-z0-9-]{1,64}")
_FROM_START = "-1"
_KIND = "a LangGraph server"
_TRIES = 5
"""Streams in a row that break before their first new event, after which the words of a run that has ended are given up."""
_STATUS = {
    "success": RunStatus.COMPLETED,
    "error": RunStatus.FAILED,
    "timeout": RunStatus.TIMEOUT,
    "interrupted": RunStatus.CANCELLED,
}


class LangGraphBackend(RemoteBackend[HttpClient]):
    """Executes runs on a LangGraph server. The name of the agent is that of a graph or assistant there."""

    capabilities = dataclasses.replace(RemoteBackend.capabilities, output="text_and_artifacts")

    def follower(self, request: RunRequest) -> GraphFollower:
        return GraphFollower(self, request)


class GraphFollower(Follower[HttpClient]):
    """One run and its counterpart on the server: a thread, and the last run on it.

    The thread id is derived from the first run of a conversation. Each run there has the id of the run here in its metadata.
    So a run whose answer was lost is found again, and none is started twice.
    """

    def __init__(self, backend: LangGraphBackend, request: RunRequest) -> None:
        super().__init__(backend, request)
        self._thread_id = str(request.remote.get("context_id") or uuid5(_THREADS, self.run_id))
        self._remote_id = str(self.noted.get("task_id", ""))
        self._questions = int(self.noted.get("questions", 0))
        self._asked: dict[str, str] = dict(self.noted.get("asked", {}))
        self._text_from = int(self.noted.get("text_from", 0))
        """The length of the text before that of the last run there."""
        self._expected = request.streamed[self._text_from :]
        """Text that is in the log already and comes again when a stream is read from its start."""
        self._is_in_step = True
        self._error = ""
        self._event, self._events = _FROM_START, set[str]()
        """The id of the last event of the run there, and those of all that were read."""
        self._status = str(self.noted.get("status", ""))
        self._state = GraphState()

    @property
    def _thread(self) -> str:
        return f"/threads/{self._thread_id}"

    @property
    def _run(self) -> str:
        return f"{self._thread}/runs/{self._remote_id}"

    @property
    def is_complete(self) -> bool:
        return self._status == "success" and not self._state.interrupts

    def ids(self) -> dict[str, Any]:
        known = {"protocol": "langgraph", "task_id": self._remote_id, "context_id": self._thread_id}
        kept = {"status": self._status, "questions": self._questions, "asked": self._asked}
        return {**known, **kept, "text_from": self._text_from}

    def result(self, status: RunStatus, error: str | None) -> RunResult:
        is_complete = status is RunStatus.COMPLETED
        response = (self._state.answer(self.run_id) if is_complete else self._streamed.text) or None
        usage, steps = self._state.usage(self.run_id)
        return self._make_result(
            status,
            error,
            None if status.is_waiting else response,
            output=self._state.output() if is_complete else None,
            steps=steps,
            usage=usage,
            suspended=self._tickets() if status.is_waiting else {},
        )

    # --- the first message, and the answers

    async def submit(self) -> None:
        body = run_body(self._agent, self.run_id, texts=self._texts_to_send())
        await self._start(body, self._submit_patience, look_first=self.request.may_be_sent)
        self.accept()
        self._note()

    async def _start(self, body: bytes, patience: float, *, look_first: bool) -> None:
        """Start a run on the thread, unless it exists: the answer to an earlier request may have been lost."""
        may_be_there = look_first

        async def start() -> GraphRun:
            nonlocal may_be_there
            if may_be_there and (found := await self._find()) is not None:
                return found
            may_be_there = True
            _, data = await self._client.ask("POST", f"{self._thread}/runs", body, refusal="did not take the run")
            return self._client.decode(decode_run, data, _KIND)

        run = await self._retry(start, patience)
        if not _ID.fullmatch(run.run_id):
            raise self._client.error("gave the run an id that cannot be used")
        self._remote_id, self._status = run.run_id, run.status
        self._event, self._events = _FROM_START, set[str]()

    async def _find(self) -> GraphRun | None:
        """Return the run there that has the id of this one and answers the same question."""
        path, refusal = f"{self._thread}/runs?limit=100", "did not list its runs"
        status, data = await self._client.ask("GET", path, refusal=refusal, expected=NOT_OFFERED)
        if status in NOT_OFFERED:
            return None
        wanted = (self.run_id, self._questions)
        found = self._client.decode(decode_runs, data, _KIND)
        return next((one for one in found if (one.metadata.get(RUN_ID), one.metadata.get(QUESTION)) == wanted), None)

    async def _decide(self) -> str | None:
        """Pass answers on; if a human ends the run instead, return the reason."""
        decisions = self.request.decisions
        for decision in decisions.values():
            if decision.action == "cancel":
                return decision.reason or "cancelled by a decision"
        answers = {self._asked.get(path, ""): one.payload for path, one in decisions.items() if one.payload is not None}
        if not answers:
            self.refused = "the question needs an answer: write Decision.resume(value)"
            return None
        body = run_body(self._agent, self.run_id, answers=answers, question=self._questions)
        try:
            await self._start(body, self._patience, look_first=True)
        except (ConnectionError, ExecutionBackendError) as exc:
            self._refuse(f"the answer could not be sent: {reason_of(exc)}")
            return None
        self._text_from, self._expected = self._streamed.size, ""
        self._note()
        return None

    # --- what happens to the run

    async def follow(self) -> Outcome:
        if not self._remote_id:  # its process died before the id there was stored
            found = await self._retry(self._find)
            if found is None:
                raise ConnectionError(f"{self._client.url} does not know the run any more")
            self._remote_id = found.run_id
        if self.request.decisions and not self._token.is_set():
            reason = await self._decide()
            if reason is not None:
                return RunStatus.CANCELLED, reason
            if self.refused is not None:
                self._state = await self._retry(self._load_state)
                return RunStatus.WAITING_INPUT, self.refused
        backoff, in_vain = Backoff(), 0
        while True:
            event = self._event
            is_whole = await self._read_events()
            run = await self._retry(self._load_run)
            in_vain = 0 if self._event != event else in_vain + 1
            if run.has_ended and (is_whole or in_vain == _TRIES):
                break
            if not in_vain:
                backoff.reset()
            await backoff.wait()
        self._state = await self._retry(self._load_state)
        return self._outcome()

    async def withdraw(self) -> None:
        if (found := await self._find()) is not None:
            self._remote_id = found.run_id
            await self._ask_to_stop()

    async def _ask_to_stop(self) -> None:
        path, refusal = f"{self._run}/cancel?wait=1&action=interrupt", "did not stop the run"
        await self._client.ask("POST", path, b"", refusal=refusal, expected=(404, 409))

    async def stop(self, work: asyncio.Task[Outcome]) -> str | None:
        await cancel_all([work])
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._ask_to_stop()
        except TimeoutError:
            return "the server has not stopped it yet"
        except (ConnectionError, ExecutionBackendError) as exc:
            return f"the server could not be reached ({exc})"
        with suppress(ConnectionError, ExecutionBackendError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._load_run()
                self._state = await self._load_state()
        return None

    def _outcome(self) -> Outcome:
        status, interrupts = _STATUS.get(self._status, RunStatus.FAILED), self._state.interrupts
        if interrupts and self._status in ("success", "interrupted"):
            self._questions += 1
            self._asked = {f"input_{self._questions}_{n}": one.id for n, one in enumerate(interrupts, 1)}
            return RunStatus.WAITING_INPUT, None
        if status is RunStatus.FAILED:
            errors = [self._error, *[task.error or "" for task in self._state.tasks]]
            return status, next((one for one in errors if one), "the server gave no reason")[:MOST_WORDS]
        reasons = {RunStatus.CANCELLED: "it was stopped at the server", RunStatus.TIMEOUT: "it took too long there"}
        return status, reasons.get(status)

    async def _read_events(self) -> bool:
        """Emit the text of the graph, from where the last stream broke; return whether the stream is complete."""
        path, headers = f"{self._run}/stream?stream_mode=messages-tuple", {"last-event-id": self._event}
        try:
            async with aclosing(self._client.stream(path, headers)) as stream:
                async for found in stream:
                    for name, event_id, given in found:
                        if event_id and event_id in self._events:  # a proxy may repeat a piece
                            continue
                        if given and name == "messages":
                            self._say(said_in(given))
                        elif given and name == "error":
                            self._error = error_in(given)
                        if event_id:
                            self._event = event_id
                            self._events.add(event_id)
        except NotOffered:
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
            if self._streamed.size + len(text) > MOST_BYTES:
                raise self._client.error(f"sent more than {MOST_BYTES:,} bytes")
            self._emit_text(text)

    async def _load_run(self) -> GraphRun:
        """Return the run there; report its status if that has changed."""
        run = await self._ask(decode_run, self._run)
        if run.status != self._status:
            self._report(run.status, task_id=self._remote_id, context_id=self._thread_id)
        self._status = run.status
        return run

    async def _load_state(self) -> GraphState:
        return await self._ask(decode_state, f"{self._thread}/state")

    async def _ask(self, decode: Callable[[bytes], T], path: str) -> T:
        status, data = await self._client.ask("GET", path, refusal="did not say how the run stands", expected=(404,))
        if status == 404:
            raise ExecutionBackendError(self._client.name, "the server does not know the run any more")
        return self._client.decode(decode, data, _KIND)

    def _tickets(self) -> dict[str, SuspendTicket]:
        """Return the questions of the graph, by path."""
        found: dict[str, SuspendTicket] = {}
        for path, one in zip(self._asked, self._state.interrupts, strict=False):
            message = one.value if isinstance(one.value, str) else to_json_text(one.value)
            ticket_id = f"{self.run_id}-{path}"
            asked = SuspendTicket(ticket_id, "langgraph:interrupt", message[:MOST_WORDS], one.value, path=(path,))
            found[path] = asked
        return found
