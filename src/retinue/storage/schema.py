"""The schema, as migration steps. Never change a step that was released: add another.

Types are SQLite's; PostgreSQL replaces them by its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ..core.errors import StoreError
from ..core.runs import FRACTIONS, Usage
from .budgets import BUDGET_TABLES
from .gates import GATE_TABLES

if TYPE_CHECKING:
    from .database import Link

ROWS_KIND, DELTAS_KIND = "rows", "deltas"
"""Kinds of packs."""
NOT_PACKED, PACKED, CLEAN = 0, 1, 2
"""Marks of a log: its rows are in `events`; in `packs`; in `packs`, and `events` has none left."""
BEING_PRUNED, THINNED = 1, 2
"""Marks of a log: some of its rows are gone; all deltas and private parts are gone, and nothing else."""

COUNTS = ("questions", "children", *Usage.__struct_fields__)
"""The columns of a root run that its thread has in sum."""
_COUNTS = ", ".join([f"{name} {'REAL' if name in FRACTIONS else 'INTEGER'} NOT NULL DEFAULT 0" for name in COUNTS])

Step: TypeAlias = "str | Callable[[Link], None]"


def _tune(link: Link) -> None:
    link.tune_tables()


MIGRATIONS: tuple[tuple[Step, ...], ...] = (
    (
        # A leg waits for a worker while its log has a turn and no owner. `flow` is the user or thread that takes turns.
        # The log of a placed child has the log of its parent `above` it. `lost`: deaths of owners since it made progress.
        """CREATE TABLE logs (log_id TEXT PRIMARY KEY, owner TEXT, epoch INTEGER NOT NULL, lease_until REAL NOT NULL,
        boot TEXT NOT NULL, ended INTEGER NOT NULL DEFAULT 0, pruned INTEGER NOT NULL DEFAULT 0,
        packed INTEGER NOT NULL DEFAULT 0, engine TEXT, queue TEXT, flow TEXT, level INTEGER, turn INTEGER, due_at REAL,
        above TEXT, lost INTEGER NOT NULL DEFAULT 0, lost_steps INTEGER NOT NULL DEFAULT 0,
        lost_epoch INTEGER NOT NULL DEFAULT 0, is_alone INTEGER NOT NULL DEFAULT 0)""",
        # The owners that died with a log, and when that was found.
        "CREATE TABLE deaths (owner TEXT PRIMARY KEY, at REAL NOT NULL)",
        "CREATE INDEX logs_by_owner ON logs (owner) WHERE owner IS NOT NULL",
        "CREATE INDEX logs_ready ON logs (queue, level, turn, due_at) WHERE owner IS NULL AND turn IS NOT NULL",
        "CREATE INDEX logs_of_flow ON logs (queue, flow, turn) WHERE owner IS NULL AND turn IS NOT NULL",
        "CREATE INDEX logs_delayed ON logs (due_at) WHERE due_at IS NOT NULL AND turn IS NULL",
        "CREATE INDEX logs_leased ON logs (lease_until) WHERE owner IS NOT NULL AND engine IS NOT NULL",
        "CREATE INDEX logs_unpacked ON logs (log_id) WHERE ended = 1 AND packed < 2",  # CLEAN
        "CREATE INDEX logs_below ON logs (above) WHERE above IS NOT NULL",
        # The bytes come last, so that the columns before them are read without them.
        """CREATE TABLE events (log_id TEXT NOT NULL, seq INTEGER NOT NULL, sub INTEGER NOT NULL, kind TEXT NOT NULL,
        held INTEGER NOT NULL, body BLOB, private BLOB, PRIMARY KEY (log_id, seq, sub))""",
        # A log that has ended, rewritten: `deltas` of the `held` events are deltas, `size` is what all take as JSON.
        """CREATE TABLE packs (log_id TEXT NOT NULL, seq INTEGER NOT NULL, held INTEGER NOT NULL, deltas INTEGER NOT NULL,
        size INTEGER NOT NULL, body BLOB NOT NULL, private BLOB, PRIMARY KEY (log_id, seq))""",
        # The texts of such a log that are in no conversation: bytes up to `last`, so many. The streams are at 0.
        """CREATE TABLE said (log_id TEXT NOT NULL, last INTEGER NOT NULL, held INTEGER NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (log_id, last))""",
        """CREATE TABLE inbox (log_id TEXT NOT NULL, wish_id TEXT NOT NULL, run_id TEXT NOT NULL, kind TEXT NOT NULL,
        body BLOB NOT NULL, at REAL NOT NULL, reply BLOB, PRIMARY KEY (log_id, wish_id))""",
        "CREATE INDEX inbox_open ON inbox (log_id) WHERE reply IS NULL",
        # `place`: in the queue of its thread, while the run waits there.
        # `rank`: of a root, the status of its log as a number; below 3 if the log has not ended.
        f"""CREATE TABLE runs (run_id TEXT PRIMARY KEY, log_id TEXT NOT NULL, parent_run_id TEXT, thread_id TEXT NOT NULL,
        user_id TEXT, agent TEXT NOT NULL, status TEXT NOT NULL, place INTEGER, started_at REAL NOT NULL, ended_at REAL,
        rank INTEGER, {_COUNTS}, request BLOB, identity BLOB NOT NULL, result BLOB)""",
        "CREATE INDEX runs_open ON runs (thread_id, rank) WHERE rank < 3",  # OPEN
        "CREATE INDEX runs_of_thread ON runs (thread_id, started_at)",
        "CREATE INDEX runs_queued ON runs (thread_id, place) WHERE status = 'queued'",
        "CREATE INDEX runs_of_user ON runs (user_id, started_at) WHERE user_id IS NOT NULL",
        "CREATE INDEX runs_by_status ON runs (status, started_at)",
        "CREATE INDEX runs_by_time ON runs (started_at)",
        "CREATE INDEX runs_by_end ON runs (ended_at) WHERE ended_at IS NOT NULL",
        "CREATE INDEX runs_of_log ON runs (log_id) WHERE log_id <> run_id",
        # `changed_at`: when its summary changed. `search`: its title, folded. `kept`: its first messages, which rows refer to.
        # `above`: of a sub-agent, the thread of the root run.
        f"""CREATE TABLE threads (thread_id TEXT PRIMARY KEY, user_id TEXT, holder TEXT, made_at REAL,
        saved_at REAL NOT NULL DEFAULT 0, changed_at REAL NOT NULL DEFAULT 0, rank INTEGER, {_COUNTS},
        kept INTEGER NOT NULL DEFAULT 0, above TEXT, title TEXT, search TEXT, state BLOB)""",
        "CREATE INDEX threads_of_user ON threads (user_id, changed_at)",
        "CREATE INDEX threads_below ON threads (above) WHERE above IS NOT NULL",
        # The messages of a thread, packed: those up to the place `last`, so many. Places count from 1.
        """CREATE TABLE messages (thread_id TEXT NOT NULL, last INTEGER NOT NULL, held INTEGER NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (thread_id, last))""",
        """CREATE TABLE tasks (agent TEXT NOT NULL, session_id TEXT NOT NULL, task_id TEXT NOT NULL, user_id TEXT,
        log_id TEXT, place INTEGER NOT NULL, is_open INTEGER NOT NULL, saved_at REAL NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (agent, session_id, task_id))""",
        "CREATE INDEX tasks_open ON tasks (agent, session_id) WHERE is_open = 1",
        "CREATE INDEX tasks_by_end ON tasks (saved_at) WHERE is_open = 0",
        """CREATE TABLE task_results (agent TEXT NOT NULL, session_id TEXT NOT NULL, task_id TEXT NOT NULL,
        body BLOB NOT NULL, PRIMARY KEY (agent, session_id, task_id))""",
        """CREATE TABLE files (space TEXT NOT NULL, folder TEXT NOT NULL, name TEXT NOT NULL, is_folder INTEGER NOT NULL,
        mark TEXT NOT NULL, size INTEGER NOT NULL, changed_at REAL NOT NULL, body BLOB,
        PRIMARY KEY (space, folder, name))""",
        """CREATE TABLE tokens (token_id TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, user_id TEXT NOT NULL,
        scopes TEXT NOT NULL, made_at REAL NOT NULL, revoked_at REAL)""",
        # Sessions of pages. `token_hash` is that of the token with which a session was begun.
        """CREATE TABLE sessions (hash TEXT PRIMARY KEY, token_hash TEXT NOT NULL, user_id TEXT NOT NULL,
        scopes TEXT NOT NULL, until REAL NOT NULL)""",
        """CREATE TABLE push_targets (run_id TEXT NOT NULL, config_id TEXT NOT NULL, body BLOB NOT NULL,
        sent INTEGER NOT NULL, is_open INTEGER NOT NULL, holder TEXT, held_until REAL NOT NULL,
        tries INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (run_id, config_id))""",
        "CREATE INDEX push_targets_open ON push_targets (held_until) WHERE is_open = 1",
        """CREATE TABLE workers (owner TEXT PRIMARY KEY, engine TEXT NOT NULL, queues TEXT NOT NULL, agents TEXT NOT NULL,
        slots INTEGER NOT NULL, busy INTEGER NOT NULL, seen_until REAL NOT NULL)""",
        """CREATE TABLE schedules (schedule_id TEXT PRIMARY KEY, engine TEXT NOT NULL, next_at REAL NOT NULL,
        body BLOB NOT NULL, last_run TEXT, skipped INTEGER NOT NULL DEFAULT 0)""",
        "CREATE INDEX schedules_by_time ON schedules (next_at)",
        # The folder that a server of this database lets only one user work in.
        "CREATE TABLE one_user_files (place TEXT PRIMARY KEY)",
        *GATE_TABLES,
        *BUDGET_TABLES,
        _tune,
    ),
)

# All development versions made a table `threads`, and none made both `schema_info`, which has the version, and `packs`.
# So a database with `threads` and without one of these was written by one of them.
_VERSION, _OLD, _NEW = "schema_info", "threads", "packs"


def newest_version() -> int:
    return len(MIGRATIONS)


def read_version(link: Link, place: str) -> int:
    """Return the version of a database, 0 if it has no schema; raise StoreError if this code cannot read it."""
    tables = {row[0] for row in link.run(link.list_tables)}
    if _VERSION in tables:
        version = link.run(f"SELECT version FROM {_VERSION}")[0][0]
        if version > newest_version():
            known = f"schema {version}, known {newest_version()}"
            raise StoreError(place, f"it was written by a newer version ({known}): upgrade")
        if _OLD not in tables or _NEW in tables:
            return version
    if _OLD in tables:
        raise StoreError(
            place,
            "it was written by a development version before the first release and cannot be converted: delete it, and "
            "it is created again",
        )
    return 0


def upgrade(link: Link, place: str) -> None:
    """Migrate a database to the newest schema, in one transaction."""
    try:
        link.begin()
        link.prepare_schema()
        version = read_version(link, place)
        if version == 0:
            link.run(f"CREATE TABLE {_VERSION} (version INTEGER NOT NULL)")
            link.run(f"INSERT INTO {_VERSION} (version) VALUES (0)")
        for step in [step for steps in MIGRATIONS[version:] for step in steps]:
            if isinstance(step, str):
                link.run(step)
            else:
                step(link)
        link.run(f"UPDATE {_VERSION} SET version = ?", newest_version())
        link.commit()
    except BaseException:
        link.rollback()
        raise
