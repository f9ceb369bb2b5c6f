"""`retinue runs list`, `show` and `events`: the runs in a database, whichever process works on them."""

from __future__ import annotations

import argparse
import sys
import time

from ..core.stores import RunRecord
from ..wire.resources import run_json
from .database import database_url, find_run, follow_events, open_database, owned_logs, stored_events
from .outline import ShownTree, event_line, gist, tree_json, tree_lines, waiting_lines
from .parsers import COMPLETED
from .text import clean, complain, count, duration, moment, print_fields, print_json, table
from .view import JsonView


async def list_runs(args: argparse.Namespace) -> int:
    """List runs, newest first."""
    async with open_database(database_url(args)) as store:
        records = await store.list_runs(
            args.thread,
            user_id=args.user,
            status=args.status,
            limit=args.limit,
            on_unreadable=lambda problem: complain(str(problem)),
        )
        ends = await store.ends_of([record.identity.run_id for record in records])
        owned, place = await owned_logs(store), store.place
    orphaned = {record.identity.run_id for record in records if record.result is None} - owned
    by_id = {record.identity.run_id: record for record in records}
    if args.json:
        print_json([run_json(one, ends.get(run_id), orphaned=run_id in orphaned) for run_id, one in by_id.items()])
    elif records:
        rows = [("run", "status", "agent", "thread", "started", "took", "")]
        for run_id, record in by_id.items():
            identity, started = record.identity, moment(record.started_at)
            said = "no process works on it now" if run_id in orphaned else gist(record)
            took = _took(record, ends.get(run_id))
            rows.append((run_id, _status(record), identity.agent, identity.thread_id, started, took, said))
        print("\n".join(table(rows)))
    else:
        is_filtered = any(wanted is not None for wanted in (args.thread, args.user, args.status))
        complain(f"{place} has no such runs" if is_filtered else f"{place} has no runs yet")
    return COMPLETED


def _status(record: RunRecord) -> str:
    """Return the status of a run, with how often its process died if it has not ended."""
    return (
        record.status if not record.lost or record.has_ended else f"{record.status}, lost {count(record.lost, 'time')}"
    )


def _took(record: RunRecord, ended_at: float | None) -> str:
    if ended_at is None:
        return "" if record.result is not None or record.queued else duration(time.time() - record.started_at)
    return duration(ended_at - record.started_at)


async def show_run(args: argparse.Namespace) -> int:
    """Show the tree of a run, its answer, and what it waits for."""
    async with open_database(database_url(args)) as store:
        record, tree = await find_run(store, args.run_id), ShownTree()
        async for event in stored_events(store, args.run_id):
            tree(event)
        ended_at = (await store.ends_of([args.run_id])).get(args.run_id)
        is_free = record.result is None and args.run_id not in await owned_logs(store)
        facts = await store.facts_of(args.run_id)
        is_placed = facts is not None and facts.engine is not None
        is_orphaned = is_free and not is_placed
    if args.json:
        shown = tree_json(tree.root) if tree.root is not None else None
        print_json({**run_json(record, ended_at, orphaned=is_orphaned), "tree": shown})
    else:
        _print_run(record, tree, ended_at)
    if record.lost and not record.has_ended:
        complain(f"the process that worked on it died {count(record.lost, 'time')} since it last made progress")
    if is_free and is_placed:
        complain("it waits for a worker; see: retinue queues")
    if is_orphaned:
        complain(
            f"no process works on it now: retinue runs resume {args.run_id} continues it, "
            f"retinue runs cancel {args.run_id} ends it"
        )
    return COMPLETED


def _print_run(record: RunRecord, tree: ShownTree, ended_at: float | None) -> None:
    identity, result = record.identity, record.result
    fields = {
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
    print_fields(fields)
    if tree.root is not None:
        print("\n" + "\n".join(tree_lines(tree.root)))
    if result is not None and result.response:
        print(clean(f"\n{result.response}"))
    if waits := list(waiting_lines(record)):
        print("\n" + "\n".join(waits))


async def print_events(args: argparse.Namespace) -> int:
    """Print the events of a run, one a line."""
    async with open_database(database_url(args)) as store:
        record = await find_run(store, args.run_id)
        if args.follow and record.result is None and args.run_id not in await owned_logs(store):
            complain("no process works on it now: nothing comes until one resumes it")
        as_json = JsonView(sys.stdout)
        read = follow_events if args.follow else stored_events
        async for event in read(store, args.run_id, args.after):
            if args.json:
                as_json.show(event)
            else:
                print(clean(event_line(event)), flush=args.follow)
    return COMPLETED
