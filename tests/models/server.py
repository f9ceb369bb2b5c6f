"""A real HTTP server on loopback that answers as it is told, well or badly."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from ..runners import stop_listening

Answer = Callable[["Reply"], Awaitable[None]]


class Asked(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: Any


class Reply:
    """What an answer writes with."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.closes = False

    async def head(self, status: int = 200, kind: str = "text/event-stream", *lines: str) -> None:
        headers = [f"HTTP/1.1 {status} Whatever", f"content-type: {kind}", "transfer-encoding: chunked", *lines]
        self.writer.write("\r\n".join([*headers, "", ""]).encode())
        await self.writer.drain()

    async def piece(self, data: bytes) -> None:
        if data:
            self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await self.writer.drain()
            await asyncio.sleep(0)

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def cut(self) -> None:
        """Break the connection off."""
        self.closes = True
        self.writer.transport.abort()


class Server:
    """`answers` are used in order, the last one again and again; `asked` is what came in."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[Asked] = []
        self.url = ""
        self.connections = 0

    def add(self, *answers: Answer) -> None:
        self.answers.extend(answers)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (asked := await _read(reader)) is not None:
                self.asked.append(asked)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                reply = Reply(writer)
                await answer(reply)
                if reply.closes:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = first.split(" ")
    return Asked(method, path, headers, json.loads(body) if body else None)


@asynccontextmanager
async def serving(*answers: Answer, port: int = 0) -> AsyncIterator[Server]:
    """A server that is up, and down at the end."""
    server = Server()
    server.add(*answers)
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError):  # the server goes down
            await server(reader, writer)

    listening = await asyncio.start_server(connected, "127.0.0.1", port)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        await stop_listening(listening)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def stream(events: Iterable[bytes], size: int | None = None) -> Answer:
    """A good stream: an event a piece, or pieces of some size."""
    whole = list(events)

    async def answer(reply: Reply) -> None:
        await reply.head()
        data = b"".join(whole)
        pieces = whole if size is None else [data[at : at + size] for at in range(0, len(data), size)]
        for piece in pieces:
            await reply.piece(piece)
        await reply.end()

    return answer


def split(events: Iterable[bytes], at: int) -> Answer:
    """A good stream in two pieces, which the reader gets one by one."""
    data = b"".join(events)

    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.piece(data[:at])
        for _ in range(3):
            await asyncio.sleep(0)
        await reply.piece(data[at:])
        await reply.end()

    return answer


def refuse(status: int, body: Any = b"", kind: str = "application/json", *lines: str) -> Answer:
    """An answer that is no stream."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def answer(reply: Reply) -> None:
        await reply.head(status, kind, *lines)
        await reply.piece(data)
        await reply.end()

    return answer


def break_after(events: Iterable[bytes]) -> Answer:
    """A stream whose connection breaks."""
    whole = list(events)

    async def answer(reply: Reply) -> None:
        await reply.head()
        for piece in whole:
            await reply.piece(piece)
        await asyncio.sleep(0.01)
        reply.cut()

    return answer


def hang_after(events: Iterable[bytes] = (), *, head: bool = True) -> Answer:
    """A stream, or not even that, which falls silent."""
    whole = list(events)

    async def answer(reply: Reply) -> None:
        if head:
            await reply.head()
        for piece in whole:
            await reply.piece(piece)
        await asyncio.sleep(3600)

    return answer
