"""What the documents show really runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.prepared import PYTHON

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
EXAMPLES = [
    pytest.param(
        match[1], id=f"{document.relative_to(ROOT)}:{document.read_text()[: match.start()].count(chr(10)) + 1}"
    )
    for document in DOCUMENTS
    for match in re.finditer(r"^```python\n(.*?)^```", document.read_text(), re.S | re.M)
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    command = [PYTHON, "-W", "error", script]
    out = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert out.stdout


def test_files_named_in_the_architecture_exist() -> None:
    named = re.findall(r"`(\w+/\w+\.py|\w+\.py)`", (ROOT / "ARCHITECTURE.md").read_text())
    source = ROOT / "src/retinue"
    found = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    assert named
    for name in named:
        assert any(path == name or path.endswith(f"/{name}") for path in found), name
