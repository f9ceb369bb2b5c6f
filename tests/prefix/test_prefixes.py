"""A run continues from any prefix of its log: the same end, and nothing that had ended is done again."""

from __future__ import annotations

import asyncio
import os
from random import Random
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ..effort import IS_LONG, share
from .generate import make
from .scenes import SCENES
from .trying import try_program

EXAMPLES = int(os.environ.get("RETINUE_PREFIX_EXAMPLES", share(24, 4)))
"""Random programs; `scripts/prefix-test` tries more."""
CUTS = int(os.environ.get("RETINUE_PREFIX_CUTS", share(6, 1))) or None
"""Prefixes of each program, chosen by chance; 0 for all."""
PHASES = [Phase.generate, Phase.shrink] if os.environ.get("RETINUE_PREFIX_SHRINK") else [Phase.generate]
"""Making a smaller program that goes wrong takes minutes."""

WHOLE = (
    "pass decision after hooks",
    "handoff",
    "handoff by a hook",
    "refused handoff",
    "handoff of a child",
    "few steps",
    "few steps in a child",
    "few tokens",
    "spawn and send",
    "background",
    "background after the end",
    "background that waits",
)
"""Scenes of which every prefix is tried in a long test, and many always."""


@pytest.mark.parametrize("name", [name for name in SCENES if name not in WHOLE])
async def test_some_prefixes_of_a_scene(name: str) -> None:
    await try_program(SCENES[name], Random(crc32(name.encode())), CUTS, chains=1)


@pytest.mark.parametrize("name", WHOLE)
async def test_every_prefix_of_a_scene(name: str) -> None:
    counts = await try_program(SCENES[name], Random(0), None if IS_LONG else 6)
    assert counts["prefixes"] >= 6


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.randoms(use_true_random=False), st.integers(0, 2**32))
@pytest.mark.timeout(60 * max(1, EXAMPLES))
def test_random_programs(chance: Random, cuts: int) -> None:
    asyncio.run(try_program(make(chance), Random(cuts), CUTS, chains=1))
