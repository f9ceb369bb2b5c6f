"""The tree of agents as rows, and what is printed once: at any width, in ASCII, with many children."""

from __future__ import annotations

from typing import Any

import pytest
from inline_snapshot import snapshot

from retinue import Event, Message, RunStatus, ToolCallStatus, ToolResult
from retinue.cli.board import Board, text_of
from retinue.cli.columns import cells, clock, cut, short_count, wrapped
from retinue.cli.questions import Question, change_of, detail_rows, question_rows
from retinue.cli.rows import Look, plain
from retinue.core.events import (
    Compacted,
    ErrorRaised,
    InferenceFinished,
    InferenceWaiting,
    Namespace,
    RunFinished,
    RunStarted,
    StateDelta,
    StepFinished,
    StepStarted,
    TaskUpdated,
    TextDelta,
    ToolCallFinished,
    ToolCallReady,
    ToolCallStarted,
)
from retinue.core.results import SuspendTicket
from retinue.core.runs import Usage

ROOT: Namespace = ()


def made(kind: type[Event], ns: Namespace = ROOT, agent: str = "planner", at: float = 10.0, **fields: Any) -> Event:
    above = None if not ns else f"run{'/'.join(ns[:-1])}"
    return kind(run_id=f"run{'/'.join(ns)}", parent_run_id=above, agent=agent, ns=ns, at=at, seq=1, **fields)


def begun(ns: Namespace, agent: str, task: str, at: float = 10.0) -> list[Event]:
    return [
        made(RunStarted, ns, agent, at, thread_id="t", messages=(Message.user(task),)),
        made(StepStarted, ns, agent, at, step=1),
    ]


def called(ns: Namespace, agent: str, call_id: str, tool: str, at: float = 11.0, **args: Any) -> list[Event]:
    return [
        made(ToolCallStarted, ns, agent, at, call_id=call_id, tool_name=tool, message_id="m"),
        made(ToolCallReady, ns, agent, at, call_id=call_id, tool_name=tool, args=args),
    ]


def answered(
    ns: Namespace, agent: str, call_id: str, tool: str, text: str, status: str = "succeeded", **more: Any
) -> Event:
    told = Message.tool(text, tool_call_id=call_id)
    result = more.pop("result", ToolResult())
    fields = {"status": ToolCallStatus(status), "result": result, "message": told, **more}
    return made(ToolCallFinished, ns, agent, 12.0, call_id=call_id, tool_name=tool, **fields)


def used(ns: Namespace, agent: str, tokens: int, cost: float) -> Event:
    usage = Usage(input_tokens=tokens, cost=cost)
    return made(InferenceFinished, ns, agent, 11.0, step=1, message=Message.assistant(""), usage=usage)


def ended(
    ns: Namespace, agent: str, response: str, at: float = 31.0, status: RunStatus = RunStatus.COMPLETED
) -> list[Event]:
    return [made(RunFinished, ns, agent, at, status=status, termination="natural", response=response)]


def child(number: int, agent: str, task: str = "look") -> tuple[Namespace, list[Event]]:
    ns = (f"tools:c{number}",)
    return ns, [*called(ROOT, "planner", f"c{number}", "task", description=task), *begun(ns, agent, task)]


def three(board: Board) -> None:
    reader, first = child(1, "reader", "Read the helpers")
    runner, second = child(2, "runner", "Run the suite")
    writer, third = child(3, "writer", "Write it down")
    bisect = (*runner, "tools:d1")
    for event in [
        *begun(ROOT, "planner", "Find why the suite is flaky and fix it."),
        made(
            TextDelta,
            delta="I will look at three suspects side by side: the helpers, the suite itself, and what ",
            message_id="m",
        ),
        made(TextDelta, delta="changed last week.\n\n```python\nx = 1\n\ny = 2\n", message_id="m"),
        *first,
        *second,
        *third,
        used(reader, "reader", 18_000, 0.04),
        *ended(reader, "reader", "Three helpers poll the clock"),
        used(runner, "runner", 87_000, 0.19),
        *called(runner, "runner", "d1", "task"),
        *begun(bisect, "bisect", "Find the first bad commit", 50.0),
        used(bisect, "bisect", 9_000, 0.03),
        *called(bisect, "bisect", "e1", "shell", command="git log -n 40 tests/"),
        used(writer, "writer", 4_000, 0.01),
        made(TextDelta, writer, "writer", 31.0, delta="Two clocks are compared in assert_order", message_id="w"),
    ]:
        board.apply(event)
    board.look.now = 40.0


