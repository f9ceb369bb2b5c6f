"""Programs that are forked from a prepared process are as those of a new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.prepared import CAN_FORK, PYTHON

SHOW = (
    "import os, sys; print(os.getppid(), os.getcwd(), os.environ.get('MARK'), sys.argv, sys.path[0], __name__, "
    "os.getsid(0) == os.getpid(), sys.modules['__main__'].__dict__ is globals(), sys.stdout.line_buffering)"
)
ENDS: dict[str, tuple[str, int]] = {
    "its end": ("pass", 0),
    "a code": ("import sys; sys.exit(7)", 7),
    "a message": ("import sys; sys.exit('bye')", 1),
    "an exception": ("1 / 0", 1),
    "Ctrl-C": ("raise KeyboardInterrupt", -signal.SIGINT),
    "a signal": ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "a thread that goes on": ("import threading, time; threading.Thread(target=print, args=['bye']).start()", 0),
    "a function for the end": ("import atexit; atexit.register(print, 'bye')", 0),
}


def run(python: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *words], capture_output=True, text=True, timeout=90, **options)


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}, {"env": {**os.environ, "MARK": "m"}}])
def test_they_get_what_they_are_given(tmp_path: Path, options: dict[str, Any]) -> None:
    script = tmp_path / "folder" / "show.py"
    script.parent.mkdir()
    script.write_text(SHOW)
    (tmp_path / "module.py").write_text(SHOW)
    for words in (
        ["-c", SHOW, "one", "two"],
        [str(script), "one"],
        ["-W", "error", "-c", SHOW],
        ["-m", "module", "one"],
    ):
        forked, new = [run(python, *words, cwd=tmp_path, **options) for python in (PYTHON, sys.executable)]
        assert (forked.stdout, forked.stderr) == (new.stdout, "")
        assert forked.stdout.startswith(f"{os.getpid()} ")


@pytest.mark.parametrize("name", ENDS)
def test_they_end_as_others_do(name: str) -> None:
    code, expected = ENDS[name]
    forked, new = run(PYTHON, "-c", code), run(sys.executable, "-c", code)
    assert forked.returncode == new.returncode == expected
    assert (forked.stdout, forked.stderr.splitlines()[-1:]) == (new.stdout, new.stderr.splitlines()[-1:])


def test_warnings_are_errors_where_asked_for() -> None:
    warn = "import warnings; warnings.warn('careful')"
    assert run(PYTHON, "-c", warn).returncode == 0
    ended = run(PYTHON, "-W", "error", "-c", warn)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "UserWarning: careful")


@pytest.mark.parametrize("kept", ["left = ", "import retinue; retinue.left = ", "left = [0]; left[0] = left, ", ""])
def test_what_is_left_behind_is_warned_of_where_asked_for(kept: str) -> None:
    leave = f"import os, socket; {kept}socket.socket(); print('end')"
    for python in (PYTHON, sys.executable):
        ended = run(python, "-W", "error", "-c", leave)
        assert (ended.returncode, ended.stdout) == (0, "end\n")
        assert "ResourceWarning: unclosed <socket.socket" in ended.stderr
    assert run(PYTHON, "-c", leave).stderr == ""


def test_what_matters_to_the_start_of_an_interpreter_makes_a_new_one() -> None:
    code = "import sys; print(sys.stdout.encoding)"
    assert run(PYTHON, "-c", code, env={**os.environ, "PYTHONIOENCODING": "ascii"}).stdout == "ascii\n"


@pytest.mark.skipif(not CAN_FORK, reason="nothing is forked here")
def test_only_they_have_the_imports_of_the_template() -> None:
    code = "import sys; print('aiohttp' in sys.modules)"
    assert [run(python, "-c", code).stdout for python in (PYTHON, sys.executable)] == ["True\n", "False\n"]
