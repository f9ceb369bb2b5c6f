"""Work that does not end by itself is ended: by limits on time, and by limits on the size of an answer.

The limits on time are short, and what they end lasts for hours, so no test depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from retinue import Agent, Limits, RunStatus, Runtime, ToolContext, tool
from retinue.core import concurrency
from retinue.errors import ModelError
from retinue.loop import turn
from retinue.models import CallChunk, ReasoningChunk, Retrying, TextChunk
from retinue.testing import ScriptedModel, call, say
from tests.effort import share
from tests.models.server import Reply, serving
from tests.models.test_conformance import connect
from tests.waiting import let_others_run

SOON = Limits(seconds=0.2)
HOURS = 3600 * 5


class Turns:
    """A sink that counts the turns of the event loop, the events of one kind, and the most of them in one turn."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.count = self.events = self.most = 0

    def __call__(self, event: Any) -> None:
        self.events += event.kind == self._kind

    async def __aenter__(self) -> Turns:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        seen = 0
        while True:
            self.most, seen = max(self.most, self.events - seen), self.events
            self.count += 1
            await asyncio.sleep(0)


class Endless:
    """A model that sends one chunk again and again."""

    name = "test:endless"

    def __init__(self, chunk: Any, pause: float | None = None, first: Any = ()) -> None:
        self.chunk, self.pause, self.first = chunk, pause, first
        self.is_heard = self.is_closed = False

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        try:
            for chunk in self.first:
                yield chunk
            self.is_heard = True
            while True:
                yield self.chunk
                if self.pause is not None:
                    await asyncio.sleep(self.pause)
        finally:
            self.is_closed = True


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a moment only for work that does not stop."""
    from retinue.backends import local
    from retinue.runtime import live

    assert live.GRACE == local.GRACE == concurrency.GRACE
    monkeypatch.setattr(live.LiveRun.cancel, "__defaults__", (0.1,))
    monkeypatch.setattr(local, "GRACE", 0.1)


def check_out_of_time(result: Any, limit: float = 0.2) -> None:
    assert (result.status, result.termination) == (RunStatus.FAILED, "limit:seconds")
    assert result.error.startswith("the limit on seconds is reached: ")
    assert result.error.endswith(f" of {limit} used")


async def run_out_of_time(runtime: Runtime, agent: Agent, has_begun: Callable[[], bool]) -> Any:
    """Return the result of a run that ends in the midst of its work, with as much time as it takes to come there."""
    seconds = 0.2
    while True:
        thread_id, other = f"for {seconds} s", Agent("b", ScriptedModel([say("ok")]))
        result = await runtime.run(agent, "go", thread_id=thread_id, limits=Limits(seconds=seconds))
        check_out_of_time(result, seconds)
        assert (await runtime.run(other, "go", thread_id=thread_id)).response == "ok"
        if has_begun():
            return result
        seconds *= 2


async def test_a_model_that_drips_forever(place: str) -> None:
    for chunk in (TextChunk("x"), TextChunk(""), ReasoningChunk(""), CallChunk(0, "c", "wait", "")):
        model = Endless(chunk, 0.001, (TextChunk("so far"),))
        async with Runtime.open(place) as runtime:
            result = await run_out_of_time(runtime, Agent("a", model), lambda model=model: model.is_heard)
            assert (result.response or "").startswith("so far")
            assert model.is_closed


@pytest.mark.parametrize("how", ["wait", "block"])
async def test_a_tool_that_lasts_for_hours(place: str, how: str) -> None:
    begun = threading.Event()

    @tool
    async def wait() -> str:
        """Wait for hours."""
        begun.set()
        await asyncio.sleep(HOURS)
        return "?"

    @tool
    def block(ctx: ToolContext) -> str:
        """Block a thread until it is told to stop."""
        begun.set()
        stopped = threading.Event()
        ctx.cancellation.on_set(stopped.set)
        stopped.wait(HOURS)
        return "?"

    agent = Agent("a", ScriptedModel(lambda _: call(how)), tools=[wait, block])
    async with Runtime.open(place) as runtime:
        result = await run_out_of_time(runtime, agent, begun.is_set)
        assert "cancelled" in result.messages[-1].text


@pytest.mark.usefixtures("short_grace")
async def test_a_tool_that_refuses_to_stop_is_left_behind(place: str) -> None:
    is_over = asyncio.Event()

    @tool
    async def refuse_to_stop() -> str:
        """Swallow every cancellation."""
        while not is_over.is_set():
            try:
                await is_over.wait()
            except asyncio.CancelledError:
                continue
        return "?"

    child = Agent("child", ScriptedModel(lambda _: call("refuse_to_stop")), tools=[refuse_to_stop])
    ask = call("task", {"subagent_type": "child", "description": "x"})
    for agent in (
        Agent("a", ScriptedModel([call("refuse_to_stop")]), tools=[refuse_to_stop]),
        Agent("b", ScriptedModel([ask]), subagents=[child]),
    ):
        async with Runtime.open(place, [agent]) as runtime:
            result = await runtime.run(agent, "go", thread_id="t", limits=SOON)
            check_out_of_time(result)
            assert (await runtime.run(Agent("c", ScriptedModel([say("ok")])), "go", thread_id="t")).response == "ok"
            is_over.set()
        await asyncio.sleep(0)
        is_over.clear()


async def test_a_child_has_a_limit_of_its_own(place: str) -> None:
    child = Agent("child", Endless(TextChunk("x"), 0.001), limits=SOON)
    ask = call("task", {"subagent_type": "child", "description": "x"})
    agent = Agent("a", ScriptedModel([ask, say("went on")]), subagents=[child])
    async with Runtime.open(place, [agent]) as runtime:
        result = await runtime.run("a", "go", limits=Limits(seconds=HOURS))
    assert (result.status, result.response) == (RunStatus.COMPLETED, "went on")
    assert "the limit on seconds is reached" in result.messages[2].text


@pytest.mark.parametrize("is_given", [False, True], ids=["of its agent", "given with the call"])
async def test_the_time_of_a_child_begins_with_the_child(place: str, is_given: bool) -> None:
    """Its clock starts with its first event, also where the time since 1970 is more than its limit."""

    async def answer(request: object) -> Any:
        await let_others_run()  # a timer that is over ends the child meanwhile
        return say("done")

    hours = Limits(seconds=HOURS)
    child = Agent("child", ScriptedModel(answer), limits=Limits() if is_given else hours)

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        outcome = await ctx.run_child(child, "go", limits=hours if is_given else None)
        return outcome.response or str(outcome.error)

    async with Runtime.open(
        place, [Agent("a", ScriptedModel([call("delegate"), say("ok")]), tools=[delegate])]
    ) as runtime:
        result = await runtime.run("a", "go")
    assert (result.messages[2].text, result.response) == ("done", "ok")


async def test_a_timeout_ends_a_child_whose_model_drips(place: str) -> None:
    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        return (await ctx.run_child(child, "go", timeout=0.2)).status

    child = Agent("child", Endless(TextChunk(""), 0.001))
    agent = Agent("a", ScriptedModel([call("delegate"), say("went on")]), tools=[delegate])
    async with Runtime.open(place, [agent]) as runtime:
        result = await runtime.run("a", "go")
    assert (result.response, result.messages[2].text) == ("went on", "timeout")


async def test_time_in_which_a_run_waits_does_not_count() -> None:
    """The timer of a leg ends with it."""
    from retinue import Decision, ToolResult

    now = 1000.0

    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask."""
        return ToolResult.suspended("?") if ctx.resume_input is None else "answered"

    agent = Agent("a", ScriptedModel([call("ask", id="c"), say("ok")]), tools=[ask], limits=Limits(seconds=5))
    async with Runtime([agent], clock=lambda: now) as runtime:
        waiting = await runtime.run("a", "go")
        now += HOURS
        result = await runtime.resume(waiting.run_id, {"c": Decision.resume(1)})
    assert (result.status, result.response) == (RunStatus.COMPLETED, "ok")