def drawn(board: Board) -> str:
    return "\n".join(plain(row) for row in board.tree_rows())


def test_a_tree_at_80_columns() -> None:
    board = Board(Look(80))
    three(board)
    assert drawn(board) == snapshot("""\
◐ planner  step 1 · waits for 2 agents                      0:30   118k  $0.27
├ ✓ reader  Three helpers poll the clock                    0:21    18k  $0.04
├ ◐ runner  waits for 1 agent                               0:30    96k  $0.22
│ └ ◐ bisect  shell git log -n 40 tests/                    0:00     9k  $0.03
└ ◐ writer  Two clocks are compared in assert_order         0:30     4k  $0.01\
""")


def test_a_tree_at_40_columns() -> None:
    board = Board(Look(40))
    three(board)
    assert drawn(board) == snapshot("""\
◐ planner  2 agents                 0:30
├ ✓ reader  Three helpers poll t…   0:21
├ ◐ runner  waits for 1 agent       0:30
│ └ ◐ bisect  shell git log -n 4…   0:00
└ ◐ writer  ert_order               0:30\
""")
    assert max(cells(line) for line in drawn(board).split("\n")) <= 40


def test_a_tree_in_ascii() -> None:
    board = Board(Look(80, ascii=True))
    three(board)
    assert drawn(board).isascii()
    assert drawn(board) == snapshot("""\
* planner  step 1, waits for 2 agents                       0:30   118k  $0.27
|- + reader  Three helpers poll the clock                   0:21    18k  $0.04
|- * runner  waits for 1 agent                              0:30    96k  $0.22
|  `- * bisect  shell git log -n 40 tests/                  0:00     9k  $0.03
`- * writer  Two clocks are compared in assert_order        0:30     4k  $0.01\
""")


def test_an_open_row_has_its_last_lines() -> None:
    board = Board(Look(80, expanded=frozenset({"runtools:c2", "runtools:c3"})))
    three(board)
    assert drawn(board) == snapshot("""\
◐ planner  step 1 · waits for 2 agents                      0:30   118k  $0.27
├ ✓ reader  Three helpers poll the clock                    0:21    18k  $0.04
├ ◐ runner ▾ Run the suite                                  0:30    96k  $0.22
│ └ ◐ bisect  shell git log -n 40 tests/                    0:00     9k  $0.03
└ ◐ writer ▾ Write it down                                  0:30     4k  $0.01
  │ Two clocks are compared in assert_order\
""")


def test_what_waits_and_what_is_quiet_says_so() -> None:
    board = Board(Look(80))
    three(board)
    retry = {"message": "529 overloaded", "retry_model": "a:m", "retry_delay": 18.0, "code": "overloaded"}
    board.apply(made(ErrorRaised, ("tools:c3",), "writer", 90.0, **retry))
    board.look.now = 100.0
    board.look.asking = frozenset({"runtools:c2/tools:d1"})
    assert drawn(board) == snapshot("""\
◐ planner  step 1 · waits for 2 agents                      1:30   118k  $0.27
├ ✓ reader  Three helpers poll the clock                    0:21    18k  $0.04
├ ◐ runner  waits for 1 agent                               1:30    96k  $0.22
│ └ ◆ bisect  needs you: shell git log -n 40 tests/         0:50     9k  $0.03
└ ↻ writer  529 overloaded, again in 8 s                    1:30     4k  $0.01\
""")


def test_a_run_at_the_gate_of_its_provider_says_where_it_stands() -> None:
    board = Board(Look(80))
    three(board)
    wait = {"reason": "rate_limit", "position": 14, "until": 120.0, "message": "too many requests"}
    board.apply(made(InferenceWaiting, ("tools:c3",), "writer", 99.0, **wait))
    board.look.now = 100.0
    assert "↻ writer  429, waiting 20 s, 14 before you" in drawn(board)
    board.apply(made(TextDelta, ("tools:c3",), "writer", 101.0, delta="It", message_id="m"))
    assert "429" not in drawn(board)


