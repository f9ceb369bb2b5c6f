"""Limits for each user: requests by a clock, streams at once, the size of a request."""

from __future__ import annotations

import pytest

from retinue import Runtime
from retinue.server.http import ApiError
from retinue.server.limits import UserLimits

from .. import inside
from ..waiting import until
from .agents import Gate, speaker
from .serving import serving

RUNS = "/api/v1/runs"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def count(limits: UserLimits, user: str, most: int = 1000) -> int:
    """Return the number of requests that are let through, up to `most`."""
    for done in range(most):
        try:
            limits.count_request(user)
        except ApiError as exc:
            return done if exc.code == "too_many_requests" else -1
    return most


def test_requests_are_counted_by_the_clock_and_by_user() -> None:
    clock = Clock()
    limits = UserLimits(rate=10.0, clock=clock)
    assert count(limits, "ann") == 10
    assert count(limits, "bob") == 10
    clock.now += 0.5
    assert count(limits, "ann") == 5
    clock.now += 3600
    assert (count(limits, "ann"), count(limits, "bob")) == (10, 10)


def test_less_than_one_request_a_second() -> None:
    clock = Clock()
    limits = UserLimits(rate=0.1, clock=clock)
    assert count(limits, "ann") == 1
    clock.now += 9.0
    assert count(limits, "ann") == 0
    clock.now += 1.1
    assert count(limits, "ann") == 1


def test_without_a_rate_there_is_no_limit() -> None:
    assert count(UserLimits(), "ann") == 1000


def test_many_users_do_not_fill_the_memory() -> None:
    clock = Clock()
    limits = UserLimits(rate=2.0, clock=clock)
    assert count(limits, "ann") == 2
    for number in range(25_000):
        clock.now += 0.001
        limits.count_request(f"user-{number}")
    assert inside.users_with_rates(limits) <= 10_000
    # A user who asks all the time does not get a new bucket because others came.
    limits = UserLimits(rate=0.001, clock=clock)
    assert count(limits, "ann") == 1
    for number in range(10_500):
        limits.count_request(f"user-{number}")
    assert count(limits, "ann") == 0


def test_streams_at_once() -> None:
    limits = UserLimits(max_streams=2)
    with limits.stream("ann"), limits.stream("ann"), limits.stream("bob"):
        with pytest.raises(ApiError) as refused, limits.stream("ann"):
            pass
        assert (refused.value.status, refused.value.code) == (429, "too_many_streams")
    with limits.stream("ann"):
        assert inside.open_streams(limits) == {"ann": 1}
    assert not inside.open_streams(limits)


async def test_the_rate_of_a_server() -> None:
    clock = Clock()
    async with serving(Runtime([speaker("x")]), rate=3.0) as site:
        inside.set_clock_of_limits(site.service.limits, clock)
        answers = [await site.get(RUNS) for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429]
        assert answers[-1].body["code"] == "too_many_requests"
        assert answers[-1].headers["retry-after"] == "1"
        assert (await site.get("/healthz")).status == 200
        clock.now += 1.0
        assert (await site.get(RUNS)).status == 200


async def test_subscriptions_count_as_requests() -> None:
    clock = Clock()
    async with serving(Runtime([speaker("x")]), rate=3.0) as site:
        inside.set_clock_of_limits(site.service.limits, clock)
        async with site.session.ws_connect("/api/v1/events") as socket:
            for number in range(3):
                await socket.send_json({"subscribe": f"x{number}", "run_id": "run_x"})
            codes = [(await socket.receive_json())["error"]["code"] for _ in range(3)]
        assert sorted(codes) == ["not_found", "not_found", "too_many_requests"]


async def test_the_streams_of_a_server() -> None:
    gate = Gate()
    async with serving(Runtime([gate.agent()]), max_streams=2) as site:
        run_id = (await site.start("gated"))["run_id"]
        path = f"{RUNS}/{run_id}/events"
        gate.say("x")
        first = site.events(f"{path}?kinds=text_delta")
        await anext(first)
        async with site.session.ws_connect(path) as socket:
            await socket.receive_json()
            assert (await site.get(path)).body["code"] == "too_many_streams"
            assert (await site.refusal("/api/v1/events"))[0] == 4429
            async with site.session.head(path) as head:
                assert head.status == 429
        await until(lambda: inside.open_streams(site.service.limits) == {"local": 1})
        async with site.session.head(path) as head:
            assert head.status == 200
        await first.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        await until(lambda: not inside.open_streams(site.service.limits))
        gate.say(None)
        assert (await site.all_events(path))[-1].event == "run_finished"


async def test_the_size_of_a_request() -> None:
    async with serving(Runtime([speaker("x")]), max_body=1_000) as site:
        for text, status in (("x" * 900, 201), ("x" * 1_000, 413)):
            assert (await site.post(RUNS, {"agent": "speaker", "input": text})).status == status
