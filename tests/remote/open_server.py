"""A task server whose tasks stay open for ever: a background task of each goes on, whatever it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from ..runners import AppRunner


class OpenServer:
    """`status` is that of its tasks; `after_cancel` that of those that were cancelled."""

    def __init__(self, status: str = "success", after_cancel: str | None = None) -> None:
        self.status, self._after_cancel = status, after_cancel
        self.url = ""
        self.cancels: list[Any] = []
        self.has_streamed = asyncio.Event()

    async def submit(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=201)

    async def state(self, request: web.Request) -> web.Response:
        status = self._after_cancel if self.cancels and self._after_cancel else self.status
        seen = {"seq": 3, "open": True, "result": "It is started."} if status != "running" else {"seq": 2}
        return web.json_response({"task_id": request.match_info["id"], "status": status, **seen})

    async def cancel(self, request: web.Request) -> web.Response:
        data = await request.read()
        self.cancels.append(json.loads(data or b"{}"))
        return web.json_response({})

    async def events(self, request: web.Request) -> web.StreamResponse:
        common = {"at": 1.0, "run_id": "r1", "agent": "far", "ns": []}
        task = {"kind": "task_updated", "task_id": "t9", "status": "RUNNING", "call_id": "s1", "parent_run_id": "r1"}
        events = [
            {**common, "kind": "run_started", "seq": 1, "thread_id": "x"},
            {**common, **task, "seq": 2, "run_id": "t9", "ns": ["tools:s1"]},
            {**common, "kind": "run_finished", "seq": 3, "status": "completed", "termination": "natural"},
        ]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events[int(request.query["after"]) : 2 if self.status == "running" else 3]:
            await response.write(b"id: %d\ndata: %b\n\n" % (event["seq"], json.dumps(event).encode()))
        self.has_streamed.set()
        while True:
            await asyncio.sleep(0.2)
            await response.write(b": beat\n\n")


@asynccontextmanager
async def open_server(*given: Any) -> AsyncGenerator[OpenServer]:
    server = OpenServer(*given)
    app = web.Application()
    app.add_routes(
        [
            web.post("/tasks", server.submit),
            web.get("/tasks/{id}", server.state),
            web.get("/tasks/{id}/wait", server.state),
            web.post("/tasks/{id}/cancel", server.cancel),
            web.get("/tasks/{id}/events", server.events),
        ]
    )
    runner = AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
