"""scripts/bench --pauses: the longest pause of the event loop while hostile input is worked on.

A pause is the time by which a tick of 1 ms comes late, as far as this process worked in it: other programs cause
pauses too. An attack is run a few times and its best run counts. The goal is 50 ms.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.attacks import Work, content_attacks, large_values
from retinue import HarnessAgent, Runtime
from retinue.testing import ScriptedModel, call, say

GOAL_MS = 50.0
MANY = 200_000

ATTACKS: list[tuple[str, str, dict[str, Any]]] = [
    ("30,000 empty braces", "glob_files", {"pattern": "{" + "," * 30_000}),
    ("nested braces", "glob_files", {"pattern": "{a,b}" * 800}),
    ("64 long alternatives", "glob_files", {"pattern": "{a,b}" * 6 + "a*" * 2000}),
    ("2,000 stars", "glob_files", {"pattern": "many/" + "*a" * 2000}),
    ("1,300 double stars", "glob_files", {"pattern": "**/" * 1300 + "x"}),
    ("200,000 files: glob", "glob_files", {"pattern": "**/*.nothing"}),
    ("200,000 files: list", "list_files", {"path": "many"}),
    ("200,000 files: grep", "grep_files", {"pattern": "nothing", "path": "many"}),
    ("200,000 files: a missing one", "read_file", {"path": "many/999999x"}),
    ("500 folders deep", "glob_files", {"pattern": "**/leaf", "path": "deep"}),
    ("4 TB without a byte: read", "read_file", {"path": "sparse.txt"}),
    ("4 TB after a line: read", "read_file", {"path": "headed.txt"}),
    ("4 TB after a line: skip", "read_file", {"path": "headed.txt", "offset": 10**9}),
    ("4 TB after a line: grep", "grep_files", {"pattern": "x", "path": "headed.txt"}),
    ("4 TB after a line: edit", "edit_file", {"path": "headed.txt", "old": "a", "new": "b"}),
    ("a line of 200 MB", "read_file", {"path": "line.txt"}),
    ("100 million lines", "read_file", {"path": "lines.txt", "offset": 99_000_000}),
    ("regular expression that backtracks", "grep_files", {"pattern": "(a+)+$", "path": "line.txt"}),
    ("regular expression that is large", "grep_files", {"pattern": "((a{0,30}){0,30}){0,1}" * 40, "path": "line.txt"}),
    ("edit: 5 million matches", "edit_file", {"path": "edit.txt", "old": "a", "new": "bb", "replace_all": True}),
    ("edit: long replacement", "edit_file", {"path": "edit.txt", "old": "a", "new": "b" * 10**6, "replace_all": True}),
    ("edit: old text that nearly matches", "edit_file", {"path": "edit.txt", "old": "a\n" * 4000 + "b", "new": ""}),
    ("edit: old text that is not there", "edit_file", {"path": "edit.txt", "old": "zzz", "new": ""}),
    ("write 1 MB", "write_file", {"path": "big.txt", "content": "é\n" * 340_000}),
]


def fill(folder: Path) -> None:
    """Make the files of the attacks."""
    (folder / "many").mkdir()
    for number in range(MANY):
        os.close(os.open(folder / "many" / f"{number:06}.txt", os.O_CREAT | os.O_WRONLY))
    deep = folder / "deep"
    deep.mkdir()
    before = os.getcwd()
    os.chdir(deep)
    for _ in range(500):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(before)
    for name, head in (("sparse.txt", b""), ("headed.txt", b"a line\n")):
        with open(folder / name, "wb") as stream:
            stream.write(head)
            stream.truncate(4 << 40)
    (folder / "line.txt").write_bytes(b"a" * 200_000_000)
    (folder / "lines.txt").write_bytes(b"\n" * 100_000_000)


class Measured(NamedTuple):
    pause_ms: float
    seconds: float
    said: str


async def ticking(pauses: list[float]) -> None:
    while True:
        began, worked = time.perf_counter(), time.process_time()
        await asyncio.sleep(0.001)
        pauses.append(min(time.perf_counter() - began - 0.001, time.process_time() - worked))


def _use(tool: str, args: dict[str, Any]) -> Work:
    """Return an attack on a file tool."""

    async def attack(folder: Path) -> str:
        agent = HarnessAgent("a", ScriptedModel([call(tool, args), say("done")]), workspace=folder)
        result = await Runtime([agent]).run("a", "go")
        return next(message.text for message in result.messages if message.role == "tool")

    return attack


async def measure(folder: Path, attack: Work) -> Measured:
    (folder / "edit.txt").write_bytes(b"a\n" * 4_999_000)
    pauses: list[float] = [0.0]
    ticker = asyncio.create_task(ticking(pauses))
    await asyncio.sleep(0.05)
    pauses.clear()
    began = time.perf_counter()
    told = await attack(folder)
    took = time.perf_counter() - began
    await asyncio.sleep(0.01)
    ticker.cancel()
    return Measured(max(pauses) * 1000, took, " ".join(told[-200:].split())[-70:])


async def busy() -> float:
    """Return the longest pause in 5 s beside a thread that only counts: the noise of this machine."""
    pauses: list[float] = []
    ticker = asyncio.create_task(ticking(pauses))
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    thread = threading.Thread(target=count)
    thread.start()
    await asyncio.sleep(5)
    stop.set()
    ticker.cancel()
    return max(pauses) * 1000


async def cancelled(folder: Path) -> float:
    """Return the seconds for which a search goes on after it was cancelled."""

    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    agent = HarnessAgent("a", ScriptedModel([call("grep_files", {"pattern": "x"}), say("")]), workspace=folder)
    run = Runtime([agent]).stream("a", "go")
    while "tool-grep_files" not in threads():  # noqa: ASYNC110 - a thread has no event
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.2)
    began = time.perf_counter()
    await run.cancel("enough")
    while "tool-grep_files" in threads():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return time.perf_counter() - began


def main(only: Iterable[str] = (), rounds: int = 3, show: Callable[[str], None] = print) -> bool:
    """Print a table; return whether every pause is within the goal."""
    logging.disable(logging.CRITICAL)  # runs fail on purpose
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder)
        show(f"{'attack':44} {'pause ms':>8} {'seconds':>8}  answer")
        idle = min([asyncio.run(busy()) for _ in range(rounds)])
        show(f"{'none: a thread that counts':44} {idle:8.1f} {5:8.2f}  what this machine does by itself")
        attacks = [*[(title, _use(tool, args)) for title, tool, args in ATTACKS], *content_attacks(), *large_values()]
        gc.freeze()  # the values of the other attacks are not garbage to look through
        for title, attack in attacks:
            if only and not any(word in title for word in only):
                continue
            best = min([asyncio.run(measure(folder, attack)) for _ in range(rounds)])
            if not title.startswith("large:"):
                worst = max(worst, best.pause_ms)
            show(f"{title:44} {best.pause_ms:8.1f} {best.seconds:8.2f}  {best.said}")
        if not only:
            show(f"a cancelled search ends after {asyncio.run(cancelled(folder)) * 1000:.0f} ms")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    show(f"longest pause {worst:.1f} ms (goal {GOAL_MS:g}), peak memory {peak:,.0f} MB")
    return worst <= GOAL_MS


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
