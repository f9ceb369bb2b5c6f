"""The command line as a process: signals, pipes, encodings, terminals."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from .conftest import PROGRAM, Outcome, finished, started
from .models import RUDE

TAKE_TERMINAL = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
posix_only = pytest.mark.skipif(os.name != "posix", reason="signals and terminals of POSIX")


def test_python_m_retinue(folder: Path) -> None:
    command = [sys.executable, "-m", "retinue", "run", "Where is paraffin?", "--workspace", str(folder), "--json"]
    out = subprocess.run(command, capture_output=True, timeout=90, check=True).stdout
    events = [json.loads(line) for line in out.splitlines()]
    assert (events[0]["kind"], events[-1]["kind"]) == ("run_started", "run_finished")
    assert events[-1]["status"] == "completed"


def test_help_loads_neither_the_event_view_nor_rich() -> None:
    code = (
        "import sys\nfrom retinue.cli import main\nmain(['--help'])\n"
        "print([name for name in ('rich', 'tempfile', 'retinue.cli.view') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_a_server_that_cannot_start_says_only_why(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "retinue", "serve", str(folder), "--port", "0", "--grpc-port", port]
        err = subprocess.run(command, capture_output=True, text=True, timeout=90).stderr
    assert "never awaited" not in err
    assert err.splitlines()[-1] == f"retinue: cannot listen on 127.0.0.1 port {port} for gRPC: give another --grpc-port"


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_stdout_that_is_not_unicode(folder: Path, extra: list[str]) -> None:
    (folder / "灯.md").write_text("灯 lamp\n", encoding="utf-8")
    args = ("run", "where is the lamp 灯", "--workspace", str(folder), *extra)
    outcome = finished(*args, env={"PYTHONIOENCODING": "ascii"})
    assert outcome.code == 0, outcome.err
    if extra:
        assert json.loads(outcome.out.splitlines()[0])["messages"][0]["parts"][0]["text"] == "where is the lamp 灯"
    else:
        assert r"\u706f" in outcome.out
        assert outcome.out.isascii()


@posix_only
@pytest.mark.parametrize("args", [["demo"], ["demo", "--json"]])
def test_a_closed_pipe_ends_quietly(args: list[str]) -> None:
    process = started(*args)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    _, err = process.communicate(timeout=90)
    assert b"Traceback" not in err
    assert b"Broken" not in err
    assert process.returncode == 141


@posix_only
def test_no_stdout_and_no_stderr_at_all(folder: Path) -> None:
    command = [sys.executable, "-m", "retinue", "run", "lamp", "--workspace", str(folder)]
    closed = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command], timeout=90)
    assert closed.returncode == 0


def after_line(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    """Read until a line with the text comes."""
    assert process.stdout is not None
    seen = b""
    while text not in seen:
        assert select.select([process.stdout], [], [], 20)[0], seen
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, seen
        seen += piece
    return seen


@posix_only
def test_ctrl_c_cancels_the_run_and_shows_what_was_done(folder: Path) -> None:
    process = started("run", "q", "--workspace", str(folder), "--model", "test:slow")
    seen = after_line(process, b"I begin.")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=90)
    text = (seen + out).decode()
    assert process.returncode == 130
    assert "ok     list_files()" in text
    assert text.splitlines()[-1].startswith("cancelled: 2 steps, 1 call")
    assert err.decode() == "retinue: cancelling the run; press Ctrl-C again to leave at once\n"


@posix_only
def test_ctrl_c_in_json_ends_with_run_finished(folder: Path) -> None:
    process = started("run", "q", "--workspace", str(folder), "--model", "test:slow", "--json")
    seen = after_line(process, b"I begin.")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=90)
    last = json.loads((seen + out).splitlines()[-1])
    assert process.returncode == 130
    assert (last["kind"], last["status"], last["error"]) == ("run_finished", "cancelled", "interrupted")


def test_a_background_task_that_fails_shows_in_the_exit_code(folder: Path) -> None:
    process = started("run", "do it", "--workspace", str(folder), "--model", "test:delegating")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "background task of general-purpose failed: RuntimeError: the sub-agent broke" in out.decode()
    assert err.decode() == "retinue: 1 background task did not complete; see: retinue tasks list\n"


@posix_only
@pytest.mark.parametrize(("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_a_background_task_runs_stops_it(folder: Path, asked: signal.Signals, code: int) -> None:
    process = started("run", "do it slowly", "--workspace", str(folder), "--model", "test:delegating")
    seen = after_line(process, b"waiting for 1 background task")
    process.send_signal(asked)
    out, err = process.communicate(timeout=90)
    assert process.returncode == code
    assert "background task of general-purpose cancelled" in (seen + out).decode()
    assert err.decode() == "retinue: 1 background task did not complete; see: retinue tasks list\n"
    (record,) = json.loads(next((folder / "agents/assistant/tasks").glob("*.json")).read_text()).values()
    assert record["status"] == "CANCELLED"


@posix_only
def test_a_second_ctrl_c_leaves_at_once(folder: Path) -> None:
    process = started("run", "q", "--workspace", str(folder), "--model", "test:stubborn")
    after_line(process, b"I begin.")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(b"retinue: cancelling")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 130


def on_terminal(
    *args: str,
    keys: bytes = b"",
    after: bytes = b"",
    env: dict[str, str] | None = None,
    typed: Iterable[bytes] = (),
    dialogue: Iterable[tuple[bytes, bytes]] = (),
) -> Outcome:
    """The command line on a terminal of 100 by 30; keys are typed once `after` is shown, each of `typed` at a question.

    Each step of a `dialogue` is what is shown, after the step before, and the keys that are typed then."""
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    files = {"stdin": slave, "stdout": slave, "stderr": slave}
    process = started(*args, **files, program=TAKE_TERMINAL + PROGRAM, start_new_session=True, env=env or {})
    os.close(slave)
    seen = b""
    answers, steps, from_here = list(typed), list(dialogue), 0
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the last writer is gone
            break
        if not piece:
            break
        seen += piece
        if answers and seen.count(b"Allow it?") > len(tuple(typed)) - len(answers):
            os.write(master, answers.pop(0))
        while steps and (at := seen.find(steps[0][0], from_here)) >= 0:
            from_here = at + len(steps[0][0])
            os.write(master, steps.pop(0)[1])
        if keys and after in seen:
            os.write(master, keys)
            keys = b""
    os.close(master)
    return Outcome(process.wait(timeout=90), seen.decode(), "")


@posix_only
def test_on_a_terminal_the_tree_is_drawn_and_the_cursor_comes_back(folder: Path) -> None:
    code, out, _ = on_terminal("run", "What does the lamp burn?", "--workspace", str(folder))
    assert code == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert "├─ step 1" in text
    assert "✓ list_files()" in text
    assert "- lamp.md:3: The lamp burns paraffin." in text
    assert "completed: 3 steps, 4 calls" in text
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")


@posix_only
@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_may_ask_for_plain_lines(folder: Path, env: dict[str, str]) -> None:
    code, out, _ = on_terminal("run", "What does the lamp burn?", "--workspace", str(folder), env=env)
    assert code == 0
    assert "\x1b" not in out


@posix_only
def test_on_a_terminal_too_nothing_is_injected(folder: Path) -> None:
    (folder / "plain.md").write_text(f"lamp {RUDE}\n")
    (folder / "evil\x1b[2Jname.md").write_text("x")
    code, out, _ = on_terminal("run", "q" + RUDE, "--workspace", str(folder), "--model", "test:rude")
    assert code == 0
    assert "[bold red]not bold[/]" in out
    for harm in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e"):
        assert harm not in out


@posix_only
def test_ctrl_c_on_a_terminal_leaves_it_clean(folder: Path) -> None:
    code, out, _ = on_terminal(
        "run", "q", "--workspace", str(folder), "--model", "test:slow", keys=b"\x03", after=b"I begin."
    )
    assert code == 130
    assert "cancelled: 2 steps, 1 call" in out
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")


@posix_only
def test_ctrl_c_ends_the_paced_demo() -> None:
    code, out, _ = on_terminal("demo", keys=b"\x03", after=b"step 2")
    assert code == 130
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")
