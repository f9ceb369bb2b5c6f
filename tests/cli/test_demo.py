"""`retinue demo`."""

from __future__ import annotations

import json
import re
import tempfile
import time
from pathlib import Path

import pytest

from retinue.cli import demo

from .conftest import Cli

FILES = sorted((Path(demo.__file__).parent / "demo_files").glob("*.md"))


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_runs_quickly_and_cleans_up(cli: Cli, tmp_path: Path) -> None:
    began = time.monotonic()
    code, out, err = cli("demo")
    assert (code, err) == (0, "")
    assert time.monotonic() - began < 10  # on a free machine about one second
    assert "rules, not a language model" in out.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


def test_it_shows_parallel_calls_a_failure_and_the_recovery(cli: Cli) -> None:
    out = cli("demo").out
    assert out.count("grep_files") >= 8
    assert re.search(r"failed read_file\(path=\"fuel-log.md\".*not_found", out)
    assert "the nearest name is fuel-ledger.md" in out
    assert "inventory.md:22: - HN-6203 bearing, lower: 2 pieces, in tin 4" in out
    assert "log-may.md:12: - 9 May. Receipt R-0417 for the diesel was signed for by Odile Marsh" in out


def test_it_ends_with_a_summary_and_what_to_type_next(cli: Cli, tmp_path: Path) -> None:
    *_, done, after = cli("demo").out.splitlines()
    assert re.match(
        r"Done: 3 questions, \d+ steps, \d+ tool calls \(1 failed\), \d files read, (\d+ ms|\d+\.\d s) of work\.", done
    )
    assert after == 'Next: retinue run "list the files" --workspace ., or the example in the README.'


def test_keep_leaves_the_folder_and_names_it(cli: Cli, tmp_path: Path) -> None:
    out = cli("demo", "--keep").out
    (kept,) = tmp_path.iterdir()
    assert str(kept) in out.splitlines()[-1]
    assert sorted(path.name for path in kept.iterdir()) == [path.name for path in FILES]


def test_json_is_events_only(cli: Cli) -> None:
    code, out, err = cli("demo", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [event["kind"] for event in events].count("run_finished") == 3
    assert (events[0]["kind"], events[-1]["kind"]) == ("run_started", "run_finished")
    assert "rules, not a language model" in err


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_its_files_are_short_texts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert 150 <= len(text.split()) <= 400
    assert text.startswith("# ")
