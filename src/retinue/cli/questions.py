"""Questions to the person at the terminal: what is asked, what exactly would be done, and the answer."""

from __future__ import annotations

import asyncio
import difflib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from ..core.decisions import Decision
from ..core.results import SuspendTicket
from ..wire.tree import CallNode, RunNode
from .columns import cells, clock, wrapped
from .rows import Look, Row
from .text import clean, count, one_line

MOST_LINES = 40
"""Lines of a change above which it must be opened before it can be approved."""
GUARD = 0.5
"""Seconds after a question appears, or moves up, in which no key answers it."""
_FILE_TOOLS = ("write_file", "edit_file")
_TEXT = {"write_file": "content", "edit_file": "new"}
"""The argument of a file tool that its change shows."""


class Answer(NamedTuple):
    """An answer to a question. `value` answers one that is no approval."""

    approved: bool
    message: str = ""
    args: dict[str, Any] | None = None
    always: bool = False
    value: Any = None

    def decision(self, ticket: SuspendTicket) -> Decision:
        """Return the decision on the waiting call."""
        if not self.approved:
            return (
                Decision.reject(self.message or None) if ticket.is_approval else Decision.cancel(self.message or None)
            )
        return Decision.approve(self.args) if ticket.is_approval else Decision.resume(self.value)


class Change(NamedTuple):
    """The change that a call would make to a file: signs, line numbers and lines."""

    added: int
    removed: int
    lines: list[tuple[str, int, str]]

    @property
    def figures(self) -> str:
        return f"+{self.added} −{self.removed}"


@dataclass(eq=False)
class Question:
    """A call that waits for a person."""

    run_id: str
    path: tuple[str, ...]
    """The names of the agents from the root to the asker."""
    tool: str
    args: Mapping[str, Any]
    message: str = ""
    said: str = ""
    """The last sentence of the asker."""
    ticket: SuspendTicket | None = None
    """Where the call is suspended; else a call waits for the answer in this process."""
    target: str = ""
    """The path of the call in a decision."""
    read: Callable[[str], str | None] = lambda path: None
    """Returns the text of a file that the call would change."""
    asked_at: float = field(default_factory=time.time)
    shown_at: float = 0.0
    """When it came to the head of the queue."""
    is_open: bool = False
    """True once all lines were shown."""
    answered: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def is_approval(self) -> bool:
        return self.ticket is None or self.ticket.is_approval

    @property
    def wants_text(self) -> bool:
        return not self.is_approval and (
            self.ticket is None or (self.ticket.response_schema or {}).get("type") in (None, "string")
        )

    @property
    def rule(self) -> str:
        """The rule that would allow calls like this one."""
        path = self.args.get("path")
        if self.tool not in _FILE_TOOLS or not isinstance(path, str) or any(mark in path for mark in "*?[](),"):
            return self.tool
        folder, slash, _ = path.rpartition("/")
        return f"{self.tool}(path={folder}{slash}*)"

    @property
    def subject(self) -> str:
        """The call in one line: the tool, the file, the size of the change."""
        change = self.change
        if change is not None:
            return f"{one_line(self.tool, 40)} {one_line(str(self.args.get('path')), 100)}  {change.figures}"
        if self.tool == "shell" and set(self.args) == {"command"}:
            return f"shell {one_line(str(self.args['command']), 200)}"
        return one_line(self.tool, 60)

    @property
    def change(self) -> Change | None:
        return change_of(self.tool, self.args, self.read)

    @property
    def is_long(self) -> bool:
        change = self.change
        return (len(change.lines) if change else len(_argument_lines(self.args))) > MOST_LINES


def change_of(tool: str, args: Mapping[str, Any], read: Callable[[str], str | None]) -> Change | None:
    """Return the change that a call of a file tool would make, or None."""
    path, new = args.get("path"), args.get(_TEXT.get(tool, ""))
    if tool not in _FILE_TOOLS or not isinstance(path, str) or not isinstance(new, str):
        return None
    there = read(path)
    if tool == "write_file":
        return _difference(there or "", new, 1)
    old = args.get("old")
    if not isinstance(old, str):
        return None
    at = 0 if there is None else there.find(old)
    first = 1 if there is None or at < 0 else there.count("\n", 0, at) + 1
    return _difference(old, new, first)


def _difference(old: str, new: str, first: int) -> Change:
    before, after, lines = old.splitlines(), new.splitlines(), list[tuple[str, int, str]]()
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    for tag, from_a, to_a, from_b, to_b in matcher.get_opcodes():
        if tag == "equal":
            kept = range(from_a, to_a)
            near = kept if len(kept) <= 4 else [*kept[:2], *kept[-2:]]
            lines += [(" ", first + at, before[at]) for at in near]
            continue
        lines += [("-", first + at, before[at]) for at in range(from_a, to_a)]
        lines += [("+", first + at, after[at]) for at in range(from_b, to_b)]
    added, removed = (sum(sign == wanted for sign, _, _ in lines) for wanted in "+-")
    return Change(added, removed, lines)


def question_of(call: CallNode, run: RunNode, path: tuple[str, ...]) -> Question:
    """Return the question of a suspended call."""
    ticket = call.ticket
    assert ticket is not None
    parameters: Any = ticket.parameters
    given = cast("dict[str, Any]", parameters) if isinstance(parameters, dict) else None
    asked = call.args if given is None else given
    target = "/".join((*[part.removeprefix("tools:") for part in run.ns], call.call_id))
    return Question(
        run.run_id, path, call.tool, asked or {}, ticket.message or "", last_sentence(run.tail), ticket, target
    )


