"""The local view of a task on an A2A server: its wire records, and how updates change it. Pure."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..core.content import clean_text, to_json_bytes
from ..core.messages import DataPart, FilePart, ImagePart, Part, TextPart
from ..core.runs import RunStatus, Usage
from ..wire.a2a_budget import read_usage, with_integers

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


class WirePart(Struct, rename="camel"):
    text: str | UnsetType = UNSET
    raw: str | UnsetType = UNSET
    """Base64."""
    url: str | UnsetType = UNSET
    data: Any = UNSET
    filename: str = ""
    media_type: str = ""

    @property
    def size(self) -> int:
        own = sum([len(one) for one in (self.text, self.raw, self.url) if isinstance(one, str)])
        return PART_BYTES + own + (0 if self.data is UNSET else len(to_json_bytes(self.data)))

    def to_part(self) -> Part:
        """Return it as a part of a message here."""
        if isinstance(self.text, str):
            return TextPart(clean_text(self.text))
        if self.data is not UNSET:
            return DataPart(with_integers(self.data))
        url = self.url if isinstance(self.url, str) else None
        data = base64.b64encode(base64.b64decode(self.raw)).decode() if isinstance(self.raw, str) else None
        if self.media_type.startswith("image/"):
            return ImagePart(url=url, data=data, media_type=self.media_type)
        media_type = self.media_type or "application/octet-stream"
        return FilePart(url=url, data=data, media_type=media_type, name=self.filename or None)


class WireMessage(Struct, rename="camel"):
    message_id: str = ""
    context_id: str = ""
    task_id: str = ""
    role: str = ""
    parts: list[WirePart] = []

    @property
    def text(self) -> str:
        return text_of(self.parts)


class WireStatus(Struct, rename="camel"):
    state: str = ""
    message: WireMessage | None = None


class WireArtifact(Struct, rename="camel"):
    artifact_id: str = ""
    parts: list[WirePart] = []
    metadata: dict[str, Any] = {}
    """`ns` in it says that the artifact is of a sub-agent, and no part of the answer."""


class WireTask(Struct, rename="camel"):
    id: str = ""
    context_id: str = ""
    status: WireStatus = msgspec.field(default_factory=WireStatus)
    artifacts: list[WireArtifact] = []
    history: list[WireMessage] = []
    metadata: dict[str, Any] = {}


class WireTasks(Struct, rename="camel"):
    tasks: list[WireTask] = []


class StatusUpdate(Struct, rename="camel"):
    task_id: str = ""
    context_id: str = ""
    status: WireStatus = msgspec.field(default_factory=WireStatus)
    metadata: dict[str, Any] = {}


class ArtifactUpdate(Struct, rename="camel"):
    task_id: str = ""
    context_id: str = ""
    artifact: WireArtifact = msgspec.field(default_factory=WireArtifact)
    append: bool = False


class Update(Struct, rename="camel"):
    """One of a stream: a task, a message instead of one, or what changes."""

    task: WireTask | None = None
    message: WireMessage | None = None
    status_update: StatusUpdate | None = None
    artifact_update: ArtifactUpdate | None = None

    @property
    def task_id(self) -> str:
        for one in (self.status_update, self.artifact_update):
            if one is not None:
                return one.task_id
        return "" if self.task is None else self.task.id


read_update = msgspec.json.Decoder(Update).decode
read_task = msgspec.json.Decoder(WireTask).decode
read_tasks = msgspec.json.Decoder(WireTasks).decode


class TaskView:
    """A task, from the updates and snapshots so far."""

    def __init__(self, task_id: str = "", context_id: str = "") -> None:
        self.task_id, self.context_id = task_id, context_id
        self.state = ""
        """Of the protocol, such as `working` or `input_required`."""
        self.said: WireMessage | None = None
        """The message of its last status, or the one that came instead of a task."""
        self.message_ids: set[str] = set()
        """Of the messages in its history."""
        self._artifacts: dict[str, list[WirePart]] = {}
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
        return self.state in STATUS and STATUS[self.state].is_terminal

    def load(self, task: WireTask) -> None:
        """Load a snapshot, which replaces everything."""
        self._artifacts, self.size = {}, 0
        for artifact in task.artifacts:
            if not artifact.metadata.get("ns"):
                self._put(artifact.artifact_id, artifact.parts, append=False)
        self.message_ids = {message.message_id for message in task.history}
        answers = [message.text for message in task.history if message.role == "ROLE_AGENT" and message.text]
        self._last_answer = answers[-1] if answers else ""
        self._set_status(task.status, task.metadata)

    def apply(self, update: Update) -> str | None:
        """Change as an update says. Return the text that is new at the end; None if the text must be compared."""
        if update.task is not None:
            self.load(update.task)
            return None
        if update.message is not None:
            self.said, self.state = update.message, "completed"
        if update.status_update is not None:
            self._set_status(update.status_update.status, update.status_update.metadata)
        if update.artifact_update is None:
            return ""
        artifact, append = update.artifact_update.artifact, update.artifact_update.append
        if artifact.metadata.get("ns") or artifact.artifact_id in self._below:
            self._below.add(artifact.artifact_id)
            return ""
        known = list(self._artifacts)
        is_at_end = artifact.artifact_id not in known or (append and known[-1] == artifact.artifact_id)
        had_own, had_any = self._has_text(artifact.artifact_id), any(map(self._has_text, known))
        self._put(artifact.artifact_id, artifact.parts, append)
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
        return "" if self.said is None else self.said.text

    def parts(self) -> list[Part]:
        """The parts of the artifacts or, without, of the last message."""
        found = [part for parts in self._artifacts.values() for part in parts]
        if not found and self.said is not None:
            found = self.said.parts
        return [part.to_part() for part in found if not isinstance(part.text, str)]

    def asked_data(self) -> Any:
        """The data beside a question."""
        return data_of([] if self.said is None else [part.to_part() for part in self.said.parts])

    def _set_status(self, status: WireStatus, metadata: dict[str, Any]) -> None:
        self.usage, self.steps = read_usage(metadata) or (self.usage, self.steps)
        self.state = status.state.removeprefix("TASK_STATE_").lower()
        self.said = status.message

    def _put(self, artifact_id: str, parts: list[WirePart], append: bool) -> None:
        before = self._artifacts.get(artifact_id, [])
        if not append:
            self.size -= sum([part.size for part in before])
            before = []
        self.size += sum([part.size for part in parts])
        before.extend(parts)
        self._artifacts[artifact_id] = before

    def _has_text(self, artifact_id: str) -> bool:
        return any(isinstance(part.text, str) and part.text for part in self._artifacts.get(artifact_id, ()))


def text_of(parts: list[WirePart]) -> str:
    return clean_text("".join([part.text for part in parts if isinstance(part.text, str)]))


def data_of(parts: list[Part]) -> Any:
    """Return the value of the data parts: that of one, a list of several, None without."""
    values = [part.data for part in parts if isinstance(part, DataPart)]
    return values if len(values) > 1 else values[0] if values else None
