"""The places in which runs are kept: all must behave alike."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store of each kind."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/app.db"
