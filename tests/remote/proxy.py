"""A TCP proxy that delays, cuts, truncates and duplicates what passes through it. Seeded, and with a number of faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from random import Random

from ..runners import stop_listening

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
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await stop_listening(self._server)
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Cut all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with self._opened(writer), contextlib.suppress(asyncio.CancelledError):  # at the end of the proxy
            try:
                there, out = await asyncio.open_connection("127.0.0.1", self.target)
            except OSError:
                writer.transport.abort()
                return
            with self._opened(out):
                ways = [asyncio.create_task(self._pass(reader, out)), asyncio.create_task(self._pass(there, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()

    @contextlib.contextmanager
    def _opened(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Have a connection cut with all others; close it at the end."""
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.close()

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
