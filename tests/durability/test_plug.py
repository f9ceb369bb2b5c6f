"""A few rounds of the plug test and of the orphan test; `scripts/plug-test` and `scripts/orphan-test` do many."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..databases import TestServer
from ..effort import IS_LONG, share
from .orphans import play
from .plug import KINDS, Kind, can_unshare, check, one_round


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", KINDS if IS_LONG else ["kill", "humans"])
def test_a_disturbed_tree_comes_to_its_end_on_sqlite(tmp_path: Path, kind: Kind) -> None:
    if kind == "namespaces" and not can_unshare():
        pytest.skip("this process may not make pid namespaces")
    assert check(one_round(tmp_path, f"sqlite:///{tmp_path}/app.db", 1, kind=kind))["runs"] == 6


@pytest.mark.timeout(180)
def test_a_killed_tree_comes_to_its_end_on_postgres(tmp_path: Path, postgres_server: TestServer) -> None:
    assert check(one_round(tmp_path, postgres_server.url(), 1, nodes=3))["runs"] == 6


@pytest.mark.timeout(180)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_orphans_end_once_when_three_nodes_start_together(
    tmp_path: Path, store: str, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/app.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    runs = share(60, 24)
    counts = play(tmp_path, url, runs, 3, 1)
    assert counts["runs"] == runs
    assert counts["continued"] >= runs * 2 // 3
