"""The schema, as the steps that lead to it. A step that has been released is never changed: add another.

Types are SQLite's: another database puts its own in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..core.errors import StoreError
from .lanes import Link

Step = str | Callable[[Link], None]


def _split_threads(link: Link) -> None:
    """Messages have been part of their thread's row: give each a row of its own."""
    for thread_id, body in link.run("SELECT thread_id, body FROM threads"):
        thread = msgspec.json.decode(bytes(body), type=dict[str, msgspec.Raw])
        messages = msgspec.json.decode(thread.get("messages", b"[]"), type=list[msgspec.Raw])
        rows = [(thread_id, place, bytes(message)) for place, message in enumerate(messages)]
        link.run_many("INSERT INTO messages (thread_id, place, body) VALUES (?, ?, ?)", rows)
        state = bytes(thread.get("state", b"{}"))
        link.run("UPDATE threads SET state = ? WHERE thread_id = ?", state, thread_id)


def _date_the_undated(link: Link) -> None:
    """When things ended or were saved has not always been written down: they count as of now, so nothing goes early."""
    now = link.clock()
    link.run("UPDATE threads SET saved_at = ?", now)
    ended = "('completed', 'failed', 'cancelled', 'timeout')"
    link.run(f"UPDATE runs SET ended_at = ? WHERE ended_at IS NULL AND status IN {ended}", now)


MIGRATIONS: tuple[tuple[Step, ...], ...] = (
    (
        "CREATE TABLE threads (thread_id TEXT PRIMARY KEY, user_id TEXT, body BLOB NOT NULL)",
        """CREATE TABLE runs (run_id TEXT PRIMARY KEY, thread_id TEXT NOT NULL, user_id TEXT, agent TEXT NOT NULL,
        status TEXT NOT NULL, started_at REAL NOT NULL, identity BLOB NOT NULL, result BLOB)""",
        "CREATE INDEX runs_of_thread ON runs (thread_id, started_at)",
        "CREATE INDEX runs_by_time ON runs (started_at)",
        "CREATE TABLE logs (log_id TEXT PRIMARY KEY, ended INTEGER NOT NULL)",
        """CREATE TABLE events (log_id TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (log_id, seq))""",
    ),
    (
        "ALTER TABLE threads ADD COLUMN state BLOB",
        "ALTER TABLE threads ADD COLUMN holder TEXT",
        """CREATE TABLE messages (thread_id TEXT NOT NULL, place INTEGER NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (thread_id, place))""",
        _split_threads,
        "ALTER TABLE threads DROP COLUMN body",
        "ALTER TABLE runs ADD COLUMN decided BLOB",
        "ALTER TABLE runs ADD COLUMN ended_at REAL",
        "CREATE INDEX runs_of_user ON runs (user_id, started_at)",
        "CREATE INDEX runs_by_status ON runs (status, started_at)",
        "ALTER TABLE logs ADD COLUMN owner TEXT",
        "ALTER TABLE logs ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE logs ADD COLUMN lease_until REAL NOT NULL DEFAULT 0",
        "ALTER TABLE logs ADD COLUMN cancel TEXT",
        "CREATE INDEX logs_by_owner ON logs (owner) WHERE owner IS NOT NULL",
        """CREATE TABLE journal (log_id TEXT NOT NULL, place INTEGER NOT NULL, run_id TEXT NOT NULL, key TEXT NOT NULL,
        kind TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (log_id, place))""",
    ),
    (
        # The bytes come last: what stands before them is read without them.
        """CREATE TABLE files (space TEXT NOT NULL, folder TEXT NOT NULL, name TEXT NOT NULL, is_folder INTEGER NOT NULL,
        version INTEGER NOT NULL, mark TEXT NOT NULL, size INTEGER NOT NULL, changed_at REAL NOT NULL, body BLOB,
        PRIMARY KEY (space, folder, name))""",
        """CREATE TABLE tasks (agent TEXT NOT NULL, session_id TEXT NOT NULL, task_id TEXT NOT NULL, user_id TEXT,
        place INTEGER NOT NULL, is_open INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (agent, session_id, task_id))""",
        "CREATE INDEX tasks_open ON tasks (agent, session_id) WHERE is_open = 1",
        """CREATE TABLE task_results (agent TEXT NOT NULL, session_id TEXT NOT NULL, task_id TEXT NOT NULL,
        body BLOB NOT NULL, PRIMARY KEY (agent, session_id, task_id))""",
    ),
    (
        "ALTER TABLE logs ADD COLUMN pruned INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE threads ADD COLUMN saved_at REAL NOT NULL DEFAULT 0",
        _date_the_undated,
        "CREATE INDEX runs_by_end ON runs (ended_at) WHERE ended_at IS NOT NULL",
    ),
    ("ALTER TABLE events ADD COLUMN held INTEGER NOT NULL DEFAULT 1",),
    (
        """CREATE TABLE asks (ask_id TEXT PRIMARY KEY, run_id TEXT NOT NULL, asked_at REAL NOT NULL, body BLOB NOT NULL,
        taker TEXT, reply BLOB)""",
    ),
)

SCHEMA_VERSION = len(MIGRATIONS)


def check_version(version: int, place: str) -> int:
    """The version of a database, where this code can read it."""
    if version > SCHEMA_VERSION:
        raise StoreError(
            place, f"it was written by a newer version (schema {version}, known {SCHEMA_VERSION}): upgrade"
        )
    return version


def migrate(link: Link, version: int, steps: Sequence[Sequence[Step]]) -> None:
    """Do what leads from a version to the newest; the caller commits, or takes all of it back."""
    for step in [step for steps_of_one in steps[version:] for step in steps_of_one]:
        if isinstance(step, str):
            link.run(step)
        else:
            step(link)
