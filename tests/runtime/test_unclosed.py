"""A program that ends its event loop without `close()` returns."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from ..durability.nodes import node
from ..effort import share

TURNS = (0, 0, 1, 2, 2, 4, 8, 16, 32, 32)[:: share(1, 3)]
"""Turns of the event loop that each program takes before it returns."""


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_program_with_a_background_child_ends_with_its_event_loop(tmp_path: Path, kind: str) -> None:
    """A race, so it is tried at several moments."""
    with ExitStack() as stack:
        programs = []
        for number, turns in enumerate(TURNS):
            folder = tmp_path / str(number)
            folder.mkdir()
            url = "memory:" if kind == "memory" else f"sqlite:///{folder}/app.db"
            programs.append(stack.enter_context(node("forgets_to_close", url, folder, turns)))
        for program in programs:
            await asyncio.to_thread(program.expect, "main returns")
        codes = await asyncio.gather(*[asyncio.to_thread(program.wait) for program in programs], return_exceptions=True)
        assert codes == [0] * len(TURNS)
