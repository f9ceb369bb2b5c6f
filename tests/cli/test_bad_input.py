"""Every command refuses bad input in one line that says what to do, with an exit code and without a traceback."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from .. import inside
from ..storage.stored import sql
from .conftest import Cli

RUN = ["run", "q", "--model", "offline:rules"]
CHAT = ["chat", "--model", "offline:rules"]
ON_RUNS = [
    ["runs", "show", "run_x"],
    ["runs", "events", "run_x"],
    ["runs", "approve", "run_x"],
    ["runs", "deny", "run_x", "call_1"],
    ["runs", "answer", "run_x", "yes"],
    ["runs", "resume", "run_x"],
    ["runs", "send", "run_x", "more"],
    ["runs", "cancel", "run_x"],
    ["runs", "fork", "run_x", "--at", "1"],
]
SERVE = ["serve", ".", "--port", "0"]
ON_TOKENS = [["tokens", "add", "ann"], ["tokens", "list"], ["tokens", "revoke", "token_x"]]
ON_TASKS = [["tasks", "show", "task_x"], ["tasks", "wait", "task_x"], ["tasks", "cancel", "task_x"]]
ON_BUDGETS = [["budgets", "list"], ["budgets", "set", "user/day", "--cost", "1"], ["budgets", "reset", "user/day"]]
ON_DATABASE = [["db", "check"], ["db", "migrate"], ["db", "prune", "--older-than", "1d"]]
WITH_DATABASE = [
    RUN,
    CHAT,
    ["tasks", "list"],
    *ON_TASKS,
    ["runs", "list"],
    *ON_RUNS,
    *ON_TOKENS,
    *ON_BUDGETS,
    *ON_DATABASE,
    SERVE,
]
AGENTS = [["agents", "list"], ["agents", "validate"]]
ON_ENGINE = [["worker", "."], ["queues"]]
ALL = [*WITH_DATABASE, *AGENTS, *ON_ENGINE, ["demo"], ["replay", "x"]]
NEEDS_DATABASE = [command for command in WITH_DATABASE if command[0] in ("runs", "tokens", "budgets", "db")]
CREATING = [RUN, CHAT, SERVE, ["tokens", "add", "ann"], ON_BUDGETS[1], ["db", "migrate"]]
"""Commands that make the database they are given."""
SINGLE = ("run", "chat", "serve", "worker", "queues", "demo", "replay")
IN_FOLDER = [RUN, CHAT, ["tasks", "list"], *ON_TASKS, *AGENTS]


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
    declared = inside.declared_commands()
    assert {" ".join(command[:2] if command[0] not in SINGLE else command[:1]) for command in ALL} == declared


def test_an_empty_thread(cli: Cli) -> None:
    """A script whose variable is not set would begin a new conversation each time."""
    assert "thread_id is empty: give an id, or leave it out" in refused(cli, *RUN, "--thread", "")


@named(ALL)
def test_a_wrong_option(cli: Cli, command: list[str]) -> None:
    words = command[:1] if command[0] in SINGLE else command[:2]
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
        (
            ["fly"],
            "unknown command 'fly'; choose from run, chat, replay, agents, tasks, runs, serve, worker, queues, tokens, budgets, db, demo; see retinue --help",
        ),
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


@named(ON_ENGINE)
def test_what_only_postgresql_has(cli: Cli, command: list[str]) -> None:
    assert "use --db URL, as in postgresql://localhost/app, or set $RETINUE_DB" in refused(cli, *command)
    assert "'app.db'" in refused(cli, *command, "--db", "app.db")
    assert cli("db", "migrate", "--db", "sqlite:///app.db").code == 0
    assert "PostgreSQL" in refused(cli, *command, "--db", "sqlite:///app.db")
    down = refused(cli, *command, "--db", "postgresql://nobody@127.0.0.1:1/nothing?connect_timeout=1")
    assert "postgresql://nobody@127.0.0.1:1/nothing" in down


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing:agents"], "TARGET missing:agents: ModuleNotFoundError"),
        (["nowhere"], "there is no folder 'nowhere'"),
        ([".", "--engine", "redis"], "there is no engine 'redis'"),
        ([".", "--slots", "0"], "--slots: '0' is not a whole number above 0"),
        ([".", "--queues", "a,,b"], "a queue is named with letters"),
        ([".", "--lease", "0"], "--lease: "),
    ],
)
def test_a_worker_that_cannot_work(cli: Cli, words: list[str], says: str) -> None:
    assert says in refused(cli, "worker", *words, "--db", "postgresql://nobody@127.0.0.1:1/nothing")


@named(WITH_DATABASE)
def test_what_is_no_url(cli: Cli, command: list[str]) -> None:
    assert "'app.db'" in refused(cli, *command, "--db", "app.db")


@named([command for command in WITH_DATABASE if command not in CREATING])
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


@named([*ON_RUNS, *ON_TASKS, ["tokens", "revoke", "token_x"]])
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


@named([["tasks"], ["runs"], ["agents"], ["tokens"], ["db"], []])
def test_a_command_without_its_action_prints_help(cli: Cli, command: list[str]) -> None:
    code, out, err = cli(*command)
    assert (code, err) == (0, "")
    assert out == cli(*command, "--help").out


@named(ALL)
def test_help_has_an_example(cli: Cli, command: list[str]) -> None:
    words = " ".join(command[:1] if command[0] in SINGLE else command[:2])
    code, out, _ = cli(*words.split(), "--help")
    assert code == 0
    assert f"\nExamples:\n  retinue {words} " in out


BROKEN = """
from retinue import Agent, Runtime
agent = Agent("a", "offline:rules")
runtime = Runtime([agent])
number = 3
none = []
mixed = [agent, 3]

