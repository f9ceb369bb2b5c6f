"""`retinue run --record` and `retinue replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Cli, started
from .terminal import Terminal
from .test_process import posix_only


def test_what_was_recorded_is_shown_again_to_the_letter(cli: Cli, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    asked = ("run", "What does the lamp burn?", "--workspace", str(folder))
    recorded = cli(*asked, "--record", str(file))
    assert recorded.code == 0
    again = cli("replay", str(file), "--speed", "1000")
    assert (again.code, again.out) == (0, recorded.out)
    events = [json.loads(line) for line in cli("replay", str(file), "--json").out.splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert cli(*asked, "--record", str(file)).err.endswith(f"there is a file {str(file)!r}: give a name that is free\n")


@posix_only
def test_it_is_drawn_on_a_terminal(cli: Cli, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    cli("run", "What does the lamp burn?", "--workspace", str(folder), "--record", str(file))
    terminal = Terminal("replay", str(file), "--speed", "1000")
    assert terminal.end() == 0
    assert "› What does the lamp burn?" in terminal.text
    assert "✓ done 0:00" in terminal.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot read"),
        ("", "is no record of a run: retinue run … --record FILE makes one"),
        ("{}\n", "is no record of a run"),
        ('{"retinue_record": 9}\n', "has record format 9: this version of retinue reads 1"),
        ('{"retinue_record": 1}\n[]\n', "line 2: this is no event"),
    ],
)
def test_what_is_no_record_is_refused_with_the_line(cli: Cli, tmp_path: Path, text: str | None, problem: str) -> None:
    file = tmp_path / "x.jsonl"
    if text is not None:
        file.write_text(text)
    code, _, err = cli("replay", str(file))
    assert code == 2
    assert problem in err
    assert err.count("\n") == 1


@posix_only
def test_a_record_that_cannot_go_on_does_not_stop_the_run(folder: Path, tmp_path: Path) -> None:
    import resource
    import signal

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    file = tmp_path / "run.jsonl"
    process = started(
        "run", "What does the lamp burn?", "--workspace", str(folder), "--record", str(file), preexec_fn=small_files
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, b"completed: " in out) == (0, True)
    assert err.count(b"the record ends here, the run goes on") == 1
    again = started("replay", str(file), "--speed", "1000")
    assert b"the record is cut off here" in again.communicate(timeout=60)[1]
