"""`retinue demo`."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from retinue.cli import demo, text

from .conftest import Cli

FOLDER = Path(demo.__file__).parent / "demo_files"
FILES = sorted(FOLDER.glob("*.md"))
SUBAGENTS = ["crew", "stores", "tides"]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_runs_and_cleans_up(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("demo")
    assert (code, err) == (0, "")
    assert "rules, not a language model" in out.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


def test_it_shows_parallel_calls_a_failure_and_the_recovery(cli: Cli) -> None:
    out = cli("demo").out
    assert out.count("grep_files") >= 8
    assert re.search(r"failed read_file\(path=\"fuel-log.md\".*not_found", out)
    assert "the nearest name is fuel-ledger.md" in out
    assert "inventory.md:22: - HN-6203 bearing, lower: 2 pieces, in tin 4" in out
    assert "log-may.md:12: - 9 May. Receipt R-0417 for the diesel was signed for by Odile Marsh" in out


def test_it_fans_out_to_its_declared_sub_agents_and_shows_each(cli: Cli) -> None:
    fan_out = cli("demo").out.split("assistant: Ask stores, crew and tides:")[1]
    for name in SUBAGENTS:
        assert f"      {name}: Your part: Looks up in " in fan_out
        assert re.search(rf"^ {{10}}{name}: ok +read_file\(", fan_out, re.M)
        assert re.search(rf"^ {{8}}{name} completed: \d steps, ", fan_out, re.M)
        assert re.search(rf"^    ok     agent_spawn\(agent_id=\"{name}\".* In \w+\.md, \d+ lines", fan_out, re.M)
    last_start = max(fan_out.index(f"step 1 of {name}") for name in SUBAGENTS)
    assert last_start < min(fan_out.index(f"{name} completed") for name in SUBAGENTS)
    answer = fan_out.split("3 of 3 sub-agents reported")[1]
    assert "## stores" in answer
    assert "- inventory.md:22: - HN-6203 bearing, lower: 2 pieces" in answer
    assert "- people.md:11: He is trained for the lens motor too" in answer
    assert "- tides.md:23: On 22 May a boat can land between about 08:15 and 10:15" in answer


def test_it_starts_a_background_task_and_shows_it_finish(cli: Cli) -> None:
    last = cli("demo").out.split("assistant: Ask tides in the background:")[1]
    answered = last.index("In the background: tides. I did not wait for that.")
    waiting = last.index("waiting for 1 background task; press Ctrl-C to stop what still runs")
    ended = last.index("background task of tides completed: In tides.md, ")
    assert answered < waiting < ended


def test_its_sub_agents_are_declared_without_a_fault(cli: Cli) -> None:
    assert cli("agents", "validate", str(FOLDER)).out == "3 declared sub-agents can be used, no problems\n"


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


def test_it_ends_with_a_summary_and_what_to_type_next(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    *_, done, after = cli("demo").out.splitlines()
    took = r"(\d+ ms|\d+\.\d s)"
    counted = r"Done: 5 questions, 4 sub-agents, \d+ steps, \d+ tool calls \(1 failed\), \d files read, "
    assert re.fullmatch(rf"{counted}{took} of work\.", done)
    assert after == 'Next: retinue run "list the files" --workspace ., or the example in the README.'


def test_keep_leaves_the_folder_and_names_it(cli: Cli, tmp_path: Path) -> None:
    out = cli("demo", "--keep").out
    (kept,) = tmp_path.iterdir()
    assert str(kept) in out.splitlines()[-1]
    made = kept / "agents"  # the record of the background task
    assert [path.name for path in made.rglob("*.json")] == ["demo.json"]
    files = {
        path.relative_to(kept).as_posix(): path.read_bytes()
        for path in kept.rglob("*")
        if path.is_file() and made not in path.parents
    }
    assert files == {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in FOLDER.rglob("*.md")}
    assert f"subagents/{SUBAGENTS[0]}.md" in files


def test_json_is_events_only(cli: Cli) -> None:
    code, out, err = cli("demo", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    finished = [event for event in events if event["kind"] == "run_finished"]
    assert [bool(event["ns"]) for event in finished].count(False) == 5
    assert sorted(event["agent"] for event in finished if event["ns"]) == sorted([*SUBAGENTS, "tides"])
    assert (events[0]["kind"], events[-1]["kind"]) == ("run_started", "task_updated")
    assert events[-1]["status"] == "completed"
    assert "rules, not a language model" in err


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_its_files_are_short_texts(path: Path) -> None:
    content = path.read_text(encoding="utf-8")
    assert 150 <= len(content.split()) <= 400
    assert content.startswith("# ")
