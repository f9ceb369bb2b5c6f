"""Ends: what must be the same when a run was cut and continued, and what must hold for every log."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from msgspec import Struct, field

from retinue.core.events import ToolCallFinished
from retinue.core.messages import Message, ToolCall
from retinue.core.results import ToolCallStatus
from retinue.log.receipts import receipt_of
from retinue.log.state import LogState, RunState

from .hooks import BEFORE, COUNT, HIDDEN, OWNER, THREAD, Bump
from .program import Plan, World, key_of
from .tape import End, Tape

UNKNOWN = "interrupted, outcome unknown"
NEWS = "<task-notification>"
_SECRET = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{20}|\d{4}-\d\d-\d\dT[\d:.]+Z")


class Cut(Struct):
    """What a cut leaves: calls whose outcome is unknown, children that nobody continues, and what is done for good."""

    unknown: set[str] = field(default_factory=set)
    rounds: Counter[str] = field(default_factory=Counter)
    """How often hooks came before each call, in attempts that have ended."""
    is_unsure: bool = False
    """How often they came is not known, because an earlier cut left a call whose outcome is unknown."""
    left: set[str] = field(default_factory=set)
    """The labels of the runs below an unknown call."""
    ended: set[str] = field(default_factory=set)
    """Tool bodies that have ended, as key#number."""
    done: set[str] = field(default_factory=set)
    """Effects and actions that are done."""


def cut_of(tape: Tape, cut: int, world: World) -> Cut:
    """What a cut leaves."""
    found, state = Cut(), tape.state(cut)
    for run in state.runs.values():
        if run.identity.parent_run_id is None:
            _visit(state, run, found, world)
    _scan(tape, cut, found, world)
    found.rounds = rounds(tape, cut)
    return found


def rounds(tape: Tape, cut: int | None = None) -> Counter[str]:
    """Count how often hooks came before each call and admitted it, in the attempts that have ended by then."""
    found: Counter[str] = Counter()
    admitted: set[tuple[str, str]] = set()
    asked = _asked(tape, cut)
    for row in tape.rows[:cut]:
        event, private = row.event, row.private
        if private is not None and private.kind == "entered":
            admitted.add((private.run_id, private.call_id))
        if isinstance(event, ToolCallFinished) and (call := (event.run_id, event.call_id)) in admitted:
            admitted.remove(call)
            found[asked[call]] += 1
    return found


def _visit(tree: LogState, run: RunState, found: Cut, world: World) -> None:
    for call in run.open():
        key = key_of(call.call.args, call.call.name)
        plan = world.calls.get(key)
        again = plan is None or plan.runs_again or (call.resumes > 0 and call.decision is None)
        if call.status is ToolCallStatus.RUNNING and call.entered and not again:
            found.unknown.add(key)
            for child in plan.children if plan else ():
                found.left.update(_labels(child))
            continue
        for ref in call.children.values():
            if ref.run_id in tree.runs and not tree.runs[ref.run_id].request.detached:
                _visit(tree, tree.runs[ref.run_id], found, world)
    for child in tree.children_of(run):
        if child.request.detached:
            _visit(tree, child, found, world)


def _labels(plan: Plan) -> set[str]:
    from .program import plans_of

    return {one.label for one in plans_of(plan)}


def _scan(tape: Tape, cut: int, found: Cut, world: World) -> None:
    jobs: dict[tuple[str, int], str] = {}
    for row in tape.rows[:cut]:
        event, private = row.event, row.private
        if isinstance(event, ToolCallFinished):
            _end(event, tape, cut, found, world)
        if private is None:
            continue
        run_id = event.run_id if event is not None else private.run_id
        for job in private.jobs:
            jobs[run_id, job.number] = _job(job)
        if private.done:
            found.done.add(jobs[run_id, private.done])


def _job(job: Any) -> str:
    """What a job does, as a world notes it."""
    given = (
        job.given
        if isinstance(job.given, dict)
        else {name: getattr(job.given, name) for name in job.given.__struct_fields__}
    )
    if job.what == "effect":
        return f"mail {given['key']}"
    return f"bump {given['key']} {Bump(**given).again}"


def _end(event: ToolCallFinished, tape: Tape, cut: int, found: Cut, world: World) -> None:
    ticket = event.result.suspension
    if event.status is ToolCallStatus.SUSPENDED:
        if ticket is not None and ticket.parameters and ticket.parameters.get("n", -1) >= 0:
            found.ended.add(f"{ticket.parameters['key']}#{ticket.parameters['n']}")
        return
    key = _asked(tape, cut).get((event.run_id, event.call_id), "")
    if event.message.text.startswith(UNKNOWN):
        found.unknown.add(key)
        for child in world.calls[key].children if key in world.calls else ():
            found.left.update(_labels(child))
        found.is_unsure = True
    found.ended.update(f"{key}#{number}" for number in range(4))


