"""Content is sent only when asked for, as the conventions write it."""

from __future__ import annotations

import json

from inline_snapshot import snapshot

from retinue import Agent, RunStatus, Runtime
from retinue.testing import ScriptedModel, call, fail
from tests.telemetry.agents import leaf, look, run_tree
from tests.telemetry.collector import Collector, attributes, every


async def test_content_is_sent_only_when_asked_for() -> None:
    def all_text(got: Collector) -> str:
        return repr([(span.name, every(span), span.status.description) for span in got.spans])

    without, _ = await run_tree()
    assert "secret" not in all_text(without)
    assert "found" not in all_text(without)
    got, _ = await run_tree(content=True)
    root, last = got.span("invoke_agent leaf"), got.span("chat small", -1)
    assert every(root)["gen_ai.input.messages"] == snapshot(
        '[{"role":"user","parts":[{"type":"text","content":"secret-task"}]}]'
    )
    assert every(root)["gen_ai.output.messages"] == snapshot(
        '[{"role":"assistant","parts":[{"type":"text","content":"read"}],"finish_reason":"natural"}]'
    )
    assert every(last)["gen_ai.input.messages"] == snapshot(
        '[{"role":"user","parts":[{"type":"text","content":"secret-task"}]},{"role":"assistant","parts":[{"type":"tool_call","id":"call_1_1_00c857ef","name":"look","arguments":{"q":"secret-q"}}]},{"role":"tool","parts":[{"type":"tool_call_response","id":"call_1_1_00c857ef","response":"found secret-q"}]}]'
    )
    assert every(last)["gen_ai.output.messages"] == snapshot(
        '[{"role":"assistant","parts":[{"type":"text","content":"read"}],"finish_reason":"stop"}]'
    )
    looked = every(got.span("execute_tool look"))
    assert looked["gen_ai.tool.call.arguments"] == '{"q":"secret-q"}'
    assert looked["gen_ai.tool.call.result"] == "found secret-q"


async def test_the_error_of_a_failed_run_is_typed_and_its_text_is_content() -> None:
    def broken() -> Agent:
        return Agent("a", ScriptedModel([call("look", {"q": "x"}), fail(RuntimeError("secret"))]), tools=[look])

    got = Collector()
    assert (await Runtime([broken()], sinks=[got.sink]).run("a", "go")).status is RunStatus.FAILED
    assert got.tree() == snapshot(
        [
            "invoke_agent a [ERROR: RuntimeError]",
            "  chat scripted",
            "  execute_tool look",
            "  chat scripted [ERROR: RuntimeError]",
        ]
    )
    assert attributes(got.span("chat scripted", -1)) == snapshot(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.agent.name": "a",
            "retinue.step": 2,
            "gen_ai.request.stream": True,
            "gen_ai.provider.name": "testing",
            "gen_ai.request.model": "scripted",
            "error.type": "RuntimeError",
        }
    )
    assert got.open == 0
    got = Collector(content=True)
    await Runtime([broken()], sinks=[got.sink]).run("a", "go")
    assert got.span("invoke_agent a").status.description == "RuntimeError: secret"


async def test_content_of_a_thread_that_goes_on_begins_with_what_was_said_before() -> None:
    got = Collector(content=True)
    runtime = Runtime([leaf()], sinks=[got.sink])
    await runtime.run("leaf", "one", thread_id="t")
    await runtime.run("leaf", "two", thread_id="t")
    told = json.loads(every(got.span("chat small", -1))["gen_ai.input.messages"])
    said = "user assistant tool assistant user assistant tool".split()
    assert [message["role"] for message in told] == said
