"""The contract of stores, over every implementation."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retinue import MemoryStore
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
