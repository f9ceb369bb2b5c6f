"""`retinue worker`: a process that works on the runs which an engine schedules; and `retinue queues`, which shows them."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

import msgspec

from ..core.concurrency import helpers
from ..core.errors import ConfigurationError
from ..runtime import Runtime
from ..runtime.worker import Worker
from ..storage.depths import QueueDepth, explain_depths, read_depths
from ..storage.schedules import Schedules
from ..storage.sql import SqlStore
from ..wire.resources import iso
from .database import as_misuse, database_url, open_database
from .interrupt import Interrupt
from .parsers import COMPLETED
from .serve import loop_factory, make_runtime, warn_of_target
from .text import complain, count, duration, print_json, table

__all__ = ["loop_factory", "show_queues", "work"]


_EXAMPLE = "postgresql://localhost/app"


async def work(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Work on runs until a signal comes; then begin nothing more, let what runs finish, and leave the runs to others."""
    database_url(args, _EXAMPLE)
    runtime = make_runtime(args)
    worker = Worker(runtime, queues=args.queues.split(","), slots=args.slots, grace=args.grace)
    stop = asyncio.Event()

    def ready() -> None:
        warn_of_target(args, runtime)
        agents, queues = ", ".join(runtime.agents), ", ".join(worker.info.queues)
        if args.json:
            print_json({"agents": list(runtime.agents), "queues": list(worker.info.queues), "slots": args.slots})
        else:
            print(f"working on {agents} from {queues} with {count(args.slots, 'slot')}")
        print("ready", flush=True)

    try:
        with as_misuse():
            await runtime.__aenter__()
        assert isinstance(runtime.store, SqlStore)
        async with helpers(_stop_when(interrupt, stop, worker)), _metrics(args.metrics, runtime, worker):
            await worker.run(stop, ready)
    finally:
        await runtime.close(args.grace)
    return COMPLETED


async def _stop_when(interrupt: Interrupt, stop: asyncio.Event, worker: Worker) -> None:
    await interrupt.wait()
    if worker.at_work:
        complain(f"stopping: {count(len(worker.at_work), 'run')} left to other workers; press Ctrl-C to leave at once")
    stop.set()


async def show_queues(args: argparse.Namespace) -> int:
    """Print what waits in each queue, the workers, and the schedules."""
    async with open_database(database_url(args, _EXAMPLE)) as store:
        if not store.has_queues:
            raise ConfigurationError("queues are in a PostgreSQL database: give its --db")
        (depths, workers), schedules = await explain_depths(store), await Schedules(store).list()
    if args.json:
        planned = [{**msgspec.structs.asdict(one), "next_at": iso(one.next_at)} for one in schedules]
        print_json(msgspec.to_builtins({"queues": depths, "workers": workers, "schedules": planned}))
        return COMPLETED
    rows = [["QUEUE", "READY", "DELAYED", "WORKING", "OLDEST", "WORKERS"]]
    for one in depths:
        serving = sum(worker.is_alive and one.queue in worker.queues for worker in workers)
        rows.append([one.queue, str(one.ready), str(one.delayed), str(one.working), duration(one.oldest), str(serving)])
    print("\n".join(table(rows)) if depths else "nothing waits, nothing works")
    for one in depths:
        for reason in one.reasons:
            print(f"queue {one.queue}: {reason}")
    for worker in workers:
        state = f"{worker.busy} of {worker.slots} slots" if worker.is_alive else "gone"
        print(f"worker {worker.owner}: {state}; {', '.join(worker.queues)}; {', '.join(worker.agents)}")
    for one in schedules:
        at = datetime.fromtimestamp(one.next_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        why = f"; {count(one.skipped, 'time')} left out, as run {one.last_run} had not ended" if one.skipped else ""
        print(f"schedule {one.id}: {one.agent} in {one.queue} at {at}{why}")
    return COMPLETED


@asynccontextmanager
async def _metrics(address: str | None, runtime: Runtime, worker: Worker) -> AsyncGenerator[None]:
    """Serve figures for Prometheus, and for whoever decides on the number of workers."""
    if address is None:
        yield
        return
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65_535:
        raise ConfigurationError(f"--metrics {address!r}: write HOST:PORT, as in 127.0.0.1:9100")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            async with asyncio.timeout(10):
                await reader.readuntil(b"\r\n\r\n")
                assert isinstance(runtime.store, SqlStore)
                lines = [*_figures(await read_depths(runtime.store), worker), *await runtime.budgets.figures()]
                lines += runtime.gates.figures()
                body = "".join([f"{line}\n" for line in lines]).encode()
                head = f"HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\ncontent-length: {len(body)}\r\n"
                writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host.strip("[]") or "127.0.0.1", int(port))
    except (OSError, socket.gaierror) as exc:
        raise ConfigurationError(f"--metrics {address}: {exc.strerror or exc}: choose another port") from exc
    async with server:
        yield


def _figures(depths: Sequence[QueueDepth], worker: Worker) -> Iterable[str]:
    """Yield the lines of each figure together, as Prometheus wants them."""
    fields = {"ready": "ready", "delayed": "delayed", "working": "working", "oldest_seconds": "oldest"}
    figures = {
        f"retinue_queue_{name}": {f'{{queue="{one.queue}"}}': getattr(one, field) for one in depths}
        for name, field in fields.items()
    }
    figures["retinue_worker_slots"] = {"": worker.info.slots.total}
    figures["retinue_worker_busy"] = {"": len(worker.info.slots.working)}
    for name, values in figures.items():
        yield f"# TYPE {name} gauge"
        for label, value in values.items():
            yield f"{name}{label} {round(value, 3)}"
