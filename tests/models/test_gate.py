"""The gate of a provider's account: what is sent when, in virtual time. `scripts/bench --rates` has real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from retinue import ConfigurationError, Rate, Runtime
from retinue.core.gate import LocalGateTable, check_rates, rate_of
from retinue.errors import ModelRateLimited, ModelUnavailable
from retinue.models.limits import Told, told_by
from retinue.models.resilience import RetryPolicy
from tests.models.gated import Process, Provider
from tests.virtual import run_virtually

IDEAL = 19.0
"""Seconds in which a provider of 10 requests a second, and 10 at once, takes 200 requests."""


async def fan_out(provider: Provider, count: int, *processes: Process) -> float:
    """Ask so often at once; return the seconds that it took. A request that is lost raises."""
    now = asyncio.get_running_loop().time
    began, chosen = now(), processes or (Process(provider),)
    await asyncio.gather(*[chosen[place % len(chosen)].ask() for place in range(count)])
    for process in chosen:
        await process.gates.close()
    return now() - began


def timed(work: Coroutine[Any, Any, float]) -> float:
    return run_virtually(work)


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize(
    ("tells", "retry_after", "most", "refused"),
    [(True, None, 1.25, 0.05), (False, 1.0, 1.25, 0.05), (False, 0.1, 1.25, 0.05), (False, None, 1.4, 1.0)],
    ids=["headers", "retry-after 1", "retry-after 0.1", "nothing"],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_is_lost_at_a_limit(
    status: int, tells: bool, retry_after: float | None, most: float, refused: float, processes: int
) -> None:
    provider, table = Provider(status=status, tells=tells, retry_after=retry_after), LocalGateTable()
    taken = timed(fan_out(provider, 200, *[Process(provider, table) for _ in range(processes)]))
    assert taken <= most * (IDEAL + provider.seconds)
    assert provider.refused <= refused * len(provider.arrivals)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_given_rate_is_kept_in_every_window(processes: int) -> None:
    provider, table = Provider(rate=None), LocalGateTable()
    rate = Rate(requests_per_minute=600)
    timed(fan_out(provider, 100, *[Process(provider, table, m=rate) for _ in range(processes)]))
    times = sorted(at for at, _, _ in provider.arrivals)
    assert all(sum(at <= one < at + 1.0 for one in times) <= 10 for at in times)
    assert times[-1] <= 10.5


def test_a_rate_is_a_ceiling_under_which_headers_count() -> None:
    provider = Provider(tells=True)
    taken = timed(fan_out(provider, 50, Process(provider, m=Rate(requests_per_minute=60_000))))
    assert provider.refused <= 6
    assert taken <= 1.25 * 5


def test_tokens_are_paced_and_settled_by_what_was_used() -> None:
    provider = Provider(rate=None)
    process = Process(provider, m=Rate(tokens_per_minute=60_000))
    taken = timed(fan_out(provider, 660, process))  # each uses 100 tokens, and reserves about 1,000
    assert 50 <= taken <= 75


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_slots_are_shared(processes: int) -> None:
    provider, table = Provider(rate=None, parallel=6), LocalGateTable()
    taken = timed(fan_out(provider, 120, *[Process(provider, table, m=Rate(parallel=6)) for _ in range(processes)]))
    assert (provider.most_busy, provider.refused) == (6, 0)
    assert taken <= 1.4 * 120 / 6 * provider.seconds


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_a_limit_on_requests_at_once_is_learned(seconds: float) -> None:
    provider = Provider(rate=None, parallel=8, seconds=seconds)
    taken = timed(fan_out(provider, 200))
    assert taken <= 1.4 * 200 / 8 * seconds
    assert provider.refused <= 0.1 * len(provider.arrivals)


def test_a_provider_without_limits_is_not_slowed_down() -> None:
    provider = Provider(rate=None, seconds=10.0)
    assert timed(fan_out(provider, 200)) <= 1.1 * provider.seconds


@pytest.mark.parametrize("processes", [1, 2])
def test_an_outage_loses_nothing_and_is_probed(processes: int) -> None:
    provider, table = Provider(rate=None, down=(0.0, 30.0)), LocalGateTable()
    taken = timed(fan_out(provider, 200, *[Process(provider, table) for _ in range(processes)]))
    probes = [at for at, _, _ in provider.arrivals if 0.1 < at < 30]
    assert len(probes) <= 15 * processes
    assert all(sum(at <= one < at + 2 for one in probes) <= processes for at in probes)
    back = min(at for at, _, accepted in provider.arrivals if accepted)
    assert sum(back <= at < back + 0.1 for at, _, _ in provider.arrivals) <= processes
    assert taken <= 45


def test_users_take_turns() -> None:
    async def work() -> None:
        provider = Provider()
        process = Process(provider, m=Rate(requests_per_minute=600))
        crowd = [asyncio.create_task(process.ask("a", "a")) for _ in range(300)]
        await asyncio.sleep(2)
        for _ in range(5):
            before = len(provider.arrivals)
            await process.ask("b", "b")
            place = next(at for at in range(before, len(provider.arrivals)) if provider.arrivals[at][1] == "b")
            assert place - before <= 3
        for one in crowd:
            one.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)

    run_virtually(work())


def test_the_oldest_comes_first_and_a_refused_request_keeps_its_place() -> None:
    async def work() -> None:
        provider = Provider(rate=5.0, burst=1.0, retry_after=0.5)
        process = Process(provider)
        await asyncio.gather(*[process.ask(words=f"{place:02}") for place in range(30)])
        assert len(provider.arrivals) > 30
        said = [words for _, words, accepted in provider.arrivals if accepted]
        late = [abs(place - int(words)) for place, words in enumerate(said)]
        assert max(late) <= 24  # the refused ones of the first moment come back before those that were never sent
        assert said[-1] == "29"

    run_virtually(work())


def test_a_request_that_is_cancelled_while_it_waits_leaves_at_once() -> None:
    async def work() -> None:
        provider = Provider(rate=None, down=(0.0, 1e9))
        process = Process(provider)
        waiting = [asyncio.create_task(process.ask()) for _ in range(20)]
        await asyncio.sleep(5)
        now = asyncio.get_running_loop().time()
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert asyncio.get_running_loop().time() - now < 0.1

    run_virtually(work())


def test_patience_is_for_a_provider_that_accepts_nothing() -> None:
    async def work(provider: Provider) -> float:
        hasty = Process(provider, policy=RetryPolicy(patience=30), m=Rate(requests_per_minute=60))
        return await fan_out(provider, 90, hasty)

    assert run_virtually(work(Provider(rate=None))) > 60  # a queue that moves is not given up
    with pytest.raises(ModelUnavailable, match=r"RetryPolicy\(patience=30\) allows"):
        run_virtually(work(Provider(rate=None, down=(0.0, 1e9))))


def test_a_refusal_for_longer_than_patience_fails_at_once() -> None:
    async def work() -> None:
        process = Process(Provider(rate=0.001, burst=0.5, retry_after=1e9))
        with pytest.raises(ModelRateLimited, match="it asks to wait 1e"):
            await process.ask()
        assert asyncio.get_running_loop().time() < 1

    run_virtually(work())


def test_a_provider_that_lies_about_what_remains_is_not_believed() -> None:
    provider = Provider(tells=True, lies=True)
    taken = timed(fan_out(provider, 200))
    assert taken <= 1.4 * IDEAL
    assert provider.refused <= 0.15 * len(provider.arrivals)


def test_waiting_is_in_the_usage() -> None:
    async def work() -> None:
        process = Process(Provider(rate=None, down=(0.0, 1.0)))
        assert 1.0 < (await process.ask()).waited < 6.0
        assert (await process.ask()).waited == 0.0

    run_virtually(work())


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (("100", "40", "6m0s"), Told(100, 40, 360)),
        (("100", "40", "120ms"), Told(100, 40, 0.12)),
        (("100", "100", "0"), Told(100, 100, 0)),
        (("100", "101", "1s"), None),
        (("-1", "0", "1s"), None),
        (("100", "-5", "1s"), None),
        (("nan", "1", "1s"), None),
        (("1e400", "1", "1s"), None),
        (("100", "1", "soon"), None),
        (("100", "1", "-3"), None),
        (("100", "1", "9e9d"), None),
    ],
)
def test_headers_tell_limits_or_nothing(headers: tuple[str, str, str], expected: Told | None) -> None:
    names = ("limit", "remaining", "reset")
    given = {f"x-ratelimit-{name}-requests": value for name, value in zip(names, headers, strict=True)}
    assert told_by(given, "requests") == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"requests_per_minute": 0},
        {"requests_per_minute": -1},
        {"requests_per_minute": float("nan")},
        {"tokens_per_minute": float("inf")},
        {"tokens_per_minute": "many"},
        {"parallel": 0},
        {"parallel": 1.5},
        {"parallel": True},
    ],
)
def test_an_impossible_rate_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"Rate.{next(iter(fields))} is a"):
        Rate(**fields)


@pytest.mark.parametrize(
    "rates", [{"openai": Rate(parallel=1)}, {"*": Rate(parallel=1)}, {"openai:*": 5}, {"openai:*": Rate()}, [1], {5: 5}]
)
def test_impossible_rates_are_refused(rates: Any) -> None:
    with pytest.raises(ConfigurationError, match="rates"):
        Runtime(rates=rates)


def test_the_most_specific_pattern_wins() -> None:
    rates = check_rates(
        {"openai:*": Rate(parallel=1), "openai:gpt-5*": Rate(parallel=2), "openai:gpt-5": Rate(parallel=3)}
    )
    found = [rate_of(rates, f"openai:{name}") for name in ("gpt-5", "gpt-5-mini", "o3")]
    assert [one and one[1].parallel for one in found] == [3, 2, 1]
    assert rate_of(rates, "anthropic:claude") is None