# --- the size of an answer


@pytest.mark.parametrize(
    "chunk",
    [
        TextChunk("x"),
        TextChunk("x" * 5000),
        TextChunk(""),
        ReasoningChunk("x"),
        ReasoningChunk("", "signed"),
        CallChunk(0, "c", "work", "x"),
        CallChunk(0, "c", "work", ""),
    ],
    ids=["text", "long", "empty", "reasoning", "signatures", "arguments", "nothing"],
)
async def test_a_flood_is_cut(place: str, chunk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that never lets other work have its turn."""
    monkeypatch.setattr(turn, "MAX_ANSWER", 100_000)
    model, beats = Endless(chunk), 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    async with Runtime.open(place, [Agent("a", model)]) as runtime:
        heart = asyncio.create_task(beat())
        result = await runtime.run("a", "go", thread_id="t")
        heart.cancel()
        assert result.status is RunStatus.FAILED
        assert "the answer is too long: it has more than 100,000 characters or 3,125 pieces" in (result.error or "")
        assert model.is_closed
        assert beats > 5 or len(getattr(chunk, "text", "")) > 1000
        assert (await runtime.run(Agent("b", ScriptedModel([say("ok")])), "go", thread_id="t")).response == "ok"


async def test_an_answer_may_not_ask_for_too_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "MAX_CALLS", 50)

    class Many:
        name = "test:many"

        async def stream(self, request: Any) -> AsyncIterator[Any]:
            for number in range(10_000):
                yield CallChunk(number, None, "work", "{}")

    result = await Runtime([Agent("a", Many())]).run("a", "go")
    assert "the answer asks for more than 50 calls" in (result.error or "")
    assert [message.role for message in result.messages] == ["user"]


@pytest.mark.parametrize(
    "last", [None, Retrying(code="lost", message="broken", restarts=True)], ids=["failed", "retried"]
)
async def test_many_calls_that_are_dropped_leave_turns_to_others(last: Any) -> None:
    """Each turn of the event loop drops a part of them."""
    calls = [CallChunk(number, f"c{number}", "work", "{}") for number in range(2_000)]

    class Broken:
        name = "test:broken"

        async def stream(self, request: Any) -> AsyncIterator[Any]:
            for chunk in calls:
                yield chunk
            if last is None:
                raise ModelError("broken", "test:broken")
            yield last
            yield TextChunk("end")

    async with Turns("tool_call_finished") as turns:
        result = await Runtime([Agent("a", Broken())], sinks=[turns]).run("a", "go")
    assert result.status is (RunStatus.FAILED if last is None else RunStatus.COMPLETED)
    assert turns.events == 2_000
    assert turns.most <= 400


async def test_wrong_arguments_of_many_calls_leave_turns_to_others() -> None:
    """To list the errors of a call takes time: there is a turn between two calls, and while the answer is parsed."""

    @tool
    async def work(names: list[str | None]) -> str:
        """Work."""
        return "done"

    asked, parsed = 0, 0

    def note(event: Any) -> None:
        nonlocal asked, parsed
        asked = turns.count if event.kind == "tool_call_args_delta" else asked
        parsed = turns.count if event.kind == "inference_finished" else parsed

    model = ScriptedModel([[call("work", {"names": [1] * 400}) for _ in range(600)], say("end")])
    async with Turns("tool_call_finished") as turns:
        result = await Runtime([Agent("a", model, tools=[work])], sinks=[turns, note]).run("a", "go")
    assert (result.response, turns.events) == ("end", 600)
    assert "names[399]" in result.messages[2].text
    assert turns.most == 1
    assert parsed - asked >= 4


async def test_many_calls_start_in_several_turns() -> None:
    @tool
    async def work() -> str:
        """Work."""
        return "done"

    model = ScriptedModel([[call("work") for _ in range(2_000)], say("end")])
    agent = Agent("a", model, tools=[work], limits=Limits(parallel=5_000))
    async with Turns("tool_call_ready") as turns:
        result = await Runtime([agent], sinks=[turns]).run("a", "go")
    assert (result.response, turns.events) == ("end", 2_000)
    assert turns.most <= 400


async def test_a_flood_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer up to its limit, in pieces of one character: each is an event."""
    longest = share(turn.MAX_ANSWER, turn.MAX_ANSWER // 8)
    monkeypatch.setattr(turn, "MAX_ANSWER", longest)
    tracemalloc.start()
    try:
        result = await Runtime([Agent("a", Endless(TextChunk("x")))]).run("a", "go")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.status is RunStatus.FAILED
    assert most < 25 * longest


# --- servers


async def ping_forever(reply: Reply) -> None:
    await reply.head()
    while True:
        await reply.piece(b": ping\n\n")


async def empty_forever(reply: Reply) -> None:
    await reply.head()
    while True:
        await reply.piece(b'data: {"choices": [{"delta": {"content": ""}}]}\n\n')


@pytest.mark.parametrize("answer", [ping_forever, empty_forever])
async def test_pings_and_empty_pieces_are_silence(answer: Any) -> None:
    from retinue.errors import ModelTimeout
    from retinue.testing import hear

    async with serving(answer) as server:
        model = connect("chat", server.url, idle_timeout=0.2)
        with pytest.raises(ModelTimeout, match=r"silent for 0\.2 s"):
            await hear(model)
        await cast("Any", model).aclose()


@pytest.mark.parametrize("wire", ["chat", "responses", "anthropic"])
async def test_a_limit_on_time_ends_a_request_in_flight(wire: str) -> None:
    async with serving(ping_forever) as server:
        model = connect(wire, server.url)
        result = await Runtime([Agent("a", model, limits=SOON)]).run("a", "go")
        check_out_of_time(result)
        await cast("Any", model).aclose()


async def flood(reply: Reply) -> None:
    await reply.head()
    piece = b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % (b"x" * 1000)
    while True:
        await reply.piece(piece * 50)


async def test_a_flood_from_a_server_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "MAX_ANSWER", 1_000_000)
    async with serving(flood) as server:
        model = connect("chat", server.url)
        result = await Runtime([Agent("a", model)]).run("a", "go")
        assert "the answer is too long" in (result.error or "")
        await cast("Any", model).aclose()
