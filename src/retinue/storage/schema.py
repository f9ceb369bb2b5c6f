"""The schema, as the steps that lead to it. A step that has been released is never changed: add another.

Types are SQLite's; PostgreSQL puts its own in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import StoreError
from .lanes import Link

Step = str | Callable[[Link], None]

MIGRATIONS: tuple[tuple[Step, ...], ...] = (
    (
        """CREATE TABLE logs (log_id TEXT PRIMARY KEY, owner TEXT, epoch INTEGER NOT NULL, lease_until REAL NOT NULL,
        boot TEXT NOT NULL, ended INTEGER NOT NULL DEFAULT 0, pruned INTEGER NOT NULL DEFAULT 0)""",
        "CREATE INDEX logs_by_owner ON logs (owner) WHERE owner IS NOT NULL",
        # The bytes come last, so that the columns before them are read without them.
        """CREATE TABLE events (log_id TEXT NOT NULL, seq INTEGER NOT NULL, sub INTEGER NOT NULL, kind TEXT NOT NULL,
        held INTEGER NOT NULL, body BLOB, private BLOB, PRIMARY KEY (log_id, seq, sub))""",
        """CREATE TABLE inbox (log_id TEXT NOT NULL, wish_id TEXT NOT NULL, run_id TEXT NOT NULL, kind TEXT NOT NULL,
        body BLOB NOT NULL, at REAL NOT NULL, reply BLOB, PRIMARY KEY (log_id, wish_id))""",
        "CREATE INDEX inbox_open ON inbox (log_id) WHERE reply IS NULL",
        """CREATE TABLE runs (run_id TEXT PRIMARY KEY, log_id TEXT NOT NULL, parent_run_id TEXT, thread_id TEXT NOT NULL,
        user_id TEXT, agent TEXT NOT NULL, status TEXT NOT NULL, started_at REAL NOT NULL, ended_at REAL,
        request BLOB, identity BLOB NOT NULL, result BLOB)""",
        "CREATE INDEX runs_of_thread ON runs (thread_id, started_at)",
        "CREATE INDEX runs_queued ON runs (thread_id, started_at) WHERE status = 'queued'",
        "CREATE INDEX runs_of_user ON runs (user_id, started_at) WHERE user_id IS NOT NULL",
        "CREATE INDEX runs_by_status ON runs (status, started_at)",
        "CREATE INDEX runs_by_time ON runs (started_at)",
        "CREATE INDEX runs_by_end ON runs (ended_at) WHERE ended_at IS NOT NULL",
        "CREATE INDEX runs_of_log ON runs (log_id) WHERE log_id <> run_id",
        """CREATE TABLE threads (thread_id TEXT PRIMARY KEY, user_id TEXT, holder TEXT, saved_at REAL NOT NULL DEFAULT 0,
        state BLOB)""",
        """CREATE TABLE messages (thread_id TEXT NOT NULL, place INTEGER NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (thread_id, place))""",
        """CREATE TABLE tasks (agent TEXT NOT NULL, session_id TEXT NOT NULL, task_id TEXT NOT NULL, user_id TEXT,
        log_id TEXT, place INTEGER NOT NULL, is_open INTEGER NOT NULL, saved_at REAL NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (agent, session_id, task_id))""",
        "CREATE INDEX tasks_open ON tasks (agent, session_id) WHERE is_open = 1",
        "CREATE INDEX tasks_by_end ON tasks (saved_at) WHERE is_open = 0",
        """CREATE TABLE task_results (agent TEXT NOT NULL, session_id TEXT NOT NULL, task_id TEXT NOT NULL,
        body BLOB NOT NULL, PRIMARY KEY (agent, session_id, task_id))""",
        """CREATE TABLE files (space TEXT NOT NULL, folder TEXT NOT NULL, name TEXT NOT NULL, is_folder INTEGER NOT NULL,
        version INTEGER NOT NULL, mark TEXT NOT NULL, size INTEGER NOT NULL, changed_at REAL NOT NULL, body BLOB,
        PRIMARY KEY (space, folder, name))""",
    ),
)

SCHEMA_VERSION = len(MIGRATIONS)

# The version is in a table of its own, which no development version made. All of those had a table `threads`. So a
# database with `threads` but without `format` is of one of them, whatever else it says about its version.
FORMAT_TABLE, OLD_TABLE = "format", "threads"


def stored_version(tables: set[str], read: Callable[[str], Sequence[Sequence[int]]], place: str) -> int:
    """Return the version of a database with these tables, 0 where it has no schema yet."""
    if FORMAT_TABLE in tables:
        return read(f"SELECT version FROM {FORMAT_TABLE}")[0][0]
    if OLD_TABLE in tables:
        raise StoreError(
            place,
            "it was written by a development version before the first release and cannot be converted: delete it, and "
            "it is created again",
        )
    return 0


def check_version(version: int, place: str) -> int:
    """Return the version of a database, if this code can read it."""
    if version > SCHEMA_VERSION:
        raise StoreError(
            place, f"it was written by a newer version (schema {version}, known {SCHEMA_VERSION}): upgrade"
        )
    return version


def migrate(link: Link, version: int, steps: Sequence[Sequence[Step]]) -> None:
    """Take the steps from a version to the newest. The caller commits them, or takes all of them back."""
    if version == 0:
        link.run(f"CREATE TABLE {FORMAT_TABLE} (version INTEGER NOT NULL)")
        link.run(f"INSERT INTO {FORMAT_TABLE} (version) VALUES (0)")
    for step in [step for steps_of_one in steps[version:] for step in steps_of_one]:
        if isinstance(step, str):
            link.run(step)
        else:
            step(link)
    link.run(f"UPDATE {FORMAT_TABLE} SET version = ?", len(steps))
