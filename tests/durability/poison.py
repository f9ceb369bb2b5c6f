"""The poison test: runs that kill their process, among runs that do not, on workers and on a server that restart.

Every good run completes, every poison run ends as `worker_lost`, at most five processes more die than there are poison runs,
and a server that starts answers within two seconds, before it continues a run that may kill it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from retinue import Agent, Runtime, tool
from retinue.core.model import ModelRequest
from retinue.runtime.worker import Worker
from retinue.storage.stores import open_store
from retinue.testing import ScriptedModel, ScriptedTurn, call, say

from ..databases import postgres_server
from ..prepared import PYTHON

ROOT, SELF = Path(__file__).parents[2], "tests.durability.poison"
FOLDER = "RETINUE_POISON_FOLDER"
"""The variable that tells a server its folder."""
DEADLINE = 600.0
LEASE = 3600.0
"""A dead process is known by its pid: nobody waits for the end of a lease."""
WORKERS = 2
MARGIN = 5
"""Processes that may die more than there are poison runs."""
SOON = 2.0
"""Seconds in which a server that starts answers."""


def make_agent(folder: Path) -> Agent:
    """An agent that makes two harmless calls, or one of two that end the process, one of which is idempotent."""

    @tool(idempotent=True)
    async def nap() -> str:
        """Sleep a little."""
        await asyncio.sleep(0.05)
        return "slept"

    async def explode() -> str:
        """End the process."""
        with (folder / "bombs").open("a") as file:
            file.write(f"{time.time():.3f} {os.getpid()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def turn(request: ModelRequest) -> ScriptedTurn:
        said, made = request.messages[0].text, sum(message.role == "tool" for message in request.messages)
        if said != "good":
            return call(said)
        return say("done") if made == 2 else call("nap")

    bombs = [tool(name=name, idempotent=name == "again")(explode) for name in ("again", "once")]
    return Agent("walker", ScriptedModel(turn), tools=[nap, *bombs], max_steps=200)


def served() -> Agent:
    """Return the agent of the server."""
    return make_agent(Path(os.environ[FOLDER]))


async def work(folder: Path, url: str, max_takeovers: int) -> None:
    """Work on runs until the process is killed."""
    options: Any = {"lease": LEASE, "engine": "postgres", "max_takeovers": max_takeovers}
    async with Runtime.open(url, [make_agent(folder)], **options) as runtime:
        await Worker(runtime).run(asyncio.Event())


async def begin(folder: Path, url: str, inputs: list[str]) -> None:
    """Store runs, which workers will begin."""
    async with Runtime.open(url, [make_agent(folder)], engine="postgres") as runtime:
        for number, text in enumerate(inputs):
            await runtime.stream("walker", text, user_id=f"user {number % 7}").stored()


class Broken(AssertionError):
    """A run was lost, or too many processes died."""


class Process:
    """A process that is started again when it dies."""

    def __init__(self, folder: Path, command: list[str], port: int | None = None) -> None:
        self._folder, self._command, self.port = folder, command, port
        self.deaths = 0
        self.starts: list[float] = []
        """The seconds until each start answered, without those in which others had the cores."""
        self.start()

    def start(self) -> None:
        with (self._folder / "stderr.txt").open("ab") as said:
            self.process = subprocess.Popen(
                self._command,
                stdout=subprocess.DEVNULL,
                stderr=said,
                cwd=ROOT,
                env={**os.environ, FOLDER: str(self._folder)},
            )
        self.began, queued = time.monotonic(), in_queue("self")
        while self.port is not None and not is_ready(self.port):
            need(self.process.poll() is None, f"it died before it answered: {tail(self._folder)}")
            need(time.monotonic() - self.began < DEADLINE, "it does not answer")
            time.sleep(0.01)
        if self.port is not None:
            others = in_queue("self") - queued + in_queue(self.process.pid)
            self.starts.append(time.monotonic() - self.began - others)

    def look(self) -> None:
        """Start it again if it has died."""
        if (code := self.process.poll()) is not None:
            need(code == -signal.SIGKILL, f"it ended with {code}: {tail(self._folder)}")
            self.deaths += 1
            self.start()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def in_queue(process: int | str) -> float:
    """Return the seconds that a process has waited for a core; 0 where the system does not count them."""
    path = Path(f"/proc/{process}/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def need(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


def tail(folder: Path) -> str:
    return (folder / "stderr.txt").read_text()[-2000:]


def mixed(good: int, poison: int) -> list[str]:
    """Return the inputs of the runs: the poison ones in between, half of them with a tool that is idempotent."""
    inputs = ["good"] * good
    for number in range(poison):
        inputs.insert((number * (good + poison)) // poison, "again" if number % 2 else "once")
    return inputs


def play_workers(folder: Path, url: str, good: int, poison: int, max_takeovers: int = 5) -> dict[str, Any]:
    asyncio.run(begin(folder, url, mixed(good, poison)))
    command = [PYTHON, "-m", SELF, "work", str(folder), url, str(max_takeovers)]
    return play(folder, url, [Process(folder, command) for _ in range(WORKERS)], good, poison)


def play_server(folder: Path, good: int, poison: int, max_takeovers: int = 5) -> dict[str, Any]:
    url, port = f"sqlite:///{folder}/app.db", free_port()
    command = [PYTHON, "-m", "retinue", "serve", f"{SELF}:served", "--db", url, "--no-auth", "--port", str(port)]
    command += ["--max-takeovers", str(max_takeovers)]
    server = Process(folder, command, port)
    try:
        for number, text in enumerate(mixed(good, poison)):
            post(server, f"run_{number:04}", text)
    except BaseException:
        server.stop()
        raise
    return play(folder, url, [server], good, poison)


def post(server: Process, run_id: str, text: str) -> None:
    """Start a run by HTTP, again and again until it is confirmed: the server may die meanwhile."""
    body = json.dumps({"agent": "walker", "input": text}).encode()
    headers = {"content-type": "application/json", "idempotency-key": run_id}
    end = time.monotonic() + DEADLINE
    while True:
        need(time.monotonic() < end, f"run {run_id} is not taken")
        server.look()
        asked = urllib.request.Request(f"http://127.0.0.1:{server.port}/api/v1/runs", body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=30):
                return
        except urllib.error.HTTPError as exc:
            raise Broken(f"{exc.code}: {exc.read()[:300]!r}") from exc
        except OSError:
            time.sleep(0.05)


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def play(folder: Path, url: str, processes: list[Process], good: int, poison: int) -> dict[str, Any]:
    """Start the processes again until all runs have ended, and check how they have."""
    began, end = time.monotonic(), time.monotonic() + DEADLINE
    try:
        while (runs := asyncio.run(ended(url))) is None or len(runs) < good + poison:
            for process in processes:
                process.look()
            need(time.monotonic() < end, f"{len(runs or ())} of {good + poison} runs have ended")
            time.sleep(0.2)
    finally:
        for process in processes:
            process.stop()
    deaths = sum(process.deaths for process in processes)
    ends = Counter((run.identity.agent, run.result.status.value, run.result.termination) for run in runs)
    wanted = {("walker", "completed", "natural"): good, ("walker", "failed", "worker_lost"): poison}
    need(ends == wanted, f"the runs ended so: {ends}")
    need(deaths <= MARGIN + poison, f"{deaths} processes died of {poison} poison runs")
    starts = sorted([seconds for process in processes for seconds in process.starts]) or [0.0]
    need(starts[-1] <= SOON, f"servers answered after {', '.join([f'{seconds:.1f}' for seconds in starts])} s")
    return {"runs": good + poison, "deaths": deaths, "seconds": time.monotonic() - began, "slowest_start": starts[-1]}


async def ended(url: str) -> list[Any] | None:
    """Return the runs that have ended; None if some have not."""
    store: Any = open_store(url)
    await store.open()
    try:
        runs = await store.list_runs()
        return runs if all(run.has_ended for run in runs) else None
    finally:
        await store.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/poison-test", description=__doc__)
    parser.add_argument("--good", type=int, default=200, metavar="N", help="runs that harm nobody (200)")
    parser.add_argument("--poison", type=int, default=20, metavar="N", help="runs that kill their process (20)")
    asked = parser.parse_args()
    try:
        for name in ("two workers on PostgreSQL", "one server on SQLite"):
            with tempfile.TemporaryDirectory(prefix="retinue-poison-") as folder:
                if name.endswith("SQLite"):
                    found = play_server(Path(folder), asked.good, asked.poison)
                else:
                    with postgres_server() as server:
                        found = play_workers(Path(folder), server.url(), asked.good, asked.poison)
            sys.stdout.write(f"{name}: { ({key: round(value, 2) for key, value in found.items()}) }\n")
            sys.stdout.flush()
    except Broken as exc:
        sys.stdout.write(f"BROKEN: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        asyncio.run(work(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    else:
        sys.exit(main())
