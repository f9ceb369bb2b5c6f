"""The A2A server of the SDK as a process that tests start, kill and start again."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.prepared import PYTHON
from tests.remote.nodes import ROOT, free_port


class Sample:
    """One server process; it keeps its port when it is started again."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.port, self.settings = folder, free_port(), settings
        if "GRPC" in settings.get("transports", ()):
            settings["grpc_port"] = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def origins(self) -> list[str]:
        return [f"http://127.0.0.1:{self.settings['grpc_port']}"] if "grpc_port" in self.settings else []

    async def start(self) -> None:
        command = [PYTHON, "-m", "tests.a2a.server", str(self.folder), str(self.port)]
        with (self.folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(self.settings)], cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line == "ready\n", (self.folder / "server.log").read_text()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def asked(self, what: str = "begin") -> list[dict[str, Any]]:
        """What it was asked so far, or what has ended there."""
        path = self.folder / "asked.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [said for line in lines if (said := json.loads(line))["what"] == what]


@asynccontextmanager
async def sample(folder: Path, **settings: Any) -> AsyncIterator[Sample]:
    server = Sample(folder, **settings)
    await server.start()
    try:
        yield server
    finally:
        server.kill()
