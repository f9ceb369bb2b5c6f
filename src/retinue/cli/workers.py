"""The processes of `retinue serve --workers`: they share a socket and a database."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress

from .interrupt import Interrupt
from .parsers import COMPLETED, FAILED
from .text import complain

READY = "\x16ready"
"""The line by which a worker reports that it listens."""


class Workers:
    """Starts the workers, replaces those that end, and stops them all."""

    def __init__(
        self, args: argparse.Namespace, listener: socket.socket, token: str | None, interrupt: Interrupt
    ) -> None:
        self._listener, self._number, self._interrupt = listener, args.workers, interrupt
        self._command = [sys.executable, "-m", "retinue", *args.argv, "--listen-fd", str(listener.fileno())]
        self._token = token
        self._processes: dict[asyncio.Task[int], Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        interrupt.clean_up = self._kill

    async def serve(self, announce: Callable[[], None]) -> int:
        stopping = asyncio.create_task(self._interrupt.wait())
        try:
            for _ in range(self._number):  # the first alone: it may have to create the database
                if not stopping.done() and (code := await self._start(stopping)) is not None:
                    return code
            if not stopping.done():
                announce()
            while not stopping.done():
                await asyncio.wait({stopping, *self._processes}, return_when=asyncio.FIRST_COMPLETED)
                if not stopping.done() and not await self._replace(stopping):
                    return FAILED
            return COMPLETED
        finally:
            stopping.cancel()
            await self._stop()

    async def _start(self, stopping: asyncio.Task[None]) -> int | None:
        """Start a worker and wait until it listens; return its exit code if it ended before."""
        fd = self._listener.fileno()
        # A session of its own: Ctrl-C is for this process, which tells the workers once.
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, pass_fds=(fd,), start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"token": self._token}).encode() + b"\n")
        ended = asyncio.create_task(process.wait())
        self._processes[ended] = process
        ready = asyncio.Event()
        reading = asyncio.create_task(_forward(process, ready))
        self._tasks.add(reading)
        reading.add_done_callback(self._tasks.discard)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if ended.done() and not ready.is_set():
            del self._processes[ended]
            return ended.result() if ended.result() > 0 else FAILED
        return None

    async def _replace(self, stopping: asyncio.Task[None]) -> bool:
        """Start a worker for each that has ended; return False if one could not be started."""
        for task in [task for task in self._processes if task.done()]:
            del self._processes[task]
            complain(f"a worker ended with exit code {task.result()}: another takes its place")
            if await self._start(stopping) is not None:
                return False
        return True

    async def _stop(self) -> None:
        self._listener.close()
        for task, process in self._processes.items():
            if not task.done():
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
        await asyncio.gather(*self._processes, *self._tasks)

    def _kill(self) -> None:
        for task, process in self._processes.items():
            if not task.done():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


async def _forward(process: Process, ready: asyncio.Event) -> None:
    """Print what a worker prints, but for the line that it is ready."""
    assert process.stdout is not None
    while piece := await process.stdout.read(65_536) if ready.is_set() else await process.stdout.readline():
        if piece == f"{READY}\n".encode():
            ready.set()
        else:
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
