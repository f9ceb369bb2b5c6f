"""Stores that processes share, and places where scenes are played."""

from __future__ import annotations

from pathlib import Path

import pytest

from .scene import Spot


@pytest.fixture
def spot(tmp_path: Path) -> Spot:
    return Spot(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Spot:
    """Where the same is played with nobody dying."""
    (tmp_path / "other").mkdir()
    return Spot(tmp_path / "other")


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, sqlite_url: str) -> str:
    """The URL of a store that several processes can share."""
    return sqlite_url if request.param == "sqlite" else request.getfixturevalue("postgres_url")
