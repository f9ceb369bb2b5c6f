"""Statements that store threads and runs, within a transaction."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..core.codec import to_json_value
from ..core.stores import RunRecord, ThreadUpdate
from .lanes import Link

Save = Callable[[Link], None]
"""A function that stores something."""

encode = msgspec.json.Encoder().encode


def saving_thread(update: ThreadUpdate, ended: str | None = None) -> Save:
    """Encode a thread. Its first messages, which are stored already, are left as they are. A run that `ended`
    releases it."""
    record, keep = update.record, update.keep
    thread_id, count = record.thread_id, len(record.messages)
    rows = [(thread_id, place, encode(record.messages[place])) for place in range(keep, count)]
    state = encode(record.state)

    def save(link: Link) -> None:
        link.run_two(
            "DELETE FROM messages WHERE thread_id = ? AND place >= ?",
            (thread_id, keep),
            f"INSERT INTO threads (thread_id, user_id, state, saved_at) VALUES (?, ?, ?, {link.now}) "
            "ON CONFLICT (thread_id) DO UPDATE SET user_id = excluded.user_id, state = excluded.state, "
            "saved_at = excluded.saved_at, holder = NULLIF(threads.holder, ?)",
            (thread_id, record.user_id, state, ended or ""),
        )
        link.insert("messages (thread_id, place, body)", rows)

    return save


def saving_run(record: RunRecord, *, release: bool = True) -> Save:
    """Encode a run. A run that has ended releases its thread; one that had ended before is not changed."""
    result = None
    if record.result is not None:
        result = encode(msgspec.structs.replace(record.result, output=to_json_value(record.result.output)))
    ends = is_terminal(record)
    values = (*run_values(record), record.status, result)
    identity = record.identity

    def save(link: Link) -> None:
        upsert = (
            "INSERT INTO runs (run_id, log_id, parent_run_id, thread_id, user_id, agent, started_at, identity, status, "
            f"result, ended_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {link.now if ends else 'NULL'}) "
            "ON CONFLICT (run_id) DO UPDATE SET status = excluded.status, result = excluded.result, "
            "ended_at = excluded.ended_at WHERE runs.ended_at IS NULL"
        )
        if ends and release:
            free = "UPDATE threads SET holder = NULL WHERE thread_id = ? AND holder = ?"
            link.run_two(free, (identity.thread_id, identity.run_id), upsert, values)
        else:
            link.run(upsert, *values)

    return save


def run_values(record: RunRecord) -> tuple[str | float | bytes | None, ...]:
    """Return the columns of a run that never change: run_id, log_id, parent_run_id, thread_id, user_id, agent,
    started_at, identity."""
    identity = record.identity
    return (
        identity.run_id,
        record.log_id or identity.run_id,
        identity.parent_run_id,
        identity.thread_id,
        identity.user_id,
        identity.agent,
        record.started_at,
        encode(identity),
    )


def is_terminal(record: RunRecord) -> bool:
    return record.result is not None and record.result.status.is_terminal
