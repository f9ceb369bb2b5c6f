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


class TaskView:
    """A task, from the updates and snapshots so far."""

    def __init__(self, task_id: str = "", context_id: str = "") -> None:
        self.task_id, self.context_id = task_id, context_id
        self.state = ""
        """Of the protocol, such as `working` or `input_required`."""
        self.said: pb.Message | None = None
        """The message of its last status, or the one that came instead of a task."""
        self.message_ids: set[str] = set()
        """Of the messages in its history."""
        self._artifacts: dict[str, list[pb.Part]] = {}
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
        self._artifacts, self.size = {}, 0
        for artifact in task.artifacts:
            if not _is_below(artifact):
                self._put(artifact, append=False)
        self.message_ids = {message.message_id for message in task.history}
        answers = [text for one in task.history if one.role == pb.ROLE_AGENT and (text := text_of(one.parts))]
        self._last_answer = answers[-1] if answers else ""
        self._set_status(task)

    def apply(self, update: pb.StreamResponse) -> str | None:
        """Change as an update says. Return the text that is new at the end; None if the text must be compared."""
        match update.WhichOneof("payload"):
            case "task":
                self.load(update.task)
                return None
            case "message":
                self.said, self.state = update.message, "completed"
            case "status_update":
                self._set_status(update.status_update)
            case "artifact_update":
                return self._add(update.artifact_update.artifact, update.artifact_update.append)
            case _:
                pass
        return ""

    def _add(self, artifact: pb.Artifact, append: bool) -> str | None:
        name = artifact.artifact_id
        if _is_below(artifact) or name in self._below:
            self._below.add(name)
            return ""
        is_at_end = name not in self._artifacts or (append and next(reversed(self._artifacts)) == name)
        had_own = any(part.text for part in self._artifacts.get(name, ()))
        had_any = any(part.text for parts in self._artifacts.values() for part in parts)
        self._put(artifact, append)
        if not is_at_end:
            return None
        text = text_of(artifact.parts)
        return BETWEEN + text if text and had_any and not had_own else text

    def text(self) -> str:
        """The text of the artifacts."""
        return BETWEEN.join([text for parts in self._artifacts.values() if (text := text_of(parts))])

    def answer(self) -> str:
        """The text of the artifacts or, without, what the agent said at the end."""
        return self.text() or self.question() or self._last_answer

    def question(self) -> str:
        """The text of the last status."""
        return "" if self.said is None else text_of(self.said.parts)

    def parts(self) -> list[Part]:
        """The parts that are not text, of the artifacts or, without, of the last message."""
        return _others([part for parts in self._artifacts.values() for part in parts] or self._said_parts())

    def asked_data(self) -> Any:
        """The data beside a question."""
        return data_of(_others(self._said_parts()))

    def _said_parts(self) -> Iterable[pb.Part]:
        return () if self.said is None else self.said.parts

    def _set_status(self, given: pb.Task | pb.TaskStatusUpdateEvent) -> None:
        self.usage, self.steps = read_usage(MessageToDict(given.metadata)) or (self.usage, self.steps)
        self.state = _STATES.get(given.status.state, "")
        self.said = given.status.message if given.status.HasField("message") else None

    def _put(self, artifact: pb.Artifact, append: bool) -> None:
        parts = self._artifacts.get(artifact.artifact_id, [])
        if not append:
            self.size -= _size_of(parts)
            parts = []
        self.size += _size_of(artifact.parts)
        parts.extend(artifact.parts)
        self._artifacts[artifact.artifact_id] = parts


def _is_below(artifact: pb.Artifact) -> bool:
    """Return whether an artifact is of a sub-agent, and no part of the answer: `ns` in its metadata says so."""
    return bool(MessageToDict(artifact.metadata).get("ns"))


def _size_of(parts: Iterable[pb.Part]) -> int:
    return sum([PART_BYTES + part.ByteSize() for part in parts])


def text_of(parts: Iterable[pb.Part]) -> str:
    return clean_text("".join([part.text for part in parts]))


def _others(parts: Iterable[pb.Part]) -> list[Part]:
    return [read_part(MessageToDict(part)) for part in parts if part.WhichOneof("content") not in ("text", None)]


def data_of(parts: list[Part]) -> Any:
    """Return the value of the data parts: that of one, a list of several, None without."""
    values = [part.data for part in parts if isinstance(part, DataPart)]
    return values if len(values) > 1 else values[0] if values else None
