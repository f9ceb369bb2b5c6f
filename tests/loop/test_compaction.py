"""Compaction: requests stay within the window, keep their prefix, and lose nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import json
from msgspec.structs import replace

from retinue import Agent, Budget, Compaction, HarnessAgent, Limits, Message, RunStatus, Runtime, Usage, tool
from retinue.core.window import shortened
from retinue.errors import ConfigurationError, ContextOverflow
from retinue.loop.compaction import size_of
from retinue.models import ModelRequest
from retinue.models.anthropic import AnthropicWire
from retinue.models.chat import ChatWire
from retinue.models.resilience import close_model
from retinue.plugins import AddContextMessage, HookContext, Plugin, Registrar
from retinue.state import StateCommand
from retinue.testing import KnownTurn, RecordingSink, ScriptedModel, call, fail, say
from tests.models.server import Answer, Asked, Reply, refuse, serving, stream
from tests.models.streams import RENDER
from tests.models.test_conformance import connect

WINDOW = 8000
SUMMARY = "## Goal\nThe work.\n## Done so far\nSome steps."


@tool
def work(n: int) -> str:
    """Work on step n."""
    return f"fact of step {n}: {n * 7919}. " + "Some more words about it. " * 24


class Windowed(ScriptedModel):
    """Refuses a request over its window, writes summaries, and leaves the rest to a function of the step."""

    def __init__(self, act: Callable[[ModelRequest, int], Any], window: int = WINDOW, factor: float = 1.0) -> None:
        super().__init__(self._answer, context_window=window)
        self._act, self._window, self._factor = act, window, factor
        self.steps: list[ModelRequest] = []
        self.summaries: list[ModelRequest] = []
        self.refused = 0

    def _answer(self, request: ModelRequest) -> Any:
        tokens = int(size_of(request) * self._factor)
        if tokens > self._window:
            self.refused += 1
            return fail(ContextOverflow("prompt is too long", self.name))
        usage = Usage(requests=1, input_tokens=tokens, output_tokens=10)
        if not request.tools:
            self.summaries.append(request)
            return say(SUMMARY, usage=usage)
        self.steps.append(request)
        made = self._act(request, len(self.steps))
        return [say("", usage=usage), *(made if isinstance(made, list) else [made])]


def working(steps: int) -> Callable[[ModelRequest, int], Any]:
    """Return a function that works for some steps, or until it is told that this is its last turn."""

    def act(request: ModelRequest, step: int) -> Any:
        is_last = step >= steps or "[limit:" in request.messages[-1].text
        return say("ok") if is_last else call("work", {"n": step})

    return act


def harness(model: Any, folder: Path, *tools: Any, **options: Any) -> HarnessAgent[str]:
    options = {"disable_subagents": True, "max_steps": 1000} | options
    return HarnessAgent("a", model, "Be exact.", list(tools) or [work], workspace=folder, **options)


async def test_four_hundred_steps_in_a_window_of_8000(tmp_path: Path) -> None:
    def act(request: ModelRequest, step: int) -> Any:
        if step == 399:
            path = re.search(r'"(history/[^"]+/1\.md)"', request.messages[1].text)
            assert path is not None, request.messages[1].text
            return call("grep_files", {"pattern": "fact of step 3:", "path": path[1]})
        return call("work", {"n": step}) if step < 400 else say("found")

    sink, model = RecordingSink(), Windowed(act)
    result = await Runtime([harness(model, tmp_path)]).run("a", "Do it all, without a break.", sinks=[sink])
    assert (result.status, result.steps, model.refused) == (RunStatus.COMPLETED, 400, 0)
    assert "fact of step 3: 23757" in result.messages[-2].text
    compacted, changed = sink.of("compacted"), sink.of("cache_prefix_changed")
    assert 10 <= len(compacted) <= 25
    assert [one.cause for one in changed] == ["compacted"] * len(compacted)
    assert sum([one.usage.requests for one in compacted]) == len(model.summaries)
    assert result.usage.requests == 400 + len(compacted)
    assert all(one.tokens_after < 0.7 * one.tokens_before and one.problem is None for one in compacted)
    assert "Do it all, without a break." in model.steps[-1].messages[1].text
    assert len(result.messages) == 1 + 399 * 2 + 1, "the conversation stays whole"
    assert [path.name for path in tmp_path.iterdir()] == [], "what was cut is no part of the workspace"


async def test_the_next_run_of_a_thread_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    model = Windowed(lambda request, step: call("work", {"n": step}) if step % 31 else say("ok"))
    runtime = Runtime([harness(model, tmp_path)])
    kinds: list[str] = []
    for turn in range(4):
        sink = RecordingSink()
        assert (await runtime.run("a", f"turn {turn}", thread_id="t", sinks=[sink])).status == "completed"
        kinds += [event.kind for event in sink.of("compacted", "cache_prefix_changed")]
    assert kinds == ["compacted", "cache_prefix_changed"] * (len(kinds) // 2)
    assert len(kinds) >= 6
    assert model.refused == 0
    assert check_prefixes(model.steps) == len(kinds) // 2
    assert "turn 3" in [message.text for message in model.steps[-30].messages]


async def test_a_refusal_compacts_and_asks_once_more(tmp_path: Path) -> None:
    """The window is not what it was thought to be: the refusal is learned from, also by the next run."""
    model = Windowed(lambda _, step: call("work", {"n": step}) if step % 60 else say("ok"), window=WINDOW)
    model.context_window = 100_000
    runtime, sink = Runtime([harness(model, tmp_path)]), RecordingSink()
    assert (await runtime.run("a", "go", thread_id="t", sinks=[sink])).status == "completed"
    assert (await runtime.run("a", "more", thread_id="t")).status == "completed"
    assert model.refused == 1
    errors = sink.of("error")
    assert [(one.code, one.fatal, one.retry_model) for one in errors] == [
        ("context_overflow", False, "testing:scripted")
    ]


async def test_counts_of_the_provider_correct_the_estimate(tmp_path: Path) -> None:
    model = Windowed(lambda _, step: call("work", {"n": step}) if step < 100 else say("ok"), factor=2.0)
    sink = RecordingSink()
    assert (await Runtime([harness(model, tmp_path)]).run("a", "go", sinks=[sink])).status == "completed"
    assert model.refused == 0
    assert all(WINDOW * 0.8 < one.tokens_before < WINDOW for one in sink.of("compacted"))


async def test_a_large_result_keeps_its_ends_and_can_be_read(tmp_path: Path) -> None:
    @tool
    def dump() -> str:
        """Dump."""
        return "\n".join([f"line {n}" for n in range(6000)])

    def act(request: ModelRequest, step: int) -> Any:
        if step == 1:
            return call("dump")
        shown = request.messages[-1].text
        if step == 2:
            assert shown.startswith("line 0\n"), shown[:300]
            assert shown.endswith("line 5999"), shown[-300:]
            assert len(shown) < WINDOW + 300
            path = re.search(r'the whole is in "(history/[^"]+)"', shown)
            assert path is not None
            return call("grep_files", {"pattern": "^line 3000$", "path": path[1]})
        return say(shown)

    sink = RecordingSink()
    result = await Runtime([harness(Windowed(act), tmp_path, dump)]).run("a", "go", sinks=[sink])
    assert "line 3000" in (result.response or "")
    assert sink.of("compacted") == []
    assert "line 3000\n" in result.messages[2].text, "the conversation stays whole"


async def test_many_large_results_of_one_step_are_cut_until_they_fit(tmp_path: Path) -> None:
    @tool
    def dump() -> str:
        """Dump."""
        return "blah " * 4000

    calls = [call("dump", id=f"c{n}") for n in range(12)]
    model = Windowed(lambda _, step: calls if step == 1 else say("ok"))
    sink = RecordingSink()
    result = await Runtime([harness(model, tmp_path, dump)]).run("a", "go", sinks=[sink])
    assert (result.status, model.refused, len(sink.of("compacted"))) == ("completed", 0, 1)


@pytest.mark.parametrize("how", ["no summary today", "wrote no summary"])
async def test_without_a_summary_the_oldest_steps_are_cut(tmp_path: Path, how: str) -> None:
    class Broken(Windowed):
        def _answer(self, request: ModelRequest) -> Any:
            if not request.tools:
                return fail(RuntimeError(how)) if how.startswith("no") else say("")
            return super()._answer(request)

    model, sink = Broken(working(60)), RecordingSink()
    result = await Runtime([harness(model, tmp_path)]).run("a", "Keep this in mind.", sinks=[sink])
    assert (result.status, model.refused) == ("completed", 0), result.error
    assert {how in (one.problem or "") and "Keep this in mind." in one.summary for one in sink.of("compacted")} == {
        True
    }


async def test_a_budget_refuses_the_summary_and_the_run_answers(tmp_path: Path) -> None:
    sink, model = RecordingSink(), Windowed(working(60))
    await Runtime([harness(model, tmp_path)]).run("a", "go", sinks=[sink])
    first = sink.of("compacted")[0].seq
    spent = sum([one.usage.tokens for one in sink.of("inference_finished") if one.seq < first])
    sink, model = RecordingSink(), Windowed(working(60))
    limits = Limits(tokens=spent + 9000)
    result = await Runtime([harness(model, tmp_path)]).run("a", "go", sinks=[sink], limits=limits)
    assert (result.status, model.refused, model.summaries) == ("completed", 0, []), result.error
    assert [one.problem for one in sink.of("compacted")] == ["this is the last turn within the limits of the run"]
    assert result.usage.tokens <= spent + 9000


async def test_compaction_may_be_switched_off_set_or_given_as_a_plugin(tmp_path: Path) -> None:
    model = Windowed(lambda _, step: call("work", {"n": step}) if step < 99 else say("ok"))
    result = await Runtime([harness(model, tmp_path, compaction=False)]).run("a", "go")
    assert (result.status, model.refused) == ("failed", 1)
    given = Compaction(keep=3)
    assert harness(model, tmp_path, plugins=[given]).compaction is given
    assert harness(model, tmp_path, plugins=[given]).mirror("x").compaction is given
    with pytest.raises(ConfigurationError, match="compaction is a Compaction, False or None, not True"):
        harness(model, tmp_path, compaction=True)
    with pytest.raises(ConfigurationError, match="window is a whole number"):
        Compaction(window=0)


async def test_a_plain_agent_compacts_with_the_plugin_and_has_no_files(tmp_path: Path) -> None:
    model = Windowed(lambda _, step: call("work", {"n": step}) if step < 99 else say("ok"))
    sink = RecordingSink()
    agent = Agent("a", model, tools=[work], plugins=[Compaction()], max_steps=200)
    result = await Runtime([agent]).run("a", "go", sinks=[sink])
    assert (result.status, model.refused) == ("completed", 0)
    assert {one.path for one in sink.of("compacted")} == {""}
    assert "history/" not in model.steps[-1].messages[0].text


async def test_what_was_cut_is_read_only_and_of_one_conversation(tmp_path: Path) -> None:
    path = "history/t/1.md"
    last = [
        call("list_files", {"path": "history/t"}),
        call("read_file", {"path": path, "limit": 3}),
        call("write_file", {"path": path, "content": "x"}),
        call("edit_file", {"path": path, "old": "Say what is known.", "new": "x"}),
        call("glob_files", {"pattern": "**/*"}),
    ]
    model = Windowed(lambda _, step: [call("work", {"n": step}), last, say("ok")][(step >= 60) + (step > 60)])
    runtime = Runtime([harness(model, tmp_path)])
    result = await runtime.run("a", "Say what is known.", thread_id="t")
    listed, read, *refused, found = [message.text for message in result.messages[-6:-1]]
    assert [line.partition(" (")[0] for line in listed.splitlines()] == ["history/t/1.md", "history/t/2.md"]
    assert "Say what is known." in read
    assert all("is a part of this conversation that was cut, and cannot be changed" in text for text in refused)
    assert found.startswith("no file in")
    other = ScriptedModel([call("read_file", {"path": path}), say("ok")])
    result = await Runtime([harness(other, tmp_path)]).run("a", "go", thread_id="u")
    assert "there is no such file" in result.messages[2].text


async def test_children_compact_for_themselves(tmp_path: Path) -> None:
    child = Windowed(lambda _, step: call("work", {"n": step}) if step < 60 else say("done"))
    boss = ScriptedModel([call("task", {"subagent_type": "a", "description": "go"}), say("ok")])
    sink = RecordingSink()
    lead = Agent("lead", boss, subagents=[harness(child, tmp_path)])
    result = await Runtime([lead]).run("lead", "go", sinks=[sink])
    assert result.status == "completed", result.error
    compacted = sink.of("compacted")
    assert {(one.agent, len(one.ns)) for one in compacted} == {("a", 1)}
    assert result.usage.requests == 2 + 60 + len(compacted)


class Notes(Plugin):
    """Adds a message to each request, which no other request has."""

    name = "notes"

    def register(self, r: Registrar) -> None:
        r.hook("step_start", lambda ctx: self._note(ctx))

    def _note(self, ctx: HookContext) -> StateCommand:
        return StateCommand().schedule(AddContextMessage(f"It is step {ctx.step}."))


def check_prefixes(requests: list[ModelRequest]) -> int:
    """Check that each request begins like the one before, on two wires; return how many do not because they are shorter."""
    breaks = 0
    for before, after in zip(requests, requests[1:], strict=False):
        if len(after.messages) <= len(before.messages) - before.transient:
            breaks += 1
            continue
        lasting = before.messages[: len(before.messages) - before.transient]
        assert after.messages[: len(lasting)] == lasting
        assert after.tools == before.tools
        for wire in (AnthropicWire(), ChatWire()):
            begins = blocks(wire, replace(before, messages=lasting, transient=0))
            assert blocks(wire, after)[: len(begins)] == begins
    return breaks


def blocks(wire: Any, request: ModelRequest) -> list[bytes]:
    """Return what a wire sends, in the order in which a provider reads it, without the marks for its cache."""
    body = wire.encode(request, "m")
    found = [body.get("tools", []), *body.get("system", [])]
    for message in body["messages"]:
        content = message.get("content")
        found += [[message["role"], block] for block in (content if isinstance(content, list) else [message])]
    text = [json.encode(one) for one in found]
    return [one.replace(b',"cache_control":{"type":"ephemeral"}', b"") for one in text]


WORDS = st.integers(1, 600).map("word ".__mul__)


@settings(max_examples=20, deadline=None)
@given(turns=st.lists(st.lists(st.lists(WORDS, min_size=1, max_size=4), max_size=8), min_size=1, max_size=6))
async def test_requests_keep_their_prefix_between_compactions(turns: list[list[list[str]]]) -> None:
    """Random conversations of several runs: each request begins with the bytes of the last one, except after a compaction."""

    @tool
    def echo(text: str) -> str:
        """Echo."""
        return text

    steps = [step for turn in turns for step in [*turn, None]]
    model = Windowed(
        lambda _, n: say("ok") if (step := steps[n - 1]) is None else [call("echo", {"text": one}) for one in step]
    )
    agent = Agent("a", model, "Be brief.", [echo], [Notes(), Compaction()], max_steps=50)
    runtime, sink = Runtime([agent]), RecordingSink()
    for turn in range(len(turns)):
        result = await runtime.run("a", f"turn {turn}", thread_id="t", sinks=[sink])
        assert result.status == "completed", result.error
    assert model.refused == 0
    assert check_prefixes(model.steps) == len(sink.of("compacted")) == len(sink.of("cache_prefix_changed"))


async def test_a_changed_system_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("Use tabs.")
    model = ScriptedModel([say("1"), say("2"), say("3")])
    runtime = Runtime([harness(model, tmp_path)])
    causes: list[list[str]] = []
    for turn in range(3):
        sink = RecordingSink()
        if turn == 2:
            (tmp_path / "AGENTS.md").write_text("Use spaces, always.")
        await runtime.run("a", "go", thread_id="t", sinks=[sink])
        causes.append([one.cause for one in sink.of("cache_prefix_changed")])
    assert causes == [[], [], ["system"]]


async def test_a_guessed_window_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedModel([say("1"), say("2"), say("3")])
    runtime = Runtime([harness(model, tmp_path)])
    await runtime.run("a", "hi")
    assert caplog.records == []
    await runtime.run("a", "word " * 14_000)
    await runtime.run("a", "word " * 14_000)
    said = "the context window of model 'testing:scripted' is not known: 32,000 tokens are assumed"
    assert [record.message[: len(said)] for record in caplog.records] == [said]


async def test_a_fork_reads_what_its_origin_has_cut(tmp_path: Path) -> None:
    runtime = Runtime([harness(Windowed(working(60)), tmp_path)])
    sink = RecordingSink()
    first = await runtime.run("a", "Say what is known.", thread_id="t", sinks=[sink])
    fork = await runtime.fork(first.run_id, at=sink.of("step_finished")[-2].seq, input="And now?")
    model = Windowed(lambda _, step: call("read_file", {"path": "history/t/1.md"}) if step == 1 else say("ok"))
    with runtime.override(model=model):
        result = await fork.result()
    assert "Say what is known." in result.messages[-2].text
    assert model.steps[0].messages[1].text.startswith("[The beginning of this conversation was cut")


@pytest.mark.parametrize("wire", sorted(RENDER))
async def test_a_provider_that_says_too_long_is_asked_again_on_every_wire(tmp_path: Path, wire: str) -> None:
    """The provider has a smaller window than it is known to have."""
    limit = 24_000

    def answer(asked: Asked) -> Answer:
        if len(str(asked.body)) > limit:
            return refuse(
                400, {"error": {"message": "prompt is too long: 9000 tokens", "type": "invalid_request_error"}}
            )
        is_summary = "You keep the memory of an agent" in str(asked.body)
        told.append("summary" if is_summary else "answer")
        return stream(RENDER[wire](KnownTurn(text=(SUMMARY if is_summary else "ok",))))

    async def reply(writer: Reply) -> None:
        await answer(server.asked[-1])(writer)

    told: list[str] = []
    async with serving(reply) as server:
        model = connect(wire, server.url)
        agent = Agent("a", model, plugins=[Compaction(window=1_000_000)])
        runtime, sink = Runtime([agent]), RecordingSink()
        for turn in range(8):
            result = await runtime.run("a", f"turn {turn} " + "word " * 1000, thread_id="t", sinks=[sink])
            assert result.status == "completed", result.error
        await close_model(model)
    refused = [one for one in sink.of("error") if one.code == "context_overflow"]
    assert len(refused) == 1, "it learns from the first refusal"
    assert told.count("answer") == 8
    assert told.count("summary") == len(sink.of("compacted")) >= 1


def test_messages_of_people_lose_their_middle_last() -> None:
    text = "a" * 10_000
    assert shortened(Message.user(text), 1000, "").text == text
    assert len(shortened(Message.tool(text, tool_call_id="c"), 1000, "").text) < 4200
    assert len(shortened(Message.user(text), 500, "").text) < 6200
    wide = shortened(Message.tool("語" * 10_000, tool_call_id="c"), 1000, "").text
    assert len(wide.encode()) < 4300


async def test_summaries_are_charged_to_budgets(tmp_path: Path) -> None:
    def price(model: str, usage: Usage) -> float:
        return usage.tokens / 1_000_000

    model = Windowed(working(60))
    budgets = [Budget(per="runtime", window="month", cost=100.0)]
    runtime = Runtime([harness(model, tmp_path)], budgets=budgets, price=price)
    result = await runtime.run("a", "Do it all.")
    (line,) = await runtime.budgets.list()
    assert model.summaries
    assert line.spent_tokens == result.usage.tokens
    assert line.held_tokens == 0


async def test_budgets_hold_through_compactions(tmp_path: Path) -> None:
    sink, model = RecordingSink(), Windowed(working(60))
    budgets = [Budget(per="runtime", window="month", tokens=250_000)]
    runtime = Runtime([harness(model, tmp_path)], budgets=budgets)
    last = ""
    while last != "budget:runtime/month":
        last = (await runtime.run("a", "Do it all.", sinks=[sink])).termination
    (line,) = await runtime.budgets.list()
    assert line.spent_tokens <= 250_000 + WINDOW


async def test_sub_agents_in_the_background_compact_and_go_on_where_they_were(tmp_path: Path) -> None:
    def act(request: ModelRequest, step: int) -> Any:
        if "# Subagent Context" in request.messages[0].text:
            below.append(request)
            last = request.messages[-1]
            return say(f"heard {last.text}") if last.text == "more" or len(below) == 60 else call("work", {"n": step})
        said = "".join([message.text for message in request.messages])
        match sum(message.role == "tool" for message in request.messages):
            case 0:
                return call("agent_spawn", {"agent_id": "general-purpose", "task": "go", "timeout_seconds": 0})
            case 1:
                task_id = re.findall(r"task_id: (\S+)", said)[0]
                return call("task_output", {"task_id": task_id, "block": True, "timeout": 60_000})
            case 2:
                key = re.findall(r"agent_key: (\S+)", said)[0]
                return call("agent_send", {"agent_key": key, "message": "more", "timeout_seconds": 60})
            case _:
                return say("done")

    below: list[ModelRequest] = []
    model, sink = Windowed(act), RecordingSink()
    agent = harness(model, tmp_path, disable_subagents=False)
    async with Runtime([agent]) as runtime:
        result = await runtime.run("a", "go", sinks=[sink])
        assert (result.status, model.refused) == ("completed", 0), result.error
    compacted = [one for one in sink.of("compacted") if one.ns]
    assert compacted
    assert {one.agent for one in compacted} == {"general-purpose"}
    assert len(below) == 61, "the next message needs no summary of its own"
    assert below[-1].messages[1] == below[-2].messages[1], "it still has the summary"
