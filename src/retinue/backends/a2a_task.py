"""The local view of a task on an A2A server, and how updates change it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from a2a.types import a2a_pb2 as pb
from google.protobuf.json_format import MessageToDict

from ..core.content import clean_text
from ..core.messages import DataPart, Part
from ..core.runs import RunStatus, Usage
from ..wire.a2a import read_part
from ..wire.a2a_budget import read_usage

PART_BYTES = 100
"""Counted for every part beside its content, so that no number of empty ones is too large."""
BETWEEN = "\n\n"
"""Between the texts of two artifacts."""

STATUS = {
    "completed": RunStatus.COMPLETED,
    "failed": RunStatus.FAILED,
    "rejected": RunStatus.FAILED,
    "canceled": RunStatus.CANCELLED,
    "input_required": RunStatus.WAITING_INPUT,
    "auth_required": RunStatus.WAITING_AUTH,
}
"""The settled states: the task has ended, or waits for a message from the client."""
_STATES = {number: name.removeprefix("TASK_STATE_").lower() for name, number in pb.TaskState.items() if number}


class _Artifact:
    """One artifact: its text in pieces, and its other parts. `place` is its number among the artifacts."""

    __slots__ = ("others", "place", "size", "text")

    def __init__(self, place: int) -> None:
        self.place, self.size = place, 0
        self.text: list[str] = []
        self.others: list[pb.Part] = []

    def drop(self) -> str:
        """Remove its content; return the text."""
        text, self.text, self.others, self.size = "".join(self.text), [], [], 0
        return text

    def add(self, parts: Iterable[pb.Part], text: str) -> None:
        if text:
            self.text.append(text)
        self.others.extend([part for part in parts if _is_other(part)])
        self.size += _size_of(parts)


class TaskView:
    """A task, from the updates and snapshots so far.

    Invariant: the cost of an update is proportional to its own size, whatever the task has already."""

    def __init__(self, task_id: str = "", context_id: str = "") -> None:
        self.task_id, self.context_id = task_id, context_id
        self.state = ""
        """Of the protocol, such as `working` or `input_required`."""
        self.said: pb.Message | None = None
        """The message of its last status, or the one that came instead of a task."""
        self._question: str | None = ""
        """The text of `said`, once it was asked for."""
        self.message_ids: set[str] = set()
        """Of the messages in its history."""
        self._artifacts: dict[str, _Artifact] = {}
        self._last_text = -1
        """The place of the last artifact that has text."""
        self._below: set[str] = set()
        """The artifacts of sub-agents."""
        self._last_answer = ""
        self.size = 0
        self.usage, self.steps = Usage(), 0
        """What the server says that it has used so far."""

    @property
    def is_settled(self) -> bool:
        """True if it has ended or waits."""
        return self.state in STATUS

    @property
    def has_ended(self) -> bool:
        return self.is_settled and STATUS[self.state].is_terminal

    @property
    def is_waiting(self) -> bool:
        return self.is_settled and STATUS[self.state].is_waiting

    def load(self, task: pb.Task) -> None:
        """Load a snapshot, which replaces everything."""
        self._artifacts, self._last_text, self.size = {}, -1, 0
        for artifact in task.artifacts:
            if not _is_below(artifact):
                self._add(artifact, append=False)
        self.message_ids = {message.message_id for message in task.history}
        answers = [text for one in task.history if one.role == pb.ROLE_AGENT and (text := text_of(one.parts))]
        self._last_answer = answers[-1] if answers else ""
        self._set_status(task)

    def apply(self, update: pb.StreamResponse) -> str | None:
        """Change as an update says. Return the text that is new at the end; None if the text has changed in another way."""
        match update.WhichOneof("payload"):
            case "task":
                self.load(update.task)
                return None
            case "message":
                self.state = "completed"
                self._set_said(update.message)
            case "status_update":
                self._set_status(update.status_update)
            case "artifact_update":
                artifact = update.artifact_update.artifact
                if not _is_below(artifact) and artifact.artifact_id not in self._below:
                    return self._add(artifact, update.artifact_update.append)
                self._below.add(artifact.artifact_id)
            case _:
                pass
        return ""

    def _add(self, artifact: pb.Artifact, append: bool) -> str | None:
        """Add to an artifact, or replace it; return what is new at the end of the whole text, or None."""
        known = self._artifacts.get(artifact.artifact_id)
        if known is None:
            known = self._artifacts[artifact.artifact_id] = _Artifact(len(self._artifacts))
        self.size -= known.size
        text, before = text_of(artifact.parts), "" if append else known.drop()
        had_text = bool(before or known.text)
        known.add(artifact.parts, text)
        self.size += known.size
        if not text.startswith(before):
            return None
        text = text[len(before) :]
        if text and known.place < self._last_text:
            return None
        if text:
            text = BETWEEN + text if self._last_text >= 0 and not had_text else text
            self._last_text = known.place
        return text

    def text(self) -> str:
        """The text of the artifacts."""
        return BETWEEN.join(["".join(one.text) for one in self._artifacts.values() if one.text])

    def answer(self) -> str:
        """The text of the artifacts or, without, what the agent said at the end."""
        return self.text() or self.question() or self._last_answer

    def question(self) -> str:
        """The text of the last status."""
        if self._question is None:
            self._question = "" if self.said is None else text_of(self.said.parts)
        return self._question

    def parts(self) -> list[Part]:
        """The parts that are not text, of the artifacts or, without, of the last message."""
        return _others([part for one in self._artifacts.values() for part in one.others] or self._said_parts())

    def asked_data(self) -> Any:
        """The data beside a question."""
        return data_of(_others(self._said_parts()))

    def _said_parts(self) -> Iterable[pb.Part]:
        return () if self.said is None else self.said.parts

    def _set_status(self, given: pb.Task | pb.TaskStatusUpdateEvent) -> None:
        self.usage, self.steps = read_usage(MessageToDict(given.metadata)) or (self.usage, self.steps)
        self.state = _STATES.get(given.status.state, "")
        self._set_said(given.status.message if given.status.HasField("message") else None)

    def _set_said(self, message: pb.Message | None) -> None:
        self.said, self._question = message, None


def _is_below(artifact: pb.Artifact) -> bool:
    """Return whether an artifact is of a sub-agent, and no part of the answer: `ns` in its metadata says so."""
    return bool(MessageToDict(artifact.metadata).get("ns"))


def _size_of(parts: Iterable[pb.Part]) -> int:
    return sum([PART_BYTES + part.ByteSize() for part in parts])


def text_of(parts: Iterable[pb.Part]) -> str:
    return clean_text("".join([part.text for part in parts]))


def _is_other(part: pb.Part) -> bool:
    return part.WhichOneof("content") not in ("text", None)


def _others(parts: Iterable[pb.Part]) -> list[Part]:
    return [read_part(MessageToDict(part)) for part in parts if _is_other(part)]


def data_of(parts: list[Part]) -> Any:
    """Return the value of the data parts: that of one, a list of several, None without."""
    values = [part.data for part in parts if isinstance(part, DataPart)]
    return values if len(values) > 1 else values[0] if values else None
