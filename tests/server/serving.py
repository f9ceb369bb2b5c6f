"""A real server in the event loop of a test, and a client that reads JSON and events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import uvicorn
from starlette.types import ASGIApp

from retinue import Runtime
from retinue.server import create_app

from ..runners import stop_listening
from ..waiting import let_others_run

TOKEN = "secret-of-the-test"


class Answer(NamedTuple):
    status: int
    body: Any
    headers: Any


class Received(NamedTuple):
    id: str | None
    event: str
    data: dict[str, Any]


class Site:
    """A client of one server with one token."""

    def __init__(self, url: str, session: aiohttp.ClientSession, service: Any = None) -> None:
        self.url, self.session, self.service = url, session, service

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        if body is not None:
            options["json"] = body
        async with self.session.request(method, path, **options) as response:
            data = await response.read()
            is_json = response.content_type == "application/json"
            return Answer(response.status, json.loads(data) if is_json else data.decode(), response.headers)

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.ask("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return await self.ask("POST", path, {} if body is None else body, **options)

    async def start(self, agent: str, input: str = "go", **more: Any) -> Any:
        answer = await self.post("/api/v1/runs", {"agent": agent, "input": input, **more})
        assert answer.status == 201, answer
        return answer.body

    async def result(self, run_id: str) -> Any:
        answer = await self.get(f"/api/v1/runs/{run_id}/result?wait=30")
        assert answer.status == 200, answer
        return answer.body

    async def events(self, path: str, **headers: str) -> AsyncIterator[Received]:
        """Yield server-sent events until the server ends the stream."""
        async with self.session.get(path, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            fields: dict[str, str] = {}
            async for line in response.content:
                text = line.decode().rstrip("\n")
                if text and not text.startswith(":"):
                    name, _, value = text.partition(": ")
                    fields[name] = value
                elif not text and "data" in fields:
                    yield Received(fields.get("id"), fields["event"], json.loads(fields["data"]))
                    fields = {}

    @asynccontextmanager
    async def socket(self, path: str, **options: Any) -> AsyncIterator[Socket]:
        async with self.session.ws_connect(path, **options) as socket:
            yield Socket(socket)

    async def refusal(self, path: str, **headers: str) -> tuple[int, str]:
        """Return the code and the reason with which the server closes a WebSocket at once."""
        async with self.session.ws_connect(path, headers=headers) as socket:
            message = await socket.receive(30)
            return message.data, message.extra or ""

    async def all_events(self, path: str, **headers: str) -> list[Received]:
        return [event async for event in self.events(path, **headers)]


class Socket:
    """A WebSocket, read object by object: a message may be an array of them."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._received: list[Any] = []
        self.messages: list[Any] = []
        """The messages as they came."""

    async def next(self, seconds: float = 30.0) -> Any:
        """Return the next object; raise StopAsyncIteration once the server has closed the socket."""
        while not self._received:
            message = await self._socket.receive(seconds)
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise StopAsyncIteration
            self.messages.append(message.json())
            self._received += self.messages[-1] if isinstance(self.messages[-1], list) else [self.messages[-1]]
        return self._received.pop(0)

    async def news(self) -> Any:
        """Return the next object that is no sign of life and no `caught_up`."""
        while not {"beat", "caught_up"}.isdisjoint(found := await self.next()):
            pass
        return found

    async def all(self) -> list[Any]:
        """Return all such objects until the server closes the socket."""
        found: list[Any] = []
        while True:
            try:
                found.append(await self.news())
            except StopAsyncIteration:
                return found

    async def send(self, **body: Any) -> None:
        await self._socket.send_json(body)

    @property
    def close_code(self) -> int | None:
        return self._socket.close_code


@asynccontextmanager
async def listening(app: ASGIApp, port: int = 0) -> AsyncIterator[str]:
    """Serve an application on a port of loopback, or on any that is free."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    server.install_signal_handlers = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    config = server.config
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    clock = asyncio.create_task(server.main_loop())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        clock.cancel()  # it looks ten times a second whether to end
        await stop_listening(*server.servers)
        for connection in list(server.server_state.connections):
            connection.shutdown()
        await let_others_run()
        if requests := list(server.server_state.tasks):
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)
        for connection in list(server.server_state.connections):  # its client reads no more
            connection.transport.abort()


@asynccontextmanager
async def serving(runtime: Runtime, token: str = TOKEN, **options: Any) -> AsyncIterator[Site]:
    """Serve a runtime; it is entered and closed here."""
    async with runtime:
        app = create_app(runtime, **{"auth": token, **options})
        async with listening(app) as url, asking(url, token) as site:
            site.service = app.state.service
            yield site


@asynccontextmanager
async def asking(url: str, token: str | None) -> AsyncIterator[Site]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        yield Site(url, session)
