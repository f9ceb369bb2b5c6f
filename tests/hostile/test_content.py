"""Text and values that no store can hold are cleaned or refused where they enter, in every store alike."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from datetime import date
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from retinue import (
    Agent,
    ConfigurationError,
    Decision,
    Message,
    RunResult,
    RunStatus,
    Runtime,
    StateKey,
    SuspendTicket,
    ToolContext,
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.core import schema
from retinue.core.content import check_shape, clean_text, to_json_anyway, to_json_text, to_json_value
from retinue.errors import DecisionRefused, StateError, UnknownRun
from retinue.loop import turn
from retinue.messages import DataPart
from retinue.models import CallChunk, PartChunk, ReasoningChunk, Retrying, TextChunk, TurnEnd
from retinue.plugins import Plugin
from retinue.testing import ScriptedModel, call, fail, say
from tests.control.test_hooks import Hooks
from tests.effort import share

from .. import inside

HALF = "\ud800 half"
CLEAN = "\ufffd half"
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
WIDE: Any = ["x"]
for _ in range(40):
    WIDE = [WIDE, WIDE]

Report = Callable[[ToolContext], Any]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Tracebacks of tools that fail on purpose are not of interest."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Chunks:
    """A model that answers with these chunks first, and then with "end"."""

    name = "test:chunks"

    def __init__(self, *chunks: Any) -> None:
        self.chunks = list(chunks)

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        for chunk in self.chunks or [TextChunk("end")]:
            yield chunk
        self.chunks = []


def reporting(report: Report) -> Any:
    @tool
    async def work(ctx: ToolContext) -> Any:
        """Work."""
        return report(ctx)

    return work


async def run_in(place: str, agent: Agent, input: Any = "go", **options: Any) -> tuple[RunResult, list[Any]]:
    """Run an agent, read its log back, use its thread again, and close: none of that may fail."""
    async with Runtime.open(place, [agent]) as runtime:
        return await run_with(runtime, agent, input, **options)


async def run_with(runtime: Runtime, agent: Agent, input: Any = "go", **options: Any) -> tuple[RunResult, list[Any]]:
    result = await runtime.run(agent, input, **options)
    events = [event async for event in runtime.events(result.run_id)]
    again = await runtime.run(Agent("again", ScriptedModel([say("fine")])), "again", thread_id=result.thread_id)
    assert again.response == "fine"
    return result, events


async def result_of(place: str, report: Report) -> tuple[str, list[Any]]:
    """Return what the model reads of a call whose tool does this, and the events."""
    async with Runtime.open(place) as runtime:
        return await result_with(runtime, report)


async def result_with(runtime: Runtime, report: Report) -> tuple[str, list[Any]]:
    agent = Agent("a", ScriptedModel([call("work"), say("ok")]), tools=[reporting(report)])
    result, events = await run_with(runtime, agent)
    assert (result.status, result.response) == (RunStatus.COMPLETED, "ok")
    (text,) = [message.text for message in result.messages if message.role == "tool"]
    return text, events


REPORTS: dict[str, Callable[[ToolContext, Any], object]] = {
    "emit": lambda ctx, value: ctx.emit(value),
    "activity": lambda ctx, value: ctx.report_activity("x", value),
    "activity_delta": lambda ctx, value: ctx.report_activity_delta("x", [{"op": "add", "path": "/x", "value": value}]),
}


NO_JSON: list[tuple[Any, str]] = [
    (Path("/x"), "a value of type PosixPath has no JSON form"),
    (CYCLE, "nested more than 100 deep, or contains itself"),
    (DEEP, "nested more than 100 deep"),
    (WIDE, "it is too large: more than 100,000 items"),
    (10**5000, "4300 digits"),
]


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
async def test_a_report_that_is_no_json_fails_its_call(place: str, report: Any) -> None:
    async with Runtime.open(place) as runtime:
        for value, problem in NO_JSON:
            text, events = await result_with(runtime, lambda ctx, value=value: report(ctx, value))
            assert text.startswith("internal: ")
            assert problem in text
            assert not [event for event in events if event.kind in ("custom", "activity_snapshot", "activity_delta")]


async def test_a_report_becomes_json_where_it_can(place: str) -> None:
    value = {HALF: HALF, "n": math.nan, "i": -math.inf, "d": date(2030, 1, 2), "t": (1, {2}), 3: b"\xff"}
    expected = {CLEAN: CLEAN, "n": None, "i": None, "d": "2030-01-02", "t": [1, [2]], "3": "/w=="}

    def report(ctx: ToolContext) -> str:
        ctx.emit(value)
        ctx.report_activity(HALF, value)
        ctx.report_activity_delta(HALF, value)
        ctx.report_progress("running", HALF, 0.5)
        ctx.stream_output(HALF)
        ctx.report_error(HALF, HALF)
        return "done"

    text, events = await result_of(place, report)
    assert text == "done"
    found = {event.kind: event for event in events}
    assert found["custom"].data == expected
    first, progress = [event for event in events if event.kind == "activity_snapshot"]
    assert (first.activity_type, first.content) == (CLEAN, expected)
    assert (progress.content["message"], progress.content["progress"]) == (CLEAN, 0.5)
    assert (found["activity_delta"].activity_type, found["activity_delta"].delta) == (CLEAN, [expected])
    assert found["tool_call_stream_delta"].delta == CLEAN
    assert (found["error"].message, found["error"].code) == (CLEAN, CLEAN)


async def test_a_value_without_end_is_named_in_a_few_words(place: str) -> None:
    text, _ = await result_of(place, lambda ctx: ctx.report_progress("running", None, WIDE))  # pyright: ignore[reportArgumentType]
    assert text.startswith("internal: ValueError: progress is a number from 0 to 1, not [[")
    async with Runtime.open(place, agents=[Agent("a", ScriptedModel([]))]) as runtime:
        for name in ("input", "thread_id", "user_id", "state"):
            given: Any = {"input": "go", name: WIDE}
            with pytest.raises(ConfigurationError, match=r"not \[\["):
                await runtime.run("a", **given)
    with pytest.raises(ConfigurationError, match=r"not \[\["):
        Decision.approve(WIDE)


async def test_output_that_is_no_text_fails_its_call(place: str) -> None:
    text, _ = await result_of(place, lambda ctx: ctx.stream_output(5))  # pyright: ignore[reportArgumentType]
    assert text == "internal: TypeError: expected text, got int"


RESULTS: list[tuple[Any, str]] = [
    (HALF, CLEAN),
    ({"a": HALF}, f'{{"a":"{CLEAN}"}}'),
    ([math.nan], "[null]"),
    (ToolResult.success({"a": 1}, HALF), CLEAN),
    (ToolResult(data="x", metadata={HALF: HALF}), "x"),
    (ToolResult.error(HALF, "half"), f"[half] {CLEAN}"),
    (Path("/x"), "internal: tool 'work' returned a value that cannot be written as JSON: a value of type Posix"),
    (CYCLE, "internal: tool 'work' returned a value that cannot be written as JSON: it is nested more than 100"),
    (
        ToolResult(metadata={"x": Path("/")}),
        "internal: tool 'work' returned a value that cannot be written as JSON",
    ),
    (
        "x" * (64 * 1024 * 1024 + 1),
        "internal: tool 'work' returned a value that cannot be written as JSON: the text",
    ),
]


async def test_results(place: str) -> None:
    async with Runtime.open(place) as runtime:
        for value, said in RESULTS:
            text, _ = await result_with(runtime, lambda ctx, value=value: value)
            assert text.startswith(said)


async def test_errors_of_tools_and_hooks_are_cleaned(place: str) -> None:
    def boom(*_: Any) -> Any:
        raise ValueError(HALF)

    text, _ = await result_of(place, boom)
    assert text == f"internal: ValueError: {CLEAN}"
    failing = Agent("a", ScriptedModel([say("x")]), plugins=[Hooks(("step_start", boom))])
    result, _ = await run_in(place, failing)
    assert (result.status, CLEAN in (result.error or "")) == (RunStatus.FAILED, True)
    result, _ = await run_in(place, Agent("a", ScriptedModel([fail(RuntimeError(HALF))])))
    assert (result.status, result.error) == (RunStatus.FAILED, f"RuntimeError: {CLEAN}")


@pytest.mark.parametrize(
    "chunks",
    [
        (TextChunk(HALF),),
        (ReasoningChunk(HALF, HALF), TextChunk(HALF)),
        (PartChunk(DataPart({HALF: [HALF]})), TextChunk(HALF)),
        (TextChunk(HALF), TurnEnd(HALF, model=HALF)),
        (Retrying(code="x", message=HALF), TextChunk(HALF)),
        (CallChunk(0, HALF, HALF, HALF), TextChunk(HALF)),
        (CallChunk(0, "c", "work", f'{{"{HALF}": "{HALF}"}}'), TextChunk(HALF)),
    ],
    ids=["text", "reasoning", "part", "end", "retry", "call", "arguments"],
)
async def test_what_a_model_says_is_cleaned(place: str, chunks: tuple[Any, ...]) -> None:
    agent = Agent("a", Chunks(*chunks), tools=[reporting(lambda ctx: "done")])
    result, events = await run_in(place, agent)
    assert result.status is RunStatus.COMPLETED
    assert CLEAN in result.messages[1].text
    assert "".join([event.delta for event in events if event.kind == "text_delta"]).startswith(CLEAN)


async def test_usage_that_cannot_be_added_up_does_not_count(place: str) -> None:
    from retinue import Usage

    odd = TurnEnd(usage=Usage(requests=1, input_tokens=-1000, output_tokens=7, cost=math.nan))
    result, _ = await run_in(place, Agent("a", Chunks(TextChunk("x"), odd)))
    assert result.usage == Usage(requests=1, output_tokens=7)


async def test_input(place: str) -> None:
    agent = Agent("a", ScriptedModel(lambda request: say(request.messages[-1].text or "none")))
    result, _ = await run_in(place, agent, HALF + "\0")
    assert result.response == CLEAN + "\0"
    result, _ = await run_in(place, agent, [Message.user([DataPart({"x": (HALF, math.nan)})], name=HALF)])
    assert result.messages[0].parts == (DataPart({"x": [CLEAN, None]}),)
    async with Runtime.open(place, [agent]) as runtime:
        for value in (Path("/x"), CYCLE, DEEP):
            with pytest.raises(ConfigurationError, match="the input cannot be used: "):
                await runtime.run("a", Message.user([DataPart(value)]), thread_id="t")
        for name in ("thread_id", "user_id"):
            for value in (HALF, "a\0b", "x" * 1001, "ü" * 501):
                with pytest.raises(ConfigurationError, match=f"{name} cannot be used: it "):
                    await runtime.run("a", "go", **cast("Any", {name: value}))
        assert (await runtime.run("a", "go", thread_id="t")).response == "go"


async def test_state_is_refused_before_anything_is_committed(place: str) -> None:
    text, number = StateKey("text", str, persistent=True), StateKey("number", float, persistent=True)
    many = StateKey("many", list, persistent=True)
    refused: list[tuple[Any, Any]] = [(text, HALF), (number, math.nan), (number, math.inf), (many, [math.nan])]
    refused += [(many, [HALF]), (many, CYCLE), (many, WIDE), (many, [Path("/x")])]

    class Keys(Plugin):
        name = "keys"

        def register(self, r: Any) -> None:
            for key in (text, number, many):
                r.key(key)

    for key, value in refused:
        with pytest.raises(StateError, match=key.name):
            await Runtime([Agent("a", ScriptedModel([say("x")]), plugins=[Keys()])]).run("a", "go", state={key: value})
        write = reporting(lambda ctx, update={key: value}: ToolOutput("x", update=update))
        agent = Agent("a", ScriptedModel([call("work"), say("ok")]), tools=[write], plugins=[Keys()])
        result, events = await run_in(place, agent)
        assert "could not commit its state" in result.messages[2].text
        assert result.state.extensions.get(key.name) is None
        assert not [event for event in events if event.kind == "state_delta"]


async def test_decisions(place: str) -> None:
    """A decision that is no JSON changes nothing; one with half a character is cleaned."""
    ask = reporting(lambda ctx: ToolResult.suspended("?") if ctx.resume_input is None else ctx.resume_input)
    agent = Agent("a", ScriptedModel([call("work", id="c"), say("ok")]), tools=[ask])
    async with Runtime.open(place, [agent]) as runtime:
        waiting = await runtime.run("a", "go", thread_id="t")
        for value in (Path("/x"), CYCLE, DEEP, object()):
            with pytest.raises(DecisionRefused, match="a decision must have a JSON form"):
                await runtime.resume(waiting.run_id, {"c": Decision.resume(value)})
        for target in (HALF, "c\0", "x" * 100_000, ""):
            with pytest.raises(DecisionRefused, match="does not wait for"):
                await runtime.resume(waiting.run_id, {target: Decision.resume(1)})
        for run_id in (HALF, "run\0", "x" * 100_000):
            with pytest.raises(UnknownRun):
                await runtime.resume(run_id, {"c": Decision.resume(1)})
            with pytest.raises(UnknownRun):
                await runtime.cancel(run_id)
        result = await runtime.resume(waiting.run_id, {"c": Decision.resume({"x": [HALF, math.nan]}, id=HALF)})
    assert result.response == "ok"
    assert result.messages[2].text == f'{{"x":["{CLEAN}",null]}}'


async def test_a_reason_for_cancelling_is_cleaned(place: str) -> None:
    ask = reporting(lambda ctx: ToolResult.suspended("?"))
    agent = Agent("a", ScriptedModel([call("work", id="c"), say("ok")]), tools=[ask])
    async with Runtime.open(place, [agent]) as runtime:
        waiting = await runtime.run("a", "go", thread_id="t")
        result = await runtime.cancel(waiting.run_id, reason=HALF)
    assert (result.status, result.error) == (RunStatus.CANCELLED, CLEAN)


@pytest.mark.no_fold_check
async def test_what_slips_through_is_stored_all_the_same(place: str) -> None:
    """A hook may put anything into a record that the loop makes: the run is stored, and its thread is free."""
    from retinue import StateCommand
    from retinue.plugins import AddContextMessage, StopRun

    def hook(ctx: Any) -> Any:
        return StateCommand().schedule(AddContextMessage(HALF)).schedule(StopRun(HALF, HALF, completed=True))

    agent = Agent("a", ScriptedModel([say("ok")]), plugins=[Hooks(("step_start", hook))])
    result, _ = await run_in(place, agent)
    assert result.status is RunStatus.COMPLETED


def test_clean_text() -> None:
    assert clean_text("plain") == "plain"
    assert clean_text("ü\0") == "ü\0"
    assert clean_text("\ud83d\ude00") == "\U0001f600"  # two halves that belong together
    assert clean_text(HALF) == CLEAN
    with pytest.raises(TypeError, match="expected text, got int"):
        clean_text(5)  # pyright: ignore[reportArgumentType]


def test_values_are_copies() -> None:
    given = {"a": [1, {"b": 2}]}
    made = to_json_value(given)
    assert made == given
    made["a"][1]["b"] = 3
    assert given == {"a": [1, {"b": 2}]}


def test_any_record_can_be_written() -> None:
    message = Message.user([DataPart({"x": Path("/x"), "y": CYCLE, HALF: HALF})])
    written = to_json_anyway(message).decode()
    assert "(PosixPath: it has no JSON form)" in written
    assert "(nested too deeply)" in written
    assert CLEAN in written


class Pool:
    """Something that no other process can have."""


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Pool(), "a value of type Pool has no JSON form"),
        ((1, 2), r"tuple \(1, 2\) would be read back as list \[1, 2\]"),
        (float("nan"), "nan would be read back as None"),
        ("\ud800", "would be read back as"),
    ],
)
async def test_a_context_that_cannot_be_stored_is_refused_at_the_start(place: str, value: Any, problem: str) -> None:
    seen: list[Any] = []

    @tool
    async def look(ctx: ToolContext) -> str:
        """Look."""
        seen.append(ctx.context["it"])
        return "seen"

    agent = Agent("a", ScriptedModel([call("look"), say("ok")]), tools=[look])
    async with Runtime.open(place, [agent]) as runtime:
        if place == "memory:":
            assert (await runtime.run("a", "go", context={"it": value})).response == "ok"
            assert seen == [value]
            return
        with pytest.raises(ConfigurationError, match=f"^context 'it' cannot be stored with the run: .*{problem}"):
            await runtime.run("a", "go", context={"it": value}, thread_id="t")
        result = await runtime.run("a", "go", context={"it": {"a": [1, None, "x"]}}, thread_id="t")
        assert (result.response, seen) == ("ok", [{"a": [1, None, "x"]}])


async def test_an_answer_to_a_run_that_cannot_be_continued_says_why(tmp_path: Path) -> None:
    @tool
    async def ask() -> ToolResult:
        """Ask."""
        return ToolResult.suspended("Which city?")

    agent = Agent("a", ScriptedModel([]), tools=[ask])
    async with Runtime.open(f"sqlite:///{tmp_path}/a.db", [agent]) as runtime:
        waiting = await runtime.run("a", "go", model=ScriptedModel([call("ask", id="c1")]))
        with pytest.raises(DecisionRefused, match="it cannot be continued: its model was given as an object"):
            await runtime.resume(waiting.run_id, {"c1": Decision.answer("Rome")})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([[] for _ in range(41_000)], "more than 40,000 lists and objects"),
        (list(range(101_000)), "more than 100,000 items"),
        (dict.fromkeys(map(str, range(101_000))), "more than 100,000 items"),
        (["x" * 1_000_000] * 90, "more than 67,108,864 characters"),
        ([HALF] * 11_000, "half a surrogate pair"),
    ],
    ids=["lists", "items", "fields", "one text many times", "broken texts"],
)
def test_what_would_hold_up_the_event_loop_is_refused(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        to_json_value(value)
    with pytest.raises(ValueError, match=problem):
        to_json_value({"a": (value,)})


def test_shapes_are_counted_alike_in_plain_and_other_classes() -> None:
    for one in ([[1, 2], {"a": [3]}], (frozenset({1, 2}), OrderedDict(a=[3]))):
        shape = check_shape(one)
        assert (shape.items, shape.boxes) == (6, 4)
    assert check_shape(5) == (0, 0, frozenset())
    assert check_shape(DataPart([1])).kinds == {DataPart, list}


def test_a_long_broken_text_is_cleaned_in_one_go() -> None:
    assert clean_text("é" * 100_000 + "\ud83d\ude00" + HALF) == "é" * 100_000 + "??? half"
    assert clean_text("\ud83d\ude00" + HALF) == "\U0001f600" + CLEAN


@settings(max_examples=share(200))
@given(
    st.recursive(
        st.none() | st.floats() | st.text() | st.integers(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)
    )
)
def test_a_copy_at_once_is_a_copy_piece_by_piece(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        inside.copy_in_pieces_above(patch, -1)
        made = schema.isolate(value)
    assert repr(made) == repr(schema.isolate(value)) == repr(value)
    assert made is not value or not isinstance(value, list | dict)


def test_a_copy_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.copy_in_pieces_above(monkeypatch, 1)
    inner: list[Any] = []
    made = schema.isolate([inner, inner, {"a": {1}}])
    made[0].append(1)
    assert (made, inner) == ([[1], [], {"a": {1}}], [])


@pytest.mark.parametrize("text", ["[" * 90_000, '{"a": [' + ",".join(["[]"] * 90_000) + "]}"], ids=["open", "lists"])
async def test_arguments_with_too_many_lists_are_given_back_to_the_model(text: str) -> None:
    model = Chunks(CallChunk(0, "c", "work", text))
    result = await Runtime([Agent("a", model)]).run("a", "go")
    assert (result.status, result.response) == (RunStatus.COMPLETED, "end")
    assert result.messages[1].tool_calls[0].malformed == text


async def test_arguments_without_end_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "MAX_ARGUMENTS", 100)
    result = await Runtime([Agent("a", Chunks(*[CallChunk(0, "c", "work", "x" * 10)] * 20))]).run("a", "go")
    assert (result.status, result.messages[1:]) == (RunStatus.FAILED, ())
    assert "the arguments of its calls have more than 100 characters" in (result.error or "")


async def test_the_arguments_of_all_calls_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "MAX_ARGUMENTS", 100)
    broken = [
        CallChunk(0, "c", "work", "x" * 60),
        Retrying(code="lost", message="again", restarts=True),
    ]  # it no longer counts
    chunks = [*broken, *[CallChunk(number, f"c{number}", "work", '"' + "x" * 28 + '"') for number in range(3)]]
    result = await Runtime([Agent("a", Chunks(*chunks))]).run("a", "go")
    assert (result.status, result.response) == (RunStatus.COMPLETED, "end")
    chunks.append(CallChunk(3, "c3", "work", '"' + "x" * 28 + '"'))
    result = await Runtime([Agent("a", Chunks(*chunks))]).run("a", "go")
    assert "the arguments of its calls have more than 100 characters" in (result.error or "")


LONG = 10**4299


@pytest.mark.parametrize(
    "value",
    [[LONG] * 60, {"a": [[LONG] * 100]}, {str(n): -LONG for n in range(60)}, [10**10_000]],
    ids=["list", "deep", "object", "one"],
)
def test_many_long_integers_are_refused(value: Any) -> None:
    """To write or read one takes the square of its length."""
    with pytest.raises(ValueError, match="too many digits in long integers|integer"):
        to_json_value(value)


@pytest.mark.parametrize("value", [[2**64 - 1] * 99_000, [2**128] * 5_000, [LONG] * 3], ids=["64", "128", "long"])
def test_some_long_integers_are_kept(value: list[int]) -> None:
    assert to_json_value(value) == value


async def test_arguments_with_many_long_integers_are_given_back_to_the_model() -> None:
    text = '{"a": [' + ",".join(["9" * 4000] * 100) + "]}"
    result = await Runtime([Agent("a", Chunks(CallChunk(0, "c", "work", text)))]).run("a", "go")
    assert result.messages[1].tool_calls[0].malformed == text


async def test_of_many_arguments_the_first_error_is_told() -> None:
    @tool
    async def work(names: list[str]) -> str:
        """Work."""
        return "done"

    few, many = ["x", *[1] * 20], ["x"] * 2_000 + [1]
    model = ScriptedModel([*[call("work", {"names": names}) for names in (few, many, many * 3)], say("end")])
    result = await Runtime([Agent("a", model, tools=[work])]).run("a", "go")
    first, second, third = [message.text for message in result.messages if message.role == "tool"]
    assert "it does not fit the schema; all errors are listed for up to 500 items" in third
    assert "names[20]" in first
    assert "names[2000]: 1 is not of type string" in second.replace('"', "")
    assert "all errors are listed for up to 500 items" in second
    assert len(second) < 200


async def test_a_decision_with_many_items_is_checked() -> None:
    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask."""
        if ctx.resume_input is not None:
            return len(cast("Any", ctx.resume_input))
        schema = {"type": "array", "items": {"type": "string"}}
        return ToolResult.suspended("?", SuspendTicket("t", "ask", "?", {}, schema))

    runtime = Runtime([Agent("a", ScriptedModel([call("ask", id="c1"), say("end")]), tools=[ask])])
    waiting = await runtime.run("a", "go")
    with pytest.raises(DecisionRefused, match=r'\[2000\]: 1 is not of type "string"'):
        await runtime.resume(waiting.run_id, {"c1": Decision.resume(["x"] * 2_000 + [1])})
    result = await runtime.resume(waiting.run_id, {"c1": Decision.resume(["x"] * 2_000)})
    assert (result.response, result.messages[-2].text) == ("end", "2000")


