"""The tree of agents as rows of styled text, for any terminal: pure, without a library and without a clock.

A row has a glyph, a name, what the run does now, and on the right its time, tokens and cost with those below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ..core.results import ToolCallStatus
from ..core.runs import RunStatus, Usage
from ..wire.tree import CallNode, RunNode
from .columns import cells, clock, cut, short_count, wrapped
from .outline import receipt_words, wait_line
from .text import arguments, clean, count, headline, one_line

Span = tuple[str, str]
"""A style, of STYLES, and its text."""
Row = list[Span]

MOST_COLUMNS = 78
"""The widest row that is painted again: terminals wrap painted rows when they get narrower."""
NARROW = 60
"""Below this width a row has no tokens and no cost."""
QUIET = 30.0
"""Seconds without an event after which a running row says so."""
_NAME = 14
_EXPANDED = 5
"""Lines of a row that is open."""


class State(StrEnum):
    """The status of a run, in the words that people read."""

    QUEUED = "queued"
    WORKS = "works"
    NEEDS_YOU = "needs you"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    STOPPED = "stopped"
    WAITS = "waits"
    LOST = "no owner"


_GLYPHS = {
    State.QUEUED: ("○", ".", "dim"),
    State.WORKS: ("◐", "*", "working"),
    State.NEEDS_YOU: ("◆", "!", "needs"),
    State.DONE: ("✓", "+", "done"),
    State.FAILED: ("✗", "x", "failed"),
    State.TIMED_OUT: ("⧖", "t", "failed"),
    State.STOPPED: ("⊘", "-", "stopped"),
    State.WAITS: ("↻", "r", "waits"),
    State.LOST: ("?", "?", "stopped"),
}
_ENDS = {
    RunStatus.COMPLETED: State.DONE,
    RunStatus.FAILED: State.FAILED,
    RunStatus.TIMEOUT: State.TIMED_OUT,
    RunStatus.CANCELLED: State.STOPPED,
}
_FOLDED_FIRST = (State.DONE, State.STOPPED, State.QUEUED, State.WORKS, State.WAITS, State.LOST)
"""The order in which rows give way. A run that needs a person, or has failed, always stays."""
_HEAD = (
    State.NEEDS_YOU,
    State.FAILED,
    State.TIMED_OUT,
    State.WAITS,
    State.WORKS,
    State.DONE,
    State.STOPPED,
    State.QUEUED,
)
_COUNTED = {State.WORKS: "work", State.DONE: "done", State.QUEUED: "wait", State.STOPPED: "stopped"}


@dataclass
class Look:
    """The settings by which a tree is drawn."""

    width: int = MOST_COLUMNS
    most: int = 12
    """Rows, without the open lines of rows."""
    now: float = 0.0
    ascii: bool = False
    expanded: frozenset[str] = frozenset()
    """The ids of runs whose row is open."""
    selected: str | None = None
    asking: frozenset[str] = frozenset()
    """The ids of runs that a person is asked about."""
    last_at: Mapping[str, float] = field(default_factory=dict[str, float])
    """The time of the last event of each run."""
    lost: bool = False
    """True where no process works on the tree."""

    @property
    def columns(self) -> int:
        return max(min(self.width, MOST_COLUMNS), 20)

    @property
    def branches(self) -> tuple[str, str, str, str]:
        return ("|- ", "`- ", "|  ", "   ") if self.ascii else ("├ ", "└ ", "│ ", "  ")

    def glyph(self, state: State) -> Span:
        drawn, plain, style = _GLYPHS[state]
        return style, plain if self.ascii else drawn

    @property
    def glyph_of_question(self) -> str:
        return self.glyph(State.NEEDS_YOU)[1]

    def cut(self, text: str, room: int) -> str:
        return cut(text, room, "..." if self.ascii else "…")


# --- figures


def money(usage: Usage) -> str:
    """Return the cost of what was used. A price that is not known is a dash."""
    if usage.cost:
        return f"${usage.cost:.2f}" if usage.cost >= 0.005 else "$0.00"
    return "—" if usage.tokens else "$0.00"


def total_usage(run: RunNode) -> Usage:
    """Return what a run and the runs below it have used so far."""
    used = run.own_usage
    for call in run.calls.values():
        for child in call.children.values():
            used += total_usage(child)
    return used


# --- what a run does


def state_of(run: RunNode, look: Look) -> State:
    if run.ended is not None and run.status in _ENDS:
        return _ENDS[run.status]
    if look.lost:
        return State.LOST
    if run.run_id in look.asking or any(_is_question(call) for call in run.calls.values()):
        return State.NEEDS_YOU
    if run.wait is not None:
        return State.WAITS
    return State.WORKS if run.steps else State.QUEUED


def _is_question(call: CallNode) -> bool:
    """Return whether a call itself waits for a person, not one below it."""
    if call.status is not ToolCallStatus.SUSPENDED:
        return False
    below = (one for child in call.children.values() for one in child.calls.values())
    return not any(one.status is ToolCallStatus.SUSPENDED for one in below)


def shown_children(run: RunNode) -> list[RunNode]:
    """Return the children of the present step, and earlier ones that still work, in the order of their calls."""
    present = run.step.calls if run.steps else {}
    return [
        child
        for call_id, call in run.calls.items()
        for child in call.children.values()
        if call_id in present or child.ended is None
    ]


def doing(run: RunNode, look: Look, room: int) -> str:
    """Return what a run does now, in one line."""
    state = state_of(run, look)
    if state is State.DONE:
        return headline(run.response or "", 200) if run.response else run.task.split("\n")[0]
    if state is State.FAILED or state is State.TIMED_OUT:
        return f"{state}: {one_line(run.error or run.termination, 200)}"
    if state is State.STOPPED:
        return "stopped"
    if state is State.LOST:
        return f"cut off in step {run.step.number}" if run.steps else "cut off"
    if state is State.WAITS:
        return wait_line(run, look.now)
    if state is State.QUEUED:
        return one_line(run.task, 200)
    return _working(run, look, room)


def _working(run: RunNode, look: Look, room: int) -> str:
    asked = [call for call in run.calls.values() if _is_question(call)]
    if asked:
        return f"needs you: {call_words(asked[0])}"
    prefix = (
        f"step {run.step.number} · " if not run.ns and not look.ascii else f"step {run.step.number}, " * (not run.ns)
    )
    working = [child for child in shown_children(run) if child.ended is None]
    if run.run_id in look.asking:
        calls = [call for call in run.step.calls.values() if call.ended is None]
        return f"needs you: {call_words(calls[-1])}" if calls else "needs you"
    if working:
        return f"{prefix}waits for {count(len(working), 'agent')}"
    quiet = look.now - look.last_at.get(run.run_id, look.now)
    running = [call for call in run.step.calls.values() if call.status is ToolCallStatus.RUNNING]
    if running:
        words = call_words(running[-1])
        if quiet >= QUIET:
            return f"{prefix}quiet for {clock(quiet)}, in {words}"
        output = one_line(running[-1].output[-100:]) if running[-1].output else ""
        return f"{prefix}{words}{f', {output}' if output else ''}"
    if quiet >= QUIET:
        return f"{prefix}quiet for {clock(quiet)}"
    if not run.ns:  # its words are drawn above
        return prefix + ("writes" if run.open_message is not None and run.open_message.text else "thinks")
    return prefix + (_words_in_progress(run, max(room - len(prefix), 10)) or one_line(run.task, 200))


def _words_in_progress(run: RunNode, room: int) -> str:
    """Return the last words of a run. They fill the room from the left, then begin again: a row that scrolls cannot be read."""
    if run.open_message is None or not run.open_message.text:
        return one_line(run.step.thought[-room:]) if run.steps and run.step.thought else one_line(run.tail[-room:])
    said = " ".join(clean("".join(run.open_message.text)).split())
    return said[(max(len(said) - 1, 0) // room) * room :].lstrip()


def call_words(call: CallNode) -> str:
    """Return a call in few words: its tool, and the values of its arguments where they are plain."""
    args = call.args or {}
    if call.tool in ("shell", "read_file", "write_file", "edit_file", "list_files", "glob_files", "grep_files"):
        plain = [one_line(str(value), 60) for name, value in args.items() if name in ("command", "path", "pattern")]
        return " ".join([one_line(call.tool, 40), *plain])
    return f"{one_line(call.tool, 40)}({arguments(args)})" if args else one_line(call.tool, 40)


# --- rows


class Item(NamedTuple):
    """A run of the tree that has a row."""

    run: RunNode
    depth: int
    ends: tuple[bool, ...]
    """At each level: true if the run above there is the last of its siblings."""
    padding: int


def _every_child(run: RunNode) -> list[RunNode]:
    return [child for call in run.calls.values() for child in call.children.values()]


def _items(
    run: RunNode,
    hidden: set[str],
    ends: tuple[bool, ...] = (),
    below: Callable[[RunNode], list[RunNode]] = shown_children,
) -> Iterator[Item]:
    """Yield the rows below a run; `below` says which children those further down have."""
    above = below if ends else shown_children
    children = [child for child in above(run) if child.run_id not in hidden]
    padding = min(max((cells(one_line(child.label)) for child in children), default=0), _NAME)
    for child in children:
        own = (*ends, child is children[-1])
        yield Item(child, len(own), own, padding)
        yield from _items(child, hidden, own, below)


def tree_rows(run: RunNode, look: Look) -> list[Row]:
    """Return a run that works and everything below it, folded to the rows there are."""
    hidden = _folded(run, look)
    above = shown_children(run)
    rows = [root_row(run, look, above)]
    items = list(_items(run, hidden))
    more = [child for child in above if child.run_id in hidden]
    for item in items:
        is_last = item.ends[0] and not more
        item = item._replace(ends=(is_last, *item.ends[1:]))
        rows.append(_child_row(item, look))
        if item.run.run_id in look.expanded:
            rows += _open_rows(item, look)
    if more:
        rows.append([("dim", look.cut(f"{look.branches[1]}{_more_words(more, look)}", look.columns))])
    return rows


def visible_runs(run: RunNode, look: Look) -> list[RunNode]:
    """Return the runs that have a row, the root first: the arrow keys go through them."""
    return [run, *[item.run for item in _items(run, _folded(run, look))]]


def _folded(run: RunNode, look: Look) -> set[str]:
    """Return the ids of the children of the root that are folded into one row."""
    hidden: set[str] = set()
    below = shown_children(run)
    room = max(look.most - 1, 1)
    size = {child.run_id: 1 + sum(1 for _ in _items(child, hidden)) for child in below}
    over = sum(size.values()) - room
    if over <= 0:
        return hidden
    over += 1  # the row that counts the others
    states = {child.run_id: state_of(child, look) for child in below}
    for state in _FOLDED_FIRST:
        order = below if state in (State.DONE, State.STOPPED) else list(reversed(below))
        for child in order:
            if over <= 0:
                return hidden
            if states[child.run_id] is state and child.run_id not in look.expanded | {look.selected}:
                if not _needs_you(child, look):
                    hidden.add(child.run_id)
                    over -= size[child.run_id]
    return hidden


def _needs_you(run: RunNode, look: Look) -> bool:
    return state_of(run, look) is State.NEEDS_YOU or any(_needs_you(child, look) for child in shown_children(run))


def _more_words(more: Sequence[RunNode], look: Look) -> str:
    states = [state_of(child, look) for child in more]
    counts = [f"{states.count(state)} {word}" for state, word in _COUNTED.items() if state in states]
    others = sum(state not in _COUNTED for state in states)
    if others:
        counts.append(f"{others} other")
    mark = "..." if look.ascii else "…"
    return f"{mark} {len(more)} more: {', '.join(counts)}   Tab, then / finds one"


def root_row(run: RunNode, look: Look, above: Sequence[RunNode] = ()) -> Row:
    """Return the row of a root: with many children it counts them."""
    state = State.WORKS if state_of(run, look) is State.QUEUED else state_of(run, look)
    if len(above) > look.most - 1:
        states = [state_of(child, look) for child in above]
        glyphs = [(one, states.count(one)) for one in _HEAD if one in states]
        counts = "  ".join(f"{look.glyph(one)[1]} {number}" for one, number in glyphs)
        now = f"{len(above)} agents:  {counts}"
    elif look.columns < NARROW and any(child.ended is None for child in above):
        now = count(sum(child.ended is None for child in above), "agent")
    else:
        now = doing(run, look, look.columns - 40)
    return _row(run, look, state, "", one_line(run.label, 40), now)


def _child_row(item: Item, look: Look) -> Row:
    run = item.run
    tee, corner, pipe, blank = look.branches
    lead = "".join(blank if is_last else pipe for is_last in item.ends[:-1]) + (corner if item.ends[-1] else tee)
    name = look.cut(one_line(run.label, 60), _NAME)
    name += " " * max(item.padding - cells(name), 0)
    if run.run_id in look.expanded:
        now = f"{'v' if look.ascii else '▾'} {one_line(run.task, 200)}"
        return _row(run, look, state_of(run, look), lead, f"{name.rstrip()} ", now, gap="")
    room = look.columns - cells(lead) - cells(name) - 24
    return _row(run, look, state_of(run, look), lead, name, doing(run, look, room))


def _row(run: RunNode, look: Look, state: State, lead: str, name: str, now: str, *, gap: str = "  ") -> Row:
    used, seconds = total_usage(run), (run.ended or look.now) - run.started
    right = f"{clock(seconds):>6}" if run.steps or run.ended is not None else " " * 6
    if look.columns >= NARROW:
        tokens, cost = (short_count(used.tokens), money(used)) if used.tokens else ("", "")
        right = f"{right}{tokens:>7}{cost:>7}"
    style, glyph = look.glyph(state)
    room = look.columns - cells(f"{lead}{glyph} {name}{gap}") - cells(right) - 1
    now = look.cut(now, max(room, 0))
    space = " " * max(look.columns - cells(f"{lead}{glyph} {name}{gap}{now}{right}"), 0)
    chosen = " reverse" if look.selected == run.run_id else ""
    told = (
        "needs" if state is State.NEEDS_YOU else "failed" if style == "failed" else "dim" if state is State.DONE else ""
    )
    return [("dim", lead), (style, glyph), (f"bold{chosen}", f" {name}"), (told, f"{gap}{now}"), ("dim", space + right)]


def _open_rows(item: Item, look: Look) -> list[Row]:
    """Return the last lines of a run whose row is open: its calls, and what it says."""
    _, _, pipe, blank = look.branches
    lead = "".join(blank if is_last else pipe for is_last in item.ends) + pipe
    room = look.columns - cells(lead)
    lines: list[Row] = [call_row(call, look, room) for call in item.run.calls.values() if not call.children]
    said = "" if item.run.open_message is None else clean("".join(item.run.open_message.text)[-800:])
    spoken = " ".join((said or clean(item.run.tail)).split())
    words: list[Row] = [[("", line)] for line in wrapped(spoken, room)[-3:]] if spoken else []
    return [[("dim", lead), *line] for line in [*lines[-max(_EXPANDED - len(words), 1) :], *words]]


def call_row(call: CallNode, look: Look, room: int) -> Row:
    """Return a call and its result in one row."""
    state = {
        ToolCallStatus.SUCCEEDED: State.DONE,
        ToolCallStatus.FAILED: State.FAILED,
        ToolCallStatus.CANCELLED: State.STOPPED,
        ToolCallStatus.SUSPENDED: State.NEEDS_YOU,
    }.get(call.status, State.WORKS)
    style, glyph = look.glyph(state)
    words = look.cut(call_words(call), max(room - 2, 10))
    left = max(room - 4 - cells(words), 0)
    result = look.cut(one_line(call.result or call.output[-100:], 200), left) if left > 8 else ""
    return [
        (style, f"{glyph} "),
        ("", words),
        ("failed" if state is State.FAILED else "dim", f"  {result}" * bool(result)),
    ]


# --- what stays


def ended_rows(run: RunNode, look: Look) -> list[Row]:
    """Return the children of a step that has ended, each with what it did."""
    rows: list[Row] = []
    for item in _items(run, set(), below=_every_child):
        rows.append(_child_row(item, look))
        _, _, pipe, blank = look.branches
        below = pipe if _every_child(item.run) else blank
        lead = "".join(blank if is_last else pipe for is_last in item.ends) + below
        rows.append([("dim", look.cut(f"{lead}{what_it_did(item.run)}", look.columns))])
    return rows


def what_it_did(run: RunNode) -> str:
    """Return the figures of a run in a few words: they come from its events, not from its model."""
    words = [count(len(run.steps), "step"), count(len(run.calls), "call")]
    failed = sum(call.status is ToolCallStatus.FAILED for call in run.calls.values())
    if failed and run.receipt is None:
        words[1] += f", {failed} failed"
    return " · ".join([*words, *([] if run.receipt is None else receipt_words(run.receipt))])


def done_row(run: RunNode, look: Look) -> Row:
    """Return the last line of a turn."""
    state = _ENDS.get(run.status, State.NEEDS_YOU)
    style, glyph = look.glyph(state)
    used, runs = total_usage(run), _count_runs(run)
    figures = [f"{state} {clock((run.ended or look.now) - run.started)}"]
    if runs:
        figures.append(count(runs, "agent"))
    if look.columns >= NARROW:
        figures.append(count(len(run.steps), "step"))
        if calls := sum(1 for _ in run.walk_calls()):
            figures.append(count(calls, "call"))
    if used.tokens:
        figures += [f"{short_count(used.tokens)} tok", money(used)]
    return [(style, f"{glyph} "), ("", look.cut((", " if look.ascii else " · ").join(figures), look.columns - 2))]


def _count_runs(run: RunNode) -> int:
    below = [child for call in run.calls.values() for child in call.children.values()]
    return len(below) + sum(_count_runs(child) for child in below)


def plain(row: Row) -> str:
    """Return the text of a row, without its styles."""
    return "".join(text for _, text in row).rstrip()
