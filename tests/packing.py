"""Packs every log that a test leaves in a database, and compares what is read before and after.

`RETINUE_CHECK_PACKS=1 scripts/test` does so for each store that is closed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from retinue.core.errors import LogUnreadable, StoreError
from retinue.core.events import DELTAS
from retinue.storage.packer import Packer
from retinue.storage.schema import newest_version
from retinue.storage.sql import SqlStore

_close = SqlStore.close


def install(patch: pytest.MonkeyPatch) -> None:
    """Have every store compare its logs when it is closed."""
    patch.setattr(SqlStore, "close", _close_checked)


async def _close_checked(store: SqlStore) -> None:
    if await store.database.version() == newest_version():
        with suppress(StoreError):
            await check_packing(store)
    await _close(store)


async def everything(store: SqlStore, log_id: str) -> tuple[list[Any], Any, Any]:
    """Return all events of a log, its rows, and its runs."""
    events: list[Any] = []
    while (page := await store.read_events(log_id, events[-1].seq if events else 0, 97)) is not None and page[0]:
        events += page[0]
    runs = await store.database.rows("SELECT run_id FROM runs WHERE log_id = ? ORDER BY run_id", log_id)
    records = [await store.load_run(run_id) for (run_id,) in runs]
    return events, await store.read_log(log_id), records


async def pack_all(store: SqlStore) -> None:
    """Pack the logs that have ended, also those that the packer of a runtime has in hand."""
    query = "SELECT log_id FROM logs WHERE ended = 1 AND packed < 2 AND pruned = 0"
    for (log_id,) in await store.database.rows(query):
        await Packer(store).pack(log_id)


async def check_packing(store: SqlStore) -> int:
    """Pack all logs that have ended; raise AssertionError if one then reads differently. Return their number."""
    packer, count = Packer(store), 0
    query = "SELECT log_id FROM logs WHERE ended = 1 AND packed = 0 AND pruned = 0"
    for (log_id,) in await store.database.rows(query):
        try:
            before = await everything(store, log_id)
        except (LogUnreadable, StoreError):
            continue
        await packer.pack(log_id)
        assert await store.database.value("SELECT packed FROM logs WHERE log_id = ?", log_id) == 2
        compare(before, await everything(store, log_id))
        count += 1
    return count


def compare(before: tuple[list[Any], Any, Any], after: tuple[list[Any], Any, Any]) -> None:
    """Compare a log before and after it was packed: only the times of deltas may differ, within their order."""
    assert [timeless(event) for event in after[0]] == [timeless(event) for event in before[0]]
    assert after[1:] == before[1:]
    if all(one.at <= two.at for one, two in zip(before[0], before[0][1:], strict=False)):
        assert all(one.at <= two.at for one, two in zip(after[0], after[0][1:], strict=False))


def timeless(event: Any) -> Any:
    return replace(event, at=0.0) if isinstance(event, DELTAS) else event
