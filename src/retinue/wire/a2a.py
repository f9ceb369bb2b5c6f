"""A2A: a run as a task of the protocol, and its messages as ours. Pure; JSON in the shape of A2A 1.0, no vendor.

A task is a root run, its context the thread. All of it follows from the log: reading the same events gives the same task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from ..core.content import record_json
from ..core.decisions import Decision
from ..core.events import (
    DELTAS,
    ActivitySnapshot,
    ChildFinished,
    ChildStarted,
    Custom,
    ErrorRaised,
    Event,
    Handoff,
    InferenceFinished,
    Namespace,
    RunFinished,
    RunStarted,
    StepStarted,
    TextDelta,
    ToolCallReady,
    ToolCallResumed,
)
from ..core.messages import DataPart, FilePart, ImagePart, Message, Part, Role, TextPart, Visibility
from ..core.results import SuspendTicket
from ..core.runs import RunResult, RunStatus, unique
from .a2a_budget import usage_json, with_integers
from .resources import Decisions
from .snapshot import SnapshotTree

Json = dict[str, Any]

SUBMITTED, WORKING = "TASK_STATE_SUBMITTED", "TASK_STATE_WORKING"
INPUT_REQUIRED, AUTH_REQUIRED = "TASK_STATE_INPUT_REQUIRED", "TASK_STATE_AUTH_REQUIRED"
COMPLETED, FAILED = "TASK_STATE_COMPLETED", "TASK_STATE_FAILED"
CANCELED, REJECTED = "TASK_STATE_CANCELED", "TASK_STATE_REJECTED"
ENDED = frozenset({COMPLETED, FAILED, CANCELED, REJECTED})
INTERRUPTED = frozenset({INPUT_REQUIRED, AUTH_REQUIRED})

ANSWER = "answer"
"""The artifact with the text of the answer. That of a sub-agent has its namespace after it."""
OUTPUT = "output"
"""The artifact with the structured answer."""
_BETWEEN = "\n\n"
"""Separates the texts of one message."""
_IDS = "a2a:"
"""The ids of decisions that came as messages begin so: `a2a:<one of ours>.<number>:<id of the message>`."""
_AUTH = "a2a:auth_required"
"""The action of tickets that ask for credentials."""
_STATES = {
    RunStatus.COMPLETED: COMPLETED,
    RunStatus.FAILED: FAILED,
    RunStatus.TIMEOUT: FAILED,
    RunStatus.CANCELLED: CANCELED,
}


def time_text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def state_of(status: RunStatus, termination: str = "") -> str:
    """Return the state of a task whose run has this status."""
    if status is RunStatus.FAILED and termination == "blocked":
        return REJECTED
    return _STATES.get(status) or (WORKING if status is RunStatus.RUNNING else INPUT_REQUIRED)


def waiting_state(tickets: Mapping[str, SuspendTicket]) -> str:
    """Return the state of a task that waits for answers to these."""
    is_auth = bool(tickets) and all(ticket.action == _AUTH for ticket in tickets.values())
    return AUTH_REQUIRED if is_auth else INPUT_REQUIRED


# --- parts and messages


def part_json(part: Part) -> Json | None:
    """Return a part; None for reasoning, which stays here."""
    match part:
        case TextPart():
            return {"text": part.text}
        case DataPart():
            return {"data": record_json(part.data), "mediaType": "application/json"}
        case ImagePart() | FilePart():
            content = {"url": part.url} if part.url is not None else {"raw": part.data or ""}
            name = part.name if isinstance(part, FilePart) else None
            return {**content, "mediaType": part.media_type, **({"filename": name} if name else {})}
        case _:
            return None


def parts_json(parts: Iterable[Part]) -> list[Json]:
    return [shown for part in parts if (shown := part_json(part)) is not None]


def read_part(given: Mapping[str, Any]) -> Part:
    """Return the part that a client sent. Raise ValueError if it has no content."""
    if "text" in given:
        return TextPart(given["text"])
    if "data" in given:
        return DataPart(with_integers(given["data"]))
    media_type = given.get("mediaType") or "application/octet-stream"
    content = {name: given[key] for name, key in (("url", "url"), ("data", "raw")) if key in given}
    if not content:
        raise ValueError("a part has no content: give text, data, raw or url")
    if media_type.startswith("image/"):
        return ImagePart(**content, media_type=media_type)
    return FilePart(**content, media_type=media_type, name=given.get("filename"))


def read_message(given: Mapping[str, Any]) -> Message:
    """Return the message that a client sent as input of a run. Raise ValueError if it cannot be one.

    An empty line separates its texts: each may be a message of its own, as of a parent that gives several to a child.
    """
    parts, between = list[Part](), ""
    for part in map(read_part, given.get("parts", ())):
        if isinstance(part, TextPart):
            part, between = TextPart(f"{between}{part.text}"), _BETWEEN
        parts.append(part)
    if not any(not isinstance(part, TextPart) or part.text.strip() for part in parts):
        raise ValueError("the message is empty")
    return Message.user(parts, id=given.get("messageId"))


def read_decisions(given: Mapping[str, Any], questions: Sequence[Json]) -> dict[str, Decision]:
    """Return the decisions that a message makes on the open questions of a task. Raise ValueError if it makes none.

    A data part answers the only question, or is `{"decisions": …}`. Text answers the only question without a schema.
    """
    parts: Sequence[Json] = given.get("parts", ())
    values = [with_integers(part["data"]) for part in parts if "data" in part]
    made = unique()

    def name(place: int = 0) -> str:
        return f"{_IDS}{made}.{place}:{given.get('messageId', '')}"

    if len(values) > 1:
        raise ValueError('the message has several data parts: put all answers into one, as {"decisions": …}')
    if values:
        value = values[0]
        if isinstance(value, dict) and set(cast("Json", value)) == {"decisions"}:
            found = msgspec.convert(value, Decisions).decisions.items()
            named = {key: one if one.id else replace(one, id=name(place)) for place, (key, one) in enumerate(found)}
            return Decisions(named).as_decisions()
        if len(questions) != 1:
            raise ValueError(f'{len(questions)} questions are open: answer with {{"decisions": {{<call>: …}}}}')
        return {questions[0]["path"]: Decision.resume(value, id=name())}
    text = _BETWEEN.join(part["text"] for part in parts if "text" in part)
    open_to_text = [one for one in questions if one["ticket"]["response_schema"] is None]
    if len(open_to_text) != 1:
        needed = "a data part that fits the schema" if not open_to_text else '{"decisions": …} in a data part'
        raise ValueError(f"text cannot answer this task: send {needed}")
    return {open_to_text[0]["path"]: Decision.resume(text, id=name())}


# --- tasks


class TaskProjection:
    """The task of a run. Call it with the events of the log, in order; it returns what a stream sends for each."""

    def __init__(self, task_id: str, context_id: str, at: float) -> None:
        self.id, self.context_id, self._at = task_id, context_id, at
        self.status: Json = {"state": SUBMITTED, "timestamp": time_text(at)}
        self.history: list[Json] = []
        self.wants_message = False
        """True if a `run_start` hook asked for a message in place of a task."""
        self.answer: Message | None = None
        self.questions: list[Json] = []
        self.answered_by: set[str] = set()
        """The ids of the messages that have answered a question."""
        self._artifacts: dict[str, Json] = {}
        self._texts: dict[str, tuple[str, list[str]]] = {}
        """For each artifact of text: the message it holds, and the pieces."""
        self._unfinished: set[str] = set()
        """The artifacts of text whose last chunk has not come."""
        self._tree = SnapshotTree()
        self._used: Json = {}
        """Metadata with the usage so far."""
        self._began = False
        self._last_reply: tuple[str, Json] = "", {}

    @property
    def state(self) -> str:
        return self.status["state"]

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_settled(self) -> bool:
        return self.state in ENDED or self.state in INTERRUPTED

    def task(self) -> Json:
        artifacts = [self._whole(one) for one in self._artifacts.values()]
        known = {"id": self.id, "contextId": self.context_id, "status": self.status}
        return _with_metadata({**known, "artifacts": artifacts, "history": self.history}, self._used)

    @property
    def _place(self) -> Json:
        return {"taskId": self.id, "contextId": self.context_id}

    def reply(self) -> Json:
        """Return the task or, if the run asked for that and is complete, its answer as a message."""
        if not self.wants_message or self.state != COMPLETED:
            return {"task": self.task()}
        answer = self.answer or Message.assistant()
        parts = parts_json(answer.parts) or [{"text": ""}]
        known = answer.id or f"{self.id}-answer"
        message = {"messageId": known, "role": "ROLE_AGENT", "contextId": self.context_id, "parts": parts}
        return {"message": message}

    def settle(self, result: RunResult | None) -> list[Json]:
        """End the task of a run that was cancelled before it began: its log has no end."""
        if self.is_settled or result is None or not result.status.is_terminal:
            return []
        parts = [{"text": result.error}] if result.error else None
        return [self._update(state_of(result.status), self._at, "end", parts)]

    def __call__(self, event: Event) -> list[Json]:
        if self.has_ended:  # background tasks continue after it
            return []
        if not isinstance(event, DELTAS):
            self._tree(event)
        is_root = not event.ns
        match event:
            case TextDelta():
                return [self._text_delta(event)]
            case InferenceFinished():
                return self._inferred(event)
            case RunStarted() if is_root:
                return self._leg_started(event)
            case StepStarted() if is_root and self.state == SUBMITTED:
                return [self._update(WORKING, event.at, str(event.seq))]
            case RunFinished():
                return [*self._last_text(event), *(self._finished(event) if is_root else [])]
            case Custom() if is_root and event.call_id is None and event.data == {"a2a": "message"}:
                self.wants_message = True
                return []
            case ErrorRaised():
                return self._failed(event)
            case ToolCallResumed():
                self._answered(event)
                return []
            case _:
                return self._progress(event)

    # the state

    def _update(
        self, state: str, at: float, name: str, parts: list[Json] | None = None, metadata: Json | None = None
    ) -> Json:
        self.status = {"state": state, "timestamp": time_text(at)}
        if parts:
            self.status["message"] = self._message(f"{self.id}-{name}", "ROLE_AGENT", parts)
        return self._status_update(metadata)

    def _status_update(self, metadata: Json | None) -> Json:
        return {"statusUpdate": _with_metadata({**self._place, "status": self.status}, metadata)}

    def _message(self, message_id: str, role: str, parts: list[Json]) -> Json:
        return {"messageId": message_id, "role": role, **self._place, "parts": parts}

    def _leg_started(self, event: RunStarted) -> list[Json]:
        if not self._began:
            self._began = True
            for message in event.messages:
                if message.role is Role.USER and message.visibility is Visibility.ALL:
                    self._remember(message.id or f"{self.id}-input", parts_json(message.parts))
            return []
        if self.state not in INTERRUPTED:
            return []
        if (asked := self.status.get("message")) is not None:
            self.history.append(asked)
        self.questions = []
        return [self._update(WORKING, event.at, str(event.seq))]

    def _remember(self, message_id: str, parts: list[Json]) -> Json:
        self.history.append(self._message(message_id, "ROLE_USER", parts))
        return self.history[-1]

    def _answered(self, event: ToolCallResumed) -> None:
        """Put an answer into the history. The answers of one message are one entry."""
        decision = event.decision
        if decision is None:
            return
        if decision.action == "cancel":
            part: Json = {"data": {"action": "cancel", "reason": decision.reason}}
        else:
            text = decision.payload
            part = {"text": text} if isinstance(text, str) else {"data": record_json(text)}
        key, message_id = decision.id, decision.id
        if decision.id.startswith(_IDS):
            own, _, message_id = decision.id.removeprefix(_IDS).partition(":")
            key = own.partition(".")[0]
            self.answered_by.add(message_id)
        if self._last_reply[0] == key:
            self._last_reply[1]["parts"].append(part)
        else:
            self._last_reply = key, self._remember(message_id or decision.id, [part])

    def _finished(self, event: RunFinished) -> list[Json]:
        name, self._used = str(event.seq), usage_json(event.usage, event.steps)
        if not event.status.is_terminal:
            return [self._asked(event)]
        updates: list[Json] = []
        if event.status is RunStatus.COMPLETED and event.output is not None:
            data = [{"data": record_json(event.output), "mediaType": "application/json"}]
            updates.append(self._artifact(event, OUTPUT, data, is_last=True))
        parts = [{"text": event.error}] if event.error else None
        return [*updates, self._update(state_of(event.status, event.termination), event.at, name, parts, self._used)]

    def _asked(self, event: RunFinished) -> Json:
        self.questions = [one for one in self._tree.questions() if one["answer_to"] == self.id]
        return self._update(INPUT_REQUIRED, event.at, str(event.seq), self._forms(), self._used)

    def ask(self, tickets: Mapping[str, SuspendTicket]) -> Json:
        """Ask what the run waits for now. It knows better than its log, which has no questions of other servers."""
        known = {one["path"]: one for one in self.questions}
        self.questions = []
        for key, ticket in tickets.items():
            path = "/".join(ticket.path) or key
            shown = known.get(path, {"agent": "", "tool": "", "args": {}})
            self.questions.append({**shown, "path": path, "ticket": record_json(ticket)})
        self.status = {**self.status, "state": waiting_state(tickets)}
        self.status["message"] = {**self.status["message"], "parts": self._forms()}
        return self._status_update(self._used)

    def _forms(self) -> list[Json]:
        parts: list[Json] = []
        for one in self.questions:
            ticket = one["ticket"]
            parts.append({"text": ticket["message"] or f"{one['tool']} waits for an answer"})
            form: Json = {name: one[name] for name in ("agent", "tool", "args")}
            form |= {"call": one["path"], "ticket": ticket, "schema": ticket["response_schema"]}
            parts.append({"data": form, "mediaType": "application/json"})
        return parts or [{"text": "waits for an answer"}]

    # progress

    def _progress(self, event: Event) -> list[Json]:
        match event:
            case ToolCallReady():
                return self._say(event, {"text": f"{event.agent} calls {event.tool_name}"})
            case ChildStarted():
                return self._say(event, {"text": f"{event.child_agent} started"}, event.child_ns)
            case ChildFinished():
                return self._say(event, {"text": f"{event.child_agent}: {event.status.value}"})
            case Handoff():
                return self._say(event, {"text": f"{event.to_agent} continues"})
            case ActivitySnapshot():
                content = record_json(event.content)
                return self._say(event, {"data": {"activity": event.activity_type, "content": content}})
            case Custom():
                return self._say(event, {"data": record_json(event.data)})
            case _:
                return []

    def _say(self, event: Event, part: Json, ns: Namespace | None = None) -> list[Json]:
        """Show progress of a run, unless the task waits."""
        if self.state != WORKING:
            return []
        metadata = {"kind": event.kind, **_of_run(event.agent, event.ns if ns is None else ns)}
        name = str(event.seq or f"notice-{event.at}")  # a notice has no number
        return [self._update(WORKING, event.at, name, [part], metadata)]

    def _failed(self, event: ErrorRaised) -> list[Json]:
        updates: list[Json] = []
        name = _text_name(event.ns)
        dropped = event.dropped_message_id
        if dropped is not None and self._texts.get(name, ("", []))[0] == dropped:
            updates.append(self._artifact(event, name, [{"text": ""}]))
            del self._artifacts[name], self._texts[name]
            self._unfinished.discard(name)
        return updates if event.fatal else [*updates, *self._say(event, {"text": event.message})]

    # artifacts

    def _text_delta(self, event: TextDelta) -> Json:
        name = _text_name(event.ns)
        held, pieces = self._texts.get(name, ("", []))
        if held != event.message_id or name not in self._artifacts:
            return self._new_text(event, event.delta, event.message_id)
        pieces.append(event.delta)
        return self._artifact_update({**self._artifacts[name], "parts": [{"text": event.delta}]}, append=True)

    def _new_text(self, event: Event, text: str, message_id: str, *, is_last: bool = False) -> Json:
        """Start a new text artifact for the answer of a run, and return its update."""
        name = _text_name(event.ns)
        self._texts[name] = message_id, [text]
        (self._unfinished.discard if is_last else self._unfinished.add)(name)
        return self._artifact(event, name, [{"text": text}], is_last=is_last)

    def _inferred(self, event: InferenceFinished) -> list[Json]:
        message, updates, name = event.message, list[Json](), _text_name(event.ns)
        text, is_last = message.text, not message.tool_calls
        if not event.ns and is_last:
            self.answer = message
        if text:
            held, pieces = self._texts.get(name, ("", []))
            if is_last or held != message.id or "".join(pieces) != text:
                # The last piece is the whole: clients keep that one, and show the others as they come.
                updates.append(self._new_text(event, text, message.id or "", is_last=is_last))
        for place, part in enumerate(message.parts):
            if isinstance(part, ImagePart | FilePart | DataPart) and (shown := part_json(part)) is not None:
                updates.append(self._artifact(event, f"{message.id}-{place}", [shown], is_last=True))
        return updates

    def _last_text(self, event: RunFinished) -> list[Json]:
        """Finish the text of a run that has ended. The text of an answer that was cut short is in the end of its run:
        a log that is read from a database has no deltas."""
        name, text = _text_name(event.ns), event.response
        if not text or not event.status.is_terminal or (name in self._texts and name not in self._unfinished):
            return []
        return [self._new_text(event, text, "", is_last=True)]

    def _artifact(self, event: Event, name: str, parts: list[Json], *, is_last: bool = False) -> Json:
        artifact: Json = {"artifactId": name, "name": parts[0].get("filename") or event.agent, "parts": parts}
        if event.ns:
            artifact["metadata"] = _of_run(event.agent, event.ns)
        self._artifacts[name] = artifact
        return self._artifact_update(artifact, append=False, is_last=is_last)

    def _artifact_update(self, artifact: Json, *, append: bool, is_last: bool = False) -> Json:
        return {"artifactUpdate": {**self._place, "artifact": artifact, "append": append, "lastChunk": is_last}}

    def artifact(self, name: str) -> Json:
        """Return an artifact, whole."""
        return self._whole(self._artifacts[name])

    def _whole(self, artifact: Json) -> Json:
        text = self._texts.get(artifact["artifactId"])
        return artifact if text is None else {**artifact, "parts": [{"text": "".join(text[1])}]}


def _with_metadata(known: Json, metadata: Json | None) -> Json:
    return {**known, "metadata": metadata} if metadata else known


def _text_name(ns: Namespace) -> str:
    return ":".join((ANSWER, "|".join(ns))) if ns else ANSWER


def _of_run(agent: str, ns: Namespace) -> Json:
    """Return the metadata of what belongs to a run below the root."""
    return {"agent": agent, "ns": "|".join(ns)} if ns else {"agent": agent}
