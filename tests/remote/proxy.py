"""A TCP proxy that delays, cuts, truncates and duplicates what passes through it. Seeded, and with a number of faults."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

KINDS = ("delay", "cut", "truncate", "duplicate")


class Proxy:
    """`async with Proxy(port, seed, faults=20) as proxy`: passes connections to `proxy.port` on to another port."""

    def __init__(self, target: int, seed: int = 0, faults: int = 0, kinds: tuple[str, ...] = KINDS) -> None:
        self.target, self.left, self._kinds = target, faults, kinds
        self._random = Random(seed)
        self.done: list[str] = []
        """The faults so far."""
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Cut all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there, out = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(out)
        try:
            ways = [asyncio.create_task(self._pass(reader, out)), asyncio.create_task(self._pass(there, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
        finally:
            for one in (writer, out):
                self._writers.discard(one)
                one.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2048):
                fault = self._fault()
                if fault == "cut":
                    writer.transport.abort()
                    return
                if fault == "truncate":
                    writer.write(data[: self._random.randrange(len(data))])
                    await writer.drain()
                    return
                if fault == "delay":
                    await asyncio.sleep(self._random.uniform(0.0, 0.05))
                writer.write(data * 2 if fault == "duplicate" else data)
                await writer.drain()

    def _fault(self) -> str:
        if self.left <= 0 or self._random.random() > 0.25:
            return ""
        self.left -= 1
        self.done.append(self._random.choice(self._kinds))
        return self.done[-1]
