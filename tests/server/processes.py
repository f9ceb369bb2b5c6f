"""`retinue serve` as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.prepared import PYTHON

from .serving import Site, asking

ROOT = Path(__file__).parents[2]
TOKEN = "token-of-the-processes"


class Served:
    """A server process, and the address it has printed."""

    def __init__(self, process: Process, lines: list[str], site: Site) -> None:
        self.process, self.lines, self.site = process, lines, site

    async def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signum)
        return await self.process.wait()

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


@asynccontextmanager
async def served(target: str, *options: str, token: str | None = TOKEN, folder: Path | None = None, port: int = 0):
    """Start a server and wait until it is ready; it is killed at the end if it still works."""
    words = [PYTHON, "-m", "retinue", "serve", target, "--port", str(port), *options]
    if token is not None and "--no-auth" not in options and "--user-header" not in options:
        words += ["--token", token]
    environment = {**os.environ, "SERVED_FOLDER": str(folder or "")}
    environment.pop("RETINUE_DB", None)
    process = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=PIPE, cwd=ROOT, env=environment)
    try:
        lines = await _until_ready(process)
        printed = next((line.removeprefix("token: ") for line in lines if line.startswith("token: ")), token)
        async with asking(next(line for line in lines if "://" in line).split()[-1], printed) as site:
            yield Served(process, lines, site)
    except BaseException:
        process.kill()
        assert process.stderr is not None
        sys.stderr.write((await process.stderr.read()).decode())
        raise
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]


async def _until_ready(process: Process) -> list[str]:
    assert process.stdout is not None
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or lines[-1] != "ready":
        line = await process.stdout.readline()
        assert line, (await process.stderr.read()).decode()
        lines.append(line.decode().rstrip("\n"))
    return lines


@asynccontextmanager
async def as_user(server: Served, token: str | None) -> AsyncIterator[Site]:
    async with asking(server.site.url, token) as site:
        yield site
