"""Readers that do not read cost a server a bounded share of memory, however large the log is."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.load import server, stalled

from ..effort import share

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a process of Linux")


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "from the start"])
async def test_readers_that_do_not_read_cost_little(tmp_path: Path, *, is_late: bool) -> None:
    readers, megabytes = share(40, 10), share(70, 10)
    async with server("ours", f"sqlite:///{tmp_path}/a.db") as running:
        found = await stalled(running, readers, megabytes, is_late=is_late, seconds=0.5)
    assert found["grew_mb"] <= 40, found
