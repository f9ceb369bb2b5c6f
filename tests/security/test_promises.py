"""SECURITY.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_behind_each_promise_exist() -> None:
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`([a-z0-9_]+/[a-z0-9_]+\.py)`", row.rstrip("|").rpartition("|")[2])
        assert named, row
        for name in named:
            assert (ROOT / "tests" / name).exists(), name
