"""`retinue runs`: the runs in a database, whichever process worked or works on them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .database import add_options, database_url
from .numbers import count_from_0, count_from_1

if TYPE_CHECKING:
    from ..core.stores import RunRecord
    from .tree import ShownTree

_MORE = "docs/operations.md says more."
_STATUSES = (
    "queued",
    "running",
    "completed",
    "failed",
    "cancelled",
    "timeout",
    "suspended",
    "waiting_input",
    "waiting_auth",
)
_TARGET = "who is to go on with it: an agent, a list of agents, or a function that gives them or a Runtime"


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "runs",
        help="list, show, follow, resume, cancel or fork the runs in a database",
        description=f"The runs that are kept in a database, as retinue run --db and Runtime.open do. {_MORE}",
    )
    actions: Any = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = _action(actions, "list", "list runs, newest first", execute_list, one=False)
    listing.add_argument("--thread", metavar="ID", help="only those of one conversation")
    listing.add_argument("--user", metavar="ID", help="only those of one user")
    listing.add_argument("--status", choices=_STATUSES, help="only those that stand so")
    listing.add_argument("--limit", metavar="N", type=count_from_1, default=50, help="at most so many (default: 50)")
    _action(actions, "show", "show the tree of agents of a run, and what it waits for", execute_show)
    events = _action(actions, "events", "print the events of a run, one a line", execute_events)
    events.add_argument("--after", metavar="N", type=count_from_0, default=0, help="only those after number N")
    events.add_argument("--follow", action="store_true", help="go on until the run has ended or waits")
    cancel = _action(actions, "cancel", "stop a run, and wait until it has stopped", execute_cancel)
    cancel.add_argument("--reason", metavar="TEXT", default="cancelled", help="why, for the record")
    _add_target(cancel)
    resume = _action(
        actions, "resume", "answer a run that waits, or go on with one whose process has died", execute_resume
    )
    _add_decisions(resume)
    _add_target(resume)
    fork = _action(actions, "fork", "start a new run that continues as another stood after an event", execute_fork)
    fork.add_argument("--at", metavar="SEQ", type=count_from_1, required=True, help="the number of the event")
    fork.add_argument("--input", metavar="TEXT", help="continue with this message")
    _add_decisions(fork)
    _add_target(fork)


def _add_decisions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--approve", metavar="CALL[=JSON]", action="append", default=[], help='go on, with JSON or {"approved": true}'
    )
    parser.add_argument(
        "--cancel", metavar="CALL[=REASON]", action="append", default=[], help="do not go on; the model is told why"
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--target", metavar="MODULE:ATTR", help=_TARGET)
    where.add_argument("--workspace", metavar="DIR", help="the folder that retinue run worked in (default: this one)")
    parser.add_argument("--model", metavar="M", help="for a workspace, as with retinue run")


def _action(actions: Any, name: str, about: str, execute: Any, *, one: bool = True) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=about, description=f"{about}. {_MORE}")
    if one:
        action.add_argument("run_id", metavar="RUN", help="the id of the run; retinue runs list shows them")
    add_options(action)
    action.set_defaults(execute=execute)
    return action


def execute_list(args: argparse.Namespace) -> int:
    import asyncio

    from .database import opened
    from .exits import COMPLETED
    from .outline import run_json
    from .steering import at_work
    from .text import complain

    url = database_url(args.db)

    async def look() -> tuple[list[RunRecord], dict[str, float], set[str], str]:
        async with opened(url) as store:
            found = await store.list_runs(
                args.thread,
                user_id=args.user,
                status=args.status,
                limit=args.limit,
                on_unreadable=lambda problem: complain(str(problem)),
            )
            ends = await store.ends_of([record.identity.run_id for record in found])
            return found, ends, await at_work(store), store.place

    records, ends, working, place = asyncio.run(look())
    left = {record.identity.run_id for record in records if record.result is None} - working
    if args.json:
        by_id = {record.identity.run_id: record for record in records}
        _print_json([run_json(one, ends.get(run_id), left=run_id in left) for run_id, one in by_id.items()])
    elif records:
        _print_table(records, ends, left)
    else:
        is_filtered = any(wanted is not None for wanted in (args.thread, args.user, args.status))
        complain(f"{place} has no such runs" if is_filtered else f"{place} has no runs yet")
    return COMPLETED


def _print_table(records: list[RunRecord], ends: dict[str, float], left: set[str]) -> None:
    from .outline import gist
    from .text import moment, table

    rows = [("run", "status", "agent", "thread", "started", "took", "")]
    for record in records:
        identity, started = record.identity, moment(record.started_at)
        took = _took(record, ends.get(identity.run_id))
        said = "no process works on it now" if identity.run_id in left else gist(record)
        rows.append((identity.run_id, record.status, identity.agent, identity.thread_id, started, took, said))
    print("\n".join(table(rows)))


def _took(record: RunRecord, ended_at: float | None) -> str:
    import time

    from .text import duration

    if ended_at is None:
        return "" if record.result is not None or record.queued else duration(time.time() - record.started_at)
    return duration(ended_at - record.started_at)


def execute_show(args: argparse.Namespace) -> int:
    import asyncio

    from .database import find_run, opened, so_far
    from .exits import COMPLETED
    from .outline import run_json, tree_json
    from .steering import is_at_work
    from .text import complain
    from .tree import ShownTree

    url = database_url(args.db)

    async def look() -> tuple[RunRecord, ShownTree, float | None, bool]:
        async with opened(url) as store:
            record, tree = await find_run(store, args.run_id), ShownTree()
            async for event in so_far(store, args.run_id):
                tree(event)
            ended_at = (await store.ends_of([args.run_id])).get(args.run_id)
            return record, tree, ended_at, record.result is None and not await is_at_work(store, args.run_id)

    record, tree, ended_at, is_left = asyncio.run(look())
    if args.json:
        shown = tree_json(tree.root) if tree.root is not None else None
        _print_json({**run_json(record, ended_at, left=is_left), "tree": shown})
    else:
        _print_run(record, tree, ended_at)
    if is_left:
        complain(
            f"no process works on it now: retinue runs resume {args.run_id} goes on with it, "
            f"retinue runs cancel {args.run_id} ends it"
        )
    return COMPLETED


def _print_run(record: RunRecord, tree: ShownTree, ended_at: float | None) -> None:
    from .outline import tree_lines, waiting_lines
    from .text import clean, moment, one_line

    identity, result = record.identity, record.result
    told = {
        "run": identity.run_id,
        "status": record.status,
        "agent": identity.agent,
        "thread": identity.thread_id,
        "user": identity.user_id,
        "started": moment(record.started_at),
        "took": _took(record, ended_at),
        "tokens": f"{result.usage.input_tokens:,} in, {result.usage.output_tokens:,} out" if result else None,
        "error": result.error if result else None,
    }
    for name, value in told.items():
        if value:
            print(f"{name}: {one_line(value, 1_000)}")
    if tree.root is not None:
        print("\n" + "\n".join(tree_lines(tree.root)))
    if result is not None and result.response:
        print(clean(f"\n{result.response}"))
    if waits := list(waiting_lines(record)):
        print("\n" + "\n".join(waits))


def execute_events(args: argparse.Namespace) -> int:
    import asyncio

    from .exits import COMPLETED

    asyncio.run(_events(database_url(args.db), args))
    return COMPLETED


async def _events(url: str, args: argparse.Namespace) -> None:
    import sys

    from .database import find_run, opened, so_far
    from .outline import event_line
    from .steering import followed, is_at_work
    from .text import clean, complain
    from .view import JsonView

    async with opened(url) as store:
        record = await find_run(store, args.run_id)
        if args.follow and record.result is None and not await is_at_work(store, args.run_id):
            complain("no process works on it now: nothing comes until one takes it up")
        as_json = JsonView(sys.stdout)
        read = followed if args.follow else so_far
        async for event in read(store, args.run_id, args.after):
            if args.json:
                as_json.show(event)
            else:
                print(clean(event_line(event)), flush=args.follow)


def execute_cancel(args: argparse.Namespace) -> int:
    import asyncio

    from .steering import cancel

    return asyncio.run(cancel(database_url(args.db), args))


def execute_resume(args: argparse.Namespace) -> int:
    import asyncio

    from .interrupt import Interrupt
    from .steering import read_decisions, resume

    url, decisions = database_url(args.db), read_decisions(args.approve, args.cancel)
    with Interrupt() as interrupt:
        return asyncio.run(resume(url, decisions, args, interrupt))


def execute_fork(args: argparse.Namespace) -> int:
    import asyncio

    from .interrupt import Interrupt
    from .steering import fork, read_decisions

    url, decisions = database_url(args.db), read_decisions(args.approve, args.cancel)
    with Interrupt() as interrupt:
        return asyncio.run(fork(url, decisions, args, interrupt))


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2, default=str))
