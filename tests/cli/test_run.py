"""`retinue run`, as a user types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from retinue.events import event_from_json

from .conftest import Cli
from .models import RUDE


def test_it_shows_steps_calls_and_the_answer(cli: Cli, folder: Path) -> None:
    code, out, err = cli("run", "What does the lamp burn?", "--workspace", str(folder))
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "assistant: What does the lamp burn?"
    assert lines[1] == "  step 1"
    assert lines[2].startswith("    Plan: see which files there are")
    assert any(
        re.fullmatch(r"    ok     list_files\(\)  \d+ ms  lamp.md \(\d+ bytes\) \(\+1 line\)", line) for line in lines
    )
    assert "- lamp.md:3: The lamp burns paraffin." in lines
    assert re.fullmatch(r"completed: 3 steps, 4 calls, \d,\d+ tokens, \d+ ms", lines[-1])
    assert err.count("rules, not a language model") == 1
    assert "--model" in err
    assert "RETINUE_MODEL" in err
    assert "\x1b" not in out + err


def test_json_is_one_event_a_line_and_nothing_else(cli: Cli, folder: Path) -> None:
    code, out, _ = cli("run", "What does the lamp burn?", "--workspace", str(folder), "--json", "--thread", "t1")
    events = [event_from_json(json.loads(line)) for line in out.splitlines()]
    assert code == 0
    assert (events[0].kind, events[-1].kind) == ("run_started", "run_finished")
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert json.loads(out.splitlines()[0])["thread_id"] == "t1"


def test_a_chosen_model_is_not_remarked_upon(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("run", "hello", "--workspace", str(folder), "--model", "offline:rules").err == ""
    monkeypatch.setenv("RETINUE_MODEL", "offline:rules")
    assert cli("run", "hello", "--workspace", str(folder)).err == ""


def test_the_current_folder_is_the_default(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert "- stores.md" in cli("run", "list the files").out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["", "--workspace", "."], "the question is empty"),
        ([" \n", "--workspace", "."], "the question is empty"),
        (["q", "--workspace", "missing"], "there is no folder 'missing': create it"),
        (["q", "--workspace", "lamp.md"], "'lamp.md' is a file: give the folder it is in"),
        (["q", "--workspace", "a\0b"], "cannot work in"),
        (
            ["q", "--model", "gpt"],
            "is not of the form 'provider:model', as in offline:rules",
        ),
        (["q", "--model", "nobody:gpt"], "unknown model provider 'nobody'"),
        (["q", "--model", "offline:gpt"], "there is no model 'offline:gpt'; there is: offline:rules"),
        (["q", "--model", "\x1b[31m:x"], "unknown model provider"),
        (["q", "--max-steps", "0"], "'0' is not a whole number above 0"),
        (["q", "--max-steps", "many"], "'many' is not a whole number above 0"),
        (["q", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        ([], "required: QUESTION"),
    ],
)
def test_misuse_is_one_line_that_says_what_to_do(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], says: str
) -> None:
    monkeypatch.chdir(folder)
    code, out, err = cli("run", *args)
    assert (code, out) == (2, "")
    assert err.startswith("retinue: ")
    assert err.count("\n") == 1
    assert says in err
    assert "\x1b" not in err


def test_a_bad_variable_is_named(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETINUE_MODEL", "gpt")
    outcome = cli("run", "q", "--workspace", str(folder))
    assert outcome.code == 2
    assert outcome.err.startswith("retinue: $RETINUE_MODEL: model 'gpt'")


def test_commands(cli: Cli) -> None:
    assert cli("--help").code == 0
    assert "rules, not a language model" in " ".join(cli("run", "--help").out.split())
    assert cli("--version").out.startswith("retinue ")
    alone = cli()
    assert (alone.code, alone.err) == (0, "")
    assert alone.out == cli("--help").out


def test_agents_md_is_in_the_instructions(cli: Cli, folder: Path) -> None:
    (folder / "AGENTS.md").write_text("\ufeffAlways answer in verse.", encoding="utf-8")
    out = cli("run", "q", "--workspace", str(folder), "--model", "test:echo").out
    assert "works on the files of one folder" in out
    assert '<file path="AGENTS.md">\nAlways answer in verse.\n</file>' in out


def test_a_long_agents_md_is_cut_where_it_shows(cli: Cli, folder: Path) -> None:
    (folder / "AGENTS.md").write_text("é" * 40_000, encoding="utf-8")
    out = cli("run", "q", "--workspace", str(folder), "--model", "test:echo").out
    assert "é\n[8,000 more characters do not fit: read AGENTS.md with read_file]" in out


def test_an_unreadable_agents_md_stops_at_once(cli: Cli, folder: Path) -> None:
    path = folder / "AGENTS.md"
    path.write_bytes(b"\xff\xfe\xfa")
    outcome = cli("run", "q", "--workspace", str(folder))
    assert (outcome.code, outcome.err) == (
        2,
        "retinue: AGENTS.md of the workspace is not UTF-8 text: save it as UTF-8\n",
    )
    path.unlink()
    path.mkdir()
    assert cli("run", "q", "--workspace", str(folder)).err == (
        "retinue: cannot read AGENTS.md of the workspace: it is a folder, not a file: correct, shorten or remove it\n"
    )
    path.rmdir()
    path.write_text("a" * 10_000_001)
    assert cli("run", "q", "--workspace", str(folder)).err == (
        "retinue: cannot read AGENTS.md of the workspace: it has 10,000,001 bytes, over the limit of 10,000,000 for "
        "reading it whole: correct, shorten or remove it\n"
    )


def test_a_link_for_agents_md_is_not_followed(cli: Cli, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_text("the secret")
    (folder / "AGENTS.md").symlink_to(secret)
    code, out, err = cli("run", "q", "--workspace", str(folder), "--model", "test:echo")
    assert "the secret" not in out + err
    assert code in (0, 2)


def test_a_run_that_does_not_complete_is_1(cli: Cli, folder: Path) -> None:
    code, out, err = cli("run", "Where is the lamp?", "--workspace", str(folder), "--max-steps", "1")
    assert code == 1
    assert out.splitlines()[-1].startswith("failed: 1 step")
    assert "retinue: the run did not complete: failed: no answer after max_steps=1" in err


def test_a_model_that_breaks_is_one_line_without_traceback(cli: Cli, folder: Path) -> None:
    code, out, err = cli("run", "q", "--workspace", str(folder), "--model", "test:broken")
    assert code == 1
    assert "So far" in out
    assert err.count("\n") == 1
    assert "RuntimeError: the line went ␛[31mdead" in err


def test_verbose_logs_and_shows_tracebacks(cli: Cli, folder: Path) -> None:
    _, out, err = cli("run", "q", "--workspace", str(folder), "--model", "test:broken", "--verbose")
    assert "Traceback" in err
    assert "\x1b" not in out + err
    _, _, err = cli("run", "q", "--workspace", str(folder / "missing"), "--verbose")
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("retinue: there is no folder")


def test_an_unexpected_error_is_one_line(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: object, **options: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr("retinue.cli.session.make_assistant", explode)
    outcome = cli("run", "q", "--workspace", str(folder))
    assert outcome.code == 1
    assert outcome.err == "retinue: unexpected ZeroDivisionError: by zero; run it again with --verbose to see where\n"


def test_no_control_character_reaches_the_terminal(cli: Cli, folder: Path) -> None:
    (folder / "evil\x1b[2Jname.md").write_text("x")
    (folder / "plain.md").write_text(f"lamp {RUDE}\n")
    for question, model in (("where is the lamp", "offline:rules"), ("\x1b[2J" + RUDE, "test:rude")):
        code, out, err = cli("run", question, "--workspace", str(folder), "--model", model)
        assert code == 0
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out + err)
        assert "[bold red]not bold[/]" in out


def test_a_question_that_is_not_text_is_asked_all_the_same(cli: Cli, folder: Path) -> None:
    code, out, _ = cli("run", "lamp \udcff", "--workspace", str(folder), "--json")
    assert code == 0
    assert json.loads(out.splitlines()[0])["messages"][0]["parts"][0]["text"] == "lamp ?"
