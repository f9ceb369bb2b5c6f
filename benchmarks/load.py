"""scripts/load: many readers and many starts against a real server, beside a bare Starlette endpoint in the same run.

Server and readers are two processes on loopback. The lag of an event is the time from its `at` to its arrival at a reader.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import aiohttp

from retinue import ToolContext, tool

TOKEN = "token-of-the-load-test"
TICK = 0.02
_FRAME = re.compile(rb'id: (\d+)\nevent: (\w+)\ndata: \{[^\n]*?"at":([\d.]+)')
_PAGE = os.sysconf("SC_PAGE_SIZE")


# --- the servers


@tool
async def flood(ctx: ToolContext, megabytes: int) -> str:
    """Stream so much output, in pieces of 10 KB."""
    for number in range(megabytes * 100):
        ctx.stream_output(f"{number:>10}" * 1000)
        await asyncio.sleep(0)
    return "done"


class Flooding:
    """A model that calls `flood` with the megabytes that the input says."""

    name = "testing:flooding"

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        from retinue.models import CallChunk, TextChunk

        if request.messages[-1].role == "tool":
            yield TextChunk("done")
        else:
            yield CallChunk(0, "c1", "flood", f'{{"megabytes": {request.messages[-1].text}}}')


class Ticking:
    """A model that says a word every 20 ms; the input is the number of words. It waits for `GO` if there is one."""

    name = "testing:ticking"

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        from retinue.models import TextChunk

        words = int(request.messages[-1].text)
        due = time.monotonic()
        for _ in range(words):
            due += TICK
            await asyncio.sleep(max(due - time.monotonic(), 0))
            yield TextChunk("word ")


async def serve_ours(port: int, db: str) -> None:
    import uvicorn

    from retinue import Agent, Runtime
    from retinue.server import create_app

    agents = [Agent("ticking", Ticking()), Agent("flooding", Flooding(), tools=[flood])]
    async with Runtime.open(db, agents=agents) as runtime:
        app = create_app(runtime, auth=TOKEN)
        config = uvicorn.Config(app, port=port, log_level="warning", backlog=4096, lifespan="off")
        await uvicorn.Server(config).serve()


async def serve_bare(port: int) -> None:
    """The least a Starlette endpoint does for the same stream: each reader has its own clock."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    frame = (
        b'id: %d\nevent: text_delta\ndata: {"kind":"text_delta","seq":%d,"at":%.6f,"run_id":"' + b"x" * 100 + b'"}\n\n'
    )

    async def events(request: Request) -> StreamingResponse:
        async def ticks() -> AsyncIterator[bytes]:
            due = time.monotonic()
            for seq in range(1, int(request.query_params["words"]) + 1):
                due += TICK
                await asyncio.sleep(max(due - time.monotonic(), 0))
                yield frame % (seq, seq, time.time())

        return StreamingResponse(ticks(), media_type="text/event-stream")

    async def healthy(request: Request) -> JSONResponse:
        return JSONResponse({})

    app = Starlette(routes=[Route("/events", events), Route("/healthz", healthy)])
    config = uvicorn.Config(app, port=port, log_level="warning", backlog=4096, lifespan="off")
    await uvicorn.Server(config).serve()


