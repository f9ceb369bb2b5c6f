"""Workers as processes: `retinue worker`, to be killed, frozen and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from retinue import Runtime
from tests.prepared import PYTHON

ROOT = Path(__file__).resolve().parent.parent.parent


class WorkerProcess:
    """A worker. `output` is what it has printed."""

    def __init__(self, process: Process) -> None:
        self.process, self.output = process, ""

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ready(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.output += line.decode()
            if line == b"ready\n":
                return
        assert self.process.stderr is not None
        raise AssertionError(self.output + (await self.process.stderr.read()).decode())

    def send(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signum)

    async def end(self, signum: int = signal.SIGKILL) -> int:
        self.send(signum)
        return await self.process.wait()


async def start_worker(
    url: str,
    folder: Path | None = None,
    *options: str,
    engine: str = "postgres",
    target: str = "tests.engines.app:agents",
) -> WorkerProcess:
    """Start a worker and wait until it can claim."""
    env = dict(os.environ)
    if folder is not None:
        env["CREW_FOLDER"] = str(folder)
    command = [
        PYTHON,
        "-m",
        "retinue",
        "worker",
        target,
        "--db",
        url,
        "--engine",
        engine,
        "--max-takeovers",
        "1000",
        *options,
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=env, cwd=ROOT)
    worker = WorkerProcess(process)
    try:
        await worker.ready()
    except BaseException:
        await worker.end()
        raise
    return worker


@asynccontextmanager
async def workers(
    number: int, url: str, folder: Path | None = None, *options: str, engine: str = "postgres"
) -> AsyncGenerator[list[WorkerProcess]]:
    """Start workers together; those that still work at the end are killed."""
    started = list(await asyncio.gather(*[start_worker(url, folder, *options, engine=engine) for _ in range(number)]))
    try:
        yield started
    finally:
        await asyncio.gather(*[worker.end() for worker in started])


async def owner_pid(client: Runtime, run_id: str) -> int | None:
    """The pid of the process that has a run, if one has it. An owner id is boot/namespace/pid/start/random."""
    owner = await client.store.owner_of(run_id)  # type: ignore[attr-defined]
    return None if owner is None else int(owner.split("/")[2])


async def holder(started: Sequence[WorkerProcess], client: Runtime, run_id: str) -> WorkerProcess | None:
    """The worker that has a run."""
    pid = await owner_pid(client, run_id)
    return next((worker for worker in started if worker.pid == pid), None)


async def command(*words: str) -> tuple[int | None, str]:
    """Run `retinue …`; return its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-m", "retinue", *words), stdout=PIPE, stderr=PIPE, cwd=ROOT, env={**os.environ}
    )
    out, err = await process.communicate()
    return process.returncode, (out + err).decode()
