"""Helpers of these tests: agents that ask or wait, nodes in processes of their own, and what a log says."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retinue import Agent, Decision, Runtime, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say
from tests.prepared import PYTHON

PROJECT = Path(__file__).parents[2]
PATIENCE = 90.0
"""Seconds after which a test fails because something did not happen."""


def yes() -> Decision:
    return Decision.resume("yes")


async def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Return when a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition is a test's own
            await asyncio.sleep(0.01)


class Effects:
    """Lines in a file: things that were done, by whichever process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, line: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{line}\n")

    @property
    def lines(self) -> list[str]:
        return self.file.read_text().splitlines() if self.file.exists() else []


def pay_tool(effects: Effects) -> Any:
    @tool
    async def pay(to: str, ctx: ToolContext) -> Any:
        """Pay somebody after a human has agreed."""
        if ctx.resume_input is None:
            return ToolResult.suspended(f"may I pay {to}?")
        effects.add(f"paid {to}")
        return f"paid {to}"

    return pay


def payer(effects: Effects, name: str = "payer") -> Agent:
    """An agent that pays whom its input names last, and answers further messages with their text."""

    def turn(request: Any) -> Any:
        last = request.messages[-1]
        if last.role == "tool":
            return say(f"done: {last.text}")
        if last.text.startswith("pay "):
            return call("pay", {"to": last.text.split()[-1]}, id="p1")
        return say(f"heard {last.text}")

    return Agent(name, ScriptedModel(turn), tools=[pay_tool(effects)])


async def events_so_far(runtime: Runtime, run_id: str, last: Callable[[Any], bool]) -> list[Any]:
    """Return the log of a run up to the first event for which `last` holds."""
    events: list[Any] = []
    async with asyncio.timeout(PATIENCE):
        async for event in runtime.events(run_id):
            events.append(event)
            if last(event):
                return events
    raise AssertionError(f"the log ended before that: {[event.kind for event in events]}")


async def whole_log(runtime: Runtime, run_id: str) -> list[Any]:
    """Return the events of a run whose log has ended, numbered without gaps."""
    async with asyncio.timeout(PATIENCE):
        events: list[Any] = [event async for event in runtime.events(run_id)]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return events


def ends_of(events: Sequence[Any]) -> dict[str, list[str]]:
    """Return how each run of a log ended: the statuses of its `run_finished`, without those where it only waits."""
    ends: dict[str, list[str]] = {event.run_id: [] for event in events if event.kind == "run_started"}
    for event in events:
        if event.kind == "run_finished" and event.status != "suspended":
            ends[event.run_id].append(str(event.status.value))
    return ends


class Node:
    """A process that runs a function of `programs`. It prints lines, and goes on when it is told to."""

    def __init__(self, program: str, *args: Any, prefix: Sequence[str] = (), env: dict[str, str] | None = None) -> None:
        command = [*prefix, PYTHON, "-m", "tests.findings.programs", program, *map(str, args)]
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
