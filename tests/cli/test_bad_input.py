"""Every command refuses bad input in one line that says what to do, with an exit code and without a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from retinue.cli import parsers

from ..storage.stored import sql
from .conftest import Cli

RUN = ["run", "q", "--model", "offline:rules"]
ON_RUNS = [
    ["runs", "show", "run_x"],
    ["runs", "events", "run_x"],
    ["runs", "approve", "run_x"],
    ["runs", "deny", "run_x", "call_1"],
    ["runs", "answer", "run_x", "yes"],
    ["runs", "resume", "run_x"],
    ["runs", "cancel", "run_x"],
    ["runs", "fork", "run_x", "--at", "1"],
]
ON_TASKS = [["tasks", "show", "task_x"], ["tasks", "wait", "task_x"], ["tasks", "cancel", "task_x"]]
ON_DATABASE = [["db", "check"], ["db", "migrate"], ["db", "prune", "--older-than", "1d"]]
WITH_DATABASE = [RUN, ["tasks", "list"], *ON_TASKS, ["runs", "list"], *ON_RUNS, *ON_DATABASE]
AGENTS = [["agents", "list"], ["agents", "validate"]]
ALL = [*WITH_DATABASE, *AGENTS, ["demo"]]
NEEDS_DATABASE = [command for command in WITH_DATABASE if command[0] in ("runs", "db")]
IN_FOLDER = [RUN, ["tasks", "list"], *ON_TASKS, *AGENTS]


def named(commands: list[list[str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("command", commands, ids=lambda command: " ".join(command[:2]))


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(cli: Cli, *words: str) -> str:
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert err.startswith("retinue: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_the_table_has_every_command() -> None:
    declared = {words for words, *_ in parsers._COMMANDS}  # pyright: ignore[reportPrivateUsage]
    assert {" ".join(command[:2] if command[0] not in ("run", "demo") else command[:1]) for command in ALL} == declared


@named(ALL)
def test_a_wrong_option(cli: Cli, command: list[str]) -> None:
    words = command[:1] if command[0] in ("run", "demo") else command[:2]
    says = refused(cli, *command, "--jsn")
    assert says == (
        f"retinue: unrecognized arguments: --jsn; did you mean --json? see retinue {' '.join(words)} --help\n"
    )


@named([*ON_RUNS, *ON_TASKS])
def test_a_missing_argument(cli: Cli, command: list[str]) -> None:
    says = refused(cli, *command[:2])
    assert "the following arguments are required: " in says
    assert f"see retinue {' '.join(command[:2])} --help" in says


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rnu"], "unknown command 'rnu'; did you mean run? see retinue --help"),
        (["fly"], "unknown command 'fly'; choose from run, agents, tasks, runs, db, demo; see retinue --help"),
        (["tasks", "lst"], "unknown action 'lst'; did you mean list? see retinue tasks --help"),
        (["runs", "list", "--status", "runing"], "--status: unknown value 'runing'; did you mean running?"),
        (["tasks", "list", "more"], "unrecognized arguments: more; see retinue tasks list --help"),
        (["runs", "approve", "run_x", "a", "b", "--db", "sqlite:///app.db"], "there is no Retinue database at app.db"),
    ],
)
def test_a_wrong_word(cli: Cli, words: list[str], says: str) -> None:
    assert says in refused(cli, *words)


@named(NEEDS_DATABASE)
def test_no_database(cli: Cli, command: list[str]) -> None:
    assert "use --db URL, as in sqlite:///app.db, or set $RETINUE_DB" in refused(cli, *command)


@named(WITH_DATABASE)
def test_what_is_no_url(cli: Cli, command: list[str]) -> None:
    assert "'app.db'" in refused(cli, *command, "--db", "app.db")


@named([command for command in WITH_DATABASE if command not in (RUN, ["db", "migrate"])])
def test_a_missing_database(cli: Cli, tmp_path: Path, command: list[str]) -> None:
    says = refused(cli, *command, "--db", "sqlite:///app.db")
    assert "there is no Retinue database at app.db: is it the right --db?" in says
    assert not (tmp_path / "app.db").exists()


@named(WITH_DATABASE)
def test_an_unreadable_database(cli: Cli, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "app.db").write_text("a shopping list, and no database at all" * 10)
    assert "file is not a database" in refused(cli, *command, "--db", "sqlite:///app.db")


@named(WITH_DATABASE)
def test_a_database_of_an_older_format(cli: Cli, tmp_path: Path, command: list[str]) -> None:
    sql(tmp_path / "app.db", "CREATE TABLE threads (thread_id TEXT PRIMARY KEY)")
    says = refused(cli, *command, "--db", "sqlite:///app.db")
    assert "it was written by a development version before the first release" in says


@named([*ON_RUNS, *ON_TASKS])
def test_an_unknown_id(cli: Cli, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETINUE_DB", "sqlite:///app.db")
    assert cli("db", "migrate").code == 0
    what = command[0].removesuffix("s")
    says = refused(cli, *command)
    assert re.search(rf"there is no {what} '{what}_x' in .*; see: retinue {command[0]} list", says)


@named(IN_FOLDER)
def test_a_missing_folder(cli: Cli, command: list[str]) -> None:
    assert "there is no folder 'missing': create it" in refused(cli, *command, "--workspace", "missing")


@named([*ON_TASKS, ["agents", "validate"]])
def test_an_empty_folder(cli: Cli, command: list[str]) -> None:
    assert re.search("see: retinue tasks list|write one as subagents/<id>.md", refused(cli, *command))


@named([["tasks", "list"], ["agents", "list"]])
def test_a_list_of_nothing_is_no_error(cli: Cli, command: list[str]) -> None:
    code, _, err = cli(*command)
    assert (code, err.count("\n")) == (0, 1)


@named([["tasks"], ["runs"], ["agents"], ["db"], []])
def test_a_command_without_its_action_prints_help(cli: Cli, command: list[str]) -> None:
    code, out, err = cli(*command)
    assert (code, err) == (0, "")
    assert out == cli(*command, "--help").out


@named(ALL)
def test_help_has_an_example(cli: Cli, command: list[str]) -> None:
    words = " ".join(command[:1] if command[0] in ("run", "demo") else command[:2])
    code, out, _ = cli(*words.split(), "--help")
    assert code == 0
    assert f"\nExamples:\n  retinue {words} " in out
