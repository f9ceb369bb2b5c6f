"""Databases to keep things in, each empty."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/app.db"
