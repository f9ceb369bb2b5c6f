"""The path of one delegation stays short enough to read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "trace_path.py"


def test_one_delegation_on_sqlite_calls_at_most_25_modules() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--functions"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run_loop\n" in done.stdout, "the child's loop"
