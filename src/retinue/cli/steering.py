"""Runs of other processes: answer, resume, message, cancel and fork them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from ..core.concurrency import until_stopped
from ..core.decisions import Decision
from ..core.errors import (
    ConfigurationError,
    DecisionRefused,
    ExecutionBackendError,
    RunElsewhere,
    RunEnded,
    UnknownAgent,
    UnknownRun,
)
from ..core.events import Event
from ..core.results import SuspendTicket
from ..core.runs import RunResult, RunStatus
from ..core.stores import RunRecord
from ..runtime import Run, Runtime
from ..storage.sql import SqlStore
from ..wire.resources import run_json
from .agents import load_runtime, workspace_runtime
from .consent import Consent
from .database import as_misuse, database_url, find_run, open_database, owned_logs, stored_events
from .interrupt import Interrupt, exit_code, make_view, watch
from .outline import how_it_ended, questions, waiting_lines
from .parsers import COMPLETED, FAILED
from .text import complain, print_json
from .view import View

T = TypeVar("T")
Decisions = Mapping[str, Decision]
Decide = Callable[[RunRecord], Decisions]
"""Makes the decisions of a command line for a run; none to continue one whose process has died."""

CANCEL_TIMEOUT = 10.0
"""Seconds that another process has to stop a run."""


async def approve(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Let a waiting call go on, with other arguments if they are given."""
    edited: Any = None if args.args is None else _parse_json("--args", args.args)
    if edited is not None and not isinstance(cast("object", edited), dict):
        raise ConfigurationError(f"--args: {args.args!r} is not a JSON object")

    def decide(record: RunRecord) -> Decisions:
        return {_choose_call(record, args.words): Decision.approve(edited)}

    return await _resume(args, decide, interrupt)


