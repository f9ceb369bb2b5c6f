"""Views show the events of a run as they come: as plain lines, as JSON, or (`live`) drawn on a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from functools import partial
from typing import Any, Self, TextIO, cast

import msgspec

from ..core.events import (
    CachePrefixChanged,
    Compacted,
    ErrorRaised,
    Event,
    Handoff,
    InferenceFinished,
    InferenceWaiting,
    Namespace,
    RunFinished,
    RunStarted,
    StateDelta,
    StepStarted,
    TaskUpdated,
    TextDelta,
    ToolCallFinished,
    ToolCallStarted,
    event_to_json,
)
from ..core.functions import in_thread
from ..core.runs import RunResult
from ..plugins.todo import TODOS
from ..tasks.task import TaskStatus
from ..wire.resources import iso
from ..wire.tree import RunNode
from .outline import ShownTree, call_line, summary, todo_lines, wait_line
from .questions import Answer, Question, detail_rows, parse_value
from .rows import Look, plain
from .text import clean, complain, escape_json, headline, one_line

_INDENT = 6
"""Columns by which a child is indented."""


class View:
    """Shows one run after another. This one shows nothing but remarks."""

    asks = False
    """True if it can put a question to a person."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.terminal = asyncio.Lock()
        """Held while a question is on a terminal that only shows lines: nothing else is shown then."""
        self._replies: dict[Namespace, str] = {}
        """The replies of background tasks, by the namespace of their run."""

    def show(self, event: Event) -> None:
        """Show an event."""

    def recall(self, event: Event) -> None:
        """Read an earlier event without showing it: a later one may refer to it."""

    def show_task(self, event: Event) -> None:
        """Show the end of a background task whose run has ended before."""
        if type(event) is RunFinished:
            self._replies[event.ns] = event.response or event.error or ""
        elif type(event) is TaskUpdated and TaskStatus(event.status).is_terminal:
            reply = self._replies.get(event.ns)
            said = f": {headline(reply, 160)}" if reply else ""
            self.note(f"background task of {event.agent} {event.status.lower()}{said}")

    def note(self, text: str) -> None:
        """Show a remark."""

    def warn(self, text: str) -> None:
        """Tell the person something that is no part of the run."""
        complain(text)

    def tick(self) -> None:
        """Draw again; called several times a second."""

    async def ask(self, question: Question) -> Answer:
        """Put a question to a person and return the answer."""
        raise NotImplementedError

    async def answers(self, result: RunResult) -> dict[str, Answer]:
        """Return the answers of a person to what a run waits for, by the path of the call; none if nobody can be asked."""
        return {}

    def waiting(self, target: str) -> Question | None:
        """Return the question of a suspended call, if a person sees it."""
        return None

    def lose(self, lost: bool) -> None:
        """Show that no process works on the run, or that one does again."""

    def decide(self, run_id: str, call_id: str, answer: Answer) -> None:
        """Note the answer to a question that a call is about to ask."""

    def close(self) -> None:
        """Leave the terminal as it was; may be called at any time and twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


def is_interactive(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can be drawn on."""
    return os.environ.get("TERM") != "dumb" and stream.isatty()


class JsonView(View):
    """Prints one event a line, as JSON in UTF-8 whatever the terminal's encoding, and so that a terminal obeys nothing."""

    def show(self, event: Event) -> None:
        line = escape_json(_encode(event).decode()).encode() + b"\n"
        binary = getattr(self._stream, "buffer", None)
        if binary is None:
            self._stream.write(line.decode())
        else:
            binary.write(line)
        self._stream.flush()

    def show_task(self, event: Event) -> None:
        self.show(event)


def _encode(event: Event) -> bytes:
    try:
        return msgspec.json.encode(_in_style(event_to_json(event)))
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold but UTF-8 cannot
        return json.dumps(_in_style(msgspec.to_builtins(event, enc_hook=repr))).encode()


