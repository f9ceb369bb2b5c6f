"""The path of one run stays short enough to read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "trace_path.py"


def test_a_run_with_one_delegation_calls_no_more_than_its_caps() -> None:
    """The caps on modules, functions and edges between modules are in the script: lower them with the path."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--functions"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run_loop\n" in done.stdout, "the loop"
    assert "run_child_agent\n" in done.stdout, "the delegation"
