"""`retinue chat`: one conversation, one run for each line, through a pipe or on a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from retinue.cli.interrupt import Interrupt
from retinue.cli.parsers import INTERRUPTED

from .conftest import PROGRAM, Cli, Outcome, started
from .terminal import Terminal
from .test_consent import made
from .test_process import after_line

posix_only = pytest.mark.skipif(os.name != "posix", reason="signals and terminals of POSIX")


def piped(text: str, *args: str) -> Outcome:
    """The command line with lines from a pipe."""
    process = started("chat", *args, stdin=subprocess.PIPE)
    out, err = process.communicate(text.encode(), timeout=90)
    return Outcome(process.returncode, out.decode(), err.decode())


def events(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_lines_of_a_pipe_are_one_conversation(folder: Path) -> None:
    code, out, err = piped("What does the lamp burn?\n\nWho has it", "--workspace", str(folder), "--json")
    assert code == 0, err
    runs = [event for event in events(out) if event["kind"] == "run_started"]
    assert [event["messages"][-1]["parts"][0]["text"] for event in runs] == ["What does the lamp burn?", "Who has it"]
    assert len({event["thread_id"] for event in runs}) == 1
    (before,) = [event for event in events(out) if event["kind"] == "messages_snapshot"]
    assert "The lamp burns paraffin." in str(before["messages"])


def test_a_stored_conversation_is_continued(cli: Cli, folder: Path) -> None:
    where = ("--workspace", str(folder), "--db", f"sqlite:///{folder}/app.db")
    first = piped("What does the lamp burn?\n/exit\nnever asked\n", *where)
    assert first.code == 0, first.err
    (thread_id,) = re.findall(r"continue with: retinue chat --thread (\S+) --db ", first.err)
    assert piped("Who has it?\n", *where, "--thread", thread_id).code == 0
    runs = json.loads(cli("runs", "list", *where[2:], "--thread", thread_id, "--json").out)
    assert [run["status"] for run in runs] == ["completed", "completed"]
    assert json.loads(cli("runs", "list", *where[2:], "--json").out) == runs


def test_a_run_that_fails_shows_in_the_exit_code_and_the_next_line_is_read(folder: Path) -> None:
    code, out, err = piped("one\ntwo\n", "--workspace", str(folder), "--model", "test:broken")
    assert code == 1
    assert err.count("retinue: the run did not complete: failed: RuntimeError: the line went") == 2
    assert out.count("assistant: ") == 2


def test_without_a_terminal_nothing_is_written(folder: Path) -> None:
    code, _, err = piped("write\nagain, write\n", "--workspace", str(folder), "--model", "test:writing")
    assert (code, made(folder)) == (1, [])
    assert err.count("2 calls refused, as there is no terminal to ask at") == 2
    allowed = piped("write\n", "--workspace", str(folder), "--model", "test:writing", "--yes")
    assert (allowed.code, made(folder)) == (0, ["made/a.txt", "b.txt"])


@posix_only
@pytest.mark.parametrize(("asked", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 143)])
def test_a_signal_without_a_terminal_ends_it(folder: Path, asked: signal.Signals, code: int) -> None:
    for model, text in (("test:slow", b"I begin."), ("test:echo", b"completed: ")):
        process = started("chat", "--workspace", str(folder), "--model", model, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(b"begin\n")
        process.stdin.flush()
        after_line(process, text)  # at work on a line, then waiting for one
        process.send_signal(asked)
        process.wait(timeout=90)
        assert process.returncode == code
        process.communicate()


BETWEEN = """
import signal, sys
from retinue.cli import interrupt
class Between(interrupt.Interrupt):
    count = 0
    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if name == "happened" and sys._getframe(1).f_code.co_name == "_read_lines":
            Between.count += 1
            if Between.count == 1:
                signal.raise_signal(signal.SIGINT)  # right after chat has looked
        return value
interrupt.Interrupt = Between
"""


@posix_only
def test_a_signal_between_two_lines_is_not_lost(folder: Path) -> None:
    where = ("--workspace", str(folder), "--model", "test:echo")
    process = started("chat", *where, program=BETWEEN + PROGRAM, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"begin\n")
    process.stdin.flush()  # it stays open: only the signal can end the wait for another line
    process.wait(timeout=90)
    assert process.returncode == INTERRUPTED
    process.communicate()


@posix_only
async def test_a_signal_that_was_seen_and_forgotten_does_not_come_again() -> None:
    with Interrupt() as interrupt:
        waiting = asyncio.create_task(interrupt.wait())
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.happened
        interrupt.forget()  # before the event loop has told those who wait
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        waiting.cancel()


@posix_only
def test_on_a_plain_terminal_ctrl_c_stops_the_run_and_ctrl_d_leaves(folder: Path) -> None:
    terminal = Terminal("chat", "--workspace", str(folder), "--model", "test:slow", "--plain")
    terminal.see("\n>")
    terminal.type("begin\n")
    terminal.see("I begin.")
    terminal.type("\x03")
    terminal.see("cancelled: 2 steps")
    terminal.type("\x03")
    terminal.see("> ^C\n>")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Ctrl-C stops an answer, Ctrl-D or /exit leaves" in terminal.text
    assert "cancelling the run; press Ctrl-C again to leave at once" in terminal.text


@posix_only
def test_on_a_plain_terminal_pasted_lines_give_no_consent(folder: Path) -> None:
    terminal = Terminal("chat", "--workspace", str(folder), "--model", "test:writing", "--plain")
    terminal.see("\n>")
    terminal.type("write\na\na\n")
    terminal.see("asks: write_file made/a.txt", "answer a approve")
    terminal.type("r\n")
    terminal.see("asks: write_file b.txt", "1 + 2\nanswer a approve")
    terminal.type("r\n")
    terminal.see("the user said no")
    terminal.type("\x04")
    terminal.end()
    assert made(folder) == []
