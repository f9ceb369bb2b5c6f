"""The live view: a tree that is redrawn while a run works, and stays as text when it has ended.

Finished work is printed once and scrolls away. Only the step and the line of text in progress are redrawn, cut to the
height of the terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ..core.events import ErrorRaised, Event, Handoff, RunFinished, RunStarted, StepFinished, TextDelta
from ..core.results import ToolCallStatus
from ..core.runs import RunStatus
from ..wire.tree import CallNode, RunNode, StepNode
from .outline import ShownTree, summary
from .text import arguments, clean, count, duration, one_line
from .view import View

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_MARKS = {
    ToolCallStatus.SUCCEEDED: ("✓", "green"),
    ToolCallStatus.FAILED: ("✗", "red"),
    ToolCallStatus.CANCELLED: ("⊘", "yellow"),
    ToolCallStatus.SUSPENDED: ("⏸", "yellow"),
}
_STATUS_STYLE = {RunStatus.COMPLETED: "green", RunStatus.FAILED: "red"}
_GUTTER = "│  "
_CHILD_CALLS = (4, 2, 1, 0)
"""Calls shown of a running child: the first number that fits the terminal; with 0 it is one line."""
_LONG = 3.0
"""Seconds after which a running call shows its duration."""


class LiveView(View):
    """Draws with rich, in the thread of the event loop, so that nothing is drawn half-changed."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=False)
        self._live: Live | None = None
        self._tree = ShownTree()
        self._line = ""
        """The line of text in progress."""
        self._headed: StepNode | None = None
        """The step whose heading is printed."""
        self._ended: StepNode | None = None
        """The step that is printed whole."""
        self._in_text = False
        self._behind = 0.0
        """Seconds from an event to its showing, which `pace` may delay: subtracted from durations."""

    def recall(self, event: Event) -> None:
        self._tree(event)

    def note(self, text: str) -> None:
        self._print(Text(clean(text)))

    def show(self, event: Event) -> None:
        if type(event) is RunStarted and not event.ns:
            self._begin()
        self._tree(event)
        self._behind = time.time() - event.at
        run = self._tree.runs.get(event.run_id)
        if run is None:  # an event of a task
            return
        if type(event) is Handoff or (type(event) is ErrorRaised and not event.fatal):
            if not event.ns:
                self._end_text()
            self._print(Text(f"  {one_line(f'{run.label}: ' * bool(event.ns) + run.notes[-1], 300)}", style="yellow"))
        if event.ns:
            return
        match event:
            case RunStarted():
                self._print(Text.assemble((one_line(run.label), "bold"), f"  {one_line(run.task, 300)}"))
            case TextDelta():
                self._text(run, event.delta)
            case StepFinished():
                self._end_step(run)
            case RunFinished():
                self.close()
                self._print(Text(summary(run), style=_STATUS_STYLE.get(run.status, "yellow")))
            case _:
                pass

    def tick(self) -> None:
        if self._live is not None and self._live.is_started:
            self._live.refresh()

    def pause(self) -> None:
        if self._live is not None:
            self._live.stop()

    def proceed(self) -> None:
        if self._live is not None:
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(3, options.size.height - 2)
        lines: list[Text] = []
        for child_calls in _CHILD_CALLS:
            lines = list(self._in_progress(console, _Drawing(self._now(), child_calls)))
            if len(lines) <= room:
                break
        if len(lines) > room:
            lines = [*lines[:1], _row(f"{_GUTTER}… {len(lines) - room + 2} lines above"), *lines[2 - room :]]
        yield from lines

    def _in_progress(self, console: Console, drawing: _Drawing) -> Iterator[Text]:
        run = self._tree.root
        if run is None or not run.steps or run.step is self._ended:
            return
        if self._in_text:
            yield from Text(self._line).wrap(console, console.width)
        if run.step.calls or not self._in_text:
            yield from _step_lines(run.step, drawing, heading=run.step is not self._headed)
        if not run.step.calls and not self._in_text:
            yield _row(f"{_GUTTER}{_spinner()}", "cyan")

    def _begin(self) -> None:
        self.close()
        self._tree, self._line, self._headed, self._ended, self._in_text = ShownTree(), "", None, None, False
        self._live = Live(
            self,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )
        self._live.start()

    def _text(self, run: RunNode, delta: str) -> None:
        if not self._in_text:
            self._print_heading(run.step)
            self._print(Text())
            self._in_text, delta = True, delta.lstrip("\n")
        *whole, self._line = (self._line + clean(delta)).split("\n")
        for line in whole:
            self._print(Text(line))

    def _end_text(self) -> None:
        if self._in_text:
            self._print(Text(self._line))
            self._print(Text())
            self._in_text, self._line = False, ""

    def _print_heading(self, step: StepNode) -> None:
        if self._headed is not step:
            self._headed = step
            for line in _heading(step):
                self._print(line)

    def _end_step(self, run: RunNode) -> None:
        self._end_text()
        self._print_heading(run.step)
        for line in _step_lines(run.step, _Drawing(self._now()), heading=False):
            self._print(line)
        self._ended = run.step

    def _now(self) -> float:
        """Return the present time of the run."""
        return time.time() - self._behind

    def _print(self, line: Text) -> None:
        self._console.print(line, no_wrap=line.no_wrap, overflow=line.overflow)