def _asked(tape: Tape, cut: int | None) -> dict[tuple[str, str], str]:
    asked: dict[tuple[str, str], str] = {}
    for row in tape.rows[:cut]:
        message: Message | None = getattr(row.event, "message", None) if row.event is not None else None
        if isinstance(message, Message):
            asked.update({(row.event.run_id, made.id): _key(made) for made in message.tool_calls})  # type: ignore[union-attr]
    return asked


def _key(made: ToolCall) -> str:
    return key_of(made.args, made.name)


# --- comparing


def label_of(run: RunState) -> str:
    """Which plan a run follows."""
    said = [m.text for m in run.messages[run.own_from :] if m.role == "user" and m.text.startswith("do ")]
    return said[0][3:]


def by_label(tree: LogState) -> dict[str, RunState]:
    return {label_of(run): run for run in tree.runs.values()}


def bare(text: Any) -> str:
    """Text without ids and times that are made anew."""
    return _SECRET.sub("…", str(text))


def texts(run: RunState, unknown: set[str]) -> list[tuple[str, ...]]:
    """A conversation without ids; what is unknown reads the same everywhere."""
    asked: dict[str, str] = {}
    said: list[tuple[str, ...]] = []
    for message in run.messages:
        for made in message.tool_calls:
            asked[made.id] = _key(made)
        key = asked.get(message.tool_call_id or "", "")
        if message.role == "user" and message.text.startswith(NEWS):
            continue  # when a session hears of its tasks depends on the moment
        text = UNKNOWN if key in unknown else message.text
        for call_id, one in asked.items():
            text = text.replace(call_id, one)
        text = bare(text)
        if message.role == "tool" and message.text.startswith(UNKNOWN) and key not in unknown:
            text = f"{key} must be known"
        said.append((message.role.value, key, text))
    return said


def same_end(whole: End, other: End, cut: Cut) -> None:
    """Nobody can tell from what it came to that a process was lost, but by what is unknown."""
    ours, theirs = by_label(whole.tree), by_label(other.tree)
    left = cut.left | _repeats(whole.world)
    assert set(theirs) - left == set(ours) - left
    for label, run in ours.items():
        if label in left:
            continue
        again = theirs[label]
        assert texts(again, cut.unknown) == texts(run, cut.unknown), label
        assert (again.status, again.ending, again.step) == (run.status, run.ending, run.step), label
        assert again.identity.agent == run.identity.agent
        assert again.handoffs == run.handoffs
        assert again.output == run.output
        assert again.response() == run.response()
        same_values(run, again, cut, whole)
        if not cut.left and not _repeats(whole.world):
            assert again.total == run.total, label
            assert (again.total_steps, again.total_children) == (run.total_steps, run.total_children), label
            if not cut.unknown:
                assert bare(receipt_of(other.tree, again)) == bare(receipt_of(whole.tree, run)), label
    assert other.result.status == whole.result.status
    assert other.result.response == whole.result.response
    assert other.result.termination == whole.result.termination
    assert {task.status for task in other.tree.tasks.values()} == {task.status for task in whole.tree.tasks.values()}
    same_work(whole, other, cut)


def _repeats(world: World) -> set[str]:
    """The labels of runs that are repeated when an attempt fails: how often depends on where the cut is."""
    tries = [child for call in world.calls.values() if call.does == "tries" for child in call.children]
    return {label for child in tries for label in _labels(child)}


def same_values(run: RunState, again: RunState, cut: Cut, whole: End) -> None:
    """State is that of an undisturbed run, without what unknown calls would have written."""
    expected, world = dict(run.values), whole.world
    asked = {made.id: _key(made) for message in run.messages for made in message.tool_calls}
    for message in run.messages:
        if asked.get(message.tool_call_id or "") in cut.unknown and message.text.startswith("cancelled"):
            return  # no hook saw its end, but hooks see that of a call whose outcome is unknown
    for place, message in enumerate(run.messages):
        for made in message.tool_calls:
            key = _key(made)
            if key in cut.unknown and place >= run.own_from:
                _take_back(expected, key, run, cut, whole)
            elif key in cut.unknown:  # of an earlier run on the same thread
                _drop(expected, key)
    for name in {*expected, *again.values}:
        if name.startswith("p.") and not (name == BEFORE.name and cut.is_unsure):
            assert again.values.get(name) == expected.get(name), (name, label_of(run))
    if not cut.unknown and world.repository is None:  # what is told of tasks is a commit of its own
        assert again.revision == run.revision


