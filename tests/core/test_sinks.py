"""Fan-out: one source, many readers, bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import ConfigurationError, Event, NullSink
from retinue.core.events import Custom
from retinue.errors import ConsumerTooSlow
from retinue.events import FanOut
from retinue.testing import RecordingSink


def events(n: int) -> list[Event]:
    return [Custom(seq=i, data=i) for i in range(1, n + 1)]


async def test_everybody_gets_everything_in_order() -> None:
    recording = RecordingSink()
    fan_out = FanOut(NullSink(), recording)
    first, second = fan_out.subscribe(), fan_out.subscribe()
    for event in events(5):
        fan_out(event)
    fan_out.close()
    assert [e.seq async for e in first] == [e.seq async for e in second] == [1, 2, 3, 4, 5]
    assert recording.events == events(5)


async def test_a_reader_waits_for_what_comes() -> None:
    fan_out = FanOut()
    subscription = fan_out.subscribe()

    async def read() -> list[int]:
        return [e.seq async for e in subscription]

    reader = asyncio.create_task(read())
    for event in events(3):
        await asyncio.sleep(0)
        fan_out(event)
    fan_out.unsubscribe(subscription)
    assert await reader == [1, 2, 3]


@pytest.mark.parametrize("maxsize", [0, -1, 1.5, None])
async def test_a_queue_without_a_bound_is_refused(maxsize: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"maxsize is .* at least 1, not {maxsize}"):
        FanOut().subscribe(maxsize)


async def test_a_reader_that_falls_behind_is_told_where_to_read_on_and_nobody_else_notices() -> None:
    fan_out = FanOut()
    slow, fast = fan_out.subscribe(maxsize=2), fan_out.subscribe(maxsize=10)
    for event in events(5):
        fan_out(event)
    fan_out.close()
    got: list[int] = []

    async def read() -> None:
        async for event in slow:
            got.append(event.seq)

    with pytest.raises(ConsumerTooSlow, match="after=2") as told:
        await read()
    assert (got, told.value.last_seq) == ([1, 2], 2)
    assert [e.seq async for e in fast] == [1, 2, 3, 4, 5]


async def test_a_reader_that_fell_behind_is_told_also_if_the_end_comes_while_it_handles_its_last_event() -> None:
    fan_out = FanOut()
    slow = fan_out.subscribe(maxsize=1)
    for event in events(2):
        fan_out(event)

    async def read() -> None:
        async for _ in slow:
            fan_out.close()

    with pytest.raises(ConsumerTooSlow, match="after=1"):
        await read()
