"""`retinue chat` on a terminal, as a person sees it: the line editor, what is printed, what is painted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from .terminal import Terminal
from .test_process import posix_only

pytestmark = posix_only
PASTE = "\x1b[200~{}\x1b[201~"


def chat(folder: Path, model: str = "test:echo", *args: str, columns: int = 80) -> Terminal:
    where = ("--workspace", str(folder), "--model", model)
    terminal = Terminal("chat", *where, *args, columns=columns, state=folder / "state")
    terminal.see("/help shows keys and commands", "›")
    return terminal


def test_a_conversation_stays_in_the_terminal(folder: Path) -> None:
    terminal = chat(folder, "offline:rules")
    terminal.type("What does the lamp burn?\r")
    terminal.see("lamp.md:3: The lamp burns paraffin.", "✓ done 0:0")
    terminal.type("\x1b[A")  # the history
    terminal.see("› What does the lamp burn?\n  rules")
    terminal.type("\x15Who has it?\r")
    terminal.see("› Who has it?")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert terminal.text.count("› What does the lamp burn?") == 1
    assert terminal.text.count("✓ done") == 2
    assert "Ctrl-C stops" not in terminal.text  # what is painted is gone
    history = folder / "state/retinue/history"
    assert "+Who has it?" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_pasted_lines_are_one_message_that_is_not_sent(folder: Path) -> None:
    terminal = chat(folder)
    terminal.type(PASTE.format("one\ntwo\nthree"))
    terminal.see("› one\n  two\n  three")
    assert "done" not in terminal.text
    terminal.type("\r")
    terminal.see("✓ done")
    assert "› one\n  two\n  three\n" in terminal.text
    assert terminal.text.count("✓ done") == 1
    terminal.type("\x04")
    assert terminal.end() == 0


@pytest.mark.parametrize("columns", [80, 40])
def test_the_first_screen(folder: Path, columns: int) -> None:
    terminal = chat(folder, columns=columns)
    lines = terminal.screen
    assert lines[0].startswith("retinue 0.1.0  ")
    assert lines[1] == "assistant · test:echo · general-purpose"
    rule = next(at for at, line in enumerate(lines) if line.startswith("────"))
    assert len(lines[rule]) == min(columns, 78)
    assert lines[rule + 1].rstrip() == "›"
    assert lines[rule + 2].split() == ["echo", "/help"]
    terminal.type("\x04")
    assert terminal.end() == 0


def test_commands_are_completed_and_unknown_ones_are_not_sent(folder: Path) -> None:
    terminal = chat(folder)
    terminal.type("/modle x\r")
    terminal.see("/modle is no command; did you mean /model? Start with a space to send it.")
    terminal.type("/mod\t")
    terminal.see("› /model")
    terminal.type("\r")
    terminal.see("\n  test:echo\n")
    terminal.type("/re\t")
    terminal.see("/retry", "/resume", "/receipt")
    terminal.type("\x15look at @la\t")
    terminal.see("› look at @lamp.md")
    terminal.type("\x15/help\r")
    terminal.see("In the tree", "/fork")
    assert "done" not in terminal.text
    terminal.type("/exit\r")
    assert terminal.end() == 0


def test_ctrl_c_stops_the_turn_and_the_conversation_goes_on(folder: Path) -> None:
    terminal = chat(folder, "test:slow")
    terminal.type("begin\r")
    terminal.see("I begin.", "Ctrl-C stops")
    terminal.type("/later and then this\r")
    terminal.see("1 for later")
    terminal.type("\x03")
    terminal.see("⊘ stopped", "› and then this")
    terminal.see_times("I begin.", 2)
    terminal.type("\x03")
    terminal.see_times("⊘ stopped", 2)
    terminal.type("\x04")
    assert terminal.end() == 0


def test_what_is_typed_while_agents_work_is_read_at_their_next_step(folder: Path) -> None:
    terminal = chat(folder, "test:writing")
    terminal.type("write\r")
    terminal.see("Question 1 of 2")
    terminal.type("also say hello\r")
    terminal.see("↳ to assistant: also say hello  sent, not read yet")
    terminal.type("@nobody there\r")
    terminal.see("No agent at work is called nobody.", "› @nobody there")
    terminal.type("\x15")
    for number in (2, 1):
        reject(terminal, "no")
        terminal.see("Question" if number == 2 else "read at step 2", gone=("Why?",))
    terminal.type("\x03")
    terminal.see("⊘ stopped")
    terminal.type("\x04")
    assert terminal.end() == 0


def reject(terminal: Terminal, reason: str) -> None:
    terminal.type("\x1br")
    terminal.see("Why? ›")
    terminal.type(f"{reason}\r")


def test_the_tree_is_opened_read_and_stopped_by_keys(folder: Path) -> None:
    terminal = chat(folder, "test:delegating")
    terminal.type("do it slowly\r")
    terminal.see("It works on it.", "✓ done")
    terminal.type("/tasks\r")
    terminal.see("task_")
    terminal.type("\t")
    terminal.see("Enter read")
    terminal.type("\x1b[C")
    terminal.see("▾ do it slowly")
    terminal.type("\r")
    terminal.see("PgUp PgDn  Esc back", "do it slowly")
    terminal.type("q")
    terminal.see("Enter read")
    terminal.type("z")
    terminal.see("z does nothing here.")
    terminal.type("\x1b")
    terminal.see("/help", gone=("Enter read",))
    terminal.type("\x04")
    assert terminal.end() == 0


def test_the_last_conversation_is_continued_and_a_turn_is_said_again(folder: Path) -> None:
    database = ("--db", f"sqlite:///{folder}/app.db")
    terminal = chat(folder, "offline:rules", *database)
    terminal.type("What does the lamp burn?\r")
    terminal.see("✓ done 0:0")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "continue with: retinue chat --thread thread_" in terminal.text
    terminal = chat(folder, "offline:rules", *database, "--continue")
    terminal.see("› What does the lamp burn?", "The lamp burns paraffin.")
    terminal.type("Who has paraffin?\r")
    terminal.see("✓ done 0:0", "three barrels")
    terminal.type("/fork\r")
    terminal.see("› Who has paraffin?\n  Enter sends it in a new conversation")
    terminal.type("\x15Where is the lamp?\r")
    terminal.see("› Where is the lamp?")
    terminal.type("/resume\r")
    terminal.see("thread_")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_resizing_leaves_what_was_printed_whole(folder: Path) -> None:
    terminal = chat(folder, "offline:rules")
    terminal.type("What does the lamp burn?\r")
    terminal.see("✓ done 0:0")
    terminal.resize(40, 30)
    terminal.type("x")
    terminal.see("› x")
    terminal.resize(80, 30)
    terminal.type("y")
    terminal.see("› xy")
    assert "lamp.md:3: The lamp burns paraffin." in terminal.text
    terminal.type("\x15\x04")
    assert terminal.end() == 0


def test_an_idle_screen_writes_nothing(folder: Path) -> None:
    terminal = chat(folder)
    before = len(terminal.raw)
    terminal.sees_soon("nothing of the kind")
    assert len(terminal.raw) == before
    terminal.type("\x04")
    assert terminal.end() == 0
    assert os.path.exists(folder / "state/retinue")
