"""A seeded share of hostile patterns and declarations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ..effort import share
from .files import check_front_matter, check_pattern, front_matter, patterns

PATIENCE = 20.0
"""Seconds after which an example counts as a hang."""


@pytest.mark.parametrize(
    ("examples", "check"),
    [(patterns, check_pattern), (front_matter, check_front_matter)],
    ids=["patterns", "front matter"],
)
def test_hostile_files_harm_nothing(
    examples: st.SearchStrategy[Any], check: Callable[[Any, Any], Awaitable[None]], tmp_path: Path
) -> None:
    world = SimpleNamespace(folder=tmp_path)

    async def attempt(example: Any) -> None:
        async with asyncio.timeout(PATIENCE):
            await check(world, example)

    @settings(max_examples=share(10_000, 120), deadline=None, suppress_health_check=list(HealthCheck))
    @seed(1)
    @given(examples)
    def run(example: Any) -> None:
        asyncio.run(attempt(example))

    run()