def _in_style(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event as `--json` prints it: times in ISO 8601, status in lower case."""
    status = {"status": event["status"].lower()} if event.get("kind") == "task_updated" else {}
    return {**event, "at": iso(event.get("at")), **status}


class PlainView(View):
    """Prints lines without colour, and asks on a line of its own. Only the text of the root is streamed."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.asks = sys.stdin.isatty()
        self._tree = ShownTree()
        self._in_text = False

    async def ask(self, question: Question) -> Answer:
        async with self.terminal:
            if question.answered.done():  # by the rule that an answer before it has set
                return question.answered.result()
            self._say(_asked_lines(question))
            _drop_typed_ahead()
            while True:
                given = await self._read_line(_KEYS if question.is_approval else "answer, or an empty line to cancel: ")
                answer = _answer_of(question, given)
                if answer is not None:
                    return answer
                self._say([f"  {one_line(given or '', 40)} is not an answer. Nothing was answered."])

    async def answers(self, result: RunResult) -> dict[str, Answer]:
        if not self.asks:
            return {}
        found: dict[str, Answer] = {}
        for call, ticket in result.suspended.items():
            parameters: Any = ticket.parameters
            args = cast("dict[str, Any]", parameters) if isinstance(parameters, dict) else {}
            path, target = (one_line(ticket.action, 60),), "/".join(ticket.path) or call
            tool = ticket.action.removeprefix("tool:")
            question = Question(result.run_id, path, tool, args, ticket.message or "", "", ticket, target)
            found[target] = await self.ask(question)
        return found

    def _say(self, lines: list[str]) -> None:
        print("\n".join(lines), file=sys.stderr, flush=True)

    async def _read_line(self, prompt: str) -> str | None:
        print(prompt, end="", file=sys.stderr, flush=True)
        # os.read holds no lock of sys.stdin, so a question that nobody answers does not hinder the exit.
        given = await in_thread(partial(os.read, sys.stdin.fileno(), 4096), {})
        return given.decode(errors="replace").strip() if given else None

    def recall(self, event: Event) -> None:
        self._tree(event)
        run = self._tree.runs.get(event.run_id)
        for step in [] if run is None else run.steps[-1:]:
            step.thought = ""

    def note(self, text: str) -> None:
        self._stream.write(f"{clean(text)}\n")
        self._stream.flush()

    def show(self, event: Event) -> None:
        if type(event) is RunStarted and not event.ns:
            self._tree = ShownTree()
        self._tree(event)
        run = self._tree.runs.get(event.run_id)
        if run is None:  # an event of a task
            return
        match event:
            case TextDelta():
                self._print_thought(run)
                if not run.ns:
                    self._text(event.delta)
            case RunStarted():
                self._line(run, -2, f"{run.label}: {one_line(run.task, 200)}")
            case StepStarted():
                self._line(run, 0, f"step {event.step}{f' of {run.label}' if run.ns else ''}")
            case ToolCallStarted() | InferenceFinished():
                self._print_thought(run)
            case InferenceWaiting() | ErrorRaised(fatal=False) | Handoff() | Compacted() | CachePrefixChanged():
                self._remark(run, event)
            case StateDelta():
                self._print_todos(event, run)
            case ToolCallFinished():
                call = call_line(run.calls[event.call_id])
                self._line(run, 2, f"{run.label}: {call}" if run.ns else call)
            case RunFinished():
                self._line(run, *((0, f"{run.label} {summary(run)}") if run.ns else (-2, summary(run))))
            case _:
                pass

    def _remark(
        self, run: RunNode, event: InferenceWaiting | ErrorRaised | Handoff | Compacted | CachePrefixChanged
    ) -> None:
        if type(event) is InferenceWaiting:
            self._line(run, 0, f"{f'{run.label}: ' if run.ns else ''}{wait_line(run, event.at)}")
        else:
            self._line(run, 0, f"note: {one_line(run.notes[-1], 200)}")

    def _print_todos(self, event: StateDelta, run: RunNode) -> None:
        for line in [] if run.ns else todo_lines(event.delta.get(TODOS.name, ()), 200):
            self._line(run, 2, line)

    def _print_thought(self, run: RunNode) -> None:
        if run.step.thought:
            self._line(run, 2, one_line(run.step.thought, 300))
            run.step.thought = ""

    def _text(self, delta: str) -> None:
        text = clean(delta)
        if not self._in_text:
            text = "\n" + text.lstrip("\n")
        self._in_text = True
        self._stream.write(text)
        self._stream.flush()

    def _line(self, run: RunNode, indent: int, text: str) -> None:
        if self._in_text:
            self._stream.write("\n\n")
            self._in_text = False
        self._stream.write(f"{' ' * max(0, 2 + indent + _INDENT * len(run.ns))}{text}\n")
        self._stream.flush()


_KEYS = "answer a approve, r reject, l approve and do not ask again: "
_MEANINGS = {
    **dict.fromkeys(("a", "approve", "y", "yes"), "approve"),
    **dict.fromkeys(("l", "always"), "always"),
    **dict.fromkeys(("r", "reject", "n", "no"), "reject"),
}


def _asked_lines(question: Question) -> list[str]:
    """Return a question as lines, all of it: what is not shown must not be approved."""
    look = Look(width=78, ascii=True)
    said = [f"  {one_line(question.message, 300)}"] if question.message and not question.is_approval else []
    detail = [plain(row) for row in detail_rows(question, look)] if question.is_approval else []
    return [f"{' > '.join(clean(name) for name in question.path)} asks: {question.subject}", *said, *detail]


def _answer_of(question: Question, given: str | None) -> Answer | None:
    """Return the answer that was typed; None if it is none. The end of the input is a no."""
    if given is None:
        return Answer(False, "nobody answered")
    if not question.is_approval:
        return Answer(True, value=parse_value(question, given)) if given else Answer(False)
    meaning = _MEANINGS.get(given.lower())
    return None if meaning is None else Answer(meaning != "reject", always=meaning == "always")


def _drop_typed_ahead() -> None:
    """Drop what was typed, or pasted, before a question: it is no answer to it."""
    with suppress(ImportError, OSError):
        import termios  # not on Windows

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
