"""Nothing is written, edited or executed by `retinue run` that the user has not allowed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from retinue.cli.parsers import parse
from retinue.cli.serve import make_runtime

from .conftest import Cli
from .test_process import on_terminal

posix_only = pytest.mark.skipif(os.name != "posix", reason="a terminal")
BEGINNINGS = ["write", "delegate", "delegate in the background"]


def made(folder: Path) -> list[str]:
    """The files of a folder, or of the own folder of a sub-agent in it."""
    return [name for name in ("made/a.txt", "b.txt") if list(folder.rglob(name))]


@pytest.mark.parametrize("question", BEGINNINGS)
def test_without_a_terminal_writes_are_refused_and_the_option_is_named(cli: Cli, folder: Path, question: str) -> None:
    code, _, err = cli("run", question, "--workspace", str(folder), "--model", "test:writing")
    assert made(folder) == []
    assert code == 1
    assert (
        "2 calls refused, as there is no terminal to ask at: allow them with --allow write_file, or all with --yes"
        in err
    )


@pytest.mark.parametrize("question", BEGINNINGS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--yes"], ["made/a.txt", "b.txt"]),
        (["--allow", "write_file"], ["made/a.txt", "b.txt"]),
        (["--allow", "write_file(path=made/*)"], ["made/a.txt"]),
        (["--allow", "edit_file"], []),
        (["--read-only"], []),
    ],
)
def test_options_allow_as_much_as_they_say(
    cli: Cli, folder: Path, question: str, options: list[str], expected: list[str]
) -> None:
    code, out, _ = cli("run", question, "--workspace", str(folder), "--model", "test:writing", *options)
    assert made(folder) == expected
    assert code == (0 if len(expected) == 2 or options == ["--read-only"] else 1), out


def test_a_declared_agent_that_runs_by_itself_is_asked_about_too(cli: Cli, folder: Path) -> None:
    (folder / "subagents").mkdir()
    (folder / "subagents/clerk.md").write_text("---\ndescription: d\n---\nWrite.\n")
    for agent in ("clerk", "general-purpose"):
        cli("run", "write", "--workspace", str(folder), "--model", "test:writing", "--agent", agent)
        assert made(folder) == []
    cli("run", "write", "--workspace", str(folder), "--model", "test:writing", "--agent", "clerk", "--yes")
    assert made(folder) == ["made/a.txt", "b.txt"]


@pytest.mark.parametrize("extra", [["--yes"], ["--allow", "shell"], ["--shell"]])
def test_read_only_and_more_is_misuse(cli: Cli, folder: Path, extra: list[str]) -> None:
    code, _, err = cli("run", "q", "--workspace", str(folder), "--read-only", *extra)
    assert (code, err.count("\n")) == (2, 1)
    assert "leave --yes, --allow and --shell out" in err


def test_a_rule_that_is_none_is_misuse(cli: Cli, folder: Path) -> None:
    code, _, err = cli("run", "q", "--workspace", str(folder), "--allow", "write file")
    assert code == 2
    assert "not a permission rule" in err


@posix_only
@pytest.mark.parametrize("question", BEGINNINGS)
@pytest.mark.parametrize(("keys", "expected"), [(b"n\nn\n", 0), (b"\n\n", 0), (b"y\nn\n", 1), (b"a\n", 2)])
def test_on_a_terminal_the_user_is_asked(folder: Path, question: str, keys: bytes, expected: int) -> None:
    first, *others = keys.splitlines(keepends=True)
    code, out, _ = on_terminal(
        "run", question, "--workspace", str(folder), "--model", "test:writing", typed=[first, *others]
    )
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert "wants to call write_file:" in text
    assert "path: made/a.txt" in text
    assert "\x1b]0" not in out  # what a file holds does not steer the terminal
    assert len(made(folder)) == expected
    assert code == 0


@pytest.mark.parametrize("question", BEGINNINGS[:2])
@pytest.mark.parametrize(
    ("options", "status", "expected"),
    [
        ([], "suspended", []),
        (["--allow", "write_file(path=made/*)"], "suspended", ["made/a.txt"]),
        (["--yes"], "completed", ["made/a.txt", "b.txt"]),
        (["--read-only"], "completed", []),
    ],
)
async def test_a_served_folder_asks_its_clients(
    folder: Path, question: str, options: list[str], status: str, expected: list[str]
) -> None:
    args = parse(["serve", str(folder), "--model", "test:writing", *options])
    async with make_runtime(args) as runtime:
        result = await runtime.run("assistant", question)
    assert (result.status, made(folder)) == (status, expected)
