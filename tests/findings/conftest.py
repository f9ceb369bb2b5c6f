"""What these tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support import Effects


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store that several nodes can share."""
    return f"sqlite:///{tmp_path}/app.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/app.db"


@pytest.fixture
def effects(tmp_path: Path) -> Effects:
    return Effects(tmp_path / "effects.txt")
