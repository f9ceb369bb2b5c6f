"""A conversation that is compacted reads the same to the model after kill -9 at any place."""

from __future__ import annotations

import pytest

from . import compacting
from .scene import Spot, died, same, undisturbed


@pytest.mark.parametrize("points", [("summary:1",), ("m:12", "summary:2"), ("m:10", "m:11", "m:24")], ids=str)
async def test_the_next_process_makes_the_same_requests(spot: Spot, other: Spot, points: tuple[str, ...]) -> None:
    played, plain = await died(spot, compacting.lasting, *points), await undisturbed(other, compacting.lasting)
    same(plain, played)
    assert set(played.done) == set(plain.done), "each request has the same text"
    compacted = [event.tokens_before for event in played.all("compacted")]
    assert compacted == [event.tokens_before for event in plain.all("compacted")]
    assert len(compacted) >= 2
    assert len(played.all("cache_prefix_changed")) == len(compacted)
