"""Events to text: the tree, its nesting, and what is done to the text of others."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from msgspec.structs import replace

from retinue import Event, Message, RunStatus, ToolCall, ToolCallStatus, ToolResult, Usage
from retinue.cli.outline import ShownTree, tree_lines
from retinue.cli.text import arguments, clean, duration, headline, one_line, reply_of
from retinue.cli.view import JsonView, PlainView
from retinue.core.events import (
    CachePrefixChanged,
    Compacted,
    ErrorRaised,
    Handoff,
    MessagesSnapshot,
    Namespace,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TaskUpdated,
    TextDelta,
    ToolCallFinished,
    ToolCallReady,
    ToolCallResumed,
    ToolCallStarted,
    ToolCallStreamDelta,
    UnknownEvent,
)

BOSS: Namespace = ()
FIRST: Namespace = ("tools:c1",)
SECOND: Namespace = ("tools:c1~2",)
DEEP: Namespace = ("tools:c1", "tools:d1")
AGENTS: dict[Namespace, str] = {BOSS: "boss", FIRST: "helper", SECOND: "helper", DEEP: "clerk"}


def event(kind: type[Event], ns: Namespace = BOSS, **fields: Any) -> Event:
    above = f"run{ns[:-1]}" if ns else None
    return kind(run_id=f"run{ns}", parent_run_id=above, agent=AGENTS[ns], ns=ns, at=fields.pop("at", 1.0), **fields)


def call(ns: Namespace, call_id: str, name: str, **args: Any) -> list[Event]:
    started = event(ToolCallStarted, ns, call_id=call_id, tool_name=name)
    return [started, event(ToolCallReady, ns, call_id=call_id, tool_name=name, args=args)]


def result(ns: Namespace, call_id: str, name: str, text: str, status: str = "succeeded") -> Event:
    message = Message.tool(text, tool_call_id=call_id)
    fields = {"status": ToolCallStatus(status), "result": ToolResult(), "message": message, "at": 1.5}
    return event(ToolCallFinished, ns, call_id=call_id, tool_name=name, **fields)


def begin(ns: Namespace, task: str) -> list[Event]:
    return [event(RunStarted, ns, thread_id="t", messages=(Message.user(task),)), event(StepStarted, ns, step=1)]


def end(ns: Namespace, status: RunStatus = RunStatus.COMPLETED) -> list[Event]:
    return [event(StepFinished, ns, step=1), event(RunFinished, ns, status=status, termination="natural", at=3.0)]


FAMILY = [
    *begin(BOSS, "Find out."),
    event(ReasoningDelta, delta="Ask "),
    event(ReasoningDelta, delta="two."),
    event(TextDelta, delta="I ask.\n"),
    *call(BOSS, "c1", "task", description="look"),
    *begin(FIRST, "look left"),
    *begin(SECOND, "look right"),
    *call(FIRST, "d1", "grep_files", pattern="x"),
    *begin(DEEP, "count"),
    event(TextDelta, DEEP, delta="not streamed"),
    *end(DEEP),
    result(FIRST, "d1", "grep_files", "a.md:1: x\na.md:2: x"),
    event(ErrorRaised, FIRST, message="a hiccup"),
    *end(FIRST),
    event(Handoff, SECOND, to_agent="clerk"),
    *end(SECOND, RunStatus.FAILED),
    result(BOSS, "c1", "task", "nothing", "failed"),
    event(UnknownEvent, original={}),
    *end(BOSS),
]

SHOWN = """\
boss: Find out.
  step 1
    Ask two.

I ask.


      helper: look left
        step 1 of helper
      helper#2: look right
        step 1 of helper#2
            clerk: count
              step 1 of clerk
              clerk completed: 1 step, 0 calls, 0 tokens, 2.0 s
          helper: ok     grep_files(pattern="x")  500 ms  a.md:1: x (+1 line)
        note: a hiccup
        helper completed: 1 step, 1 call, 0 tokens, 2.0 s
        note: handed over to clerk
        helper#2 failed: 1 step, 0 calls, 0 tokens, 2.0 s
    failed task(description="look")  500 ms  nothing
