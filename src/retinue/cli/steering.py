"""Runs that another process began: stopped, or gone on with."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from ..core.decisions import Decision
from ..core.errors import (
    ConfigurationError,
    DecisionRefused,
    ExecutionBackendError,
    RunElsewhere,
    UnknownAgent,
    UnknownRun,
)
from ..core.events import Event, RunFinished
from ..core.lifecycle import RunStatus
from ..core.runs import RunResult
from ..core.stores import RunRecord
from ..runtime import Runtime
from ..runtime.node import is_gone
from ..storage.sql import SqlStore
from .database import find_run, opened, said_as_misuse, so_far
from .exits import COMPLETED, FAILED
from .interrupt import Interrupt, watch
from .outline import how_it_ended, run_json, waiting_lines
from .targets import load_runtime, workspace_runtime
from .text import complain, count
from .view import View, make_view

PATIENCE = 10.0
"""Seconds in which another process should have stopped a run."""


async def is_at_work(store: SqlStore, run_id: str) -> bool:
    """Whether a process that lives has a run."""
    return run_id in await at_work(store)


async def at_work(store: SqlStore) -> set[str]:
    """The runs that processes have which live."""
    return {log.log_id for log in await store.owned_logs() if not log.expired and not is_gone(log.owner)}


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
    async with opened(url) as store:
        record = await find_run(store, args.run_id)
        if record.result is not None and record.result.status.is_terminal:
            complain(f"run {args.run_id} has ended already: {record.status}")
            return FAILED
        is_elsewhere = await is_at_work(store, args.run_id)
        runtime = None if is_elsewhere else await _runtime(url, record, args)
        await store.ask_cancel(args.run_id, args.reason)  # heard by its process, or by who takes it up after that died
        if runtime is None:
            ended = await _until_ended(store, args.run_id)
            if ended is None:
                complain(f"run {args.run_id} was asked to stop, and has not yet; see: retinue runs show {args.run_id}")
                return FAILED
            return await _tell(store, ended, args)
    async with runtime:
        await runtime.load(args.run_id)
        await runtime.cancel(args.run_id, reason=args.reason)
    async with opened(url) as store:
        return await _tell(store, await find_run(store, args.run_id), args)


async def _until_ended(store: SqlStore, run_id: str) -> RunRecord | None:
    """A run once it has ended; None where that takes too long."""
    try:
        async with asyncio.timeout(PATIENCE):
            with store.watch(run_id) as changes:
                while True:
                    record = await find_run(store, run_id)
                    if record.result is not None and record.result.status.is_terminal:
                        return record
                    await changes.wait(1.0)
    except TimeoutError:
        return None


async def resume(url: str, decisions: dict[str, Decision], args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Go on with a run that waits, with decisions, or with one whose process has died, and show it."""
    async with opened(url) as store:
        if decisions and await store.load_run(args.run_id) is None and await at_work(store):
            return await _answer_elsewhere(url, decisions, args, interrupt)  # it may be a background child
        record = await find_run(store, args.run_id)
        if record.result is not None and record.result.status.is_terminal:
            raise ConfigurationError(f"run {args.run_id} has ended already: {record.status}; it waits for nothing")
        waits, is_worked_on = record.result is not None, await is_at_work(store, args.run_id)
        if is_worked_on and not waits:
            raise ConfigurationError(
                f"run {args.run_id} is being worked on: follow it with retinue runs events {args.run_id} --follow"
            )
        past = [] if waits and not is_worked_on else [event async for event in so_far(store, args.run_id)]
    if waits and not decisions:
        raise ConfigurationError("\n".join(["what is the answer? It", *waiting_lines(record)]))
    if is_worked_on:
        return await _answer_elsewhere(url, decisions, args, interrupt, past)
    with make_view(as_json=args.json) as view:
        async with await _runtime(url, record, args) as runtime:
            go_on = _answer if waits else _take_up
            try:
                result = await go_on(runtime, args.run_id, decisions, view, interrupt, past)
            except (DecisionRefused, RunElsewhere) as exc:
                raise ConfigurationError(str(exc)) from exc
    return _exit_code(result, args.run_id, interrupt)


async def _answer(
    runtime: Runtime, run_id: str, decisions: dict[str, Decision], view: View, interrupt: Interrupt, past: list[Event]
) -> RunResult:
    await runtime.load(run_id)
    return await watch(runtime.stream_resume(run_id, decisions), view, interrupt)


async def _answer_elsewhere(
    url: str, decisions: dict[str, Decision], args: argparse.Namespace, interrupt: Interrupt, past: Sequence[Event] = ()
) -> int:
    """Give decisions to the process that works on a run, and show how it goes on there."""
    run_id = args.run_id
    with make_view(as_json=args.json) as view:
        async with Runtime.open(url, recover=False) as runtime:
            for event in past:
                view.recall(event)
            answering = asyncio.create_task(runtime.resume(run_id, decisions))
            leaving = asyncio.create_task(interrupt.wait())
            showing = asyncio.create_task(_show_leg(runtime, run_id, past[-1].seq, view)) if past else None
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not answering.done():
                answering.cancel()
                complain(f"the answer may have been given; see: retinue runs show {run_id}")
                return interrupt.code
            try:
                result = answering.result()
            except UnknownAgent:
                result = None  # the process that had it is gone: it is for somebody here who knows its agent
            except (DecisionRefused, RunElsewhere, UnknownRun, ExecutionBackendError) as exc:
                raise ConfigurationError(str(exc)) from exc
            finally:
                if showing is not None:
                    await asyncio.wait({showing}, timeout=1 if answering.exception() is None else 0)
                    showing.cancel()
    if result is None:
        return await resume(url, decisions, args, interrupt)
    if not past:
        told = {"run_id": run_id, "status": result.status.value, "response": result.response, "error": result.error}
        print(json.dumps(told) if args.json else result.response or "")
    return _exit_code(result, run_id, interrupt)


async def _show_leg(runtime: Runtime, run_id: str, after: int, view: View) -> None:
    """Show a run of another process until it ends or waits."""
    async for event in runtime.events(run_id, after):
        view.show(event)
        if isinstance(event, RunFinished) and event.run_id == run_id:
            return


async def _take_up(
    runtime: Runtime, run_id: str, decisions: dict[str, Decision], view: View, interrupt: Interrupt, past: list[Event]
) -> RunResult:
    """Go on with a run whose process has died; what it may wait for then is answered another time."""
    if decisions:
        raise ConfigurationError(f"run {run_id} waits for nothing yet: go on with it first, without decisions")
    for event in past:
        view.recall(event)
    loading = asyncio.create_task(runtime.load(run_id))
    stopping = asyncio.create_task(_cancel_when(interrupt, runtime, run_id))
    try:
        async for event in runtime.events(run_id, past[-1].seq if past else 0):
            view.show(event)
        await loading
        return await runtime.result(run_id)
    finally:
        loading.cancel()
        stopping.cancel()


async def _cancel_when(interrupt: Interrupt, runtime: Runtime, run_id: str) -> None:
    await interrupt.wait()
    complain("cancelling the run; press Ctrl-C again to leave at once")
    await runtime.cancel(run_id, reason="interrupted")


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
