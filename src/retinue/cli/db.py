"""`retinue db`: look a database over, bring it up to date, drop what is old."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .database import add_options, database_url
from .numbers import span

if TYPE_CHECKING:
    from ..core.stores import StoredLog
    from ..storage.check import Finding
    from ..storage.prune import Pruned
    from ..storage.sql import SqlStore
    from ..storage.stores import Migrated

_MORE = "docs/operations.md says more."
_CODES = (
    "Exit code 0: no errors, though there may be warnings; 1: errors, such as a damaged file or an older schema; "
    "2: nothing to look at, as it is not there, cannot be reached, is no database or is of a newer version."
)


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "db",
        help="check, migrate or prune a database",
        description=f"Look after a database that runs are kept in. {_MORE}",
    )
    actions: Any = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _action(actions, "check", "read everything, change nothing, and print what is wrong", check, _CODES)
    migrate_parser = _action(actions, "migrate", "bring a database to the schema of this version, or make one", migrate)
    pruning = "drop what is left of runs that ended long ago; the rest is not held up"
    prune_parser = _action(actions, "prune", pruning, prune)
    prune_parser.add_argument(
        "--older-than", metavar="TIME", type=span, required=True, help="since when they ended: 30d, 12h, 90m or 45s"
    )
    prune_parser.add_argument("--deltas", action="store_true", help="drop only the deltas, which are most of a log")
    prune_parser.add_argument("--threads", action="store_true", help="drop conversations without runs as well")
    for each in (migrate_parser, prune_parser):
        each.add_argument("--dry-run", action="store_true", help="only say what would be done")


def _action(actions: Any, name: str, about: str, execute: Any, more: str = "") -> argparse.ArgumentParser:
    description = f"{about}. {more} {_MORE}" if more else f"{about}. {_MORE}"
    action: argparse.ArgumentParser = actions.add_parser(name, help=about, description=description)
    add_options(action)
    action.set_defaults(execute=execute)
    return action


def check(args: argparse.Namespace) -> int:
    import asyncio

    from .exits import COMPLETED, FAILED

    findings = asyncio.run(_check(database_url(args.db), quiet=args.json))
    errors = sum(finding.severity == "error" for finding in findings)
    if args.json:
        import msgspec

        _print_json({"ok": not errors, "findings": msgspec.to_builtins(findings)})
    else:
        _print_findings(findings, errors)
    return FAILED if errors else COMPLETED


async def _check(url: str, *, quiet: bool) -> list[Finding]:
    import sys

    from ..core.errors import ConfigurationError
    from ..runtime.owner import is_gone
    from ..storage.check import check as look_over
    from ..storage.stores import sql_store
    from .database import said_as_misuse

    store = sql_store(url)
    watched = not quiet and sys.stderr.isatty()

    def tell(what: str, done: int, total: int) -> None:
        if watched:
            print(f"\r\x1b[K{what}: {done:,} of {total:,}", end="", file=sys.stderr, flush=True)

    try:
        with said_as_misuse():
            if not await _is_there(store):
                raise ConfigurationError(f"there is no Retinue database at {store.place}: is it the right --db?")
            return await look_over(store, tell, is_gone, _problem_of)
    finally:
        if watched:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        await store.close()


def _problem_of(log_id: str, log: StoredLog) -> str | None:
    """Why a log cannot be continued, in words; None where it can."""
    from ..core.errors import LogUnreadable
    from ..loop.fold import fold_all

    try:
        fold_all(log.rows, log_id=log_id)
    except LogUnreadable as exc:
        return f"event {exc.seq}: {exc.reason}"
    return None


async def _is_there(store: SqlStore) -> bool:
    """Whether there is a database, however damaged."""
    from ..core.errors import StoreError

    try:
        return bool(await store.database.version())
    except StoreError as exc:
        if exc.damaged:
            return True
        raise


def _print_findings(findings: list[Finding], errors: int) -> None:
    from .text import count, one_line

    for finding in findings:
        print(one_line(str(finding), 1_000))
    warnings = len(findings) - errors
    print(f"{count(errors, 'error')}, {count(warnings, 'warning')}" if findings else "no problems")


def migrate(args: argparse.Namespace) -> int:
    import asyncio

    from ..storage.stores import migrate as bring_up
    from .database import said_as_misuse
    from .exits import COMPLETED

    url = database_url(args.db)
    with said_as_misuse():
        done = asyncio.run(bring_up(url, dry_run=args.dry_run))
    if args.json:
        _print_json({"before": done.before, "after": done.after, "dry_run": args.dry_run})
    else:
        _print_migrated(done, args.dry_run)
    return COMPLETED


def _print_migrated(done: Migrated, dry_run: bool) -> None:
    from .text import clean

    if done.before == done.after:
        said = f"has schema {done.after} already"
    elif not done.before:
        said = f"{'would be' if dry_run else 'was'} made with schema {done.after}"
    else:
        said = f"{'would go' if dry_run else 'went'} from schema {done.before} to {done.after}"
    print(clean(f"{done.place} {said}"))


def prune(args: argparse.Namespace) -> int:
    import asyncio

    from ..core.errors import ConfigurationError
    from .exits import COMPLETED

    if args.deltas and args.threads:
        raise ConfigurationError("--deltas drops nothing but deltas: leave it or --threads out")
    gone = asyncio.run(_prune(database_url(args.db), args))
    if args.json:
        import msgspec

        _print_json({"dry_run": args.dry_run, **msgspec.to_builtins(gone)})
    else:
        print(f"{'would drop' if args.dry_run else 'dropped'} {_told(gone, args)}")
    return COMPLETED


async def _prune(url: str, args: argparse.Namespace) -> Pruned:
    from ..storage.prune import prune as drop
    from .database import opened

    async with opened(url, as_it_is=args.dry_run) as store:
        return await drop(store, args.older_than, deltas=args.deltas, threads=args.threads, dry_run=args.dry_run)


def _told(gone: Pruned, args: argparse.Namespace) -> str:
    from .text import count

    if args.deltas:
        return f"{count(gone.events, 'delta')} of {count(gone.runs, 'run')}"
    said = [count(gone.runs, "run"), count(gone.events, "event")]
    if args.threads:
        said.append(count(gone.threads, "thread"))
    return ", ".join(said)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))
