"""Databases to keep things in, each empty."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database with nothing in it."""
    return f"sqlite:///{tmp_path}/app.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
