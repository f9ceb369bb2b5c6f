"""What a log says of the past of its runs."""

from __future__ import annotations

from retinue.core.events import ChildStarted, Event, InferenceFinished, RunFinished, RunStarted
from retinue.core.lifecycle import RunStatus
from retinue.core.messages import Message
from retinue.core.runs import Usage
from retinue.loop.past import Clock, Spent


def test_time_in_which_nobody_was_at_work_does_not_count() -> None:
    clock = Clock([(4.0, 10.0), (12.0, 20.0)])
    clock.follow(RunStarted(thread_id="t", messages=(), run_id="r", at=1.0))
    assert clock.used("r", 21.0) == 3.0 + 2.0 + 1.0
    assert clock.used("unknown", 21.0) == 0.0


def test_time_a_human_took_does_not_count_and_no_time_is_left_out_twice() -> None:
    clock = Clock([(3.0, 8.0)])
    told: list[Event] = [
        RunStarted(thread_id="t", messages=(), run_id="r", at=1.0),
        RunFinished(status=RunStatus.SUSPENDED, termination="suspended", run_id="r", at=3.0),
        RunStarted(thread_id="t", messages=(), run_id="r", at=9.0),
    ]
    for event in told:
        clock.follow(event)
    assert clock.used("r", 10.0) == 2.0 + 1.0


def asked(run_id: str, tokens: int) -> InferenceFinished:
    used = Usage(requests=1, input_tokens=tokens)
    said = Message.assistant("")
    return InferenceFinished(step=1, message=said, model="m", usage=used, run_id=run_id, parent_run_id="above")


def started(run_id: str, call_id: str, child: str) -> ChildStarted:
    return ChildStarted(call_id=call_id, child_run_id=child, child_agent="a", child_ns=(), run_id=run_id)


def test_what_children_used_counts_once_and_at_any_depth() -> None:
    spent = Spent()
    told: list[Event] = [
        started("r", "c1", "child"),
        asked("child", 1),
        started("child", "c2", "grandchild"),
        asked("grandchild", 10),
        RunFinished(status=RunStatus.COMPLETED, termination="natural", run_id="grandchild"),
        RunFinished(status=RunStatus.COMPLETED, termination="natural", run_id="child"),
        started("r", "c3", "goes on"),
        asked("goes on", 100),
    ]
    for event in told:
        spent.follow(event)
    count, usages = spent.take_call("r", "c1")
    assert (count, [usage.input_tokens for usage in usages]) == (2, [1, 10])
    assert spent.take_call("r", "c1") == (0, [])
    assert spent.take_call("r", "c3") == (0, [])
