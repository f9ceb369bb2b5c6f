"""A Temporal server of the tests' own, on a port of its own. It may be killed and started again."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CLEANER = """
import os, shutil, signal, sys
pid = None
for line in sys.stdin:
    pid = int(line)
if pid is not None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
"""Ends the server and removes its folder when whoever started it is gone, however suddenly. Reads the pid, last one last."""
PROGRAM = str(Path(sys.executable).parent / "temporal")
FAST = ("transfer", "timer", "visibility")
"""Queues of the server that are read 20 times a second unless told otherwise."""
FAIR = (
    "matching.enableFairness=true",
    "matching.numTaskqueueReadPartitions=1",
    "matching.numTaskqueueWritePartitions=1",
)
"""Orders are kept exactly, by priority and fair between users."""
PROMPT = ('history.timerProcessorMaxTimeShift="20ms"',)
"""Timers are rounded up to a second unless told otherwise: those of retries, too."""
ATTRIBUTES = ("RetinueAgent=Keyword", "RetinueStep=Int", "RetinueQuestions=KeywordList")


class TemporalServer:
    """A server with its data in a file. `engine` names it with a queue that nobody else has."""

    def __init__(self, folder: Path, *, indexed: bool = True) -> None:
        self.folder, self._indexed = folder, indexed
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._cleaner = subprocess.Popen([sys.executable, "-c", CLEANER, str(folder)], stdin=subprocess.PIPE)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def engine(self) -> str:
        return f"temporal://{self.address}/default?queue=q{os.getpid()}-{next(self._numbers)}"

    def start(self) -> None:
        """Start it if it does not run, and wait until it can be connected to."""
        if self.process is not None and self.process.poll() is None:
            return
        command = [PROGRAM, "server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(self.port)]
        command += ["--db-filename", str(self.folder / "temporal.db"), "--log-level", "error"]
        command += ["--sqlite-pragma", "synchronous=off"]
        settings = [f"history.{name}ProcessorMaxPollRPS=2000" for name in FAST]
        for setting in (*settings, *FAIR, *PROMPT):
            command += ["--dynamic-config-value", setting]
        for attribute in ATTRIBUTES if self._indexed else ():
            command += ["--search-attribute", attribute]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "HOME": str(self.folder), "GOGC": "400"}
            )
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.write(f"{self.process.pid}\n".encode())
        self._cleaner.stdin.flush()
        while not (is_listening(self.port) and self._is_healthy()):
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.02)

    def _is_healthy(self) -> bool:
        """A server that listens may still refuse requests for a moment."""
        asked = [PROGRAM, "operator", "cluster", "health", "--address", self.address]
        return subprocess.run(asked, capture_output=True, env={**os.environ, "HOME": str(self.folder)}).returncode == 0

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        self.kill()
        self._cleaner.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def temporal_server(*, indexed: bool = True, inside: Path | None = None) -> Iterator[TemporalServer]:
    """A server, stopped and removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="temporal", dir=inside))
    server = TemporalServer(folder, indexed=indexed)
    try:
        server.start()
        yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def engine_named(name: str) -> Iterator[str]:
    """The engine that a script is asked for: `temporal` is a server of its own."""
    if name != "temporal":
        yield name
        return
    with temporal_server() as server:
        yield server.engine()
