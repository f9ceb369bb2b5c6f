"""Views show the events of a run as they come: as plain lines, as JSON, or (`live`) drawn on a terminal."""

from __future__ import annotations

import json
import os
from typing import Any, Self, TextIO

import msgspec

from ..core.events import (
    ErrorRaised,
    Event,
    Handoff,
    InferenceFinished,
    Namespace,
    RunFinished,
    RunStarted,
    StepStarted,
    TaskUpdated,
    TextDelta,
    ToolCallFinished,
    ToolCallStarted,
    event_to_json,
)
from ..tasks.task import TaskStatus
from ..wire.resources import iso
from ..wire.tree import RunNode
from .outline import ShownTree, call_line, summary
from .text import clean, escape_json, headline, is_unicode, one_line

_INDENT = 6
"""Columns by which a child is indented."""


class View:
    """Shows one run after another. This one shows nothing but remarks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
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

    def tick(self) -> None:
        """Draw again; called several times a second."""

    def pause(self) -> None:
        """Leave the terminal to a question."""

    def proceed(self) -> None:
        """Draw again after a question."""

    def close(self) -> None:
        """Leave the terminal as it was; may be called at any time and twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def is_interactive(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can be drawn on."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and stream.isatty() and is_unicode(stream)


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
    """Prints lines without colour. Only the text of the root is streamed."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._tree = ShownTree()
        self._in_text = False

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
            case ErrorRaised(fatal=False) | Handoff():
                self._line(run, 0, f"note: {one_line(run.notes[-1], 200)}")
            case ToolCallFinished():
                call = call_line(run.calls[event.call_id])
                self._line(run, 2, f"{run.label}: {call}" if run.ns else call)
            case RunFinished() if run.ns:
                self._line(run, 0, f"{run.label} {summary(run)}")
            case RunFinished():
                self._line(run, -2, summary(run))
            case _:
                pass

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