completed: 1 step, 2 calls, 0 tokens, 2.0 s
"""


def test_children_are_nested_by_ns() -> None:
    tree = ShownTree()
    for one in FAMILY:
        tree(one)
    assert tree.root is not None
    (task,) = tree.root.step.calls.values()
    assert [child.label for child in task.children.values()] == ["helper", "helper#2"]
    (grep,) = task.children["run('tools:c1',)"].step.calls.values()
    assert [child.label for child in grep.children.values()] == ["clerk"]
    assert [one.tool for one in tree.root.walk_calls()] == ["task", "grep_files"]


def test_the_plain_view_shows_the_whole_tree() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    for one in FAMILY:
        view.show(one)
    assert stream.getvalue() == SHOWN


def test_retries_are_shown_when_they_happen() -> None:
    retry = event(
        ErrorRaised, FIRST, message="529 from the server", code="overloaded", retry_model="a:m", retry_delay=2
    )
    again = event(ErrorRaised, message="it broke", code="broken", retry_model="b:m", dropped_message_id="m1")
    stream = io.StringIO()
    view = PlainView(stream)
    for one in [*begin(BOSS, "Find out."), *call(BOSS, "c1", "task"), *begin(FIRST, "look"), retry, again]:
        view.show(one)
    assert "retrying with a:m in 2.0 s: 529 from the server" in stream.getvalue()
    assert "retrying with b:m; the answer starts again: it broke" in stream.getvalue()


def test_a_background_task_is_one_sub_agent() -> None:
    task = TaskUpdated(
        run_id="task1", parent_run_id="run()", agent="helper", ns=FIRST, task_id="task1", status="PENDING"
    )
    started = [
        *begin(BOSS, "Find out."),
        *call(BOSS, "c1", "agent_spawn"),
        task,
        result(BOSS, "c1", "agent_spawn", "ok"),
    ]
    stream = io.StringIO()
    view = PlainView(stream)
    view.recall(task)
    for one in [*started, *begin(FIRST, "look"), *end(FIRST), *end(BOSS)]:
        view.show(one)
    assert re.findall(r"(\S+) +completed:", stream.getvalue()) == ["helper"]


def test_events_without_a_beginning_are_shown_all_the_same() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    view.show(event(ToolCallStreamDelta, DEEP, call_id="z", tool_name="t", delta="out"))
    view.show(result(DEEP, "z", "t", "done"))
    assert "clerk: ok     t()" in stream.getvalue()


WAITS = [
    *begin(BOSS, "Write it."),
    *call(BOSS, "c1", "write_file", path="a.md"),
    result(BOSS, "c1", "write_file", "May I?", "suspended"),
    *end(BOSS, RunStatus.SUSPENDED),
]
ASKED = Message.assistant("", tool_calls=(ToolCall("c1", "write_file", {"path": "a.md"}),))
GOES_ON = [
    event(RunStarted, thread_id="t", continues=True, at=4.0),
    event(MessagesSnapshot, messages=(Message.user("Write it."), ASKED), at=4.0),
    event(StepStarted, step=1, at=4.0),
    event(ToolCallResumed, call_id="c1", tool_name="write_file", at=4.0),
]


def test_a_run_that_goes_on_has_its_steps_and_calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 8.0)
    tree = ShownTree()
    for one in [*WAITS, *GOES_ON]:
        tree(one)
    assert tree.root is not None
    assert list(tree_lines(tree.root)) == [
        "boss: Write it.",
        "  step 1",
        '    running write_file(path="a.md")',
        "running: 1 step, 1 call, 7.0 s so far",
    ]
    for one in [result(BOSS, "c1", "write_file", "written"), event(StepStarted, step=2), *end(BOSS)]:
        tree(one)
    assert list(tree_lines(tree.root))[2:] == [
        '    ok     write_file(path="a.md")  500 ms  written',
        "  step 2",
        "completed: 2 steps, 1 call, 0 tokens, 2.0 s",
    ]


def test_who_sees_only_that_a_run_goes_on_sees_what_was_asked() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    for one in [*GOES_ON, result(BOSS, "c1", "write_file", "written"), *end(BOSS)]:
        view.show(one)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "boss: (goes on)"
    assert lines[2].startswith('    ok     write_file(path="a.md")  ')


def test_what_is_recalled_is_not_shown_and_not_forgotten() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    for one in [*begin(BOSS, "Write it."), event(ReasoningDelta, delta="I will."), *call(BOSS, "c1", "ask", x=1)]:
        view.recall(one)
    assert stream.getvalue() == ""
    for one in [result(BOSS, "c1", "ask", "written"), *end(BOSS)]:
        view.show(one)
    assert stream.getvalue().splitlines() == [
        "    ok     ask(x=1)  500 ms  written",
        "completed: 1 step, 1 call, 0 tokens, 2.0 s",
    ]


def test_what_a_cache_had_and_what_a_compaction_did_are_shown() -> None:
    stream, usage = io.StringIO(), Usage(requests=2, input_tokens=9000, cached_tokens=8000, output_tokens=10)
    view = PlainView(stream)
    *_, last = end(BOSS)
    compacted = event(Compacted, tokens_before=6400, tokens_after=3900, kept_from="m1", usage=Usage(input_tokens=4000))
    changed = event(CachePrefixChanged, cause="compacted", tokens=3900)
    for one in [*begin(BOSS, "Write it."), compacted, changed, replace(last, usage=usage)]:
        view.show(one)
    assert stream.getvalue().splitlines()[2:] == [
        "  note: compacted: 6,400 → 3,900 tokens, which cost 4,000",
        "  note: the cached prefix has changed: compacted",
        "completed: 1 step, 0 calls, 9,010 tokens (8,000 of them cached), 2.0 s",
    ]


def test_json_holds_what_utf8_cannot() -> None:
    stream = io.StringIO()
    JsonView(stream).show(event(TextDelta, delta="half \ud83d"))
    assert '"half \ufffd"' in stream.getvalue()


def test_json_escapes_what_a_terminal_obeys() -> None:
    stream, said = io.StringIO(), "a\x9b31m\u202eb\x7f\u2028\u2066\U000e0041\x1b[0m ünïcode 灯\n"
    JsonView(stream).show(event(TextDelta, delta=said))
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["delta"] == said
    assert line == clean(line)
    assert r"\u009b31m\u202eb\u007f\u2028\u2066\udb40\udc41\u001b[0m ünïcode 灯\n" in line


def test_clean_text_obeys_nothing() -> None:
    assert clean("a\x1b[31mb\x00\x7f\x9b\r\n\tc") == "a␛[31mb␀␡\ufffd\n    c"
    assert clean("plain ünïcode 灯 👩‍🚀") == "plain ünïcode 灯 👩‍🚀"
    assert clean("\u202eevil\ud800") == "\ufffdevil\ufffd"


def test_lines_are_shortened() -> None:
    assert one_line("a\n b\tc") == "a b c"
    assert one_line("x" * 200, 10) == "xxxxxxx..."
    assert one_line(" " * 5000 + "late", 10) == "..."
    assert headline("") == "(nothing)"
    assert headline("\n 1\t\n 2\ttext\n") == "2 text (+1 line)"
    assert arguments({"path": "a\x1b", "limit": 3, "deep": {"k": ["v"]}}) == "path=\"a␛\", limit=3, deep={'k': ['v']}"
    assert len(arguments({"a": "x" * 500, "b": "y" * 500})) <= 72


def test_of_a_sub_agents_answer_its_reply_is_shown() -> None:
    spawned = "agent_key: agent:a:1\nagent_id: a\nsession_id: sub-1\n"
    assert reply_of(f"{spawned}status: ok\nreply:\nAll is well.\nIndeed.") == "All is well.\nIndeed."
    assert reply_of(f"{spawned}status: error\nerror: it broke") == "status: error\nerror: it broke"
    assert reply_of(f"{spawned}status: accepted") == "status: accepted"
    assert reply_of("a.md:1: agent_key: x") == "a.md:1: agent_key: x"


def test_durations() -> None:
    assert [duration(seconds) for seconds in (-1, 0.0123, 2.345, 125)] == ["0 ms", "12 ms", "2.3 s", "2 min 5 s"]
