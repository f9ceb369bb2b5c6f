"""Budgets: what model calls may cost in a window, over all runs and processes of a store."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    Budget,
    ConfigurationError,
    Decision,
    ModelRequest,
    Permissions,
    RunStatus,
    Runtime,
    Usage,
    tool,
)
from retinue.core.budgets import Account, Amount, BudgetTable, Holder, window_at
from retinue.storage.budgets import LocalBudgetTable
from retinue.storage.sql import SqlStore
from retinue.storage.stores import open_store
from retinue.testing import ScriptedModel, call, fail, say

from ..prepared import PYTHON
from ..waiting import expire_lease

CALL = Usage(requests=1, input_tokens=50, output_tokens=50)
"""What each call really takes: ten cents."""
NOON = 1_700_049_600.0
"""2023-11-15 12:00 UTC, a Wednesday."""


def price(model: str, usage: Usage) -> float:
    return usage.output_tokens / 500


@tool
async def look() -> str:
    """Look."""
    return "seen"


def worker(name: str = "worker", answers_after: int = 0, **options: Any) -> Agent:
    """An agent that looks so many times, unless it is told to answer."""

    def act(request: ModelRequest) -> Any:
        looked = sum(message.role == "tool" for message in request.messages)
        if looked >= answers_after or "[budget:" in request.messages[-1].text:
            return say(f"looked {looked} times", usage=CALL)
        return [say("I look", usage=CALL), call("look")]

    return Agent(name, ScriptedModel(act), tools=[look], settings={"max_tokens": 50}, max_steps=100, **options)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/app.db"


def opened(url: str, *agents: Agent, **options: Any) -> Runtime:
    return Runtime.open(url, agents or [worker()], price=price, **{"clock": lambda: NOON, **options})


async def spent(runtime: Runtime, budget: str = "user/day") -> dict[str | None, float]:
    return {one.key: round(one.spent_cost, 6) for one in await runtime.budgets.list() if one.budget == budget}


async def test_a_run_that_spends_the_last_of_a_budget_answers_with_its_closing_turn(url: str) -> None:
    async with opened(url, worker(answers_after=90), budgets=[Budget(per="user", window="day", cost=1.05)]) as runtime:
        run = runtime.stream("worker", "go", user_id="ann")
        events = [event async for event in run]
        result = await run.result()
        assert (result.status, result.response) == (RunStatus.COMPLETED, "looked 9 times")
        assert result.usage.cost == pytest.approx(1.0), "ten calls of ten cents: the tenth is the closing turn"
        (notice,) = [event for event in events if event.kind == "error"]
        assert notice.code == "budget:user/day"
        assert "$0.05 of $1.05 left" in notice.message or "$0.15 of $1.05 left" in notice.message
        assert "renews at 2023-11-16 00:00 UTC" in notice.message
        assert result.receipt is not None
        assert result.receipt.limits == ("budget:user/day",)
        (warning,) = [event for event in events if event.kind == "budget_warning"]
        assert (warning.budget, warning.cost, warning.renews_at) == ("user/day", 1.05, NOON + 12 * 3600)
        assert warning.spent_cost == pytest.approx(0.9)
        refused = await runtime.run("worker", "go", user_id="ann")
        assert (refused.status, refused.termination, refused.steps) == (RunStatus.FAILED, "budget:user/day", 1)
        assert "the daily budget of this user is used up: $0.05 of $1.05 left, $0.2 needed" in (refused.error or "")
        assert (await spent(runtime))["ann"] == pytest.approx(1.0)
        assert [one.held_cost for one in await runtime.budgets.list()] == [0.0] * len(await runtime.budgets.list())


async def test_a_model_that_asks_for_calls_in_its_closing_turn_ends_the_run(url: str) -> None:
    stubborn = Agent(
        "stubborn",
        ScriptedModel(lambda request: [say("more", usage=CALL), call("look")]),
        tools=[look],
        settings={"max_tokens": 50},
    )
    async with opened(url, stubborn, budgets=[Budget(per="runtime", window="hour", tokens=500)]) as runtime:
        result = await runtime.run("stubborn", "go")
    assert (result.status, result.termination) == (RunStatus.FAILED, "budget:runtime/hour")
    last = [message for message in result.messages if message.role == "tool"][-1]
    assert last.text.startswith("[budget:runtime/hour] the hourly budget of this runtime is used up: ")
    assert "It renews at 2023-11-15 13:00 UTC: the call is not made" in last.text


async def test_budgets_of_users_agents_and_of_all_are_apart_and_children_count(url: str) -> None:
    lead = ScriptedModel(
        lambda request: (
            say("end", usage=CALL)
            if request.messages[-1].role == "tool"
            else [say("", usage=CALL), call("task", {"subagent_type": "worker", "description": "x"})]
        )
    )
    boss = Agent("boss", lead, subagents=[worker(answers_after=1)], settings={"max_tokens": 50})
    budgets = [Budget(per=per, window="month", cost=100.0) for per in ("user", "agent", "runtime")]
    async with opened(url, boss, budgets=budgets) as runtime:
        await runtime.run("boss", "go", user_id="ann")
        await runtime.run("boss", "go")
        assert await spent(runtime, "user/month") == {None: 0.0, "ann": 0.4, "": 0.4}
        assert await spent(runtime, "agent/month") == {None: 0.0, "boss": 0.4, "worker": 0.4}
        assert await spent(runtime, "runtime/month") == {"": 0.8}
        mine = await runtime.budgets.list("ben")
        assert {one.key for one in mine if one.budget == "user/month"} == {None}


async def test_a_child_that_gets_nothing_is_a_result_with_the_code_of_the_budget(url: str) -> None:
    lead = [call("task", {"subagent_type": "worker", "description": "x"}), say("I go on alone")]
    boss = Agent("boss", ScriptedModel(lead), subagents=[worker()], settings={"max_tokens": 50})
    async with opened(url, boss, budgets=[Budget(per="agent", window="day", cost=0.3)]) as runtime:
        await runtime.run("worker", "go")
        await runtime.run("worker", "go")
        result = await runtime.run("boss", "go")
    answer = next(message for message in result.messages if message.role == "tool")
    assert answer.text.startswith(
        "[budget:agent/day] sub-agent worker did not complete: failed: the daily budget of the "
    )
    assert (result.status, result.response) == (RunStatus.COMPLETED, "I go on alone")


async def test_a_new_window_begins_with_nothing_spent(url: str) -> None:
    now = [NOON]
    async with opened(url, budgets=[Budget(per="user", window="hour", cost=0.25)], clock=lambda: now[0]) as runtime:
        ends = []
        for _ in range(5):
            ends.append((await runtime.run("worker", "go", user_id="ann")).termination)
            now[0] += 1_200.0
    assert ends == ["natural", "budget:user/hour", "budget:user/hour", "natural", "budget:user/hour"]


@pytest.mark.parametrize(
    ("window", "start", "end"),
    [
        ("minute", "2024-02-29 23:59", "2024-03-01 00:00"),
        ("hour", "2024-02-29 23:00", "2024-03-01 00:00"),
        ("day", "2024-02-29 00:00", "2024-03-01 00:00"),
        ("week", "2024-02-26 00:00", "2024-03-04 00:00"),
        ("month", "2024-02-01 00:00", "2024-03-01 00:00"),
    ],
)
def test_windows_are_calendar_windows_in_utc(window: Any, start: str, end: str) -> None:
    def at(text: str) -> float:
        return datetime.strptime(text, "%Y-%m-%d %H:%M").replace(tzinfo=UTC).timestamp()

    assert window_at(window, at("2024-02-29 23:59") + 30.5) == (at(start), at(end))


async def test_a_price_that_is_not_known_is_the_mean_of_the_last_calls_or_refused(url: str) -> None:
    def act(request: ModelRequest) -> Any:
        return say("fine", usage=Usage(requests=1, input_tokens=5, output_tokens=5, cost=0.25))

    agent = Agent("worker", ScriptedModel(act))
    tokens = [Budget(per="user", window="day", tokens=1_000_000)]
    async with Runtime.open(url, [agent], clock=lambda: NOON, budgets=tokens) as runtime:
        await runtime.run("worker", "go", user_id="ann")
        await runtime.budgets.reset("user/day")
        runtime.budgets.use([Budget(per="user", window="day", cost=0.6)])
        results = [await runtime.run("worker", "go", user_id="ann") for _ in range(3)]
        assert [one.termination for one in results] == ["natural", "budget:user/day", "budget:user/day"]
    async with Runtime([agent], budgets=[Budget(per="user", window="day", cost=0.6)]) as other:
        refused = await other.run("worker", "go")
    assert refused.termination == "budget:user/day"
    assert "what a call of 'testing:scripted' costs is not known: give Runtime(price=…) its price" in str(refused.error)


async def test_budgets_of_the_store_win_and_can_be_reset(url: str) -> None:
    async with opened(url, budgets=[Budget(per="user", window="day", cost=100.0)]) as runtime:
        await runtime.budgets.set(Budget(per="user", window="day", cost=0.2), "ann")
        assert [await _end(runtime, "ann"), await _end(runtime, "ann")] == ["natural", "budget:user/day"]
        assert await _end(runtime, "ben") == "natural"
        assert await runtime.budgets.reset("user/day", "ann") == 1
        assert await _end(runtime, "ann") == "natural"
        assert (await spent(runtime)) == {None: 0.0, "ann": 0.1, "ben": 0.1}
        with pytest.raises(ConfigurationError, match="is no budget"):
            await runtime.budgets.reset("user/year")


async def _end(runtime: Runtime, user: str) -> str:
    return (await runtime.run("worker", "go", user_id=user)).termination


async def test_a_call_in_flight_is_not_killed_when_others_have_spent_the_budget(url: str) -> None:
    asked, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(request: ModelRequest) -> Any:
        asked.set()
        await goes_on.wait()
        return say("dear", usage=Usage(requests=1, input_tokens=50, output_tokens=5_000))

    agent = Agent("slow", ScriptedModel(slow), settings={"max_tokens": 50})
    async with opened(url, agent, worker(), budgets=[Budget(per="runtime", window="day", cost=0.35)]) as runtime:
        run = runtime.stream("slow", "go")
        await asked.wait()
        assert (await runtime.run("worker", "go")).termination == "budget:runtime/day", "two dimes are held"
        goes_on.set()
        assert (await run.result()).response == "dear"
        assert (await spent(runtime, "runtime/day"))[""] == pytest.approx(10.0)
        assert (await runtime.run("worker", "go")).termination == "budget:runtime/day"


async def test_a_call_that_fails_gives_its_hold_back(url: str) -> None:
    agent = Agent("broken", ScriptedModel([fail(OSError("line is down"))]), settings={"max_tokens": 50})
    async with opened(url, agent, worker(), budgets=[Budget(per="runtime", window="day", cost=0.2)]) as runtime:
        assert (await runtime.run("broken", "go")).termination == "error"
        assert (await runtime.run("worker", "go")).termination == "natural"


async def test_a_run_that_waits_holds_nothing(url: str) -> None:
    asks = worker("asks", answers_after=1, plugins=[Permissions(ask=["look"])])
    async with opened(url, asks, worker(), budgets=[Budget(per="runtime", window="day", cost=0.4)]) as runtime:
        waiting = await runtime.run("asks", "go")
        assert waiting.status is RunStatus.SUSPENDED
        assert [one.held_cost for one in await runtime.budgets.list()] == [0.0]
        assert (await runtime.run("worker", "go")).termination == "natural"
        (call_id,) = waiting.suspended
        assert (await runtime.resume(waiting.run_id, {call_id: Decision.approve()})).termination == "natural"


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Budget(per="team", window="day", cost=1), "Budget.per is one of 'user', 'agent', 'runtime', not 'team'"),  # type: ignore[arg-type]
    (lambda: Budget(per="user", window="year", cost=1), "Budget.window is one of 'minute', .* not 'year'"),  # type: ignore[arg-type]
    (lambda: Budget(per="user", window="day"), "limits nothing: give cost=… or tokens=…"),
    (lambda: Budget(per="user", window="day", cost=-1), "Budget.cost is a number of dollars from 0 to"),
    (lambda: Budget(per="user", window="day", cost=float("nan")), "Budget.cost is a number of dollars"),
    (lambda: Budget(per="user", window="day", cost=True), "Budget.cost is a number of dollars"),
    (lambda: Budget(per="user", window="day", tokens=1.5), "Budget.tokens is a whole number"),  # type: ignore[arg-type]
    (lambda: Budget(per="user", window="day", tokens=2**60), "Budget.tokens is a whole number from 0"),
    (lambda: Runtime(budgets=Budget(per="user", window="day", cost=1)), r"budgets is a list of Budget\(…\), not"),  # type: ignore[arg-type]
    (lambda: Runtime(budgets={"user/day": 5}), r"budgets is a list of Budget\(…\), not"),  # type: ignore[arg-type]
    (lambda: Runtime(budgets=[5]), "and has 5"),  # type: ignore[list-item]
    (lambda: Runtime(budgets=[Budget(per="user", window="day", cost=1)] * 2), "two budgets are user/day"),
]


@pytest.mark.parametrize(("make", "problem"), BAD, ids=[problem[:40] for _, problem in BAD])
def test_impossible_budgets_are_refused(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        make()


# --- the table


@pytest.fixture
async def table(url: str) -> Any:
    if url == "memory:":
        yield LocalBudgetTable()
        return
    store: Any = open_store(url)
    await store.open()
    yield store.budget_table()
    await store.close()


def account(tokens: int = 100, key: str = "ann") -> Account:
    return Account(Budget(per="user", window="day", tokens=tokens), key, NOON, NOON + 3600)


ONE, TWO = Holder("run_1", "log_1", 1), Holder("run_2", "log_2", 1)


async def test_holds_of_all_runs_count_and_each_call_is_counted_once(table: BudgetTable) -> None:
    found, full = await table.hold(ONE, 1, [account()], Amount(40), Amount(20))
    assert (full, found[0].spent, found[0].held) == (None, Amount(), Amount())
    _, full = await table.hold(TWO, 1, [account()], Amount(30), Amount(11))
    assert full is not None
    assert (full.held.tokens, full.left) == (60, {"tokens": 40})
    _, full = await table.hold(TWO, 1, [account()], Amount(30), Amount(10))
    assert full is None
    for _ in range(2):  # as a transaction that is run again because its connection broke
        settled = await table.settle(ONE, 1, Amount(70), Amount(20))
    assert [one.spent.tokens for one in settled] in ([], [70])
    _, full = await table.hold(TWO, 2, [account()], Amount(1), Amount(10))
    assert full is not None
    assert (full.spent.tokens, full.held.tokens) == (70, 20), "its own hold does not count"
    await table.keep(TWO, 2)
    await table.settle(TWO, 2, Amount(5), Amount())
    await table.release(ONE)
    await table.release(TWO)
    found, full = await table.hold(ONE, 9, [account()], Amount(25), Amount())
    assert (full, found[0].spent.tokens, found[0].held.tokens) == (None, 75, 0)
    assert await table.warn(account())
    assert not await table.warn(account())


async def test_a_run_holds_in_all_accounts_or_in_none(table: BudgetTable) -> None:
    small, large = account(10, "ann"), account(1_000, "zoe")
    _, full = await table.hold(ONE, 1, [large, small], Amount(50), Amount(50))
    assert full is not None
    assert full.account is small
    found, _ = await table.hold(TWO, 1, [large], Amount(1), Amount(1))
    assert found[0].held.tokens == 0


# --- processes

SPENDER = """
import asyncio, sys
from retinue import Budget, Runtime
from tests.runtime.test_budgets import price, worker

