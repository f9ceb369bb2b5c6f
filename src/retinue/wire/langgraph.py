"""LangGraph's HTTP API, as a client of it reads and writes: threads, runs, their streams and their states. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.content import to_json_bytes
from ..core.runs import Usage

RUN_ID = "retinue_run_id"
"""The key of a run's metadata that has the id of the run here."""
QUESTION = "retinue_question"
"""The key that has the number of the question whose answer a run brings; 0 where a run begins."""
_SAYS = ("AIMessageChunk", "ai")


class GraphRun(Struct, frozen=True):
    """A run on a thread. `status` is pending, running, success, error, timeout or interrupted."""

    run_id: str
    status: str
    metadata: dict[str, Any] = {}

    @property
    def has_ended(self) -> bool:
        return self.status not in ("pending", "running")


class Interrupt(Struct, frozen=True):
    """A question of a graph."""

    value: Any = None
    id: str = ""


class GraphTask(Struct, frozen=True):
    """A node that is next."""

    error: str | None = None
    interrupts: list[Interrupt] = []


class GraphMessage(Struct, frozen=True):
    """A message of a graph, or a piece of one."""

    type: str = ""
    content: Any = ""
    id: str | None = None
    usage_metadata: Any = None

    @property
    def is_said(self) -> bool:
        """True if it is the graph's own."""
        return self.type in _SAYS

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        try:
            return "".join([one.text for one in msgspec.convert(self.content, list[_Block]) if one.type == "text"])
        except msgspec.ValidationError:
            return ""


class _Block(Struct, frozen=True):
    """A part of the content of a message."""

    type: str = ""
    text: str = ""


class _About(Struct, frozen=True):
    langgraph_checkpoint_ns: str = ""


class GraphState(Struct, frozen=True):
    """The state of a thread."""

    values: Any = None
    tasks: list[GraphTask] = []

    @property
    def interrupts(self) -> list[Interrupt]:
        return [one for task in self.tasks for one in task.interrupts]

    def said(self, after: str) -> list[GraphMessage]:
        """Return what the graph has said after the message with an id or, else, after the last of a human."""
        values: Any = self.values
        try:
            found = msgspec.convert(values["messages"], list[GraphMessage])
        except (TypeError, KeyError, msgspec.ValidationError):
            return []
        places = [n for n, one in enumerate(found) if one.id == after]
        places = places or [n for n, one in enumerate(found) if one.type == "human"]
        return [one for one in found[places[-1] + 1 if places else 0 :] if one.is_said]

    def answer(self, after: str) -> str | None:
        """Return the last text that the graph has said after a message."""
        return next((one.text for one in reversed(self.said(after)) if one.text), None)

    def output(self) -> Any:
        """Return the structured answer, or what a graph without messages has made."""
        values: Any = self.values
        if not isinstance(values, dict):
            return values
        known = cast("dict[str, Any]", values)
        return known.get("structured_response") if "messages" in known else known or None

    def usage(self, after: str) -> tuple[Usage, int]:
        """Return the usage that messages report, and the number of those that the graph has said."""
        total, said = Usage(), self.said(after)
        for one in said:
            with suppress(msgspec.ValidationError):
                total += replace(msgspec.convert(one.usage_metadata, Usage), requests=1)
        return total, len(said)


decode_run = msgspec.json.Decoder(GraphRun).decode
decode_runs = msgspec.json.Decoder(list[GraphRun]).decode
decode_state = msgspec.json.Decoder(GraphState).decode


_decode_piece = msgspec.json.Decoder(tuple[GraphMessage, _About]).decode


def said_in(data: bytes) -> str:
    """Return the text that an event `messages` adds; only that of the graph itself, not of graphs within it."""
    message, about = _decode_piece(data)
    return message.text if message.is_said and "|" not in about.langgraph_checkpoint_ns else ""


def error_in(data: bytes) -> str:
    """Return the words of an event `error`."""
    given: Any = msgspec.json.decode(data)
    if not isinstance(given, dict):
        return str(given)
    known = cast("dict[str, Any]", given)
    return ": ".join([str(known[name]) for name in ("error", "message") if known.get(name)])


def run_body(
    assistant: str,
    run_id: str,
    *,
    texts: Sequence[str] = (),
    answers: Mapping[str, Any] | None = None,
    question: int = 0,
) -> bytes:
    """Return the body that starts a run with texts of the user, or continues an interrupted one with answers by interrupt
    id. The last text has the id of the run."""
    body: dict[str, Any] = {
        "assistant_id": assistant,
        "metadata": {RUN_ID: run_id, QUESTION: question},
        "stream_mode": ["messages-tuple"],
        "stream_resumable": True,
        "on_disconnect": "continue",
        "if_not_exists": "create",
        "multitask_strategy": "enqueue",
    }
    if answers is None:
        said: list[dict[str, Any]] = [{"role": "user", "content": text} for text in texts]
        said[-1]["id"] = run_id
        body["input"] = {"messages": said}
    else:
        only = len(answers) == 1 and not next(iter(answers))
        body["command"] = {"resume": next(iter(answers.values())) if only else dict(answers)}
    return to_json_bytes(body)
