"""Nothing is written, edited or executed by `retinue run` that the user has not allowed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from retinue.cli.parsers import parse
from retinue.cli.serve import make_runtime

from .conftest import Cli
from .terminal import Terminal

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
@pytest.mark.parametrize("how", [[], ["--plain"]])
def test_on_a_terminal_the_user_is_asked_and_the_answer_holds(folder: Path, question: str, how: list[str]) -> None:
    terminal = Terminal("run", question, "--workspace", str(folder), "--model", "test:writing", *how)
    if how:
        terminal.see("write_file made/a.txt", "answer a approve, r reject")
        terminal.type("z\n")
        terminal.see("z is not an answer. Nothing was answered.")
        terminal.type("a\n")
        terminal.see("write_file b.txt  +1 −0\n  1 + 2\nanswer a approve")
        terminal.type("r\n")
    else:
        terminal.see("write_file made/a.txt", "Alt+A approve")
        terminal.type("\t")
        terminal.see("a approve   r reject")
        terminal.type("z")
        terminal.see("z does nothing here. Nothing was answered.")
        approve(terminal, "write_file made/a.txt")
        terminal.see("write_file b.txt", gone=("has just come up",))
        reject(terminal, "not today")
    assert terminal.end() == 0
    assert "\x1b]0" not in terminal.raw.decode()  # what a file holds does not steer the terminal
    assert made(folder) == ["made/a.txt"]


def approve(terminal: Terminal, subject: str) -> None:
    """Press `a` until it counts: a question that has just come up takes no key."""
    for _ in range(40):
        terminal.type("a")
        if terminal.sees_soon("you approved: ") and subject in terminal.text:
            return
    raise AssertionError(terminal.text)


def reject(terminal: Terminal, reason: str) -> None:
    """Reject with a reason, until it counts."""
    for _ in range(40):
        terminal.type("\x1br")
        terminal.see("Why? ›")
        terminal.type(f"{reason}\r")
        if terminal.sees_soon("you rejected: "):
            return
    raise AssertionError(terminal.text)


@posix_only
def test_a_rule_given_with_an_answer_holds_for_what_waits_and_comes(folder: Path) -> None:
    terminal = Terminal("run", "write", "--workspace", str(folder), "--model", "test:writing", "--plain")
    terminal.see("write_file made/a.txt", "answer a approve")
    terminal.type("l\n")  # write_file(path=made/*): it does not hold for the other
    terminal.see("write_file b.txt  +1 −0\n  1 + 2\nanswer a approve")
    terminal.type("a\n")
    assert terminal.end() == 0
    assert made(folder) == ["made/a.txt", "b.txt"]


@posix_only
def test_arguments_can_be_edited_before_they_are_approved(folder: Path) -> None:
    terminal = Terminal("run", "write", "--workspace", str(folder), "--model", "test:writing")
    terminal.see("Question 1 of 2", "write_file made/a.txt")
    terminal.type("\x1be")
    terminal.see("Edit ›", '"path": "made/a.txt"')
    terminal.type("\x1b[1;5H" + "\x0b\x04" * 8 + '{"path": "b.txt", "content": "mine"}')
    terminal.see('"mine"')
    terminal.type("\x13")
    assert terminal.sees_soon("approved with a change"), terminal.text
    terminal.see("Question  assistant", "write_file b.txt")
    reject(terminal, "no")
    terminal.see("✓ write_file b.txt  wrote 1 line (4 bytes)", "✗ write_file b.txt  blocked: the user said no: no")
    assert ((folder / "b.txt").read_text(), made(folder)) == ("mine", ["b.txt"])
    terminal.type("\x03")
    assert terminal.end() == 130


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
