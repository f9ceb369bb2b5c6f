"""The schema, as the steps that lead to it. A step that has been released is never changed: add another."""

from __future__ import annotations

MIGRATIONS: tuple[tuple[str, ...], ...] = (
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
)

SCHEMA_VERSION = len(MIGRATIONS)
