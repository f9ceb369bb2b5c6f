"""Runs that another process began: cancelled, answered, continued or forked."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from ..core.decisions import Decision
from ..core.errors import (
    ConfigurationError,
    DecisionRefused,
    ExecutionBackendError,
    RunElsewhere,
    UnknownAgent,
    UnknownRun,
)
from ..core.events import Event
from ..core.lifecycle import RunStatus
from ..core.runs import RunResult
from ..core.stores import RunRecord
from ..runtime import Run, Runtime
from ..runtime.owner import is_gone
from ..storage.sql import SqlStore
from .database import find_run, opened, said_as_misuse, so_far
from .exits import COMPLETED, FAILED
from .interrupt import Interrupt, watch
from .outline import how_it_ended, run_json, waiting_lines
from .targets import load_runtime, workspace_runtime
from .text import complain, count
from .view import View, make_view

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds in which another process should have stopped a run."""


async def is_at_work(store: SqlStore, log_id: str) -> bool:
    """Whether a process that lives owns a log."""
    return log_id in await at_work(store)


async def at_work(store: SqlStore) -> set[str]:
    """The logs whose owners live."""
    logs = await store.open_logs()
    return {log.log_id for log in logs if log.owner is not None and not log.expired and not is_gone(log.owner)}


async def followed(store: SqlStore, run_id: str, after: int) -> AsyncIterator[Event]:
    """Yield the events of a run after a number, until it has ended or waits and nobody works on it."""
    with store.watch(run_id) as changes:
        while True:
            record = await find_run(store, run_id)
            is_idle = record.result is not None and not await is_at_work(store, run_id)
            async for event in so_far(store, run_id, after):
                after = event.seq
                yield event
            if is_idle:
                return
            await changes.wait(1.0)


def read_decisions(approved: Sequence[str], cancelled: Sequence[str]) -> dict[str, Decision]:
    """Decisions as they are written on a command line, by what they are on."""
    decisions: dict[str, Decision] = {}
    for text in approved:
        call, given, payload = text.partition("=")
        decisions[_named(call, decisions)] = Decision.resume(_payload(call, payload) if given else {"approved": True})
    for text in cancelled:
        call, _, reason = text.partition("=")
        decisions[_named(call, decisions)] = Decision.cancel(reason or None)
    return decisions


def _named(call: str, decisions: dict[str, Decision]) -> str:
    if not call:
        raise ConfigurationError("a decision is on a call: write --approve CALL or --cancel CALL")
    if call in decisions:
        raise ConfigurationError(f"two decisions on {call!r}: give one")
    return call


