"""The state of the screen: events go in, blocks that are finished come out, and the rest is drawn again and again.

Pure: it draws nothing and reads no clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from ..core.events import (
    Compacted,
    ErrorRaised,
    Event,
    Handoff,
    InferenceFinished,
    MessageAdded,
    MessageDropped,
    RunFinished,
    RunStarted,
    StateDelta,
    StepFinished,
    StepStarted,
    TaskUpdated,
    TextDelta,
    ToolCallStarted,
)
from ..core.results import ToolCallStatus
from ..core.runs import RunStatus
from ..plugins.todo import TODOS
from ..tasks.task import TaskStatus
from ..wire.tree import CallNode, Node, RunNode
from .columns import wrapped
from .outline import ShownTree, todo_lines
from .questions import Question, question_of
from .rows import Look, Row, call_row, done_row, ended_rows, plain, shown_children, tree_rows
from .text import clean, headline, one_line

OPEN_LINES = 6
"""Lines of the words in progress that are drawn."""
_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)


class Block(NamedTuple):
    """Something that is printed once, and stays: Markdown, or rows."""

    words: str = ""
    rows: tuple[Row, ...] = ()
    gap: bool = True
    """True for an empty line below."""


@dataclass
class Sent:
    """A message to an agent at work."""

    run_id: str
    name: str
    words: str
    id: str = ""
    """Of the stored message; empty until its event came."""
    read_at: int = 0
    """The step whose request has it."""


class Board:
    """One conversation: the turn in progress, and what it has left to say."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.tree = ShownTree()
        self._open = ""
        """Words of the root that are not printed yet."""
        self._has_spoken = False
        """True once the name of the root stands above its words."""
        self._printed: set[int] = set()
        """The numbers of the steps whose calls are printed."""
        self.last_at: dict[str, float] = {}
        self.last_seq = 0
        self.context = 0
        """The tokens that the root's last model call has read and written."""
        self.tasks: dict[str, str] = {}
        """The background tasks that work, by id: their agent."""
        self._messages: list[Sent] = []
        """The messages to agents at work, in this turn."""
        self._replies: dict[tuple[str, ...], str] = {}

    @property
    def root(self) -> RunNode | None:
        return self.tree.root

    @property
    def works(self) -> bool:
        root = self.root
        return root is not None and root.ended is None

    def recall(self, event: Event) -> None:
        """Read an earlier event without printing anything."""
        self.tree(event)

    def apply(self, event: Event) -> list[Block]:
        """Read an event and return what is finished by it."""
        begins = type(event) is RunStarted and not event.ns and event.run_id not in self.tree.runs
        if begins:
            self._begin_turn()
        self.tree(event)
        if not event.seq and type(event) is ErrorRaised:
            return [_note(event.message, self.look)]
        self.last_at[event.run_id], self.last_seq = event.at, event.seq
        if type(event) is TaskUpdated:
            return self._task_updated(event)
        self._note_reading(event)
        run = self.tree.runs.get(event.run_id)
        if run is None:
            return []
        if run.ns:
            if isinstance(event, RunFinished):
                self._replies[event.ns] = event.response or event.error or ""
            return []
        if begins:
            return [Block(rows=said_rows(run.task, self.look))] if run.task else []
        return self._of_root(event, run)

    def sent(self, run_id: str, name: str, words: str) -> None:
        """Note a message that an agent at work was given."""
        self._messages.append(Sent(run_id, name, words))

    def _note_reading(self, event: Event) -> None:
        """Note when a message is read: with the first request after it was accepted."""
        if isinstance(event, MessageAdded):
            said = [one for one in self._messages if one.run_id == event.run_id and not one.id]
            if said:
                said[0].id = event.message.id or "?"
        elif isinstance(event, StepStarted):
            for one in self._messages:
                if one.run_id == event.run_id and one.id and not one.read_at:
                    one.read_at = event.step
        elif isinstance(event, MessageDropped):
            self._messages = [one for one in self._messages if one.id != event.message_id]

    def message_rows(self) -> list[Row]:
        """Return the messages to agents at work: whether each is read."""
        mark = ">" if self.look.ascii else "↳"
        rows: list[Row] = []
        for one in self._messages[-4:] if self.works else []:
            right = f"read at step {one.read_at}" if one.read_at else "sent, not read yet"
            left = self.look.cut(
                f"{mark} to {one.name}: {one_line(one.words, 200)}", self.look.columns - len(right) - 2
            )
            rows.append([("", left), ("dim", f"  {right}")])
        return rows

    def _begin_turn(self) -> None:
        self.tree, self._open, self._has_spoken = ShownTree(), "", False
        self._printed.clear()
        self.last_at.clear()
        self._messages.clear()

    def _of_root(self, event: Event, run: RunNode) -> list[Block]:
        match event:
            case TextDelta():
                self._open += clean(event.delta) if self._open or event.delta.strip() else ""
                return self._closed_words(run)
            case InferenceFinished():
                self.context = event.usage.input_tokens + event.usage.output_tokens
                return self._flush(run)
            case ToolCallStarted():
                return self._flush(run)
            case StepStarted():
                return self._step_ended(run, before=event.step)
            case StepFinished():
                return [*self._flush(run), *self._step_ended(run)]
            case ErrorRaised():
                return self._error(event)
            case Handoff():
                return [_note(f"handed over to {one_line(event.to_agent, 60)}", self.look)]
            case Compacted():
                return [_note(run.notes[-1], self.look)]
            case StateDelta() if TODOS.name in event.delta:
                rows = [[("dim", f"  {line}")] for line in todo_lines(event.delta[TODOS.name], self.look.columns - 4)]
                return [*self._flush(run), Block(rows=tuple(rows))] if rows else []
            case RunFinished():
                return [*self._flush(run), *self._step_ended(run), *self._run_ended(event, run)]
            case _:
                return []

    # --- the words of the root

    def _closed_words(self, run: RunNode) -> list[Block]:
        """Return the Markdown blocks that are complete: an empty line outside of code ends one."""
        at = 0
        while (end := self._open.find("\n\n", at)) >= 0:
            at = end + 2
            if len(_FENCE.findall(self._open[:at])) % 2 == 0:
                closed, self._open = self._open[:end], self._open[at:].lstrip("\n")
                return [*self._headed(run), Block(words=closed), *self._closed_words(run)]
        return []

    def _flush(self, run: RunNode) -> list[Block]:
        words, self._open = self._open.strip("\n"), ""
        return [*self._headed(run), Block(words=words)] if words.strip() else []

    def _headed(self, run: RunNode) -> list[Block]:
        if self._has_spoken:
            return []
        self._has_spoken = True
        return [Block(rows=([("bold", one_line(run.label, 60))],), gap=False)]

    def _error(self, event: ErrorRaised) -> list[Block]:
        if event.dropped_message_id and self._open:
            self._open = ""
        return [] if event.fatal or event.retry_model is not None else [_note(event.message, self.look)]

    # --- what ends

    def _step_ended(self, run: RunNode, before: int | None = None) -> list[Block]:
        """Return the calls and children of the last step, once, unless one of them is still open."""
        steps = [step for step in run.steps if step.calls and step.number not in self._printed]
        blocks: list[Block] = []
        for step in steps:
            if before is not None and step.number >= before:
                continue
            calls = list(step.calls.values())
            if any(call.ended is None or call.status is ToolCallStatus.SUSPENDED for call in calls):
                continue
            self._printed.add(step.number)
            self._has_spoken = False
            look = self.look
            alone = [call_row(call, look, look.columns) for call in calls if not call.children and not call.is_task]
            if alone:
                blocks.append(Block(rows=tuple(alone), gap=not any(call.children for call in calls)))
            rows = ended_rows(run, look) if step is run.step else []
            if rows:
                blocks.append(Block(rows=tuple(rows)))
        return blocks

    def _run_ended(self, event: RunFinished, run: RunNode) -> list[Block]:
        if event.status.is_waiting:
            return []
        rows: list[Row] = []
        if event.status in (RunStatus.FAILED, RunStatus.TIMEOUT):
            why = clean(event.error or event.termination)
            rows += [
                [("failed", line)]
                for line in wrapped(f"{self._bad} The turn failed: {why}", self.look.columns, "", "  ")
            ]
            rows.append([("dim", f"  {run.run_id} · step {run.step.number}")])
        rows.append(done_row(run, self.look))
        return [Block(rows=tuple(rows))]

    @property
    def _bad(self) -> str:
        return "x" if self.look.ascii else "✗"

    def _task_updated(self, event: TaskUpdated) -> list[Block]:
        status = TaskStatus(event.status)
        if not status.is_terminal:
            self.tasks[event.task_id] = event.agent
            return []
        self.tasks.pop(event.task_id, None)
        good = status is TaskStatus.COMPLETED
        mark = ("done", "+" if self.look.ascii else "✓") if good else ("failed", self._bad)
        first: Row = [
            (mark[0], f"{mark[1]} "),
            ("", f"{one_line(event.agent, 60)} ended in the background: {status.lower()}"),
        ]
        reply = headline(self._replies.get(event.ns, ""), self.look.columns - 4) if self._replies.get(event.ns) else ""
        task: Row = [("dim", self.look.cut(f"  task {event.task_id}", self.look.columns))]
        return [Block(rows=(first, *([[("dim", f"  {reply}")]] if reply else []), task))]

    # --- what is drawn

    def questions(self) -> list[Question]:
        """Return the calls that wait for a person, deepest first seen in the order of their calls."""
        root = self.root
        return [] if root is None else list(_questions(root, (root.agent,)))

    def path_of(self, run_id: str) -> tuple[str, ...]:
        """Return the names of the agents from the root to a run."""
        names: list[str] = []
        node: Node | None = self.tree.runs.get(run_id)
        while node is not None:
            if isinstance(node, RunNode):
                names.append(node.label)
            node = node.parent
        return tuple(reversed(names))

    def find(self, name: str) -> RunNode | None:
        """Return the run at work that is called so: the newest, if there are several."""
        working = [run for run in self.tree.runs.values() if run.ended is None and run.label == name]
        return working[-1] if working else None

    def open_rows(self) -> list[Row]:
        """Return the last lines of the words in progress."""
        if not self._open.strip():
            return []
        lines = wrapped(self._open.strip("\n")[-2_000:], self.look.columns)[-OPEN_LINES:]
        head: list[Row] = [] if self._has_spoken or self.root is None else [[("bold", one_line(self.root.label, 60))]]
        return [*head, *[[("", line)] for line in lines], []]

    def tree_rows(self) -> list[Row]:
        root = self.root
        if root is None or (root.ended is not None and not root.status.is_waiting):
            return self._task_rows()
        self.look.last_at = self.last_at
        return tree_rows(root, self.look)

    def _task_rows(self) -> list[Row]:
        """Return the children that outlive their turn."""
        root = self.root
        if root is None or not any(child.ended is None for child in shown_children(root)):
            return []
        return tree_rows(root, self.look)[1:]


def _questions(run: RunNode, path: tuple[str, ...]) -> list[Question]:
    found: list[Question] = []
    for call in run.calls.values():
        below = [one for child in call.children.values() for one in _questions(child, (*path, child.label))]
        found += below
        if not below and _waits(call):
            found.append(question_of(call, run, path))
    return found


def _waits(call: CallNode) -> bool:
    return call.status is ToolCallStatus.SUSPENDED and call.ticket is not None


def said_rows(text: str, look: Look) -> tuple[Row, ...]:
    """Return what a person said."""
    mark = "> " if look.ascii else "› "
    return tuple([[("bold", line)] for line in wrapped(clean(text), look.width - 1, mark, "  ")])


def _note(text: str, look: Look) -> Block:
    lines = wrapped(one_line(text, 400), look.columns - 2, "  ")
    return Block(rows=tuple([[("waits", line)] for line in lines]))


def text_of(blocks: list[Block]) -> str:
    """Return blocks as plain text: what a test compares."""
    lines = [
        line for block in blocks for line in ([block.words] if block.words else [plain(row) for row in block.rows])
    ]
    return "\n".join(lines)