def last_sentence(text: str) -> str:
    """Return the last sentence of a text, in one line."""
    said = " ".join(clean(text[-400:]).split())
    sentences = [one.strip() for one in said.replace("! ", ".\0").replace("? ", "?\0").replace(". ", ".\0").split("\0")]
    return one_line(sentences[-1], 200) if sentences else ""


def _argument_lines(args: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for name, value in args.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        first, *others = clean(text).split("\n")
        lines += [f"{one_line(name, 60)}: {first}", *[f"| {line}" for line in others]]
    return lines


def detail_rows(question: Question, look: Look, most: int | None = None) -> list[Row]:
    """Return everything that the call would do: the change of a file, or all arguments. No line is cut."""
    room, change = look.columns - 4, question.change
    rows: list[Row] = []
    if change is None:
        if question.tool == "shell" and set(question.args) == {"command"} and "\n" not in str(question.args["command"]):
            return [[("bold", line)] for line in wrapped(clean(str(question.args["command"])), room, "  $ ", "    ")]
        for text in _argument_lines(question.args):
            rows += [[("", f"  {line}")] for line in wrapped(text, room, "", "↪ " if not look.ascii else "> ")]
    else:
        digits = max((len(str(number)) for _, number, _ in change.lines), default=1)
        for sign, number, text in change.lines:
            style = {"+": "added", "-": "removed"}.get(sign, "dim")
            first, *others = wrapped(clean(text), room - digits - 4, "", "↪ " if not look.ascii else "> ")
            rows.append([("dim", f"  {number:>{digits}} "), (style, f"{sign} {first}")])
            rows += [[("dim", f"  {' ' * digits} "), (style, f"{sign} {line}")] for line in others]
    if most is not None and len(rows) > most:
        rows = [*rows[: most - 1], [("dim", f"  {count(len(rows) - most + 1, 'more line')}: v shows all")]]
    return rows


def question_rows(
    question: Question, look: Look, number: int, total: int, *, focused: bool, most: int, remark: str = ""
) -> list[Row]:
    """Return the question at the head of the queue, with the keys that answer it."""
    bar: Row = [("needs", "| " if look.ascii else "▌ ")] if focused else []
    place = f" {number} of {total}" if total > 1 else ""
    head, path = f"{look.glyph_of_question} Question{place}", (" > " if look.ascii else " › ").join(question.path)
    waits = f"waits {clock(look.now - question.asked_at)}"
    space = look.columns - cells(f"{head}  {path}{waits}") - 2 * focused - 1
    rows: list[Row] = (
        [[("needs", head), ("bold", f"  {path}"), ("dim", " " * space + waits)]]
        if space > 0
        else [[("needs", head)], [("bold", f"  {path}")]]
    )
    if question.said:
        rows += [[("dim", line)] for line in wrapped(f"“{question.said}”", look.columns - 4, "  ")]
    if question.message and question.ticket is not None and not question.is_approval:
        rows += [[("", line)] for line in wrapped(clean(question.message), look.columns - 4, "  ")]
    if question.is_approval:
        if question.tool != "shell" or set(question.args) != {"command"}:
            rows.append([("bold", look.cut(f"  {question.subject}", look.columns - 2))])
        rows += detail_rows(question, look, None if question.is_open and focused else most)
    rows += [[("", line)] for line in wrapped(_keys(question, focused), look.columns - 4, "  ")]
    if remark:
        rows += [[("needs", line)] for line in wrapped(remark, look.columns - 4, "  ")]
    return [[*bar, *row] for row in rows]


def _keys(question: Question, focused: bool) -> str:
    if not question.is_approval:
        return (
            "Enter write the answer   r cancel   n next   Esc input"
            if focused
            else "Alt+A answer   Alt+R cancel   Alt+N next"
        )
    if focused:
        return "a approve   r reject   e edit   l always   v all lines   n next   Esc input"
    return f"Alt+A approve   Alt+R reject with a reason   Alt+E edit   Alt+N next\nAlt+L approve, and do not ask again for {question.rule}"


def answered_row(question: Question, answer: Answer, look: Look, by: str = "you") -> Row:
    """Return the line that stays of an answer."""
    what = f"{question.path[-1]} {question.subject}"
    if not question.is_approval:
        done = f"{by} answered" if answer.approved else f"{by} cancelled"
        return [("done" if answer.approved else "stopped", f"{'+' if look.ascii else '✓'} "), ("", f"{done}: {what}")]
    if not answer.approved:
        why = f"   “{one_line(answer.message, 100)}”" if answer.message else ""
        return [("stopped", f"{'-' if look.ascii else '⊘'} "), ("", f"{by} rejected: {what}{why}")]
    how = "approved with a change" if answer.args is not None else "approved"
    rule = f", and all of {question.rule}" if answer.always else ""
    return [("done", f"{'+' if look.ascii else '✓'} "), ("", f"{by} {how}: {what}{rule}")]


def parse_value(question: Question, text: str) -> Any:
    """Read an answer: as text where the question wants text, else as JSON where it is some."""
    if question.wants_text:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_edited(question: Question, text: str) -> dict[str, Any]:
    """Read the edited arguments; raises ValueError with what is wrong."""
    try:
        args = json.loads(text)
    except ValueError as exc:
        raise ValueError(f"that is not JSON: {exc}") from exc
    if not isinstance(args, dict):
        raise ValueError("arguments are an object: {…}")
    return args  # pyright: ignore[reportUnknownVariableType]
