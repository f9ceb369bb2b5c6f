"""A few rounds of the plug test; `scripts/plug-test` does many."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..databases import TestServer
from .plug import check, one_round


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_tree_comes_to_its_end_on_sqlite(tmp_path: Path, seed: int) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    one_round(tmp_path, url, seed)
    assert check(tmp_path, url)["runs"] == 6


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_tree_comes_to_its_end_on_postgres(tmp_path: Path, seed: int, postgres_server: TestServer) -> None:
    url = postgres_server.url()
    one_round(tmp_path, url, seed, nodes=2)
    assert check(tmp_path, url)["runs"] == 6