def _take_back(values: dict[str, Any], key: str, run: RunState, cut: Cut, whole: End) -> None:
    call = whole.world.calls[key]
    asked = {made.id: _key(made) for message in run.messages for made in message.tool_calls}
    (text,) = [m.text for m in run.messages if m.role == "tool" and asked[m.tool_call_id or ""] == key]
    if not cut.is_unsure and (more := rounds(whole.tape)[key] - cut.rounds[key]):
        _reduce(values, BEFORE.name, more)
    if text.startswith((f"{key} done", f"{key} error", f"{key}: ")):
        _reduce(values, COUNT.name, 1)
        _reduce(values, HIDDEN.name, 1)
        _drop(values, key)
        assert not call.claims, OWNER.name


def _drop(values: dict[str, Any], key: str) -> None:
    """Take back what a call wrote of its thread."""
    left = [one for one in values.pop(THREAD.name, ()) if one != key]
    if left:
        values[THREAD.name] = left


def _reduce(values: dict[str, Any], name: str, by: int) -> None:
    values[name] -= by
    if not values[name]:
        del values[name]


def same_work(whole: End, other: End, cut: Cut) -> None:
    """What had ended is not done again; all the rest is done once."""
    left = {call for call, label in whole.world.label_of.items() if label in cut.left | _repeats(whole.world)}
    for what, times in whole.world.ran.items():
        key = what.partition("#")[0]
        call = whole.world.calls[key]
        if key in left or call.children:
            if key not in left and what in cut.ended:
                assert not other.world.ran[what], f"{what} was done again"
            continue
        assert times == 1, what
        expected = 0 if what in cut.ended or key in cut.unknown else 1
        assert other.world.ran[what] == expected, f"{what} ran {other.world.ran[what]} times"
    for what in whole.world.did:
        label, key = _source(what, whole.world)
        if label in cut.left | _repeats(whole.world):
            continue
        if what in cut.done:
            assert not other.world.did[what], f"{what} was done again"
        elif key not in cut.unknown:
            assert other.world.did[what] == 1, f"{what} was done {other.world.did[what]} times"


def _source(what: str, world: World) -> tuple[str, str]:
    """The run that asked for an effect or an action, and the call, where it was one."""
    name = what.removesuffix(" True").removesuffix(" False").split(" ")[-1]
    return (name.split("/")[0], "") if "/" in name else (world.label_of[name], name)


# --- what holds for every log


def check_log(end: End) -> None:
    """No hole, and every run, leg, step and call begins once and ends once."""
    events = end.events
    assert not end.problems
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert all(run.is_over for run in end.tree.runs.values())
    assert not end.tree.has_open_tasks()
    runs: dict[str, list[Any]] = {}
    for event in events:
        if event.kind != "task_updated":
            runs.setdefault(event.run_id, []).append(event)
    for own in runs.values():
        legs = [event.kind for event in own if event.kind in ("run_started", "run_finished")]
        assert legs == ["run_started", "run_finished"] * (len(legs) // 2), legs
        assert own[0].kind == "run_started"
        assert own[-1].kind == "run_finished"
        assert len({event.ns for event in own}) == 1
        _check_calls(own)
        inferences = [event.step for event in own if event.kind == "inference_finished"]
        assert inferences == sorted(set(inferences))
    assert len({own[0].ns for own in runs.values()}) == len(runs), "two runs share a namespace"
    _check_children(end, events)


def _check_calls(own: list[Any]) -> None:
    begun = Counter(event.call_id for event in own if event.kind == "tool_call_started")
    ready = Counter(event.call_id for event in own if event.kind == "tool_call_ready")
    ended = Counter(
        event.call_id
        for event in own
        if event.kind == "tool_call_finished" and event.status is not ToolCallStatus.SUSPENDED
    )
    assert set(begun.values()) | set(ready.values()) | set(ended.values()) <= {1}, (begun, ready, ended)
    assert set(ended) == set(begun), (ended, begun)


def _check_children(end: End, events: list[Any]) -> None:
    started = Counter(event.child_run_id for event in events if event.kind == "child_started")
    ended = Counter(
        event.child_run_id for event in events if event.kind == "child_finished" and event.status.is_terminal
    )
    assert set(started.values()) <= {1}, started
    assert set(ended.values()) <= {1}, ended
    for run in end.tree.runs.values():
        if run.identity.parent_run_id is not None and not run.request.detached:
            assert run.run_id in ended, f"the end of {run.run_id} was not told to its parent"
