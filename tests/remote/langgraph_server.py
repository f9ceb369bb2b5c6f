"""A server with the part of LangGraph's HTTP API that a client of runs needs, as `langgraph dev` 0.16 answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import uuid4

from aiohttp import web

from retinue.testing.backends import example_work

from ..runners import AppRunner

ASSISTANT = "worker"


class GraphServer:
    """Has one assistant, which does what a message says: `example_work`, `say …` word by word, or `ask …`."""

    def __init__(self) -> None:
        self.threads: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.headers: list[dict[str, str]] = []
        self.go = asyncio.Event()
        """Lets `say` go past the word `wait`."""
        self.lose_answer = self.cut_after = 0
        """Answers to starts that are lost; events after which each stream is cut."""
        self.cancels: list[str] = []
        app = web.Application()
        thread = "/threads/{thread}"
        app.router.add_post(f"{thread}/runs", self._start)
        app.router.add_get(f"{thread}/runs", self._list)
        app.router.add_get(f"{thread}/runs/{{run}}", self._run)
        app.router.add_get(f"{thread}/runs/{{run}}/stream", self._stream)
        app.router.add_post(f"{thread}/runs/{{run}}/cancel", self._cancel)
        app.router.add_get(f"{thread}/state", self._state)
        self._runner = AppRunner(app, shutdown_timeout=0)
        self.url = ""

    async def __aenter__(self) -> GraphServer:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        for run in self.runs.values():
            run["task"].cancel()
        await self._runner.cleanup()

    def of(self, run_id: str) -> list[dict[str, Any]]:
        """Return the runs here that are one run there."""
        return [run for run in self.runs.values() if run["metadata"].get("retinue_run_id") == run_id]

    async def _start(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        body = await request.json()
        if body["assistant_id"] != ASSISTANT:
            return web.json_response({"detail": f"Invalid assistant: {body['assistant_id']!r}"}, status=404)
        thread = self.threads.setdefault(request.match_info["thread"], {"messages": [], "tasks": []})
        run: dict[str, Any] = {
            "run_id": str(uuid4()), "status": "running", "metadata": body["metadata"], "body": body, "events": [],
            "news": asyncio.Event(),
        }  # fmt: skip
        self.runs[run["run_id"]] = run
        run["task"] = asyncio.create_task(self._work(run, thread, body))
        if self.lose_answer:
            self.lose_answer -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(_shown(run))

    async def _work(self, run: dict[str, Any], thread: dict[str, Any], body: dict[str, Any]) -> None:
        thread["tasks"] = []
        try:
            if "command" in body:
                answer: Any = body["command"]["resume"]
                await self._say(run, thread, f"You chose {json.dumps(answer)}.")
            else:
                for message in body["input"]["messages"]:
                    thread["messages"].append({"type": "human", "id": str(uuid4()), **message})
                text = thread["messages"][-1]["content"]
                if text.startswith("ask "):
                    asked = [{"id": f"i{n}", "value": {"question": one}} for n, one in enumerate(text[4:].split("|"))]
                    thread["tasks"] = [{"error": None, "interrupts": asked}]
                elif text.startswith("say "):
                    await self._say(run, thread, text[4:])
                else:
                    await self._say(run, thread, await example_work(text))
            run["status"] = "success"
        except asyncio.CancelledError:
            run["status"] = "interrupted"
        except RuntimeError as exc:
            run["status"], thread["tasks"] = "error", [{"error": repr(exc), "interrupts": []}]
            self._tell(run, "error", {"error": "RuntimeError", "message": str(exc)})
        run["news"].set()

    async def _say(self, run: dict[str, Any], thread: dict[str, Any], text: str) -> None:
        about = {"langgraph_checkpoint_ns": "talk:1"}
        for number, word in enumerate(text.split(" ")):
            if word == "wait":
                await self.go.wait()
            piece = {"type": "AIMessageChunk", "content": f" {word}" if number else word}
            self._tell(run, "messages", [piece, about])
            self._tell(run, "messages", [{**piece, "content": "inner"}, {"langgraph_checkpoint_ns": "talk:1|x:2"}])
            await asyncio.sleep(0)
        usage = {"input_tokens": 9, "output_tokens": 3, "total_tokens": 12}
        thread["messages"].append({"type": "ai", "content": text, "usage_metadata": usage})

    def _tell(self, run: dict[str, Any], name: str, data: Any) -> None:
        run["events"].append(f"event: {name}\r\ndata: {json.dumps(data)}\r\nid: {len(run['events']) + 1}\r\n\r\n")
        run["news"].set()

    async def _list(self, request: web.Request) -> web.Response:
        if request.match_info["thread"] not in self.threads:
            return web.json_response({"detail": "not found"}, status=404)
        return web.json_response([_shown(run) for run in self.runs.values()])

    async def _run(self, request: web.Request) -> web.Response:
        run = self.runs.get(request.match_info["run"])
        return web.json_response(
            {"detail": "Not Found"} if run is None else _shown(run), status=404 if run is None else 200
        )

    async def _state(self, request: web.Request) -> web.Response:
        thread = self.threads[request.match_info["thread"]]
        return web.json_response({"values": {"messages": thread["messages"]}, "next": [], "tasks": thread["tasks"]})

    async def _cancel(self, request: web.Request) -> web.Response:
        run = self.runs[request.match_info["run"]]
        self.cancels.append(run["run_id"])
        run["task"].cancel()
        await asyncio.wait({run["task"]})
        return web.json_response({})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        run, response = self.runs[request.match_info["run"]], web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        place, sent = max(int(request.headers["last-event-id"]), 0), 0
        while True:
            while place < len(run["events"]):
                await response.write(run["events"][place].encode())
                place, sent = place + 1, sent + 1
                if sent == self.cut_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
            if run["status"] != "running":
                return response
            run["news"].clear()
            await run["news"].wait()


def _shown(run: dict[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in ("run_id", "status", "metadata")}