class Server:
    """A server in a process of its own."""

    def __init__(self, *args: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = subprocess.Popen([sys.executable, "-m", "benchmarks.load", "serve", str(self.port), *args])

    async def ready(self) -> None:
        async with aiohttp.ClientSession(self.url) as session:
            for _ in range(300):
                try:
                    async with session.get("/healthz"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)
        raise SystemExit("the server did not start")

    def cpu(self) -> float:
        with open(f"/proc/{self._process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        with open(f"/proc/{self._process.pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)


@asynccontextmanager
async def server(*args: str) -> AsyncIterator[Server]:
    running = Server(*args)
    try:
        await running.ready()
        yield running
    finally:
        running.stop()


# --- the readers


class Reader(asyncio.Protocol):
    """Reads one stream from a raw socket and checks that no event is lost or repeated."""

    def __init__(self, path: str, lags: list[float]) -> None:
        self._path, self._lags, self._rest = path, lags, b""
        self.seqs: list[int] = []
        self._opened_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        head = f"GET {self._path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        self.transport.write(head.encode())

    def data_received(self, data: bytes) -> None:
        now = time.time()
        if not self.open.done():
            self.open.set_result(None)
            self._opened_at = now
        text = self._rest + data
        end = text.rfind(b"\n\n")
        self._rest = text if end < 0 else text[end + 2 :]
        if end >= 0:
            for seq, kind, at in _FRAME.findall(text, 0, end):
                self.seqs.append(int(seq))
                if kind == b"text_delta" and float(at) > self._opened_at:
                    self._lags.append(now - float(at))
        if self._rest.endswith(b"0\r\n\r\n"):
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    @property
    def is_whole(self) -> bool:
        return self.seqs == list(range(1, len(self.seqs) + 1)) and bool(self.seqs)


async def read(port: int, path: str, lags: list[float]) -> Reader:
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: Reader(path, lags), "127.0.0.1", port)
    return reader


async def start(session: aiohttp.ClientSession, words: int, agent: str = "ticking") -> str:
    async with session.post("/api/v1/runs", json={"agent": agent, "input": str(words)}) as response:
        body = await response.json()
        assert response.status == 201, body
        return body["run_id"]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


# --- the scenarios


async def follow(running: Server, runs: int, readers: int, seconds: float) -> dict[str, Any]:
    """`runs` runs of a model with 50 words a second, each with `readers` readers."""
    words, lags = int(seconds / TICK), list[float]()
    async with asking(running) as session:
        ids = [await start(session, words) for _ in range(runs)]
        before = running.cpu()
        paths = [f"/api/v1/runs/{run_id}/events" for run_id in ids for _ in range(readers)]
        found = await asyncio.gather(*[read(running.port, path, lags) for path in paths])
        await asyncio.gather(*[reader.done for reader in found])
    for reader in found:
        reader.transport.close()
    return figures(found, lags, running.cpu() - before)


async def follow_bare(running: Server, readers: int, seconds: float) -> dict[str, Any]:
    lags, before = list[float](), running.cpu()
    path = f"/events?words={int(seconds / TICK)}"
    found = await asyncio.gather(*[read(running.port, path, lags) for _ in range(readers)])
    await asyncio.gather(*[reader.done for reader in found])
    for reader in found:
        reader.transport.close()
    return figures(found, lags, running.cpu() - before)


def figures(readers: list[Reader], lags: list[float], cpu: float) -> dict[str, Any]:
    delivered = sum(len(reader.seqs) for reader in readers)
    return {
        "readers": len(readers),
        "whole": sum(reader.is_whole for reader in readers),
        "delivered": delivered,
        "p50_ms": statistics.median(lags) * 1000,
        "p99_ms": percentile(lags, 0.99) * 1000,
        "worst_ms": max(lags) * 1000,
        "cpu_us": cpu / delivered * 1e6,
    }


@asynccontextmanager
async def asking(running: Server) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(running.url, headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def idle(running: Server, readers: int) -> dict[str, Any]:
    """Streams of a run that says nothing for a long time."""
    async with asking(running) as session:
        busy = await start(session, 100_000)
        path = f"/api/v1/runs/{busy}/events?kinds=run_finished"
        warm = await asyncio.gather(*[read(running.port, path, []) for _ in range(50)])
        await asyncio.gather(*[reader.open for reader in warm])
        before = running.memory()
        found = await asyncio.gather(*[read(running.port, path, []) for _ in range(readers)])
        await asyncio.gather(*[reader.open for reader in found])
        await asyncio.sleep(1)
        after = running.memory()
        async with session.post(f"/api/v1/runs/{busy}/cancel", json={}):
            pass
        await asyncio.gather(*[reader.done for reader in [*warm, *found]])
        for reader in [*warm, *found]:
            reader.transport.close()
    return {"streams": readers, "kb_each": (after - before) / readers / 1024}


class Stalled(asyncio.Protocol):
    """Opens a stream, takes its first bytes and reads no more."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.open: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        head = f"GET {self._path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        self.transport.write(head.encode())

    def data_received(self, data: bytes) -> None:
        self.transport.pause_reading()
        if not self.open.done():
            self.open.set_result(None)


async def stalled(
    running: Server, readers: int, megabytes: int, *, is_late: bool, seconds: float = 3.0
) -> dict[str, Any]:
    """Readers that do not read a large log: they come after its end (`is_late`), or before its first event."""
    loop, found = asyncio.get_running_loop(), list[Stalled]()

    async def stall(path: str) -> None:
        for _ in range(readers):
            _, reader = await loop.create_connection(lambda: Stalled(path), "127.0.0.1", running.port)
            found.append(reader)
        await asyncio.gather(*[reader.open for reader in found])

    async with asking(running) as session:
        warm = await start(session, megabytes, "flooding")
        async with session.get(f"/api/v1/runs/{warm}/result?wait=300") as response:
            assert (await response.json())["status"] == "completed"
        run_id = warm
        before = running.memory()
        if not is_late:
            run_id = await start(session, megabytes, "flooding")
        await stall(f"/api/v1/runs/{run_id}/events")
        async with session.get(f"/api/v1/runs/{run_id}/result?wait=300") as response:
            assert (await response.json())["status"] == "completed"
        most = running.memory()
        for _ in range(int(seconds * 10)):
            await asyncio.sleep(0.1)
            most = max(most, running.memory())
    for reader in found:
        reader.transport.abort()
    await asyncio.sleep(0.1)  # now the sockets are closed
    return {"readers": readers, "log_mb": megabytes, "grew_mb": (most - before) / 1e6}


async def starts(running: Server, rate: int, seconds: float) -> dict[str, Any]:
    """Start runs at a fixed rate, whatever the answers take."""
    took, failed = list[float](), list[str]()

    async def one(session: aiohttp.ClientSession) -> None:
        began = time.monotonic()
        try:
            await start(session, 1)
            took.append(time.monotonic() - began)
        except (AssertionError, aiohttp.ClientError) as exc:
            failed.append(str(exc)[:200])

    async with asking(running) as session:
        begun, jobs = time.monotonic(), list[asyncio.Task[None]]()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(begun + number / rate - time.monotonic(), 0))
            jobs.append(asyncio.create_task(one(session)))
        await asyncio.gather(*jobs)
        lasted = time.monotonic() - begun
    return {
        "started": len(took),
        "failed": failed[:3] or 0,
        "per_second": len(took) / lasted,
        "p50_ms": statistics.median(took) * 1000,
        "p99_ms": percentile(took, 0.99) * 1000,
    }


def show(title: str, found: dict[str, Any]) -> None:
    shown = "  ".join(
        f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )
    print(f"{title:<44} {shown}", flush=True)


def store_url(given: str, folder: str, stack: ExitStack) -> str:
    """Return the URL of a store: `sqlite` is a new file, `postgres` a server of our own, which writes to the disk."""
    if given == "sqlite":
        return f"sqlite:///{folder}/load.db"
    if given == "postgres":
        from tests.databases import postgres_server

        return stack.enter_context(postgres_server(fsync=True)).url()
    return given


async def main(args: argparse.Namespace) -> None:
    found: dict[str, Any] = {}

    def note(title: str, figures: dict[str, Any]) -> None:
        found[title] = figures
        show(title, figures)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if args.stalled:
            for given in args.db or ["memory:", "sqlite"]:
                kind, db = given.partition(":")[0], store_url(given, folder, stack)
                for is_late in (True,) if kind == "memory" else (True, False):  # there the log itself is in memory
                    async with server("ours", db) as ours:
                        title = f"{kind}: readers that do not read, {'late' if is_late else 'from the start'}"
                        note(title, await stalled(ours, 40, args.megabytes, is_late=is_late))
            return
        for given in args.db or ["memory:", "sqlite"]:
            kind, db = given.partition(":")[0], store_url(given, folder, stack)
            async with server("ours", db) as ours:
                note(f"{kind}: idle streams", await idle(ours, 1000))
                note(f"{kind}: 50 runs, 20 readers each", await follow(ours, 50, 20, args.seconds))
                note(f"{kind}: 200 runs, a reader each", await follow(ours, 200, 1, args.seconds))
                if args.start_seconds:
                    note(f"{kind}: 200 starts a second", await starts(ours, 200, args.start_seconds))
            async with server("bare") as bare:
                note("bare Starlette: 1,000 readers", await follow_bare(bare, 1000, args.seconds))
                note("bare Starlette: 200 readers", await follow_bare(bare, 200, args.seconds))
            crowd = (
                found[f"{kind}: 50 runs, 20 readers each"]["cpu_us"] / found["bare Starlette: 1,000 readers"]["cpu_us"]
            )
            single = (
                found[f"{kind}: 200 runs, a reader each"]["cpu_us"] / found["bare Starlette: 200 readers"]["cpu_us"]
            )
            print(
                f"{kind}: CPU of the server for a delivered event: {crowd:.2f}x bare (crowd), {single:.2f}x (one each)"
            )
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio_main = (
            serve_bare(int(sys.argv[2])) if sys.argv[3] == "bare" else serve_ours(int(sys.argv[2]), sys.argv[4])
        )
        import uvloop

        uvloop.run(asyncio_main)
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--seconds", type=float, default=10.0, help="length of each run")
        parser.add_argument("--start-seconds", type=float, default=60.0, help="0: no starts")
        parser.add_argument("--db", action="append", help="the store: a URL, sqlite or postgres; may be repeated")
        parser.add_argument("--stalled", action="store_true", help="only: 40 readers that do not read a large log")
        parser.add_argument("--megabytes", type=int, default=70, help="the size of that log")
        parser.add_argument("--json", action="store_true")
        asyncio.run(main(parser.parse_args()))
