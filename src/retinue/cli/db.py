"""`retinue db`: check a database, migrate it, prune it."""

from __future__ import annotations

import argparse
import sys

import msgspec

from ..core.errors import ConfigurationError, LogUnreadable, StoreError
from ..core.stores import StoredLog
from ..loop.fold import fold_all
from ..runtime.owner import is_gone
from ..storage import check as checks
from ..storage import prune as pruning
from ..storage import stores
from ..storage.sql import SqlStore
from .database import as_misuse, database_url, missing, open_database
from .parsers import COMPLETED, FAILED
from .text import clean, count, one_line, print_json


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
            if not await _exists(store):
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


async def _exists(store: SqlStore) -> bool:
    """Return whether there is a database, however damaged."""
    try:
        return bool(await store.database.version())
    except StoreError as exc:
        if exc.damaged:
            return True
        raise


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
