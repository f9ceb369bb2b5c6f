"""A process is killed at each of its writes in turn: the conversation is told of its task, and once."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import PIPE
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..effort import share
from ..prepared import PYTHON, ROOT

STRIDE = 5


async def waker(*args: str) -> tuple[int, Any]:
    """Let a process live until it is done or killed; return its status, and what it says."""
    command = [PYTHON, "-m", "tests.tasks.waker", *args]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, cwd=ROOT)
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
    while await kill_and_continue(store, when, number, tmp_path / f"{number}", request):
        number += STRIDE
    assert number > 10, "it has made too few writes for this to be a test"


async def kill_and_continue(store: str, when: str, number: int, folder: Path, request: pytest.FixtureRequest) -> bool:
    """Return whether there was a write to be killed at."""
    folder.mkdir()
    with ExitStack() as lent:
        if store == "sqlite":
            url = f"sqlite:///{folder}/app.db"
        else:
            url = lent.enter_context(request.getfixturevalue("postgres_server").empty_url())
        given = (str(folder), url, "postgres" if store == "engine" else "-")
        status, said = await waker(*given, when, str(number))
        was_killed = status == -signal.SIGKILL
        if was_killed:
            status, said = await waker(*given, "never", "0")
        assert status == 0
        assert said == {"runs": ["completed", "completed"], "told": ["a"]}, f"{when} write {number}"
        return was_killed