def test_of_thirty_children_what_needs_a_person_and_what_failed_stay() -> None:
    board = Board(Look(80))
    for event in begun(ROOT, "planner", "Review every module."):
        board.apply(event)
    for number in range(30):
        ns, events = child(number, "reader")
        for event in events[: 4 if number < 18 else 3]:
            board.apply(event)
        if number < 9:
            board.apply(*ended(ns, "reader", "fine"))
        if number == 9:
            board.apply(
                made(RunFinished, ns, "reader", 14.0, status=RunStatus.FAILED, termination="error", error="not UTF-8")
            )
    board.look.now, board.look.asking = 31.0, frozenset({"runtools:c14"})
    shown = drawn(board)
    assert len(shown.split("\n")) <= 12
    assert shown == snapshot("""\
◐ planner  30 agents:  ◆ 1  ✗ 1  ◐ 7  ✓ 9  ○ 12             0:21
├ ✗ reader#10  failed: not UTF-8                            0:04
├ ◐ reader#11  look                                         0:21
├ ◐ reader#12  look                                         0:21
├ ◐ reader#13  look                                         0:21
├ ◐ reader#14  look                                         0:21
├ ◆ reader#15  needs you                                    0:21
├ ◐ reader#16  look                                         0:21
├ ◐ reader#17  look                                         0:21
├ ◐ reader#18  look                                         0:21
├ ○ reader#19  look
└ … 20 more: 9 done, 11 wait   Tab, then / finds one\
""")


def test_what_is_finished_is_printed_once_in_order() -> None:
    board = Board(Look(80))
    printed: list[str] = []
    ns, events = child(1, "reader", "Read it")
    for event in [
        *begun(ROOT, "planner", "Go."),
        made(TextDelta, delta="First.\n\nSecond, ", message_id="m"),
        made(TextDelta, delta="whole.", message_id="m"),
        *events,
        *called(ns, "reader", "r1", "read_file", path="a.md"),
        answered(ns, "reader", "r1", "read_file", "not_found: no a.md", "failed"),
        *ended(ns, "reader", "Nothing there."),
        answered(ROOT, "planner", "c1", "task", "Nothing there."),
        made(StepFinished, step=1),
        made(StepStarted, step=2),
        *called(ROOT, "planner", "g1", "grep_files", pattern="x"),
        answered(ROOT, "planner", "g1", "grep_files", "a.md:1: x\nb.md:2: x"),
        made(StepFinished, step=2),
        made(StepStarted, step=3),
        made(TextDelta, delta="```\ncode\n\nmore\n```", message_id="n"),
        made(StepFinished, step=3),
        *ended(ROOT, "planner", "done", 130.0),
    ]:
        printed.append(text_of(board.apply(event)))
    assert "\n".join(text for text in printed if text) == snapshot("""\
› Go.
planner
First.
Second, whole.
└ ✓ reader  Nothing there.                                  0:21
    1 step · 1 call, 1 failed
✓ grep_files x  a.md:1: x (+1 line)
planner
```
code

more
```
✓ done 2:00 · 1 agent · 3 steps · 3 calls\
""")
    assert drawn(board) == ""


def test_a_turn_that_fails_says_why_and_where() -> None:
    board = Board(Look(60))
    for event in begun(ROOT, "planner", "Go."):
        board.apply(event)
    end = made(
        RunFinished,
        at=20.0,
        status=RunStatus.FAILED,
        termination="error",
        error="401: the key is refused",
        response=None,
    )
    assert text_of(board.apply(end)) == snapshot("""\
✗ The turn failed: 401: the key is refused
  run · step 1
✗ failed 0:10 · 1 step\
""")


def test_the_end_of_a_background_task_has_its_reply() -> None:
    board = Board(Look(80))
    ns, events = child(1, "reader")
    for event in [*begun(ROOT, "planner", "Go."), *events]:
        board.apply(event)
    task = {"task_id": "task_1", "agent": "reader"}
    board.apply(made(TaskUpdated, ns, at=12.0, status="RUNNING", **task))
    assert board.tasks == {"task_1": "reader"}
    board.apply(*ended(ROOT, "planner", "It works on it."))
    board.apply(*ended(ns, "reader", "12 of 12 runs."))
    assert text_of(board.apply(made(TaskUpdated, ns, at=32.0, status="COMPLETED", **task))) == snapshot("""\
✓ reader ended in the background: completed
  12 of 12 runs.
  task task_1\
""")
    assert board.tasks == {}


