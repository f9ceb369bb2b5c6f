"""How threads and runs are written, in a transaction with whatever else changes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..core.codec import to_json_value
from ..core.stores import RunRecord, ThreadRecord
from .lanes import Link

Saving = tuple[Callable[[Link], None], int]
"""What stores something, and how many bytes that are."""

_encode = msgspec.json.Encoder().encode


def saving_thread(record: ThreadRecord, keep: int) -> Saving:
    """What stores a thread, of which the first messages are stored already."""
    rows = [(record.thread_id, place, _encode(record.messages[place])) for place in range(keep, len(record.messages))]
    state = _encode(record.state)

    def save(link: Link) -> None:
        link.run(
            "INSERT INTO threads (thread_id, user_id, state, saved_at) VALUES (?, ?, ?, ?) ON CONFLICT (thread_id) "
            "DO UPDATE SET user_id = excluded.user_id, state = excluded.state, saved_at = excluded.saved_at",
            record.thread_id,
            record.user_id,
            state,
            link.clock(),
        )
        link.run("DELETE FROM messages WHERE thread_id = ? AND place >= ?", record.thread_id, keep)
        if rows:
            link.run_many("INSERT INTO messages (thread_id, place, body) VALUES (?, ?, ?)", rows)

    return save, len(state) + sum([len(row[2]) for row in rows])


def saving_run(record: RunRecord) -> Saving:
    """What stores a run, and lets go of its thread where it has ended."""
    identity, result = record.identity, None
    if record.result is not None:
        result = _encode(msgspec.structs.replace(record.result, output=to_json_value(record.result.output)))
    ended = record.result is not None and record.result.status.is_terminal
    values = (
        identity.run_id,
        identity.thread_id,
        identity.user_id,
        identity.agent,
        record.status,
        record.started_at,
        _encode(identity),
        result,
        _encode(record.decided) if record.decided else None,
    )

    def save(link: Link) -> None:
        if ended:  # first: whoever locks both a thread and a run begins with the thread
            link.run(
                "UPDATE threads SET holder = NULL WHERE thread_id = ? AND holder = ?",
                identity.thread_id,
                identity.run_id,
            )
        link.run(
            "INSERT INTO runs (run_id, thread_id, user_id, agent, status, started_at, identity, result, decided, "
            "ended_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run_id) DO UPDATE SET "
            "status = excluded.status, result = excluded.result, decided = excluded.decided, "
            "ended_at = excluded.ended_at",
            *values,
            link.clock() if ended else None,
        )

    return save, len(result or b"")