async def deny(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Refuse a waiting call."""

    def decide(record: RunRecord) -> Decisions:
        call = _choose_call(record, args.words)
        refuse = Decision.reject if _is_approval(record, call) else Decision.cancel
        return {call: refuse(args.message)}

    return await _resume(args, decide, interrupt)


async def answer(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Answer a question with a value."""
    *words, text = args.words

    def decide(record: RunRecord) -> Decisions:
        call = _choose_call(record, words)
        value = _parse_answer(text, _tickets(record).get(call))
        # The result of a call that wants an approval; else the answer to the question of a tool.
        return {call: Decision.answer(value) if _is_approval(record, call) else Decision.resume(value)}

    return await _resume(args, decide, interrupt)


async def resume(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Continue a run that waits, with decisions, or one whose process has died, or the tasks that it left."""
    decisions = _parse_decisions(args.approve, args.cancel)
    return await _resume(args, lambda record: decisions, interrupt)


def _tickets(record: RunRecord) -> Mapping[str, SuspendTicket]:
    return {} if record.result is None else record.result.suspended


def _is_approval(record: RunRecord, call: str) -> bool:
    """Return whether a call waits for yes or no, not for an answer of another form."""
    tickets = _tickets(record)
    ticket = tickets.get(call) or next((one for one in tickets.values() if call in (one.id, "/".join(one.path))), None)
    return ticket is not None and ticket.is_approval


def _choose_call(record: RunRecord, words: Sequence[str]) -> str:
    """Return the call that is named, or the only one that waits."""
    tickets = _tickets(record)
    if len(words) > 1:
        raise ConfigurationError(f"too many words: {' '.join(words)!r}; give one CALL")
    if words:
        return words[0]
    if not tickets:
        raise ConfigurationError(f"run {record.identity.run_id} waits for nothing: it is {record.status}")
    if len(tickets) > 1:
        raise ConfigurationError(f"{len(tickets)} calls wait, name one of them as CALL: {questions(tickets)}")
    return next(iter(tickets))


def _parse_answer(text: str, ticket: SuspendTicket | None) -> Any:
    """Read a value as JSON, or else as text; always as text where the question wants that."""
    if ticket is not None and (ticket.response_schema or {}).get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_decisions(approved: Sequence[str], cancelled: Sequence[str]) -> Decisions:
    decisions: dict[str, Decision] = {}

    def add(call: str, decision: Decision) -> None:
        if not call:
            raise ConfigurationError("a decision is on a call: write --approve CALL or --cancel CALL")
        if call in decisions:
            raise ConfigurationError(f"two decisions on {call!r}: give one")
        decisions[call] = decision

    for text in approved:
        call, given, payload = text.partition("=")
        value = _parse_json(f"--approve {call}", payload) if given else {"approved": True}
        add(call, Decision.resume(value))
    for text in cancelled:
        call, _, reason = text.partition("=")
        add(call, Decision.cancel(reason or None))
    return decisions


def _parse_json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise ConfigurationError(f"{option}: {text!r} is not JSON: {exc}") from None


async def send(args: argparse.Namespace) -> int:
    """Give a run at work a message."""
    url, run_id = database_url(args), args.run_id
    async with open_database(url) as store:
        record = await find_run(store, run_id)
        if record.has_ended:
            complain(f"run {run_id} takes no message: it is {record.status}")
            return FAILED
        runtime = await _runtime_for(store, url, record, args)
    async with runtime:
        try:
            await runtime.send(run_id, args.message, ns=args.ns or ())
        except (RunEnded, RunElsewhere) as exc:
            complain(str(exc))
            return FAILED
    return COMPLETED


async def cancel(args: argparse.Namespace) -> int:
    """Have the owner of a run stop it; without one, stop it here."""
    url, run_id = database_url(args), args.run_id
    async with open_database(url) as store:
        record = await find_run(store, run_id)
        if record.result is not None and record.result.status.is_terminal:
            complain(f"run {run_id} has ended already: {record.status}")
            return FAILED
        runtime = await _runtime_for(store, url, record, args)
    async with runtime:
        try:
            await runtime.cancel(run_id, reason=args.reason, grace=CANCEL_TIMEOUT)
        except (RunElsewhere, TimeoutError):
            complain(f"run {run_id} was asked to stop, and has not yet; see: retinue runs show {run_id}")
            return FAILED
        except UnknownAgent:
            if runtime.agents:
                raise
            record = None  # its process has died since we looked
    if record is None:
        return await cancel(args)
    async with open_database(url) as store:
        record, ends = await find_run(store, run_id), await store.ends_of([run_id])
    if args.json:
        print_json(run_json(record, ends.get(run_id)))
    else:
        print(f"run {run_id} {record.status if record.result is None else how_it_ended(record.result)}")
    return COMPLETED if record.status == RunStatus.CANCELLED.value else FAILED


class _Found(NamedTuple):
    """A run that can be continued, and a runtime that reaches it."""

    record: RunRecord
    decisions: Decisions
    past: list[Event]
    """Its events so far, where its process has died."""
    runtime: Runtime

    @property
    def is_root(self) -> bool:
        return self.record.log_id in ("", self.record.identity.run_id)


async def _resume(args: argparse.Namespace, decide: Decide, interrupt: Interrupt) -> int:
    """Continue a run and show it."""
    consent = Consent(args)
    found = await _find(args, decide, consent)
    async with make_view(args) as view:
        for event in found.past:
            view.recall(event)
        async with found.runtime as runtime:
            try:
                result = await _continue(found, view, interrupt, consent)
                has_died = False
            except UnknownAgent:
                if runtime.agents:
                    raise
                result, has_died = None, True  # its process has died since we looked
            except (DecisionRefused, RunElsewhere, UnknownRun, ExecutionBackendError) as exc:
                raise ConfigurationError(str(exc)) from exc
    if has_died:
        return await _resume(args, decide, interrupt)
    if result is None:
        complain(f"the answer may have been given; see: retinue runs show {args.run_id}")
        return interrupt.code
    if not found.is_root:
        shown = {"run_id": result.run_id, "status": result.status.value}
        shown |= {"response": result.response, "error": result.error}
        print(json.dumps(shown) if args.json else result.response or "")
    if found.decisions and result.status is RunStatus.SUSPENDED:
        complain(
            f"answered; the run still waits for {questions(result.suspended)}; see: retinue runs show {args.run_id}"
        )
        return COMPLETED
    return exit_code(result, interrupt, consent=consent)


async def _find(args: argparse.Namespace, decide: Decide, consent: Consent) -> _Found:
    """Find the run of a command; raises ConfigurationError where it cannot be continued so."""
    url, run_id = database_url(args), args.run_id
    async with open_database(url) as store:
        record, owned = await find_run(store, run_id), await owned_logs(store)
        # A run that has ended may have left background tasks that no process works on.
        if record.has_ended and (run_id in owned or not await store.open_logs(run_id)):
            raise ConfigurationError(f"run {run_id} has ended already: {record.status}; it waits for nothing")
        waits = record.result is not None and not record.has_ended
        root = await find_run(store, record.log_id or run_id)
        if not waits and root.identity.run_id in owned:
            raise ConfigurationError(
                f"run {run_id} is being worked on: follow it with retinue runs events {run_id} --follow"
            )
        decisions = decide(record)
        if waits and not decisions:
            raise ConfigurationError("\n".join(["what is the answer? It", *waiting_lines(record)]))
        if not waits and root.identity.run_id != run_id:
            raise ConfigurationError(f"run {run_id} is in the background of {record.log_id}: continue that one")
        if decisions and not waits:
            raise ConfigurationError(f"run {run_id} waits for nothing yet: resume it first, without decisions")
        past = [] if waits else [event async for event in stored_events(store, run_id)]
        return _Found(record, decisions, past, await _runtime_for(store, url, root, args, consent))


async def _continue(found: _Found, view: View, interrupt: Interrupt, consent: Consent) -> RunResult | None:
    """Continue a run until it ends or waits; None where an interrupt ended only the watching."""
    runtime, run_id = found.runtime, found.record.identity.run_id
    if not found.decisions:
        run = await runtime.load(run_id)
        if run is None:
            return await runtime.result(run_id)
        return await watch(run, view, interrupt, consent=consent, has_ended=found.record.has_ended)
    if not found.is_root:
        return await _unless(interrupt, runtime.resume(run_id, found.decisions))
    run = runtime.stream_resume(run_id, found.decisions)
    if runtime.agents:
        return await watch(run, view, interrupt, consent=consent)
    return await _unless(interrupt, _show(run, view))


async def _show(run: Run, view: View) -> RunResult:
    """Show a run of another process until it ends or waits."""
    async for event in run:
        view.show(event)
    return await run.result()


async def _unless(interrupt: Interrupt, work: Coroutine[Any, Any, T]) -> T | None:
    """Wait for the work of another process; None where an interrupt comes first."""
    async with until_stopped(work, interrupt.wait()) as working:
        return working.result() if working.done() else None


async def fork(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Start a new run that continues as another stood after an event, and show it."""
    url, decisions = database_url(args), _parse_decisions(args.approve, args.cancel)
    consent = Consent(args)
    if decisions and args.input is not None:
        raise ConfigurationError("a fork continues with --input or with decisions: leave one of them out")
    async with open_database(url) as store:
        record = await find_run(store, args.run_id)
        if record.log_id not in ("", args.run_id):
            raise ConfigurationError(f"run {args.run_id} is in the background of {record.log_id}: fork that one")
        runtime = await _make_runtime(url, record, args, consent)
    async with make_view(args) as view:
        async with runtime:
            try:
                run = await runtime.fork(args.run_id, at=args.at, input=args.input, decisions=decisions or None)
            except DecisionRefused as exc:
                raise ConfigurationError(str(exc)) from exc
            complain(f"run {run.run_id} continues as run {args.run_id} stood after event {args.at}")
            result = await watch(run, view, interrupt, consent=consent)
    return exit_code(result, interrupt, consent=consent)


async def _runtime_for(
    store: SqlStore, url: str, root: RunRecord, args: argparse.Namespace, consent: Consent | None = None
) -> Runtime:
    """Return a runtime that reaches a run: one without agents where another process owns it."""
    facts = await store.facts_of(root.identity.run_id)
    if facts is not None and (engine := facts.engine) is not None:
        if args.engine is None and engine != "postgres":
            where = f"--engine {engine}://host:port/namespace"
            raise ConfigurationError(f"workers of engine {engine!r} do this run: name it with {where}")
        return Runtime.open(url, engine=args.engine or engine)
    if root.identity.run_id in await owned_logs(store):
        return Runtime.open(url, recover=False)
    return await _make_runtime(url, root, args, consent)


async def _make_runtime(url: str, record: RunRecord, args: argparse.Namespace, consent: Consent | None) -> Runtime:
    """Return a runtime that has the agent of a run."""
    agent = record.identity.agent
    if args.target is not None:
        runtime = load_runtime(args.target, url)
    else:
        with as_misuse():
            runtime = await workspace_runtime(args.workspace or ".", agent, args.model, url, consent)
    if agent not in runtime.agents:
        known = str(UnknownAgent(agent, tuple(runtime.agents)))
        raise ConfigurationError(f"{known}: name one that has it with --target")
    return runtime