@pytest.mark.parametrize("columns", [80, 40, 28])
async def test_a_question_is_never_cut(columns: int) -> None:
    look = Look(columns, now=20.0)
    old, new = "    time.sleep(timeout)\n    return check()", "    end = time.monotonic() + timeout\n    return True"
    args = {"path": "tests/helpers.py", "old": old, "new": new}
    text = f"import time\n\n\ndef wait_for(check, timeout=1.0):\n{old}\n"
    question = _question("edit_file", args, lambda path: text)
    rows = question_rows(question, look, 1, 2, focused=False, most=40)
    shown = "\n".join(plain(row) for row in rows)
    assert max(cells(line) for line in shown.split("\n")) <= columns
    joined = shown.replace("↪ ", "").replace(" ", "").replace("\n", "")
    for line in (*old.split("\n"), *new.split("\n")):
        words = [word for word in line.replace(" ", "").split("\n") if word]
        assert all(part in joined or columns < 60 for part in words)
    change = question.change
    assert change is not None
    assert (change.figures, change.lines[0][1]) == ("+2 −2", 5)


async def test_a_long_change_is_not_approved_unseen() -> None:
    question = _question(
        "write_file", {"path": "a.md", "content": "\n".join(str(n) for n in range(60))}, lambda path: None
    )
    rows = detail_rows(question, Look(80), 10)
    assert question.is_long
    assert plain(rows[-1]).strip() == "51 more lines: v shows all"


async def test_rules_name_the_folder_of_a_file_and_else_the_tool() -> None:
    assert _question("write_file", {"path": "docs/a.md", "content": ""}).rule == "write_file(path=docs/*)"
    assert _question("write_file", {"path": "a.md", "content": ""}).rule == "write_file(path=*)"
    assert _question("edit_file", {"path": "a[1].md", "old": "", "new": ""}).rule == "edit_file"
    assert _question("shell", {"command": "ls"}).rule == "shell"
    assert change_of("shell", {"command": "ls"}, lambda path: None) is None


def _question(tool: str, args: dict[str, Any], read: Any = lambda path: None) -> Question:
    ticket = SuspendTicket(
        "t", f"tool:{tool}", "", args, {"properties": {"approved": {"type": "boolean"}}}, editable=True
    )
    return Question("r", ("planner", "bisect"), tool, args, ticket=ticket, target="c1", read=read, asked_at=8.0)


def test_text_fits_its_columns() -> None:
    assert (cut("灯灯灯", 5), cells("灯a"), cut("abc", 3), cut("abcd", 3)) == ("灯灯…", 3, "abc", "ab…")
    assert wrapped("a bb ccc", 5) == ["a bb", "ccc"]
    assert wrapped("x" * 12, 5, "> ", "  ") == ["> xxx", "  xxx", "  xxx", "  xxx"]
    assert [clock(9), clock(760), clock(3723), short_count(999), short_count(131_400), short_count(2_500_000)] == [
        "0:09",
        "12:40",
        "1:02:03",
        "999",
        "131k",
        "2.5M",
    ]


def test_todos_are_shown_when_they_change() -> None:
    board = Board(Look(60))
    items = [{"text": "look around", "status": "completed"}, {"text": "x" * 90, "status": "in_progress"}]
    for event in begun(ROOT, "planner", "go"):
        board.apply(event)
    delta = {"retinue.todos": items, "other": 1}
    assert text_of(board.apply(made(StateDelta, revision=1, delta=delta))) == snapshot("""\
  todos: 1 of 2 done
  [>] xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...\
""")
    assert board.apply(made(StateDelta, revision=2, delta={"retinue.todos": []})) == []
    assert board.apply(made(StateDelta, revision=3, delta={"other": 2})) == []


def test_a_compaction_is_a_remark() -> None:
    board = Board(Look(60))
    for event in begun(ROOT, "planner", "go"):
        board.apply(event)
    fields = {"tokens_before": 6432, "tokens_after": 3897, "kept_from": "m9", "usage": Usage(input_tokens=4100)}
    assert text_of(board.apply(made(Compacted, **fields, problem="no credit"))) == snapshot("""\
  compacted: 6,432 → 3,897 tokens, which cost 4,100,
  without a summary: no credit\
""")
