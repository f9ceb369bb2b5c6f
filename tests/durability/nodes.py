"""Processes that run a function of `programs`: tests stop, kill and read them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.prepared import PYTHON

PROJECT = Path(__file__).parents[2]
PATIENCE = 90.0
"""Seconds after which a test fails because something did not happen."""


class Node:
    """A process that runs a function of `programs`. It prints lines, and goes on when it is told to."""

    def __init__(self, program: str, *args: Any, prefix: Sequence[str] = (), env: dict[str, str] | None = None) -> None:
        command = [*prefix, PYTHON, "-m", "tests.durability.programs", program, *map(str, args)]
        self.process = subprocess.Popen(
            command,
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        self.printed: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def line(self, seconds: float = PATIENCE) -> str:
        """Return the next line that it prints."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"it printed nothing for {seconds:g} s, after {self.printed}") from None
        self.printed.append(line)
        return line

    def expect(self, wanted: str, seconds: float = PATIENCE) -> None:
        """Read lines up to one that is `wanted`."""
        end = time.monotonic() + seconds
        while self.line(max(0.0, end - time.monotonic())) != wanted:
            pass

    @property
    def is_quiet(self) -> bool:
        """Whether it has printed nothing that was not read."""
        return self._lines.empty()

    def tell(self, line: str = "go") -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait()

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass


@contextmanager
def node(program: str, *args: Any, **options: Any) -> Iterator[Node]:
    """Run a program in a process of its own; it is killed at the end."""
    started = Node(program, *args, **options)
    try:
        yield started
    finally:
        started.close()
