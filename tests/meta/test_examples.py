"""Every example runs, and shows what it says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.prepared import PYTHON

EXAMPLES = Path(__file__).parents[2] / "examples"

SHOWS = {
    "approve.py": (["yes"], ["old.log is deleted", "notes.md is deleted", "I have done what you allowed."]),
    "research.py": ([], ["child_started", "tools:call_1_1 researcher run_started", "items=['source 1 on rust: news'"]),
    "permissions.py": (
        [],
        [
            "offered: read_file, write_file, list_files, glob_files, grep_files",
            "asks: May writer call write_file?",
            "blocked: write_file is not permitted with these arguments",
            "wrote 1 line",
        ],
    ),
    "serve_fastapi.py": (
        ["try"],
        ['"delta":"morning."', "event: run_finished", "bob: 404 there is no such run, or it is not yours"],
    ),
    "telemetry.py": (
        [],
        [
            '"logger": "shop", "message": "searching", "run_id": "run_',
            "      execute_tool task\n        invoke_agent searcher  (900 tokens in)\n          chat gpt-4o-mini\n",
            "Aye. 4520 tokens, $0.000732",
        ],
    ),
}


ELSEWHERE = {"workers.py"}
"""Examples that need servers: tests/engines/test_example.py."""


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - ELSEWHERE))
def test_example(name: str) -> None:
    arguments, lines = SHOWS[name]
    out = subprocess.run(
        [PYTHON, "-W", "error", EXAMPLES / name, *arguments], capture_output=True, text=True, timeout=90
    )
    assert out.returncode == 0, out.stderr
    for line in lines:
        assert line in out.stdout


def test_a_human_may_refuse() -> None:
    out = subprocess.run(
        [PYTHON, EXAMPLES / "approve.py"], input="yes\nno\n", capture_output=True, text=True, timeout=90
    )
    assert "old.log is deleted" in out.stdout
    assert "[refused] the human said no" in out.stdout