async def main():
    budgets = [Budget(per="user", window="month", cost=3.0)]
    async with Runtime.open(sys.argv[1], [worker()], price=price, recover=False, budgets=budgets) as runtime:
        count = 0
        while (result := await runtime.run("worker", "go", user_id="ann")).termination == "natural":
            count += 1
        print(count, result.termination)

asyncio.run(main())
"""
DYING = """
import asyncio, sys
from retinue import Agent, Budget, Runtime
from retinue.testing import ScriptedModel
from tests.runtime.test_budgets import price

async def never(request):
    print("asked", flush=True)
    await asyncio.sleep(3600)

async def main():
    agent = Agent("worker", ScriptedModel(never), settings={"max_tokens": 50})
    budgets = [Budget(per="user", window="month", cost=0.3)]
    async with Runtime.open(sys.argv[1], [agent], price=price, budgets=budgets) as runtime:
        await runtime.run("worker", "go", user_id="ann", run_id="run_dying")

asyncio.run(main())
"""


@pytest.fixture(params=["sqlite", "postgres"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path}/app.db"


async def test_twenty_processes_spend_one_budget_together(shared_url: str) -> None:
    number = 20 if shared_url.startswith("sqlite") else 8  # the server of the tests has few connections
    store: Any = open_store(shared_url)
    await store.open()
    await store.close()
    command = [PYTHON, "-c", SPENDER, shared_url]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(number)]
    ends = [(await asyncio.to_thread(process.communicate))[0].split() for process in processes]
    assert {end[1] for end in ends} == {"budget:user/month"}
    calls = sum(int(end[0]) for end in ends)
    # Each call costs what it holds, so nothing is overshot; less than a call and a closing turn is left.
    assert 29 <= calls <= 30
    async with Runtime.open(shared_url, [worker()]) as runtime:
        assert await spent(runtime, "user/month") == {"ann": pytest.approx(calls * 0.1)}


async def test_what_a_dead_process_held_is_free_again(shared_url: str) -> None:
    with subprocess.Popen([PYTHON, "-c", DYING, shared_url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "asked\n"
        await _outlive(process, shared_url)


async def _outlive(process: subprocess.Popen[str], shared_url: str) -> None:
    budgets = [Budget(per="user", window="month", cost=0.3)]
    async with Runtime.open(shared_url, [worker()], price=price, recover=False, budgets=budgets) as runtime:
        refused = await runtime.run("worker", "go", user_id="ann")
        assert refused.termination == "budget:user/month"
        process.kill()
        await asyncio.to_thread(process.wait)
        assert isinstance(runtime.store, SqlStore)
        await expire_lease(runtime.store, "run_dying")
        assert (await runtime.run("worker", "go", user_id="ann")).termination == "natural"
