"""examples/workers.py, with a worker, as its docstring says."""

from __future__ import annotations

import asyncio
import os
import textwrap
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.prepared import PYTHON

from .processes import ROOT, start_worker


async def test_it_runs(postgres_url: str, tmp_path: Path) -> None:
    worker = await start_worker(postgres_url, target="examples/workspace")
    try:
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, "-W", "error", str(ROOT / "examples/workers.py"), "Where is the key kept?"),
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, "RETINUE_DB": postgres_url},
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        lines = out.decode().splitlines()
        assert (lines[0], lines[-1]) == ("run_started", "['0 3 * * *']")
        assert "run_finished" in lines
    finally:
        assert await worker.end(15) == 0
    assert worker.process.stderr is not None
    warned = (await worker.process.stderr.read()).decode()
    assert warned.startswith("retinue: offline:rules answers: rules, not a language model")


def test_the_documentation_shows_it() -> None:
    page, example = (ROOT / "docs/scale.md").read_text(), (ROOT / "examples/workers.py").read_text()
    shown = page.partition("```py\n")[2].partition("```")[0]
    assert textwrap.indent(shown, "    ") in example
