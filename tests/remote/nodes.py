"""Server processes on loopback, which tests start, kill and start again, and a client for them."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from retinue.core.events import event_from_json
from tests.prepared import PYTHON
from tests.server.serving import Site, asking

from .node import TOKEN

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Node:
    """One server process with a folder of its own; it keeps its port when it is started again."""

    def __init__(self, folder: Path, role: str, below: str = "") -> None:
        self.folder, self.role, self.below, self.port = folder, role, below, free_port()
        folder.mkdir(parents=True)
        self._process: subprocess.Popen[str] | None = None
        self.starts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        command = [PYTHON, "-m", "tests.remote.node", str(self.folder), str(self.port), self.role, self.below]
        with (self.folder / "node.log").open("a") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line == "ready\n", (self.folder / "node.log").read_text()
        self.starts += 1

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    async def restart(self) -> None:
        self.kill()
        await self.start()

    @asynccontextmanager
    async def site(self) -> AsyncIterator[Site]:
        async with asking(self.url, TOKEN) as site:
            yield site

    async def run(self, input: str) -> str:
        async with self.site() as site:
            return (await site.start(self.role, input, thread_id="t1"))["run_id"]

    async def result(self, run_id: str) -> Any:
        """Return the result of a run that has ended or waits. The process may be started anew meanwhile."""
        while True:
            async with self.site() as site:
                answer = await site.get(f"/api/v1/runs/{run_id}/result?wait=60")
            if answer.status == 200:
                return answer.body

    async def answer(self, run_id: str, decisions: dict[str, Any]) -> None:
        async with self.site() as site:
            answer = await site.post(f"/api/v1/runs/{run_id}/decisions", {"decisions": decisions})
            assert answer.status == 202, answer

    async def events(self, run_id: str) -> list[Any]:
        """Return all events of a run that has ended."""
        async with self.site() as site:
            found = await site.all_events(f"/api/v1/runs/{run_id}/events?after=0")
        return [event_from_json(one.data) for one in found]

    async def seen(self, run_id: str, holds: Any) -> None:
        """Return when the run has an event for which this holds."""
        async with self.site() as site:
            async for event in site.events(f"/api/v1/runs/{run_id}/events?after=0"):
                if holds(event_from_json(event.data)):
                    return

    async def runs(self) -> list[str]:
        """Return the ids of all root runs, the oldest first."""
        async with self.site() as site:
            return [run["run_id"] for run in (await site.get("/api/v1/runs")).body["items"]][::-1]


@asynccontextmanager
async def nodes(folder: Path, *roles: str) -> AsyncIterator[list[Node]]:
    """Start servers, each of which uses the next one: the last is that of the researcher."""
    made: list[Node] = []
    try:
        for role in reversed(roles):
            made.insert(0, Node(folder / role, role, made[0].url if made else ""))
            await made[0].start()
        yield made
    except BaseException:
        for node in made:
            sys.stderr.write(f"--- {node.role}\n{(node.folder / 'node.log').read_text()[-4000:]}\n")
        raise
    finally:
        for node in made:
            node.kill()
        if not os.environ.get("KEEP_NODES"):
            shutil.rmtree(folder, ignore_errors=True)
