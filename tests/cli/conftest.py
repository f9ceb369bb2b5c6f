from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from retinue.cli import main
from tests.prepared import PYTHON

from .. import inside

ROOT = Path(__file__).parents[2]

PROGRAM = (
    "import sys\n"
    "from retinue.models import registry\n"
    "registry._PROVIDERS['test'] = 'tests.cli.models'\n"
    "from retinue.cli import main\n"
    "sys.exit(main())\n"
)
"""The command line with the models of these tests, as a program."""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETINUE_DB", "RETINUE_MODEL", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    inside.add_provider(monkeypatch, "test", "tests.cli.models")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lamp.md").write_text("# The lamp\n\nThe lamp burns paraffin.\n")
    (tmp_path / "stores.md").write_text("Paraffin: three barrels.\n")
    return tmp_path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line in this process."""

    def call(*args: str) -> Outcome:
        code = main(list(args))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


_processes: list[subprocess.Popen[Any]] = []


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """End what a test has started, also if it fails half-way: its open pipes would fail a later test."""
    yield
    while _processes:
        with _processes.pop() as process:
            process.kill()


def started(*args: str, program: str = PROGRAM, **options: Any) -> subprocess.Popen[Any]:
    """The command line in a process of its own; it ends with the test."""
    environment = {**os.environ, **options.pop("env", {})}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
    _processes.append(subprocess.Popen([PYTHON, "-c", program, *args], cwd=ROOT, env=environment, **options))
    return _processes[-1]


def finished(*args: str, **options: Any) -> Outcome:
    process = started(*args, **options)
    out, err = process.communicate(timeout=90)
    return Outcome(process.returncode, out.decode(), err.decode())
