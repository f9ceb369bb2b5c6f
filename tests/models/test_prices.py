"""Prices: a kept list, rates of one's own, and limits on cost that hold or say why they cannot."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from retinue import Agent, ConfigurationError, Limits, ModelRequest, RunStatus, Runtime, Usage, tool
from retinue.models import open_model, prices
from retinue.models.resilience import close_model
from retinue.testing import KnownTurn, ScriptedModel, call, say
from tests.models.server import serving, stream
from tests.models.streams import chat, event

MILLION = 1_000_000


class Named(ScriptedModel):
    """A scripted model that answers as one that has a price."""

    def __init__(self, script: Any, name: str = "openai:gpt-4o") -> None:
        super().__init__(script)
        self.name = name


@tool
async def work() -> str:
    """Work."""
    return "ok"


def used(input: int = 1000, output: int = 100, cached: int = 0) -> Usage:
    return Usage(requests=1, input_tokens=input, output_tokens=output, cached_tokens=cached)


def test_the_list_knows_models_and_cached_tokens_are_cheaper() -> None:
    price = prices()
    plain = price("openai:gpt-4o", used(MILLION, MILLION))
    assert plain == pytest.approx(12.5)  # 2.50 and 10.00 a million
    assert price("openai:gpt-4o", used(MILLION, MILLION, cached=MILLION)) == pytest.approx(11.25)
    assert price("openai:gpt-4o", used(10, 0, cached=20)) == pytest.approx(10 * 1.25 / MILLION)
    assert price("openai:gpt-4o", Usage()) == 0


def test_what_is_written_to_a_cache_may_be_dearer() -> None:
    price = prices()
    some, written = used(100_000, 0), Usage(input_tokens=100_000, cache_write_tokens=100_000)
    assert price("anthropic:claude-sonnet-4-5", some) == pytest.approx(0.3)
    assert price("anthropic:claude-sonnet-4-5", written) == pytest.approx(0.375)
    assert price("openai:gpt-4o", written) == price("openai:gpt-4o", some)


@pytest.mark.parametrize("model", ["openai:no-such-model", "no-such-provider:gpt-4o", "gpt-4o", "", "testing:scripted"])
def test_an_unknown_model_has_no_price(model: str) -> None:
    assert prices()(model, used()) is None


def test_rates_of_ones_own_win() -> None:
    price = prices({"acme:x": (2.0, 8.0, 0.5), "openai:gpt-4o": (1.0, 1.0), "ollama:*": (0.0, 0.0)})
    assert price("acme:x", used(MILLION, MILLION, cached=MILLION // 2)) == pytest.approx(1.0 + 0.25 + 8.0)
    assert price("openai:gpt-4o", used(MILLION, MILLION, cached=MILLION)) == pytest.approx(2.0)
    assert price("ollama:llama3", used()) == 0
    assert price("openai:gpt-4o-mini", used()) is not None


@pytest.mark.parametrize("own", [{"gpt": (1.0, 2.0)}, {"a:b": (1.0,)}, {"a:b": (-1.0, 2.0)}])
def test_nonsense_rates_are_refused(own: Any) -> None:
    with pytest.raises(ConfigurationError, match="prices: "):
        prices(own)


def test_what_to_install_is_said() -> None:
    code = "import sys; sys.modules['genai_prices'] = None; import retinue; retinue.models.prices()"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'prices() needs: pip install "retinue[prices]"' in out.stderr


async def test_the_cost_of_a_run_is_in_its_result_and_its_events() -> None:
    agent = Agent("a", Named([[say("x", usage=used()), call("work")], say("y", usage=used(cached=500))]), tools=[work])
    run = Runtime([agent], price=prices()).stream("a", "go")
    costs = [event.usage.cost async for event in run if event.kind == "inference_finished"]  # pyright: ignore[reportAttributeAccessIssue]
    assert costs == [pytest.approx(0.0035), pytest.approx(0.002875)]
    assert (await run.result()).usage.cost == pytest.approx(sum(costs))


async def test_what_the_provider_says_wins() -> None:
    told = Usage(requests=1, input_tokens=1000, cost=0.7)
    result = await Runtime([Agent("a", Named([say("x", usage=told)]))], price=prices()).run("a", "go")
    assert result.usage.cost == 0.7


async def test_a_provider_that_says_it_was_free_is_believed() -> None:
    free = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 2, "cost": 0}}
    async with serving(stream([*chat(KnownTurn(text=("Hi",)))[:-2], event(free), b"data: [DONE]\n\n"])) as server:
        model = open_model("openrouter:x/y:free", base_url=server.url, api_key="k")
        result = await Runtime([Agent("a", model)]).run("a", "go", limits=Limits(cost=1.0))
        await close_model(model)
    assert (result.status, result.response, result.usage.cost) == (RunStatus.COMPLETED, "Hi", 0), result.error


def tree(child_usage: Usage) -> tuple[Agent, Named]:
    """A parent that asks the same child again until it cannot be afforded."""
    child = Agent("child", Named(lambda r: say("ok", usage=child_usage)))

    def turn(request: ModelRequest) -> Any:
        if "limit on cost" in request.messages[-1].text:
            return say(request.messages[-1].text)
        return [say("x", usage=used(0, 1)), call("task", {"subagent_type": "child", "description": "x"})]

    model = Named(turn)
    return Agent("parent", model, subagents=[child]), model


async def test_a_limit_on_cost_holds_for_the_tree() -> None:
    parent, _ = tree(used(MILLION, 0))  # 2.50 a child
    result = await Runtime([parent], price=prices()).run("parent", "go", limits=Limits(cost=6.0))
    assert "the limit on cost is reached: 5.0" in (result.response or "")
    assert result.usage.cost == pytest.approx(5.0, abs=0.01)  # two children: a third would go over


async def test_cached_tokens_let_a_budget_reach_further() -> None:
    parent, _ = tree(used(MILLION, 0, cached=MILLION))  # 1.25 a child
    result = await Runtime([parent], price=prices()).run("parent", "go", limits=Limits(cost=6.0))
    assert result.usage.cost == pytest.approx(5.0, abs=0.01)
    assert result.usage.cached_tokens == 4 * MILLION


async def test_a_child_may_have_less_than_the_tree() -> None:
    greedy = [[say("x", usage=used(MILLION, 0)), call("work")] for _ in range(3)]
    child = Agent("child", Named(greedy), tools=[work], limits=Limits(cost=6.0))
    turns = [[say("x", usage=used()), call("task", {"subagent_type": "child", "description": "x"})], say("ok")]
    parent = Agent("parent", Named(turns), subagents=[child])
    result = await Runtime([parent], price=prices()).run("parent", "go", limits=Limits(cost=100))
    assert result.status is RunStatus.COMPLETED
    assert result.usage.cost == pytest.approx(5.0035)


async def test_an_unknown_price_counts_as_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent("a", Named(lambda r: say("x", usage=used()), "acme:big"))
    runtime = Runtime([agent], price=prices())
    for _ in range(3):
        result = await runtime.run("a", "go")
        assert (result.status, result.usage.cost) == (RunStatus.COMPLETED, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "the price of model 'acme:big' is not known: its calls count as 0. Give Runtime(price=…) its price"
    ]


@pytest.mark.parametrize(
    ("price", "problem"),
    [
        (lambda *_: 1 / 0, "failed: ZeroDivisionError: division by zero"),
        (lambda *_: float("nan"), "gave nan"),
        (lambda *_: -5.0, "gave -5.0"),
        (lambda *_: "free", "failed: TypeError: "),
    ],
)
async def test_a_price_function_that_fails_knows_no_price(
    price: Any, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime([Agent("a", Named(lambda r: say("x", usage=used())))], price=price)
    result = await runtime.run("a", "go")
    assert (result.status, result.response, result.usage.cost) == (RunStatus.COMPLETED, "x", 0)
    assert f"is not known (the price function {problem}" in caplog.text
    result = await runtime.run("a", "go", limits=Limits(cost=1.0))
    assert (result.response, result.termination) == ("x", "limit:cost")


@pytest.mark.parametrize("price", [None, "list"])
async def test_a_limit_on_cost_that_cannot_be_kept_fails_the_run_at_its_first_call(price: Any) -> None:
    model = Named([[say("x", usage=used()), call("work")]], "acme:big")
    runtime = Runtime([Agent("a", model, tools=[work])], price=prices() if price else None)
    result = await runtime.run("a", "go", limits=Limits(cost=1.0))
    assert (result.status, result.termination, len(model.requests)) == (RunStatus.FAILED, "limit:cost", 1)
    assert result.error == (
        "Limits(cost=…) cannot be kept: what a call of 'acme:big' costs is not known; "
        "give Runtime(price=…) its price, 0 where it is free"
    )
    assert result.response == "x"


async def test_the_limit_of_the_tree_binds_a_child_whose_price_is_unknown() -> None:
    child = Agent("child", Named(lambda r: say("free?", usage=used()), "ollama:llama3"))
    turns = [[say("x", usage=used()), call("task", {"subagent_type": "child", "description": "x"})], say("ok")]

    def parent() -> Agent:
        return Agent("parent", Named(list(turns)), subagents=[child])

    run = Runtime([parent()], price=prices()).stream("parent", "go", limits=Limits(cost=1.0))
    ends = [(e.agent, e.termination) async for e in run.follow() if e.kind == "run_finished"]  # pyright: ignore[reportAttributeAccessIssue]
    assert ends == [("child", "limit:cost"), ("parent", "natural")]
    runtime = Runtime([parent()], price=prices({"ollama:*": (0, 0)}))
    result = await runtime.run("parent", "go", limits=Limits(cost=1.0))
    assert (result.status, result.usage.cost) == (RunStatus.COMPLETED, pytest.approx(0.0035))
