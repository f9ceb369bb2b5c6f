"""Check at every row of every log that the live state is the fold of the rows so far.

`with checked_folds() as check:` wraps `LiveLog`. A second state is folded from copies of the rows: read back from their
stored form where a store is used, deep copies otherwise. Set RETINUE_CHECK_FOLDS=1 to check every test this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from msgspec import Struct

from retinue.core.errors import Escape
from retinue.core.events import DELTAS, Event
from retinue.core.rows import LogRow, Private
from retinue.log.fold import fold
from retinue.log.owned import LiveLog
from retinue.log.state import LogState, RunState
from retinue.storage.packs import pack_rows, unpack_rows


class FoldBroken(Escape, AssertionError):
    """The live state is not the fold of the log. It comes out of the run."""


class Shadow:
    """The rows of one log, and their fold beside the live one."""

    def __init__(self, log: LiveLog) -> None:
        self.log = log
        self.tree = copied(log.tree)
        self.rows: list[LogRow] = []


class FoldCheck:
    """What was checked, and what was found wrong."""

    def __init__(self) -> None:
        self.shadows: dict[int, Shadow] = {}
        self.rows = 0
        self.problems: list[str] = []

    def begin(self, log: LiveLog) -> None:
        self.shadows[id(log)] = Shadow(log)

    def add(self, log: LiveLog, row: LogRow) -> None:
        """Fold a copy of the row that was just appended, and compare."""
        shadow = self.shadows.get(id(log))
        if shadow is None or shadow.log is not log:
            return
        shadow.rows.append(row)
        self.rows += 1
        if isinstance(row.event, DELTAS):
            return
        fold(shadow.tree, stored(row) if log.writer is not None else copied(row))
        if problems := differences(log.tree, shadow.tree):
            self.problems.append(f"at {row.seq}.{row.sub} {_kind(row)}: {'; '.join(problems)}")
            raise FoldBroken(self.problems[-1])

    def require(self) -> None:
        """Raise what was found wrong, also where something caught it."""
        if self.problems:
            raise FoldBroken("\n".join(self.problems))


def _kind(row: LogRow) -> str:
    return row.event.kind if row.event is not None else f"row {row.private.kind if row.private else ''}"


def copied(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """A copy that shares nothing which can be changed; what a user gave and nobody can copy stays what it is."""
    seen = {} if seen is None else seen
    if isinstance(value, Struct | RunState | LogState):
        if id(value) not in seen:  # a child is known by two names, and is one
            names = value.__struct_fields__ if isinstance(value, Struct) else value.__match_args__
            fields = {name: copied(getattr(value, name), seen) for name in names}
            seen[id(value)] = type(value)(**fields)
        return seen[id(value)]
    if isinstance(value, dict):
        return {key: copied(one, seen) for key, one in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)([copied(one, seen) for one in value])
    return value


def stored(row: LogRow) -> LogRow:
    """A row as it is read back from a store."""
    (_, seq, sub, _, held, body, private), *more = pack_rows("log", [row])
    assert not more
    (read,) = unpack_rows(seq, sub, held, body, private)
    return read


def differences(live: LogState, folded: LogState) -> list[str]:
    """Where two states differ; places in the log and the time of the last row do not count."""
    problems: list[str] = []
    if list(live.runs) != list(folded.runs):
        problems.append(f"runs: {list(live.runs)} live, {list(folded.runs)} folded")
    for run_id, run in live.runs.items():
        if run_id in folded.runs and run != folded.runs[run_id]:
            problems += _run_differences(run, folded.runs[run_id])
    if live.tasks != folded.tasks:
        problems.append(f"tasks: {live.tasks} live, {folded.tasks} folded")
    return problems


def _run_differences(live: RunState, folded: RunState) -> list[str]:
    wrong: list[str] = []
    for name in RunState.__match_args__:
        one, other = getattr(live, name), getattr(folded, name)
        if one != other:
            wrong.append(f"{live.identity.agent}.{name}: {one!r:.400} live, {other!r:.400} folded")
    return wrong


@contextmanager
def checked_folds() -> Iterator[FoldCheck]:
    """Check every log that is made in this block."""
    check = FoldCheck()
    init, append, append_private = LiveLog.__init__, LiveLog.append, LiveLog.append_private
    append_stamped = LiveLog.append_stamped

    def checked_init(self: LiveLog, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        check.begin(self)

    def checked_append(self: LiveLog, run: RunState, event: Event, private: Private | None = None) -> Event | None:
        appended = append(self, run, event, private)
        if appended is not None:
            check.add(self, LogRow(appended.seq, 0, appended, private))
        return appended

    def checked_stamped(self: LiveLog, event: Event, private: Private | None = None) -> None:
        lost = self.lost
        append_stamped(self, event, private)
        if not lost:
            check.add(self, LogRow(self.events[-1].seq, 0, self.events[-1], private))

    def checked_private(self: LiveLog, private: Private) -> None:
        lost = self.lost
        append_private(self, private)
        if not lost:
            check.add(self, LogRow(self.tree.seq, self.tree.sub, None, private))

    with (
        patch.object(LiveLog, "__init__", checked_init),
        patch.object(LiveLog, "append", checked_append),
        patch.object(LiveLog, "append_stamped", checked_stamped),
        patch.object(LiveLog, "append_private", checked_private),
    ):
        yield check
    check.require()
