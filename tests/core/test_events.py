"""Events and messages as records: flat, frozen, and the same after a trip through JSON."""

from __future__ import annotations

import json
import pickle
from typing import Any

import msgspec
import pytest

from retinue import Agent, Event, FilePart, ImagePart, Message, Runtime, ToolContext, tool
from retinue.core.events import EVENT_TYPES
from retinue.events import UnknownEvent, event_from_json, event_to_json
from retinue.messages import ReasoningPart, Role, TextPart
from retinue.testing import ScriptedModel, call, say, think

KINDS = """run_started run_finished step_started step_finished text_delta reasoning_delta tool_call_started
tool_call_args_delta tool_call_ready tool_call_finished tool_call_stream_delta tool_call_resumed inference_waiting inference_finished
state_snapshot state_delta messages_snapshot activity_snapshot activity_delta child_started child_finished task_updated
handoff compacted cache_prefix_changed budget_warning message_added message_dropped custom error""".split()


def test_the_kinds_are_the_documented_ones() -> None:
    assert set(EVENT_TYPES) == {*KINDS, "unknown"}
    for kind, event_type in EVENT_TYPES.items():
        assert event_type.kind == kind
        assert set(Event.__struct_fields__) <= set(event_type.__struct_fields__)


async def test_every_event_of_a_run_survives_json_and_pickling() -> None:
    @tool
    async def work(ctx: ToolContext) -> dict[str, int]:
        """Work."""
        ctx.report_progress("running", progress=0.5)
        ctx.report_activity_delta("x", {"op": "add"})
        ctx.stream_output("…")
        ctx.emit({"a": [1, None]})
        return {"n": 1}

    model = ScriptedModel([[think("hm"), call("work", id="c1")], say("ok"), say("again")])
    runtime = Runtime([Agent("a", model, "Be nice.", [work])])
    events = [e async for e in runtime.stream("a", "go", thread_id="t")]
    events += [e async for e in runtime.stream("a", "more", thread_id="t")]
    assert len({e.kind for e in events}) == 16
    for event in events:
        data = event_to_json(event)
        assert data["kind"] == event.kind
        assert event_from_json(json.loads(json.dumps(data))) == event
        assert pickle.loads(pickle.dumps(event)) == event
        with pytest.raises(AttributeError):
            event.seq = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_an_unknown_kind_is_kept_as_it_was() -> None:
    data: dict[str, Any] = {"kind": "from_the_future", "seq": 3, "run_id": "r", "ns": ["tools:c1"], "shape": {"a": 1}}
    event = event_from_json(data)
    assert isinstance(event, UnknownEvent)
    assert (event.seq, event.run_id, event.ns, event.original) == (3, "r", ("tools:c1",), data)


def test_messages() -> None:
    parts = [TextPart("a"), ReasoningPart("no"), ImagePart(url="u"), FilePart(data="ZA==", name="f"), TextPart("b")]
    message = Message.user(parts)
    assert message.text == "ab"
    assert message.role == "user"
    assert message.role is Role.USER
    assert "ab" in str(message)
    assert Message.assistant("").parts == ()
    assert Message.tool("x", tool_call_id="c", name="t").tool_call_id == "c"
    long = Message.system("word " * 10_000)
    assert long.text in str(long)
    decoded = msgspec.json.decode(msgspec.json.encode(message), type=Message)
    assert decoded == message
