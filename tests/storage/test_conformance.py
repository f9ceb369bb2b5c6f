"""The contract of stores, over every implementation."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retinue import MemoryStore, StoreError
from retinue.storage.postgres import PostgresStore
from retinue.storage.sqlite import SqliteStore
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

    def make() -> PostgresStore:
        url = postgres_server.url()
        made = PostgresStore(url)
        urls[id(made)] = url
        return made

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
    def __init__(self, link: Any, old: str, new: str) -> None:
        self._link, self._old, self._new = link, old, new

    def run(self, sql: str, *values: Any) -> list[Any]:
        changed = sql.replace(self._old, self._new)
        return self._link.run(changed, *values[len(values) - changed.count("?") :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


FAULTS = {
    "check_an_owner_that_was_followed_writes_nothing": ("SELECT epoch,", "SELECT 1,"),
    "check_a_log_is_claimed_only_when_it_may_be": ("owner IS NULL", "owner IS NOT ''"),
    "check_one_of_two_claims_wins": ("owner IS NULL", "owner IS NOT ''"),
    "check_one_of_two_runs_gets_the_thread": ("SELECT holder FROM", "SELECT NULL FROM"),
    "check_a_queue_keeps_its_order": ("status = 'queued'", "status = 'nothing'"),
    "check_a_thread_is_free_when_its_run_has_ended": ("SET holder = NULL", "SET holder = holder"),
    "check_events_are_read_in_order": ("ORDER BY seq", "ORDER BY seq DESC"),
    "check_the_same_batch_is_written_once": ("EXISTS (", "NOT EXISTS ("),
    "check_a_journal_keeps_its_order": ("ORDER BY place", "ORDER BY place DESC"),
    "check_leases_are_prolonged": ("SET lease_until = ?", "SET lease_until = 0 * ?"),
    "check_an_owner_learns_who_is_to_be_cancelled": ("SELECT log_id, cancel FROM", "SELECT log_id, NULL FROM"),
    "check_what_is_asked_is_done_by_one": ("taker IS NULL OR", "1 = 1 OR"),
    "check_who_asked_is_told": ("DELETE FROM asks WHERE ask_id = ? AND taker IS NULL", "SELECT ?"),
    "check_a_run_begins_whole": ("SELECT owner FROM", "SELECT NULL FROM"),
    "check_runs_are_listed_newest_first": ("ORDER BY started_at DESC", "ORDER BY started_at"),
    "check_runs_are_found_by_thread_user_and_status": ("user_id = ?", "? IS NOT NULL"),
    "check_a_thread_is_read_as_it_was_saved": ("DELETE FROM messages", "SELECT 1 FROM messages"),
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
