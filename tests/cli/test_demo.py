"""`retinue demo`."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from retinue.cli import text

from .conftest import finished
from .terminal import Terminal
from .test_process import posix_only

FAST = {"RETINUE_DEMO_SPEED": "8"}


def test_it_shows_a_team_a_question_a_kill_and_the_end() -> None:
    code, out, err = finished("demo", env=FAST)
    assert (code, err) == (0, "")
    assert out.startswith("Scripted models: no key, no network, no language model.")
    assert out.count("approved by the demo, nobody answered: hold_seat DY 1204") == 1
    killed, over = (
        re.search(pattern, out) for pattern in (r"\$ kill -9 (\d+)", r"process (\d+) took over; \d+ finished calls")
    )
    assert killed is not None
    assert over is not None
    assert killed[1] != over[1]
    assert out.count("ok     hold_seat(") == 1  # what had ended did not run again
    assert "completed: 2 steps, 5 calls" in out
    assert re.search(r"  hold     2 steps · 1 call · hold_seat approved by \w+ · \$0\.00", out)
    assert "The seat was held once; the process was killed once.\nAt list prices it would have cost $0.0" in out


def test_json_is_events_only_and_each_comes_once() -> None:
    code, out, err = finished("demo", "--json", env=FAST)
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    numbers = [event["seq"] for event in events if event["seq"]]  # what has none is about the process
    assert numbers == list(range(1, len(numbers) + 1))
    assert (events[0]["kind"], events[-1]["kind"], events[-1]["status"]) == ("run_started", "run_finished", "completed")
    assert {event["agent"] for event in events} == {"lead", "trains", "flights", "hotels", "fares", "hold"}
    assert "no language model" in err


@posix_only
def test_on_a_terminal_the_question_is_answered_by_key_and_says_who() -> None:
    terminal = Terminal("demo", env={"RETINUE_DEMO_SPEED": "2"})
    terminal.see("├ ◐ trains", "├ ◐ flights", "└ ◐ hotels")
    terminal.see("Question  lead › flights › fares › hold", "flight: DY 1204")
    while not terminal.sees_soon("you approved: hold hold_seat"):
        assert "nobody answered" not in terminal.text
        terminal.type("\x1ba")
    assert terminal.end() == 0
    assert any("? fares  cut off in step" in line for line in terminal.seen)
    assert "nobody answered" not in terminal.text
    assert "│   └ ✓ hold  The seat is held until noon." in terminal.text


def test_keep_leaves_the_folder(tmp_path: Path) -> None:
    code, _, _ = finished("demo", "--keep", env={**FAST, "TMPDIR": str(tmp_path)})
    (kept,) = tmp_path.iterdir()
    assert code == 0
    assert {"demo.db", "held.txt"} <= {path.name for path in kept.iterdir()}


@pytest.mark.parametrize(
    ("on_path", "argv", "typed"),
    [
        ("/usr/bin/retinue", "/usr/bin/retinue", "retinue"),
        (None, str(Path.cwd() / ".venv/bin/retinue"), ".venv/bin/retinue"),
        (None, "/opt/tool.py", f"{min(sys.executable, os.path.relpath(sys.executable), key=len)} -m retinue"),
    ],
)
def test_the_program_is_named_so_that_it_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, on_path: str | None, argv: str, typed: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: on_path)
    monkeypatch.setattr("sys.argv", [argv])
    assert text.program() == typed
