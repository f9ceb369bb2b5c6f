"""The contract of stores, over every implementation."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retinue.errors import StoreError
from retinue.storage.postgres import PostgresStore
from retinue.storage.sqlite import SqliteStore
from retinue.stores import MemoryStore
from retinue.testing import DurableStoreSuite, StoreSuite

from ..databases import TestServer


@pytest.mark.parametrize("check", StoreSuite.names())
async def test_memory(check: str) -> None:
    await getattr(StoreSuite(MemoryStore), check)()


@pytest.mark.parametrize("check", DurableStoreSuite.names())
async def test_sqlite(check: str, tmp_path: Path) -> None:
    numbers = count()

    def make() -> SqliteStore:
        return SqliteStore(str(tmp_path / f"{next(numbers)}.db"))

    def reopen(store: Any) -> SqliteStore:
        return SqliteStore(store.path)

    await getattr(DurableStoreSuite(make, reopen), check)()


@pytest.mark.parametrize("check", DurableStoreSuite.names())
async def test_postgresql(check: str, postgres_server: TestServer) -> None:
    urls: dict[int, str] = {}
    lent = ExitStack()

    def make() -> PostgresStore:
        url = lent.enter_context(postgres_server.empty_url())
        made = PostgresStore(url)
        urls[id(made)] = url
        return made

    with lent:
        await getattr(DurableStoreSuite(make, lambda store: PostgresStore(urls[id(store)])), check)()


class Broken(SqliteStore):
    """A store whose statements are changed on their way."""

    old = new = ""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        write, read = self.database.write, self.database.read

        def change(work: Any) -> Any:
            return lambda link: work(Changed(link, self.old, self.new))

        vars(self.database)["write"] = lambda work, about="", **how: write(change(work), about, **how)
        vars(self.database)["read"] = lambda work: read(change(work))


class Changed:
    """A link that replaces a part of every statement. Values for placeholders that are gone are left out."""

    def __init__(self, link: Any, old: str, new: str) -> None:
        self._link, self._old, self._new = link, old, new

    def _change(self, sql: str, values: Any) -> tuple[str, Any]:
        changed = sql.replace(self._old, self._new)
        return changed, values[len(values) - changed.count("?") :]

    def run(self, sql: str, *values: Any) -> list[Any]:
        changed, left = self._change(sql, values)
        return self._link.run(changed, *left)

    def value(self, sql: str, *values: Any) -> Any:
        changed, left = self._change(sql, values)
        return self._link.value(changed, *left)

    def ask(self, sql: str, *values: Any) -> Any:
        changed, left = self._change(sql, values)
        return self._link.ask(changed, *left)

    def run_two(self, first: str, first_values: Any, second: str, second_values: Any) -> None:
        self._link.run_two(*self._change(first, first_values), *self._change(second, second_values))

    def require(self, sql: str, *values: Any) -> None:
        changed, left = self._change(sql, values)
        self._link.require(changed, *left)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


FAULTS = {
    "check_a_stale_owner_writes_nothing": ("epoch = ?", "? IS NOT NULL"),
    "check_a_log_without_owner_is_not_written": ("owner IS NOT NULL AND ended = 0", "1 = 1"),
    "check_a_batch_is_written_whole_or_not_at_all": ("AND (seq, sub) >= (?, ?))", "AND (seq, sub) < (?, 0 * ?))"),
    "check_a_batch_that_is_tried_again_is_written_once": ("AND NOT EXISTS (", "AND 1 = 1 OR NOT EXISTS ("),
    "check_an_end_that_is_tried_again_is_recognised": ("SELECT epoch, owner, ended", "SELECT epoch + 1, owner, ended"),
    "check_a_run_that_has_ended_is_not_changed": ("WHERE runs.ended_at IS NULL", ""),
    "check_a_background_child_is_found_by_its_own_id": ("runs.log_id FROM runs", "runs.run_id FROM runs"),
    "check_a_log_is_claimed_only_when_it_may_be": ("ended = 0 AND (owner IS NULL", "(owner IS NULL"),
    "check_one_of_two_claims_wins": ("owner IS NULL OR", "1 = 1 OR"),
    "check_one_of_two_runs_gets_the_thread": ("COALESCE(threads.holder,", "COALESCE(NULL,"),
    "check_a_queue_keeps_its_order": ("status = 'queued'", "status = 'nothing'"),
    "check_a_queued_run_that_was_cancelled_takes_nothing": (
        "WHERE run_id = ? AND status = 'queued'",
        "WHERE run_id = ?",
    ),
    "check_a_run_that_ends_releases_its_thread": ("SET holder = NULL", "SET holder = holder"),
    "check_an_interrupt_cancels_all_before_it": ("OR (thread_id = ? AND status", "OR (thread_id <> ? AND status"),
    "check_of_many_interrupts_the_newest_runs": ("run_id <> ? AND (run_id", "? <> '' AND (run_id"),
    "check_a_queue_does_not_follow_the_clocks_of_clients": ("ORDER BY place", "ORDER BY started_at"),
    "check_events_are_read_in_order": ("ORDER BY seq", "ORDER BY seq DESC"),
    "check_a_log_comes_back_as_it_was_written": ("kind <> ?", "kind <> ? AND seq <> 303"),
    "check_nobody_but_the_owner_reads_private_parts": (
        "SELECT seq, held, body FROM events",
        "SELECT seq, held, COALESCE(private, body) FROM events",
    ),
    "check_leases_are_renewed": ("SET lease_until = boot_seconds()", "SET lease_until = 0 * boot_seconds()"),
    "check_logs_that_need_an_owner_are_listed": ("status IN ('running', 'queued')", "status IN ('running')"),
    "check_wishes_wait_for_a_reply": ("AND wish_id = ? AND reply IS NULL", "AND wish_id = ?"),
    "check_a_thread_keeps_the_messages_it_has": ("SELECT COALESCE(MAX(last), 0)", "SELECT 1"),
    "check_a_run_begins_whole": ("SELECT owner FROM", "SELECT NULL FROM"),
    "check_a_run_begins_once": ("SELECT owner, epoch FROM logs", "SELECT owner, epoch + 1 FROM logs"),
    "check_runs_are_listed_newest_first": ("ORDER BY started_at DESC", "ORDER BY started_at"),
    "check_runs_are_found_by_thread_user_and_status": ("user_id = ?", "? IS NOT NULL"),
    "check_a_thread_is_read_as_it_was_saved": ("DELETE FROM messages WHERE", "DELETE FROM messages WHERE 0 = 1 AND"),
}


@pytest.mark.parametrize("check", FAULTS)
async def test_the_suite_finds_a_store_that_is_wrong(check: str, tmp_path: Path) -> None:
    numbers = count()

    class Wrong(Broken):
        old, new = FAULTS[check]

    suite = DurableStoreSuite(
        lambda: Wrong(str(tmp_path / f"{next(numbers)}.db")), lambda store: Wrong(getattr(store, "path", ""))
    )
    with pytest.raises((AssertionError, StoreError, ValueError)):
        await getattr(suite, check)()


def test_the_checks_are_those_of_the_suite() -> None:
    suite = DurableStoreSuite(lambda: SqliteStore("never made"))
    assert [check.__name__ for check in suite.checks()] == DurableStoreSuite.names()
    assert set(StoreSuite.names()) < set(DurableStoreSuite.names())
