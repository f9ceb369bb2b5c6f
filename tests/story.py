"""Events as short lines, so that a test can show a whole run at a glance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from retinue import Event

STAMP = ("seq", "at", "run_id", "parent_run_id", "agent", "ns")
SHOWN = {
    "run_started": (),
    "step_started": ("step",),
    "step_finished": ("step",),
    "text_delta": ("delta",),
    "reasoning_delta": ("delta",),
    "inference_waiting": ("reason",),
    "inference_finished": ("stop_reason",),
    "tool_call_started": ("call_id", "tool_name"),
    "tool_call_args_delta": ("call_id", "delta"),
    "tool_call_ready": ("call_id", "args"),
    "tool_call_finished": ("call_id", "status", "message"),
    "tool_call_stream_delta": ("call_id", "delta"),
    "state_delta": ("revision", "delta", "call_id"),
    "state_snapshot": ("state",),
    "activity_snapshot": ("call_id", "activity_type", "content"),
    "activity_delta": ("call_id", "activity_type", "delta"),
    "tool_call_resumed": ("call_id",),
    "messages_snapshot": (),
    "handoff": ("to_agent", "reason"),
    "child_started": ("call_id", "child_agent"),
    "child_finished": ("call_id", "status"),
    "custom": ("data",),
    "error": ("message", "code", "fatal"),
    "run_finished": ("status", "termination", "response", "error"),
}


def story(events: Iterable[Event]) -> list[str]:
    """One line an event: its kind and what matters of it."""
    return [" ".join([event.kind, *(_show(getattr(event, name)) for name in SHOWN[event.kind])]) for event in events]


def _show(value: Any) -> str:
    text = getattr(value, "text", None)
    if text is not None and not isinstance(value, str):
        return _show(text)
    return str(value) if isinstance(value, str) and value.replace("_", "").isalnum() else repr(value)


def check_order(events: Sequence[Any]) -> None:
    """What holds for every run: numbered without gaps, in time, begun first and ended last."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert all(a.at <= b.at for a, b in zip(events, events[1:], strict=False))
    assert events[0].kind == "run_started"
    assert events[-1].kind == "run_finished"
    assert {event.run_id for event in events} == {events[0].run_id}
    steps = [event for event in events if event.kind in ("step_started", "step_finished")]
    assert [event.kind for event in steps] == ["step_started", "step_finished"] * (len(steps) // 2)
    begun = [event.call_id for event in events if event.kind == "tool_call_ready"]
    ended = [event.call_id for event in events if event.kind == "tool_call_finished"]
    assert len(ended) == len(set(ended))
    assert set(begun) <= set(ended)
