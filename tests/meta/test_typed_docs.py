"""The code blocks of the documents and the examples pass `mypy --strict` and strict pyright."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every block in a file of its own, named by document and line, and `typed.py`."""
    folder = tmp_path_factory.mktemp("typed")
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        text = document.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M):
            line = text[: match.start()].count("\n") + 1
            (folder / f"{document.stem}_{line}.py").write_text(match[1])
    for example in (ROOT / "examples").glob("*.py"):
        (folder / f"example_{example.name}").write_text(example.read_text())
    (folder / "typed.py").write_text((ROOT / "tests/meta/typed.py").read_text())
    return folder


@pytest.mark.timeout(240)
def test_mypy(blocks: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", ROOT / ".venv/cache/mypy", *blocks.glob("*.py")]
    out = subprocess.run(command, capture_output=True, text=True, cwd=blocks)
    assert out.returncode == 0, out.stdout + out.stderr


@pytest.mark.timeout(240)
def test_pyright(blocks: Path) -> None:
    options = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(ROOT / "src")]}
    (blocks / "pyrightconfig.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "pyright", "-p", blocks, "--pythonpath", sys.executable]
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert out.returncode == 0, out.stdout + out.stderr