def gives_text(url):
    return "sqlite" + url

def failing():
    raise RuntimeError("not today")
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing"], "there is no folder 'missing'"),
        (["file.txt"], "'file.txt' is a file"),
        (["nowhere:agent"], "TARGET nowhere:agent: ModuleNotFoundError"),
        (["broken:nothing"], "TARGET broken:nothing: AttributeError"),
        (["broken:number"], "TARGET broken:number: it gives 3, not an agent: name an agent or a list of agents"),
        (["broken:none"], "TARGET broken:none: the list is empty: put an agent into it"),
        (["broken:mixed"], "TARGET broken:mixed: the list has 3, not an agent"),
        (["broken:gives_text"], "TARGET broken:gives_text: it gives 'sqlite"),
        (["broken:failing"], "it failed with RuntimeError: not today"),
        (["broken:"], "write MODULE:ATTR"),
        (["broken:runtime", "--db", "sqlite:///app.db"], "this Runtime has its own store: leave --db out"),
        ([".", "--db", "postgresql://nobody@127.0.0.1:1/x"], "127.0.0.1"),
        ([".", "--db", "mysql://x"], "not the URL of a store: 'mysql://x'"),
        ([".", "--db", "sqlite:////nowhere/at/all.db"], "there is no folder /nowhere/at: create it"),
        ([".", "--token-file", "missing"], "cannot read the token in 'missing': No such file"),
        ([".", "--token-file", "empty"], "'empty' is empty: write a token into it"),
        ([".", "--token-file", "."], "cannot read the token in '.'"),
        ([".", "--token", "short", "--host", "0.0.0.0"], "on 0.0.0.0 a token has at least 8 characters"),
        ([".", "--token", ""], "a token is at least one character"),
        ([".", "--token", "with a space"], "none of them white space"),
        ([".", "--token", "12345678", "--no-auth"], "--no-auth: not allowed with argument --token"),
        ([".", "--user-header", "x user"], "is not the name of a header"),
        ([".", "--no-auth", "--host", "0.0.0.0"], "--no-auth on 0.0.0.0 lets everybody"),
        ([".", "--host", "no such host"], "cannot listen on 'no such host'"),
        ([".", "--port", "70000"], "--port 70000 is not a port"),
        ([".", "--port", "x"], "'x' is not a whole number"),
        ([".", "--cors", "app.example.com"], "'app.example.com' is not an origin"),
        ([".", "--workers", "0"], "'0' is not a whole number above 0"),
        ([".", "--workers", "2"], "--workers needs a database that they share"),
        ([".", "--workers", "2", "--db", "memory:"], "--workers needs a database that they share"),
        ([".", "--rate", "0"], "'0' is not a number above 0"),
        ([".", "--tls-cert", "file.txt"], "--tls-cert and --tls-key belong together"),
        ([".", "--tls-cert", "file.txt", "--tls-key", "file.txt"], "TLS cannot be used with 'file.txt'"),
        ([".", "--tls-cert", "missing", "--tls-key", "file.txt"], "No such file or directory"),
        ([".", "--max-streams", "-1"], "'-1' is not a whole number above 0"),
        ([".", "--model", "nobody:x"], "nobody"),
        ([], "the following arguments are required: TARGET"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_served(
    cli: Cli, tmp_path: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "empty").write_text(" \n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    port = [] if "--port" in words else ["--port", "0"]
    assert says in refused(cli, "serve", *words, *port)


def test_a_port_in_use(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        says = refused(cli, "serve", ".", "--port", str(port))
        assert says.startswith(f"retinue: cannot listen on 127.0.0.1 port {port}: Address already in use: give another")


def test_a_server_that_is_not_installed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert 'pip install "retinue[server]"' in refused(cli, "serve", ".", "--port", "0")
    for name in [name for name in sys.modules if name.startswith(("retinue.server", "retinue.cli.tokens"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert 'pip install "retinue[server]"' in refused(cli, "tokens", "list", "--db", "sqlite:///app.db")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ann", "--scopes", "read,fly"], "there is no scope 'fly': use some of read, run, answer, admin"),
        (["ann", "--scopes", ","], "a token needs a scope"),
        ([" "], "the user of a token has 1 to 200 characters"),
        (["a\nb"], "that can be printed"),
        (["x" * 201], "the user of a token has 1 to 200 characters"),
    ],
)
def test_what_is_no_token(cli: Cli, words: list[str], says: str) -> None:
    assert says in refused(cli, "tokens", "add", *words, "--db", "sqlite:///app.db")
