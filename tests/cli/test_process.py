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
from pathlib import Path

import pytest

from .conftest import finished, started
from .models import RUDE
from .terminal import Terminal

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
    process = started(*args, env={"RETINUE_DEMO_SPEED": "8"})
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


@posix_only
def test_on_a_terminal_the_tree_is_drawn_and_the_cursor_comes_back(folder: Path) -> None:
    terminal = Terminal("run", "What does the lamp burn?", "--workspace", str(folder))
    assert terminal.end() == 0
    assert "› What does the lamp burn?" in terminal.text
    assert "✓ list_files" in terminal.text
    assert "lamp.md:3: The lamp burns paraffin." in terminal.text
    assert "✓ done 0:0" in terminal.text
    assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(b"\x1b[?25l")


@posix_only
@pytest.mark.parametrize("how", [{"TERM": "dumb"}, {}])
def test_a_terminal_may_ask_for_plain_lines(folder: Path, how: dict[str, str]) -> None:
    terminal = Terminal(
        *("run", "What does the lamp burn?", "--workspace", str(folder)), *["--plain"] * (not how), env=how
    )
    assert terminal.end() == 0
    assert "completed: 3 steps, 4 calls" in terminal.text
    assert b"\x1b" not in terminal.raw


@posix_only
def test_without_colours_the_layout_is_the_same(folder: Path) -> None:
    terminal = Terminal("run", "What does the lamp burn?", "--workspace", str(folder), env={"NO_COLOR": "1"})
    assert terminal.end() == 0
    assert "✓ list_files" in terminal.text
    assert not re.search(rb"\x1b\[[0-9;]*3[0-7]m", terminal.raw)


@posix_only
def test_on_a_terminal_too_nothing_is_injected(folder: Path) -> None:
    (folder / "plain.md").write_text(f"lamp {RUDE}\n")
    (folder / "evil\x1b[2Jname.md").write_text("x")
    terminal = Terminal("run", "q" + RUDE, "--workspace", str(folder), "--model", "test:rude")
    assert terminal.end() == 0
    assert "[bold red]not bold[/]" in terminal.text
    for harm in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e"):
        assert harm not in terminal.raw.decode()


@posix_only
def test_ctrl_c_on_a_terminal_leaves_it_clean(folder: Path) -> None:
    terminal = Terminal("run", "q", "--workspace", str(folder), "--model", "test:slow")
    terminal.see("I begin.")
    terminal.type("\x03")
    assert terminal.end() == 130
    assert "⊘ stopped 0:0" in terminal.text
    assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(b"\x1b[?25l")


@posix_only
def test_ctrl_c_ends_the_paced_demo() -> None:
    terminal = Terminal("demo")
    terminal.see("◐ lead")
    terminal.type("\x03")
    assert terminal.end() == 130
    assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(b"\x1b[?25l")
