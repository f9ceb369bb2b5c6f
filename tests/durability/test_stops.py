"""Processes that are told to end: another process continues their runs, and nothing is done twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from .stops import STEPS, begun, play


@pytest.mark.parametrize(("store", "engine"), [("sqlite", None), ("postgres", None), ("postgres", "postgres")])
async def test_another_process_continues_each_run(
    request: pytest.FixtureRequest, tmp_path: Path, store: str, engine: str | None
) -> None:
    """The lease lasts an hour: only the release tells the other process."""
    url = f"sqlite:///{tmp_path}/app.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    found: dict[str, Any] = await asyncio.to_thread(play, tmp_path, url, 8, engine, 0.2)
    assert found["runs"] == found["moved"] == 8
    nodes = {line[1] for line in begun(tmp_path) if line[2] == "tool"}
    assert nodes == {"first", "second"}
    assert len([line for line in begun(tmp_path) if line[2] == "tool"]) == 8 * STEPS
