"""A seeded share of the fuzzing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ..effort import share
from .campaign import fuzz
from .parts import PARTS


@pytest.mark.parametrize("name", PARTS)
def test_hostile_input_harms_nothing(name: str, tmp_path: Path) -> None:
    logging.disable(logging.CRITICAL)  # tools and models fail on purpose
    try:
        outcome = fuzz(PARTS[name], share(10_000, 20), 1, tmp_path)
    finally:
        logging.disable(logging.NOTSET)
    assert outcome.examples > 0