def _payload(call: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise ConfigurationError(f"--approve {call}: what follows = is not JSON: {exc}") from None


async def cancel(url: str, args: argparse.Namespace) -> int:
    """Have the process that works on a run stop it; where there is none, stop it here."""
    run_id = args.run_id
    async with opened(url) as store:
        record = await find_run(store, run_id)
        if record.result is not None and record.result.status.is_terminal:
            complain(f"run {run_id} has ended already: {record.status}")
            return FAILED
        runtime = await _runtime_for(store, url, record, args)
    async with runtime:
        try:
            await runtime.cancel(run_id, reason=args.reason, grace=PATIENCE)
        except (RunElsewhere, TimeoutError):
            complain(f"run {run_id} was asked to stop, and has not yet; see: retinue runs show {run_id}")
            return FAILED
        except UnknownAgent:
            if runtime.agents:
                raise
            record = None  # its process has died since we looked
    if record is None:
        return await cancel(url, args)
    async with opened(url) as store:
        return await _tell(store, await find_run(store, run_id), args)


class _Found(NamedTuple):
    """A run that can be continued, and what can reach it."""

    record: RunRecord
    past: list[Event]
    """What was told of it before, where its process has died."""
    runtime: Runtime

    @property
    def is_root(self) -> bool:
        return self.record.log_id in ("", self.record.identity.run_id)


async def resume(url: str, decisions: dict[str, Decision], args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Continue a run that waits, with decisions, or one whose process has died, and show it."""
    found = await _find(url, decisions, args)
    with make_view(as_json=args.json) as view:
        for event in found.past:
            view.recall(event)
        async with found.runtime as runtime:
            try:
                result = await _continue(found, decisions, view, interrupt)
                is_left = False
            except UnknownAgent:
                if runtime.agents:
                    raise
                result, is_left = None, True  # its process has died since we looked
            except (DecisionRefused, RunElsewhere, UnknownRun, ExecutionBackendError) as exc:
                raise ConfigurationError(str(exc)) from exc
    if is_left:
        return await resume(url, decisions, args, interrupt)
    if result is None:
        complain(f"the answer may have been given; see: retinue runs show {args.run_id}")
        return interrupt.code
    if not found.is_root:
        _print_child(result, as_json=args.json)
    return _exit_code(result, args.run_id, interrupt)


async def _find(url: str, decisions: dict[str, Decision], args: argparse.Namespace) -> _Found:
    """The run that is meant; raises ConfigurationError where it cannot be continued in this way."""
    run_id = args.run_id
    async with opened(url) as store:
        record = await find_run(store, run_id)
        if record.result is not None and record.result.status.is_terminal:
            raise ConfigurationError(f"run {run_id} has ended already: {record.status}; it waits for nothing")
        waits = record.result is not None
        root = await find_run(store, record.log_id or run_id)
        if not waits and await is_at_work(store, root.identity.run_id):
            raise ConfigurationError(
                f"run {run_id} is being worked on: follow it with retinue runs events {run_id} --follow"
            )
        if waits and not decisions:
            raise ConfigurationError("\n".join(["what is the answer? It", *waiting_lines(record)]))
        if not waits and root.identity.run_id != run_id:
            raise ConfigurationError(f"run {run_id} is in the background of {record.log_id}: continue that one")
        if decisions and not waits:
            raise ConfigurationError(f"run {run_id} waits for nothing yet: continue it first, without decisions")
        past = [] if waits else [event async for event in so_far(store, run_id)]
        return _Found(record, past, await _runtime_for(store, url, root, args))


async def _continue(
    found: _Found, decisions: dict[str, Decision], view: View, interrupt: Interrupt
) -> RunResult | None:
    """Continue a run to its end or to where it waits; None where an interrupt ended the waiting, not the run."""
    runtime, run_id = found.runtime, found.record.identity.run_id
    if not decisions:
        return await _take_up(runtime, run_id, view, interrupt)
    if not found.is_root:
        return await _unless(interrupt, runtime.resume(run_id, decisions))
    run = runtime.stream_resume(run_id, decisions)
    if runtime.agents:
        return await watch(run, view, interrupt)
    return await _unless(interrupt, _show(run, view))


async def fork(url: str, decisions: dict[str, Decision], args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Start a new run that continues as another stood after an event, and show it."""
    if decisions and args.input is not None:
        raise ConfigurationError("a fork continues with --input or with decisions: leave one of them out")
    async with opened(url) as store:
        record = await find_run(store, args.run_id)
        if record.log_id not in ("", args.run_id):
            raise ConfigurationError(f"run {args.run_id} is in the background of {record.log_id}: fork that one")
        runtime = await _runtime(url, record, args)
    with make_view(as_json=args.json) as view:
        async with runtime:
            try:
                run = await runtime.fork(args.run_id, at=args.at, input=args.input, decisions=decisions or None)
            except DecisionRefused as exc:
                raise ConfigurationError(str(exc)) from exc
            complain(f"run {run.run_id} continues as run {args.run_id} stood after event {args.at}")
            result = await watch(run, view, interrupt)
    return _exit_code(result, run.run_id, interrupt)


async def _take_up(runtime: Runtime, run_id: str, view: View, interrupt: Interrupt) -> RunResult:
    """Continue a run whose process has died; what it may wait for then is answered another time."""
    run = await runtime.load(run_id)
    return await (runtime.result(run_id) if run is None else watch(run, view, interrupt))


async def _show(run: Run, view: View) -> RunResult:
    """Show a run of another process until it ends or waits."""
    async for event in run:
        view.show(event)
    return await run.result()


async def _unless(interrupt: Interrupt, work: Coroutine[Any, Any, T]) -> T | None:
    """Wait for work that another process does; None where an interrupt comes first."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(interrupt.wait())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


def _print_child(result: RunResult, *, as_json: bool) -> None:
    """Print how a background child ended, or where it waits next."""
    told = {"run_id": result.run_id, "status": result.status.value, "response": result.response, "error": result.error}
    print(json.dumps(told) if as_json else result.response or "")


async def _runtime_for(store: SqlStore, url: str, root: RunRecord, args: argparse.Namespace) -> Runtime:
    """A runtime that can reach a run: one without agents where another process works on it."""
    if await is_at_work(store, root.identity.run_id):
        return Runtime.open(url, recover=False)
    return await _runtime(url, root, args)


async def _runtime(url: str, record: RunRecord, args: argparse.Namespace) -> Runtime:
    """A runtime that knows the agent of a run."""
    agent = record.identity.agent
    if args.target is not None:
        runtime = load_runtime(args.target, url)
    else:
        with said_as_misuse():
            runtime = await workspace_runtime(args.workspace or ".", agent, args.model, url)
    if agent not in runtime.agents:
        known = str(UnknownAgent(agent, tuple(runtime.agents)))
        raise ConfigurationError(f"{known}: name with --target who has it")
    return runtime


async def _tell(store: SqlStore, record: RunRecord, args: argparse.Namespace) -> int:
    """Say how a run stands that was to be cancelled."""
    if args.json:
        ends = await store.ends_of([args.run_id])
        print(json.dumps(run_json(record, ends.get(args.run_id)), indent=2, default=str))
    else:
        print(f"run {args.run_id} {record.status if record.result is None else how_it_ended(record.result)}")
    return COMPLETED if record.status == RunStatus.CANCELLED.value else FAILED


def _exit_code(result: RunResult, run_id: str, interrupt: Interrupt) -> int:
    if result.status is RunStatus.COMPLETED:
        return COMPLETED
    if result.status is RunStatus.CANCELLED and interrupt.happened:
        return interrupt.code
    if result.status is RunStatus.SUSPENDED:
        complain(f"the run waits for {count(len(result.suspended), 'answer')}; see: retinue runs show {run_id}")
    else:
        complain(f"the run did not complete: {how_it_ended(result)}")
    return FAILED
