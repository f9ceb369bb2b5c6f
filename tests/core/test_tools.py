"""The tool contract: every example of the page it comes from, in Python."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import (
    Agent,
    ConfigurationError,
    Denied,
    InternalError,
    InvalidArguments,
    NotFound,
    Plugin,
    ProgressStatus,
    Registrar,
    ResumeMode,
    RunResult,
    RunStatus,
    Runtime,
    StateKey,
    SuspendTicket,
    Tool,
    ToolCallStatus,
    ToolContext,
    ToolDescriptor,
    ToolError,
    ToolOutput,
    ToolResult,
    ToolStatus,
    tool,
)
from retinue.testing import RecordingSink, ScriptedModel, call, say
from tests.busy import Busy


class Greet(Tool):
    """The minimal tool."""

    descriptor = ToolDescriptor("greet", "greet", "Greet a user by name").with_parameters(
        {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    )

    async def execute(self, args: dict[str, Any], ctx: ToolContext) -> ToolOutput:
        return ToolOutput(ToolResult.success({"greeting": f"Hello, {args['name']}!"}))


preferences = StateKey("user.preferences", dict, default={"language": "en"})


class Preferences(Plugin):
    name = "preferences"

    def register(self, r: Registrar) -> None:
        r.key(preferences)


class GetPreferences(Tool):
    """Reads state from its context; the model calls it by name, records know it by id."""

    descriptor = ToolDescriptor("get_prefs", "get_preferences", "Get user preferences")

    async def execute(self, args: dict[str, Any], ctx: ToolContext) -> ToolResult:
        return ToolResult.success(ctx.state(preferences))


async def run_one(tools: list[Any], *calls: Any, sink: Any = None, **options: Any) -> RunResult:
    model = ScriptedModel([list(calls), say("done")])
    runtime = Runtime([Agent("a", model, tools=tools, **options)])
    result = await runtime.run("a", "go", sinks=[sink] if sink else [])
    model.assert_consumed()
    assert result.status is RunStatus.COMPLETED
    return result


async def read(tools: list[Any], *calls: Any, **options: Any) -> list[str]:
    """What the model reads of each call."""
    return [m.text for m in (await run_one(tools, *calls, **options)).messages if m.role == "tool"]


async def test_the_minimal_tool() -> None:
    assert await read([Greet()], call("greet", {"name": "Ann"})) == ['{"greeting":"Hello, Ann!"}']


async def test_arguments_are_checked_before_the_tool_runs() -> None:
    (text,) = await read([Greet()], call("greet", {"name": 5}))
    assert text == 'invalid_arguments: name: 5 is not of type "string"'


async def test_a_tool_reads_state_from_its_context() -> None:
    assert await read([GetPreferences()], call("get_preferences"), plugins=[Preferences()]) == ['{"language":"en"}']


async def test_a_tool_is_called_by_its_name_not_by_its_id() -> None:
    (text,) = await read([GetPreferences()], call("get_prefs"), plugins=[Preferences()])
    assert text == "not_found: there is no tool named 'get_prefs'; available: get_preferences"


def test_descriptor_builders() -> None:
    made = ToolDescriptor("id", "name", "what").with_category("data").with_metadata({"a": 1})
    assert (made.id, made.name, made.description, made.category) == ("id", "name", "what", "data")
    assert made.parameters == {"type": "object", "properties": {}}
    assert made.with_parameters({"type": "object"}).category == "data"


@pytest.mark.parametrize(
    ("result", "status", "data", "message", "reads"),
    [
        (ToolResult.success({"a": 1}), ToolStatus.SUCCESS, {"a": 1}, None, '{"a":1}'),
        (ToolResult.success("plain"), ToolStatus.SUCCESS, "plain", None, "plain"),
        (ToolResult.success({"a": 1}, message="said"), ToolStatus.SUCCESS, {"a": 1}, "said", "said"),
        (ToolResult.error("bad"), ToolStatus.ERROR, None, "bad", "bad"),
        (
            ToolResult.error("bad", code="limit:e1"),
            ToolStatus.ERROR,
            {"error": {"code": "limit:e1", "message": "bad"}},
            "[limit:e1] bad",
            "[limit:e1] bad",
        ),
        (ToolResult.suspended("wait"), ToolStatus.PENDING, None, "wait", "wait"),
    ],
)
def test_result_constructors(result: ToolResult, status: ToolStatus, data: Any, message: Any, reads: str) -> None:
    assert (result.status, result.data, result.message, result.text) == (status, data, message, reads)
    assert (result.is_success(), result.is_pending(), result.is_error()) == (
        status == "success",
        status == "pending",
        status == "error",
    )
    assert result.to_json()["status"] == status.value


def test_a_ticket_takes_the_mode_as_a_word() -> None:
    ticket = SuspendTicket("t1", "approve", "Delete it?", {"path": "x"}, resume_mode="use_decision")  # pyright: ignore[reportArgumentType]
    assert ticket.resume_mode is ResumeMode.USE_DECISION
    assert ToolResult.suspended("wait", ticket=ticket).to_json()["suspension"]["resume_mode"] == "use_decision"


ERRORS = {
    "InvalidArguments": "invalid_arguments",
    "ExecutionFailed": "execution_failed",
    "Denied": "denied",
    "NotFound": "not_found",
    "InternalError": "internal",
    "ToolTimeout": "timeout",
    "ToolCancelled": "cancelled",
}


@pytest.mark.parametrize(("name", "kind"), ERRORS.items())
async def test_an_error_ends_the_call_and_the_model_reads_kind_and_message(name: str, kind: str) -> None:
    error: ToolError = getattr(retinue, name)("because")
    assert (error.kind, error.message) == (kind, "because")
    assert str(pickle.loads(pickle.dumps(error))) == f"{kind}: because"

    @tool
    async def fail() -> None:
        """Fail."""
        raise error

    assert await read([fail], call("fail")) == [f"{kind}: because"]


async def test_a_raised_error_drops_state_and_an_error_result_commits_it() -> None:
    tries = StateKey("tries", int, persistent=True)

    class Tries(Plugin):
        def register(self, r: Registrar) -> None:
            r.key(tries)

    class Raises(Tool):
        descriptor = ToolDescriptor("raises", "raises", "")

        async def execute(self, args: dict[str, Any], ctx: ToolContext) -> ToolOutput:
            ToolOutput("never", update={tries: 1})
            raise Denied("no")

    class Returns(Tool):
        descriptor = ToolDescriptor("returns", "returns", "")

        async def execute(self, args: dict[str, Any], ctx: ToolContext) -> ToolOutput:
            return ToolOutput(ToolResult.error("no"), update={tries: 2})

    sink = RecordingSink()
    out = await run_one([Raises(), Returns()], call("raises"), call("returns"), plugins=[Tries()], sink=sink)
    assert out.state[tries] == 2
    finished: list[Any] = sink.of("tool_call_finished")
    assert [e.status for e in finished] == [ToolCallStatus.FAILED, ToolCallStatus.FAILED]


async def test_any_other_exception_is_internal_and_its_traceback_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @tool
    async def crash() -> None:
        """Crash."""
        raise KeyError("secret_path")

    with caplog.at_level(logging.ERROR):
        assert await read([crash], call("crash")) == ["internal: KeyError: 'secret_path'"]
    assert "Traceback" in caplog.text


async def test_a_tool_that_cancels_itself_fails_alone() -> None:
    @tool
    async def odd() -> None:
        """Odd."""
        raise asyncio.CancelledError

    assert await read([odd], call("odd")) == ["internal: the tool cancelled itself"]


async def test_validate_args_runs_after_the_schema_and_may_refuse() -> None:
    seen: list[Any] = []

    class Strict(Greet):
        def validate_args(self, args: dict[str, Any]) -> None:
            seen.append(args)
            if args["name"] == "Bob":
                raise InvalidArguments("name: not Bob")
            if args["name"] == "Bug":
                raise ZeroDivisionError("oops")

    calls = [call("greet", {"name": n}) for n in ("Ann", "Bob", "Bug")]
    assert await read([Strict()], call("greet", {}), *calls) == [
        'invalid_arguments: "name" is a required property',
        '{"greeting":"Hello, Ann!"}',
        "invalid_arguments: name: not Bob",
        "internal: ZeroDivisionError: oops",
    ]
    assert [args["name"] for args in seen] == ["Ann", "Bob", "Bug"]


async def test_progress_carries_the_lineage_and_a_word_will_do() -> None:
    @tool
    async def work(ctx: ToolContext) -> str:
        """Work."""
        ctx.report_progress(ProgressStatus.RUNNING, "half", 0.5)
        ctx.report_progress("done")
        return "ok"

    sink = RecordingSink()
    out = await run_one([work], call("work", id="c1"), sink=sink)
    shown: list[Any] = sink.of("activity_snapshot")
    assert [e.activity_type for e in shown] == ["tool-call-progress"] * 2
    assert shown[0].content == {
        "status": "running",
        "message": "half",
        "progress": 0.5,
        "call_id": "c1",
        "tool_name": "work",
        "run_id": out.run_id,
        "parent_run_id": None,
        "parent_call_id": None,
    }
    assert shown[1].content["status"] == "done"


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_report_may_be_awaited_and_need_not_be(is_async: bool) -> None:
    """A tool in a thread cannot await, and nothing warns of what was not awaited (warnings are errors here)."""

    @tool
    async def awaits(ctx: ToolContext) -> str:
        """Await each report."""
        await ctx.report_activity("reading", "page 1")
        await ctx.report_activity_delta("reading", {"op": "replace", "path": "", "value": "page 2"})
        await asyncio.gather(ctx.report_progress("running", "half", 0.5), ctx.stream_output("text"))
        await ctx.report_error("odd")
        await ctx.emit({"a": 1})
        return "ok"

    @tool
    def goes_on(ctx: ToolContext) -> str:
        """Await no report."""
        ctx.report_activity("reading", "page 1")
        ctx.report_activity_delta("reading", {"op": "replace", "path": "", "value": "page 2"})
        ctx.report_progress("running", "half", 0.5)
        ctx.stream_output("text")
        ctx.report_error("odd")
        ctx.emit({"a": 1})
        return "ok"

    sink = RecordingSink()
    work = awaits if is_async else goes_on
    assert [m.text for m in (await run_one([work], call(work.name), sink=sink)).messages if m.role == "tool"] == ["ok"]
    kinds = "activity_snapshot activity_delta activity_snapshot tool_call_stream_delta error custom".split()
    assert [event.kind for event in sink.events if event.kind in kinds] == kinds


async def test_progress_in_the_place_of_the_message_is_refused() -> None:
    @tool
    async def work(ctx: ToolContext) -> str:
        """Work."""
        ctx.report_progress("running", 0.5)  # pyright: ignore[reportArgumentType]
        return "unreachable"

    (text,) = await read([work], call("work"))
    assert text.endswith("the message is text, not 0.5: write report_progress(status, progress=0.5)")


async def test_a_result_in_the_order_of_another_language_fails_its_call_with_the_right_order() -> None:
    class Swapped(Greet):
        async def execute(self, args: dict[str, Any], ctx: ToolContext) -> Any:
            return ToolResult.error("greet", f"could not greet {args['name']}")

    (text,) = await read([Swapped()], call("greet", {"name": "Ann"}))
    assert "write ToolResult.error('could not greet Ann', code='not_found'). A result does not name its tool" in text


async def test_attributes_of_a_tool_are_its_own() -> None:
    """Only the descriptor has settings for the runtime: a client with a timeout and a queue is a client."""

    class Fetch(Greet):
        timeout = 0.000_001
        retries = "twice"
        queue = "gpu"

        def __init__(self) -> None:
            self.result_limit = 3
            self.idempotent = "no"

        async def execute(self, args: dict[str, Any], ctx: ToolContext) -> Any:
            assert ctx.deadline is None
            await asyncio.sleep(0)
            return f"{args['name']}, {self.timeout}, {self.result_limit}, {self.queue}"

    assert await read([Fetch()], call("greet", {"name": "Ann"})) == ["Ann, 1e-06, 3, gpu"]


async def test_the_descriptor_has_the_options_of_the_calls() -> None:
    attempts: list[float | None] = []

    class Flaky(Greet):
        descriptor = Greet.descriptor.with_options(timeout=3600, retries=1, result_limit=40)

        async def execute(self, args: dict[str, Any], ctx: ToolContext) -> Any:
            attempts.append(ctx.deadline)
            if len(attempts) == 1:
                raise OSError("not yet")
            return "x" * 100

    (text,) = await read([Flaky()], call("greet", {"name": "Ann"}))
    assert "characters left out here" in text
    assert len(attempts) == 2
    assert None not in attempts
    options = Flaky.descriptor.with_options(idempotent=True).options
    assert (options.timeout, options.retries, options.idempotent) == (3600, 1, True)


async def test_the_context_says_who_and_where() -> None:
    seen: list[ToolContext] = []

    @tool(timeout=5)
    async def look(ctx: ToolContext) -> str:
        """Look."""
        seen.append(ctx)
        return "ok"

    model = ScriptedModel([call("look", id="c1"), say("ok")])
    agent = Agent("a", model, tools=[look])
    await Runtime([agent]).run("a", "go", thread_id="t", user_id="u", context={"tenant": 7})
    (ctx,) = seen
    assert (ctx.call_id, ctx.tool_name, ctx.agent, ctx.context) == ("c1", "look", agent, {"tenant": 7})
    assert (ctx.run.thread_id, ctx.run.user_id, ctx.run.agent, ctx.run.depth) == ("t", "u", "a", 0)
    assert ctx.run.parent_run_id is None
    assert ctx.deadline is not None
    assert not ctx.cancellation.is_set()


async def test_what_is_sent_to_the_sink_is_the_calls_own_and_nothing_else_passes() -> None:
    from retinue.core.events import Custom, RunFinished, TextDelta, ToolCallStreamDelta

    @tool
    async def send(ctx: ToolContext) -> str:
        """Send."""
        ctx.sink(ToolCallStreamDelta(call_id="somebody else", delta="x"))
        ctx.sink(TextDelta(delta="leak"))
        ctx.sink(RunFinished(status=RunStatus.FAILED, termination="error"))
        ctx.sink(Custom(run_id="a child's", data=1))
        return "ok"

    sink = RecordingSink()
    out = await run_one([send], call("send", id="c1"), sink=sink)
    (delta,) = sink.of("tool_call_stream_delta")
    assert (delta.call_id, delta.delta, delta.run_id) == ("c1", "x", out.run_id)
    assert sink.of("custom") == []
    assert sink.kinds.count("run_finished") == 1
    assert [e.delta for e in sink.of("text_delta")] == ["done"]


async def test_retries_try_again_but_not_after_wrong_arguments() -> None:
    tries: list[str] = []

    @tool(retries=2)
    async def flaky(how: str) -> str:
        """Fail twice."""
        tries.append(how)
        if how == "wrong":
            raise InvalidArguments("never right")
        if len(tries) < 3:
            raise ConnectionError("again")
        return "third time lucky"

    assert await read([flaky], call("flaky", {"how": "net"})) == ["third time lucky"]
    tries.clear()
    assert await read([flaky], call("flaky", {"how": "wrong"})) == ["invalid_arguments: never right"]
    assert tries == ["wrong"]


async def test_a_sync_tool_runs_beside_the_event_loop_and_can_be_timed_out() -> None:
    import threading
    import time

    told = threading.Event()

    @tool(timeout=0.05)
    def stuck(ctx: ToolContext) -> str:
        """Block."""
        while not ctx.cancellation.is_set():
            time.sleep(0.005)
        told.set()
        return "too late"

    @tool
    def where() -> bool:
        """Say whether this is the main thread."""
        return threading.current_thread() is threading.main_thread()

    assert await read([stuck, where], call("stuck"), call("where")) == ["timeout: no result after 0.05 s", "false"]
    await asyncio.to_thread(told.wait)


async def test_values_with_no_json_form_fail_the_call_and_say_so() -> None:
    @tool
    async def odd() -> Any:
        """Odd."""
        return {"handle": object()}

    (text,) = await read([odd], call("odd"))
    assert text.startswith("internal: tool 'odd' returned a value that cannot be written as JSON")
    assert "object" in text


async def test_a_huge_result_is_cut_where_it_shows_and_the_event_keeps_it_whole() -> None:
    @tool
    async def huge() -> str:
        """Fifty megabytes."""
        return "x" * 50_000_000

    sink = RecordingSink()
    out = await run_one([huge], call("huge"), sink=sink)
    (message,) = [m for m in out.messages if m.role == "tool"]
    assert len(message.text) < 81_000
    assert "[… 49,920,000 of 50,000,000 characters left out here …]" in message.text
    (finished,) = sink.of("tool_call_finished")
    assert len(finished.result.data) == 50_000_000


async def test_only_so_many_calls_run_at_once() -> None:
    busy = Busy()
    await run_one([busy.tool], *[call("work") for _ in range(50)], limits=retinue.Limits(parallel=4))
    assert busy.most == 4


def test_misuse_raises_at_once_and_says_where() -> None:
    @tool(name="greet")
    async def other() -> None:
        """Other."""

    with pytest.raises(ValueError, match="agent 'a' has two tools named 'greet'"):
        Agent("a", tools=[Greet(), other])
    with pytest.raises(ValueError, match=r"give an instance of the tool class Greet: Greet\(\)"):
        Agent("a", tools=[Greet])
    with pytest.raises(ValueError, match="not a tool: 5"):
        Agent("a", tools=[5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="agent name '-x'"):
        Agent("-x")
    with pytest.raises(ValueError, match="max_steps must be at least 1"):
        Agent("a", max_steps=0)

    class Broken(Tool):
        descriptor = ToolDescriptor("b", "broken", "").with_parameters({"type": "nonsense"})

        async def execute(self, args: dict[str, Any], ctx: ToolContext) -> None: ...

    with pytest.raises(ValueError, match="tool 'broken': its parameters: not a valid JSON Schema"):
        Agent("a", tools=[Broken()])

    class Nameless(Tool):
        async def execute(self, args: dict[str, Any], ctx: ToolContext) -> None: ...

    with pytest.raises(ValueError, match="tool class Nameless has no descriptor"):
        Agent("a", tools=[Nameless()])


def test_a_schema_has_nothing_fetched(tmp_path: Path) -> None:
    """Neither a file nor an address: schemas come from servers too."""
    (tmp_path / "s.json").write_text('{"type": "object"}')
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        places = [f"file://{tmp_path}/s.json", f"http://127.0.0.1:{listening.getsockname()[1]}/s.json"]
        for place in places:
            with pytest.raises(ConfigurationError, match="nothing is fetched"):
                SuspendTicket("t", "ask", response_schema={"$ref": place})
        with pytest.raises(BlockingIOError):
            listening.accept()


async def test_an_unknown_tool_names_those_there_are() -> None:
    assert await read([Greet()], call("grete", {"name": "x"})) == [
        "not_found: there is no tool named 'grete'; available: greet"
    ]
    assert issubclass(NotFound, ToolError)
    assert issubclass(InternalError, ToolError)


async def test_an_exception_keeps_its_type() -> None:
    @tool
    async def leave() -> None:
        """Leave."""
        sys.exit(3)

    @tool
    async def empty() -> None:
        """Raise without a word."""
        raise ValueError

    assert await read([leave, empty], call("leave"), call("empty")) == [
        "internal: SystemExit: 3",
        "internal: ValueError",
    ]