class _Drawing(NamedTuple):
    """The present time of the run, and the calls to show of each child."""

    now: float
    child_calls: int = _CHILD_CALLS[0]


def _step_lines(
    step: StepNode, drawing: _Drawing, *, heading: bool, gutter: str = "", most: int | None = None
) -> Iterator[Text]:
    """Yield a step with its calls and their children; of more than `most` calls only the last."""
    if heading:
        yield from _heading(step, gutter)
    calls = list(step.calls.values())
    if most is not None and len(calls) > most:
        yield _row(f"{gutter}{_GUTTER}… {count(len(calls) - most, 'call')} before", "dim")
        calls = calls[-most:]
    for call in calls:
        yield _call_line(call, drawing.now, gutter + _GUTTER)
        for child in call.children.values():
            yield from _child_lines(child, drawing, gutter + 2 * _GUTTER)


def _child_lines(run: RunNode, drawing: _Drawing, gutter: str) -> Iterator[Text]:
    """Yield a child: its present step while it runs, its summary when it has ended."""
    if run.ended is not None:
        yield _row(f"{gutter}{one_line(run.label)}  {summary(run)}", "dim")
        return
    if not drawing.child_calls:
        yield _row(
            f"{gutter}{one_line(run.label)}  step {run.step.number}, {count(len(run.step.calls), 'call')}", "bold"
        )
        return
    yield _row(f"{gutter}{one_line(run.label)}", "bold")
    for step in run.steps[-1:]:
        yield from _step_lines(step, drawing, heading=True, gutter=gutter, most=drawing.child_calls)
    if run.tail:
        yield _row(f"{gutter}{_GUTTER}{one_line(run.tail[-100:])}", "dim")


def _heading(step: StepNode, gutter: str = "") -> Iterator[Text]:
    yield _row(f"{gutter}├─ step {step.number}", "cyan")
    if step.thought:
        yield _row(f"{gutter}{_GUTTER}{one_line(step.thought, 300)}", "dim italic")


def _call_line(call: CallNode, now: float, gutter: str) -> Text:
    mark, style = _MARKS.get(call.status, (_spinner(), "cyan"))
    seconds = (call.ended or now) - call.started
    took = duration(seconds) if call.ended is not None or seconds > _LONG else ""
    result = call.result or one_line(call.output[-100:])
    return Text.assemble(
        gutter,
        (mark, style),
        f" {one_line(call.tool)}({'...' if call.status is ToolCallStatus.NEW else arguments(call.args or {})})",
        (f"  {took}  ", "dim"),
        (result, "red" if call.status is ToolCallStatus.FAILED else "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _spinner() -> str:
    return _SPINNER[int(time.monotonic() * 12) % len(_SPINNER)]


def _row(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
