"""A run does not claim what its store does not have, and a slow disk does not hold the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, RetinueError, RunStatus, Runtime, tool
from retinue.testing import ScriptedModel, call, say

from ..durability.nodes import node


def remover(folder: Path) -> Agent:
    """Its tool deletes the database."""

    @tool
    async def remove() -> str:
        """Delete the database."""
        for file in folder.glob("app.db*"):
            file.unlink()
        return "removed"

    def turn(request: Any) -> Any:
        return say("all is well") if request.messages[-1].role == "tool" else call("remove", {})

    return Agent("a", ScriptedModel(turn), tools=[remove])


async def test_a_run_whose_database_is_deleted_does_not_complete_silently(
    sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raised: RetinueError | None = None
    result = None
    async with Runtime.open(sqlite_url, [remover(tmp_path)]) as runtime, asyncio.timeout(90):
        try:
            result = await runtime.run("a", "go", thread_id="t")
        except RetinueError as exc:
            raised = exc
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert raised is not None or (result is not None and result.status is not RunStatus.COMPLETED), "it completed"
    told = [*said, str(raised or ""), (result and result.error) or ""]
    assert any("app.db" in text for text in told), f"nobody says which file is gone: {told}"


async def test_the_next_run_after_the_database_was_deleted_is_refused_or_stored(
    sqlite_url: str, tmp_path: Path
) -> None:
    """What is reported as completed is there for the next process."""
    async with Runtime.open(sqlite_url, [remover(tmp_path)]) as runtime, asyncio.timeout(90):
        completed = []
        for number in range(2):
            try:
                result = await runtime.run("a", "go", thread_id=f"t{number}")
            except RetinueError:
                continue
            if result.status is RunStatus.COMPLETED:
                completed.append(result)
    async with Runtime.open(sqlite_url, recover=False) as reader:
        for result in completed:
            stored = await reader.store.load_run(result.run_id)
            assert stored is not None, "it completed, and nothing is stored"
            assert stored.status == "completed"


def disk_image(folder: Path) -> Path:
    """Make a small file system that can be frozen; skips where that is not possible."""
    needed = ("mkfs.ext4", "fsfreeze", "mount", "unshare")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"freezing a disk needs root and {', '.join(needed)}")
    image = folder / "disk.img"
    with image.open("wb") as file:
        file.truncate(32 * 1024 * 1024)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mount = ["unshare", "--mount", "sh", "-c", 'mount -o loop "$0" "$1"', str(image), str(folder / "disk")]
    (folder / "disk").mkdir()
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("freezing a disk needs the right to mount one")
    return image


async def test_a_disk_that_stalls_does_not_hold_the_event_loop(tmp_path: Path) -> None:
    """A run works on a disk that is frozen until the event loop thaws it."""
    image = disk_image(tmp_path)
    with node("on_a_frozen_disk", image, tmp_path / "disk", prefix=["unshare", "--mount"]) as program:
        assert (await asyncio.to_thread(program.line)) == "disk thaw"
        assert (await asyncio.to_thread(program.line)) == "ended completed"
        assert await asyncio.to_thread(program.wait) == 0