async def test_of_a_large_output_some_errors_are_told() -> None:
    """pydantic would list each: 21 MB for 99,000 wrong items, and the model would have to read them."""

    class Numbers(BaseModel):
        found: list[int]

    some, many = [to_json_text({"found": ["x"] * count}) for count in (2_000, 2_001)]
    agent = Agent("a", ScriptedModel([say(some), say(many), say('{"found": [1]}')]), output=Numbers)
    result = await Runtime([agent]).run("a", "go")
    assert result.output == Numbers(found=[1])
    first, second = [message.text for message in result.messages if message.role == "user"][1:]
    assert "found[19]: Input should be a valid integer" in first
    assert "found[20]" not in first
    assert "and 1,980 more errors" in first
    assert "it has 2,001 errors" in second
    assert len(second) < 200


async def test_an_output_that_is_too_large_is_not_parsed() -> None:
    texts = ['["' + "x" * 2_000_000 + '"]', "[" + ",".join(["[]"] * 90_000) + "]", "[" * 200 + "]" * 200]
    agent = Agent("a", ScriptedModel([*map(say, texts), say('["x"]')]), output=list[Any])
    result = await Runtime([agent]).run("a", "go")
    assert result.output == ["x"]
    told = [message.text for message in result.messages if message.role == "user"][1:]
    for problem, text in zip(["more than 1,048,576 characters", "opening brackets", "deep"], told, strict=True):
        assert problem in text
