"""A process is killed at each of its writes in turn: the conversation is told of its task, and once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from ..effort import share

STRIDE = 5
ROOT = Path(__file__).resolve().parent.parent.parent


async def waker(*args: str) -> tuple[int, Any]:
    """Let a process live until it is done or killed; return its status, and what it says."""
    command = [sys.executable, "-m", "tests.tasks.waker", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env=env, cwd=ROOT)
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(said) if said else None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("store", ["sqlite", "postgres", "engine"])
@pytest.mark.parametrize("place", range(1, 1 + share(STRIDE, 1)))
async def test_killed_at_a_write(
    store: str, when: str, place: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each test kills at every fifth write, from its own place on, until no such write comes."""
    number = place
    while True:
        folder = tmp_path / f"{number}"
        folder.mkdir()
        server = None if store == "sqlite" else request.getfixturevalue("postgres_server")
        url = f"sqlite:///{folder}/app.db" if server is None else server.url()
        given = (str(folder), url, "postgres" if store == "engine" else "-")
        status, said = await waker(*given, when, str(number))
        was_killed = status == -signal.SIGKILL
        if was_killed:
            status, said = await waker(*given, "never", "0")
        assert status == 0
        assert said == {"runs": ["completed", "completed"], "told": ["a"]}, f"{when} write {number}"
        if not was_killed:
            assert number > 10, "it has made too few writes for this to be a test"
            return
        number += STRIDE
