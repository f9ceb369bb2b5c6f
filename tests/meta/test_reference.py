"""docs/reference.md names every public name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_reference_is_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/reference.py", "--check"], timeout=60)
    assert done.returncode == 0, "run: python scripts/reference.py"
