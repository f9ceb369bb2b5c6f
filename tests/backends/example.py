"""Backends for tests: a small one in this process, and the task protocol over HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from retinue import (
    Agent,
    Backend,
    BackendProfile,
    CancellationToken,
    ExecutionBackendError,
    PersistedState,
    RunResult,
    RunStatus,
    Runtime,
    Usage,
)
from retinue.backends import RunRequest
from retinue.backends.tasks_http import HttpTaskClient, TaskHttpBackend
from retinue.core.events import Custom, TextDelta
from retinue.testing import ScriptedModel, example_work, say
from tests.remote.server import TaskServer


class Workshop:
    """Where runs of the example backend go on, whoever asks for them."""

    def __init__(self) -> None:
        self.jobs: dict[str, asyncio.Task[str]] = {}
        self.texts: dict[str, str] = {}
        self.starts: Counter[str] = Counter()

    def start(self, run_id: str, text: str) -> None:
        self.starts[run_id] += 1
        self.texts[run_id] = text
        self.jobs[run_id] = asyncio.create_task(example_work(text))


class ExampleBackend:
    """Has runs done in a workshop. Streams its answers, a word at a time."""

    def __init__(self, workshop: Workshop | None, profile: BackendProfile | None = None) -> None:
        self.workshop, self._profile = workshop, profile
        self.requests: list[RunRequest] = []
        self.usage = Usage(requests=1, input_tokens=100, output_tokens=10)
        self.is_closed = False

    def profile(self) -> BackendProfile:
        return self._profile or BackendProfile(cancellation="cooperative", persistence="stored")

    async def close(self) -> None:
        self.is_closed = True

    async def abort(self, run_id: str) -> None:
        if self.workshop is not None and (job := self.workshop.jobs.get(run_id)) is not None:
            job.cancel()

    async def run(self, request: RunRequest) -> RunResult:
        self.requests.append(request)
        run_id, texts = request.identity.run_id, [message.text for message in request.remote_messages()]
        if not texts:
            raise ExecutionBackendError(request.agent.name, "there is nothing to send")
        if self.workshop is None:
            raise ExecutionBackendError(request.agent.name, "the workshop is closed")
        if not request.is_dispatched:
            self.workshop.start(run_id, "\n".join(texts))
        if request.accepted is not None:
            request.accepted()
        job = self.workshop.jobs.get(run_id)
        if job is None:
            return self._result(request, RunStatus.FAILED, None, "it is not known here any more")
        await _end_of(job, request.cancellation)
        if job.cancelled():
            return self._result(request, RunStatus.CANCELLED, None, request.cancellation.reason or "aborted")
        if (problem := job.exception()) is not None:
            return self._result(request, RunStatus.FAILED, None, str(problem))
        if request.emit is not None:
            request.emit(Custom(data={"workshop": "done"}))
            for word in job.result().split():
                request.emit(TextDelta(delta=f"{word} "))
        return self._result(request, RunStatus.COMPLETED, job.result(), None)

    def _result(self, request: RunRequest, status: RunStatus, text: str | None, error: str | None) -> RunResult:
        ends = {RunStatus.COMPLETED: "natural", RunStatus.CANCELLED: "cancelled"}
        return RunResult(
            status=status,
            run_id=request.identity.run_id,
            thread_id=request.identity.thread_id,
            response=text,
            state=PersistedState(),
            steps=1,
            usage=self.usage,
            error=error,
            termination=ends.get(status, "error"),
        )


async def _end_of(job: asyncio.Task[str], token: CancellationToken) -> None:
    """Wait for a job to end, and stop it where that is wanted."""
    stop = asyncio.create_task(token.wait())
    try:
        await asyncio.wait({job, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            job.cancel()
            await asyncio.wait({job})
    finally:
        stop.cancel()


class ExampleHarness:
    def __init__(self) -> None:
        self.workshop = Workshop()
        self.backend: Backend = ExampleBackend(self.workshop)
        self.broken: Backend = ExampleBackend(None)

    def starts(self, run_id: str) -> int:
        return self.workshop.starts[run_id]

    def is_at_work(self, run_id: str) -> bool:
        job = self.workshop.jobs.get(run_id)
        return job is not None and not job.done()

    def sent(self, run_id: str) -> Sequence[str]:
        return self.workshop.texts[run_id].split("\n")


class HttpHarness:
    def __init__(self, server: TaskServer) -> None:
        self._server = server
        self.backend: Backend = TaskHttpBackend(HttpTaskClient(server.url), "worker")
        self.broken: Backend = TaskHttpBackend(HttpTaskClient("http://127.0.0.1:9"), "worker", patience=0.1)

    def starts(self, run_id: str) -> int:
        return sum(submission.task_id == run_id for submission in self._server.submissions)

    def is_at_work(self, run_id: str) -> bool:
        run = self._server.runs.get(run_id)
        return run is not None and not run.ended

    def sent(self, run_id: str) -> Sequence[str]:
        return [one.input for one in self._server.submissions if one.task_id == run_id]


@asynccontextmanager
async def example() -> AsyncIterator[ExampleHarness]:
    yield ExampleHarness()


async def answer(request: Any) -> Any:
    return say(await example_work(request.messages[-1].text))


@asynccontextmanager
async def over_http() -> AsyncIterator[HttpHarness]:
    async with Runtime([Agent("worker", ScriptedModel(answer))]) as far, TaskServer(far) as server:
        harness = HttpHarness(server)
        try:
            yield harness
        finally:
            for backend in (harness.backend, harness.broken):
                closing: Any = backend
                await closing.close()
