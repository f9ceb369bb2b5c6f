"""A small real task server: it runs agents of a runtime, over HTTP, and can be told to misbehave."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

import msgspec
from aiohttp import web

from retinue import DecisionRefused, RunStatus, Runtime
from retinue.core.content import to_json_bytes
from retinue.core.events import event_to_json
from retinue.core.receipts import Receipt
from retinue.runtime import Run
from retinue.wire.resources import Decisions
from retinue.wire.task_protocol import RemoteTask, TaskSubmission

from .. import inside
from ..runners import AppRunner

_STATUS = {
    RunStatus.COMPLETED: "success",
    RunStatus.FAILED: "error",
    RunStatus.TIMEOUT: "error",
    RunStatus.CANCELLED: "cancelled",
}


class TaskServer:
    """`async with TaskServer(runtime) as server`: tasks run as runs of the agent they name."""

    def __init__(self, runtime: Runtime, token: str | None = None, *, has_events: bool = False) -> None:
        self.runtime, self._token = runtime, token
        self.runs: dict[str, Run] = {}
        self.requests: list[tuple[str, str]] = []
        self.submissions: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[int] = []
        """Statuses with which the next requests are answered instead."""
        self.results_only_when_waiting = False
        self.stops_after: float | None = None
        """Seconds after which a task is stopped whose cancel was answered at once."""
        self.has_events = has_events
        """False for a server with only status and result."""
        self.breaks_after: list[int] = []
        """The numbers of events after which the next streams break."""
        self._later: asyncio.Task[None] | None = None
        self.url = ""
        self.has_work = asyncio.Event()
        self.holds = asyncio.Event()
        """No events are sent, and no task has ended, unless it is set."""
        self.holds.set()
        self.says_used: dict[str, float] | None = None
        """What it says was used, in states and in events, in place of the truth."""
        self.says_done: Receipt | None = None
        """What it says a run did, in place of the truth."""

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/tasks", self._submit),
                web.get("/tasks/{id}", self._state),
                web.get("/tasks/{id}/wait", self._wait),
                web.post("/tasks/{id}/cancel", self._cancel),
            ]
        )
        if self.has_events:
            app.add_routes([web.get("/tasks/{id}/events", self._events), web.post("/tasks/{id}/resume", self._resume)])
        self._runner = AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/"
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._later is not None:
            self._later.cancel()
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        self.headers.append(dict(request.headers))
        if self.faults:
            return web.Response(status=self.faults.pop(0), text="out of order")
        if self._token is not None and request.headers.get("Authorization") != f"Bearer {self._token}":
            return web.json_response({"error": "who are you?"}, status=401)
        return await handler(request)

    async def _submit(self, request: web.Request) -> web.Response:
        submission = msgspec.json.decode(await request.read(), type=TaskSubmission)
        self.submissions.append(submission)
        if (known := self.runs.get(submission.task_id)) is not None and known.ended:
            return web.json_response({"error": f"task_id already finished: {submission.task_id}"}, status=409)
        if known is None:
            self.runs[submission.task_id] = self.runtime.stream(
                submission.agent_id, submission.input, thread_id=submission.context.get("session_id")
            )
            self.has_work.set()
        return web.json_response({"task_id": submission.task_id, "status": "pending"})

    async def _state(self, request: web.Request) -> web.Response:
        return self._answer(await self._task(request.match_info["id"]))

    async def _wait(self, request: web.Request) -> web.Response:
        run = self.runs.get(request.match_info["id"])
        if run is not None:
            await asyncio.wait({asyncio.create_task(run.result())}, timeout=float(request.query["timeout_seconds"]))
        return self._answer(await self._task(request.match_info["id"], waited=True))

    async def _cancel(self, request: web.Request) -> web.Response:
        if (run := self.runs.get(request.match_info["id"])) is not None:
            if self.stops_after is None:
                await run.cancel()
            else:
                self._later = asyncio.create_task(_stop_later(run, self.stops_after))
        return web.Response()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        run, after = self.runs[request.match_info["id"]], int(request.query["after"])
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await self.holds.wait()
        left = self.breaks_after.pop(0) if self.breaks_after else -1
        async for event in self.runtime.events(run.run_id, after):
            if left == 0:
                await response.write(b'id: 1\ndata: {"kind": "text_de')
                assert request.transport is not None
                request.transport.abort()
                break
            left -= 1
            body = json.dumps(self._falsified(event_to_json(event)))
            await response.write(f": beat\n\nid: {event.seq}\nevent: {event.kind}\ndata: {body}\n\n".encode())
        return response

    async def _resume(self, request: web.Request) -> web.Response:
        given = msgspec.json.decode(await request.read(), type=Decisions)
        task_id = request.match_info["id"]
        try:
            self.runs[task_id] = self.runtime.stream_resume(self.runs[task_id].run_id, given.as_decisions())
        except DecisionRefused as exc:
            return web.json_response({"detail": str(exc)}, status=409)
        return web.json_response({"status": "running"})

    async def _task(self, task_id: str, *, waited: bool = False) -> RemoteTask | None:
        run = self.runs.get(task_id)
        if run is None:
            return None
        if not run.ended or not self.holds.is_set():
            return RemoteTask("running", task_id=task_id)
        result = await run.result()
        if result.status is RunStatus.SUSPENDED:
            log = await inside.log_of(run)
            return RemoteTask("running", task_id=task_id, awaiting=result.suspended, seq=log.tree.seq)
        shown = result.response if waited or not self.results_only_when_waiting else None
        if not self.has_events:
            return RemoteTask(_STATUS[result.status], shown, result.error, task_id)
        log = await inside.log_of(run)
        return RemoteTask(
            _STATUS[result.status], shown, result.error, task_id, usage=result.usage, steps=result.steps,
            output=result.output, seq=log.tree.seq, run_id=run.run_id, receipt=self.says_done or result.receipt,
        )  # fmt: skip

    def _answer(self, task: RemoteTask | None) -> web.Response:
        if task is None:
            return web.json_response({"status": "error", "error": "task not found"}, status=404)
        return web.json_response(self._falsified(json.loads(to_json_bytes(task))))

    def _falsified(self, said: dict[str, Any]) -> dict[str, Any]:
        is_report = said.get("kind") in (None, "inference_finished", "run_finished")
        return said if self.says_used is None or not is_report else {**said, "usage": self.says_used}


async def _stop_later(run: Run, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await run.cancel()
