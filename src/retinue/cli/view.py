"""Views: events come in, text goes out. A view shows the whole tree of runs."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Protocol, Self, TextIO

import msgspec

from ..core.events import (
    ErrorRaised,
    Event,
    Handoff,
    InferenceFinished,
    RunFinished,
    RunStarted,
    StepStarted,
    TextDelta,
    ToolCallFinished,
    ToolCallStarted,
    event_to_json,
)
from ..wire.tree import RunNode
from .tasklines import TaskLines
from .text import clean, is_unicode, iso, one_line
from .tree import ShownTree, call_line, summary

_INDENT = 6
"""Columns a child is further in than the run it belongs to."""


class View(Protocol):
    """Shows one run after another. `tick` comes several times a second, for what moves."""

    def show(self, event: Event) -> None: ...

    def recall(self, event: Event) -> None:
        """Take in what was told before, without showing it: what comes next may be about it."""
        ...

    def show_task(self, event: Event) -> None:
        """Show what happens in background tasks after their run has ended."""
        ...

    def note(self, text: str) -> None:
        """Say something about what is shown."""
        ...

    def tick(self) -> None: ...

    def close(self) -> None:
        """Leave the terminal as it was; may come at any time and twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def make_view(*, as_json: bool = False) -> View:
    """The view for where stdout goes."""
    stream = sys.stdout
    if as_json:
        return JsonView(stream)
    if is_interactive(stream):
        try:
            from .live import LiveView
        except ModuleNotFoundError:  # rich is not installed
            return PlainView(stream)
        return LiveView(stream)
    return PlainView(stream)


def is_interactive(stream: TextIO) -> bool:
    """Whether somebody watches, on a terminal that can be drawn on."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and stream.isatty() and is_unicode(stream)


class _Quiet:
    """A view that draws nothing by itself."""

    def recall(self, event: Event) -> None:
        return

    def note(self, text: str) -> None:
        return

    def tick(self) -> None:
        return

    def close(self) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class JsonView(_Quiet):
    """One event a line, as JSON in UTF-8 whatever the terminal's encoding."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, event: Event) -> None:
        line = _encode(event) + b"\n"
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
    status = {"status": event["status"].lower()} if event["kind"] == "task_updated" else {}
    return {**event, "at": iso(event["at"]), **status}


class PlainView(_Quiet):
    """Lines without colour, each written when what it tells is known. Of the text, only the root's is streamed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._tree = ShownTree()
        self._in_text = False
        self._tasks = TaskLines()

    def recall(self, event: Event) -> None:
        self._tree(event)
        for step in self._tree.run_of(event).steps[-1:]:
            step.thought = ""

    def show_task(self, event: Event) -> None:
        if line := self._tasks.take(event):
            self.note(line)

    def note(self, text: str) -> None:
        self._stream.write(f"{clean(text)}\n")
        self._stream.flush()

    def show(self, event: Event) -> None:
        if type(event) is RunStarted and not event.ns:
            self._tree = ShownTree()
        self._tree(event)
        run = self._tree.run_of(event)
        match event:
            case TextDelta():
                self._tell_thought(run)
                if not run.ns:
                    self._text(event.delta)
            case RunStarted():
                self._line(run, -2, f"{run.label}: {one_line(run.task, 200)}")
            case StepStarted():
                self._line(run, 0, f"step {event.step}{f' of {run.label}' if run.ns else ''}")
            case ToolCallStarted() | InferenceFinished():
                self._tell_thought(run)
            case ErrorRaised(fatal=False) | Handoff():
                self._line(run, 0, f"note: {one_line(run.notes[-1], 200)}")
            case ToolCallFinished():
                self._line(run, 2, f"{f'{run.label}: ' if run.ns else ''}{self._call(event)}")
            case RunFinished():
                self._finish(run)
            case _:
                pass

    def _call(self, event: ToolCallFinished) -> str:
        return call_line(self._tree.run_of(event).calls[event.call_id])

    def _finish(self, run: RunNode) -> None:
        if run.ns:
            self._line(run, 0, f"{run.label} {summary(run)}")
        else:
            self._line(run, -2, summary(run))

    def _tell_thought(self, run: RunNode) -> None:
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
