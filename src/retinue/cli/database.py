"""The database of runs: open it, find runs and events in it; and `retinue db`, which checks, migrates and prunes it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager

import msgspec

from ..core.errors import ConfigurationError, LogUnreadable, StoreError
from ..core.events import Event
from ..core.stores import RunRecord, StoredLog
from ..log.fold import fold_all
from ..log.ownership import is_gone
from ..storage import check as checks
from ..storage import prune as pruning
from ..storage import stores
from ..storage.schema import newest_version
from ..storage.sql import SqlStore
from .parsers import COMPLETED, FAILED
from .text import clean, count, one_line, print_json

VARIABLE = "RETINUE_DB"


def database_url(args: argparse.Namespace, example: str = "sqlite:///app.db") -> str:
    """Return the database of --db or $RETINUE_DB; raises ConfigurationError if there is none."""
    if not (url := optional_url(args)):
        raise ConfigurationError(f"no database is given: use --db URL, as in {example}, or set ${VARIABLE}")
    return url


def optional_url(args: argparse.Namespace) -> str | None:
    """Return the database of --db or $RETINUE_DB, None if there is none."""
    return args.db if args.db is not None else os.environ.get(VARIABLE) or None


@asynccontextmanager
async def open_database(url: str, *, migrate: bool = True, create: bool = False) -> AsyncGenerator[SqlStore]:
    """Open a database, without a write lock; an older schema is migrated first, or refused.

    Errors of the database are raised as ConfigurationError: another --db may be meant.
    """
    store = stores.sql_store(url)
    try:
        with as_misuse():
            version = await store.database.version()
            if not version and not create:
                raise missing(store)
            if version < newest_version():
                if not migrate:
                    raise ConfigurationError(f"{store.place} has an older schema: run retinue db migrate first")
                await store.open()
            yield store
    finally:
        await store.close()


def missing(store: SqlStore) -> ConfigurationError:
    return ConfigurationError(f"there is no Retinue database at {store.place}: is it the right --db?")


@contextmanager
def as_misuse() -> Generator[None]:
    """Raise errors of a database that cannot be used as ConfigurationError."""
    try:
        yield
    except StoreError as exc:
        raise ConfigurationError(str(exc)) from exc


async def find_run(store: SqlStore, run_id: str) -> RunRecord:
    record = await store.load_run(run_id)
    if record is None:
        raise ConfigurationError(f"there is no run {run_id!r} in {store.place}; see: retinue runs list")
    return record


async def stored_events(store: SqlStore, run_id: str, after: int = 0) -> AsyncIterator[Event]:
    """Yield the events of a run that are stored by now."""
    while found := (await store.read_events(run_id, after) or ((), True))[0]:
        for event in found:
            yield event
        after = found[-1].seq


async def follow_events(store: SqlStore, run_id: str, after: int) -> AsyncIterator[Event]:
    """Yield the events of a run after a number, until it has ended, or waits without an owner."""
    with store.watch(run_id) as changes:
        while True:
            record = await find_run(store, run_id)
            is_idle = record.result is not None and run_id not in await owned_logs(store)
            async for event in stored_events(store, run_id, after):
                after = event.seq
                yield event
            if is_idle:
                return
            await changes.wait(1.0)


async def owned_logs(store: SqlStore) -> set[str]:
    """Return the ids of the logs whose owners live."""
    logs = await store.open_logs()
    return {log.log_id for log in logs if log.owner is not None and not log.expired and not is_gone(log.owner)}


async def check(args: argparse.Namespace) -> int:
    """Print every problem of a database."""
    findings = await _findings(database_url(args), quiet=args.json)
    errors = sum(finding.severity == "error" for finding in findings)
    if args.json:
        print_json({"ok": not errors, "findings": msgspec.to_builtins(findings)})
    else:
        for finding in findings:
            print(one_line(str(finding), 1_000))
        summary = f"{count(errors, 'error')}, {count(len(findings) - errors, 'warning')}"
        print(summary if findings else "no problems")
    return FAILED if errors else COMPLETED


async def _findings(url: str, *, quiet: bool) -> list[checks.Finding]:
    store = stores.sql_store(url)
    shows_progress = not quiet and sys.stderr.isatty()

    def report(what: str, done: int, total: int) -> None:
        if shows_progress:
            print(f"\r\x1b[K{what}: {done:,} of {total:,}", end="", file=sys.stderr, flush=True)

    try:
        with as_misuse():
            try:
                exists = bool(await store.database.version())
            except StoreError as exc:
                if not (exists := exc.damaged):
                    raise
            if not exists:
                raise missing(store)
            return await checks.check(store, report, is_gone, _fold_problem)
    finally:
        if shows_progress:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        await store.close()


def _fold_problem(log_id: str, log: StoredLog) -> str | None:
    """Return why a log cannot be continued, None where it can."""
    try:
        fold_all(log.rows, log_id=log_id)
    except LogUnreadable as exc:
        return f"event {exc.seq}: {exc.reason}"
    return None


async def migrate(args: argparse.Namespace) -> int:
    """Bring a database to the schema of this version."""
    with as_misuse():
        done = await stores.migrate(database_url(args), dry_run=args.dry_run)
    if args.json:
        print_json({"before": done.before, "after": done.after, "dry_run": args.dry_run})
        return COMPLETED
    if done.before == done.after:
        said = f"has schema {done.after} already"
    elif not done.before:
        said = f"{'would be' if args.dry_run else 'was'} created with schema {done.after}"
    else:
        said = f"{'would go' if args.dry_run else 'went'} from schema {done.before} to {done.after}"
    print(clean(f"{done.place} {said}"))
    return COMPLETED


async def prune(args: argparse.Namespace) -> int:
    """Drop old runs, or their deltas."""
    if args.deltas and args.threads:
        raise ConfigurationError("--deltas drops nothing but deltas: leave it or --threads out")
    async with open_database(database_url(args), migrate=not args.dry_run) as store:
        dropped = await pruning.prune(
            store, args.older_than, deltas=args.deltas, threads=args.threads, dry_run=args.dry_run
        )
    if args.json:
        print_json({"dry_run": args.dry_run, **msgspec.to_builtins(dropped)})
        return COMPLETED
    parts = [count(dropped.runs, "run"), count(dropped.events, "event")]
    if args.threads:
        parts.append(count(dropped.threads, "thread"))
    said = f"{count(dropped.events, 'delta')} of {count(dropped.runs, 'run')}" if args.deltas else ", ".join(parts)
    print(f"{'would drop' if args.dry_run else 'dropped'} {said}")
    return COMPLETED
