"""Runs one part of the fuzzing on many examples, and measures how long it held the event loop."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import logging
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings

from .parts import PARTS, Part, World

PATIENCE = 90.0
"""Seconds after which an example counts as a hang."""


class Outcome(NamedTuple):
    examples: int
    seconds: float
    longest_pause: float
    """Seconds that one callback held the event loop."""


@contextmanager
def measured_pauses() -> Iterator[list[float]]:
    """Yield a list of one number: the seconds that the slowest callback of any event loop has taken."""
    plain, longest = asyncio.events.Handle._run, [0.0]  # pyright: ignore[reportAttributeAccessIssue]

    def run(handle: asyncio.Handle) -> None:
        began = time.thread_time()  # of the processor: what else the machine does is not counted
        plain(handle)
        longest[0] = max(longest[0], time.thread_time() - began)

    handles: Any = asyncio.events.Handle
    handles._run = run
    gc.disable()  # the collector would mostly walk the examples
    try:
        yield longest
    finally:
        gc.enable()
        handles._run = plain


def fuzz(part: Part, examples: int, number: int | None, folder: Path) -> Outcome:
    """Try a part on examples that the number decides; raise at the first that breaks a promise."""
    tried = 0
    with asyncio.Runner() as runner, measured_pauses() as longest:
        world = World(folder)

        async def attempt(example: Any) -> None:
            async with asyncio.timeout(PATIENCE):
                await part.check(world, example)

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        )
        @given(part.examples)
        def check(example: Any) -> None:
            nonlocal tried
            tried += 1
            if tried % 200 == 0:
                gc.collect()
            runner.run(attempt(example))

        began = time.perf_counter()
        try:
            (check if number is None else seed(number)(check))()
        finally:
            runner.run(world.close())
    return Outcome(tried, time.perf_counter() - began, longest[0])


def watched(part: Part) -> Part:
    """Return a part whose examples may not hold the event loop for ever: then the process ends and shows where it is."""

    async def check(world: World, example: Any) -> None:
        faulthandler.dump_traceback_later(3 * PATIENCE, exit=True)
        await part.check(world, example)

    return Part(part.examples, check)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Try hostile input at random.")
    parser.add_argument("parts", nargs="*", help=f"what to fuzz: {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--examples", type=int, default=10_000, help="examples for each part")
    parser.add_argument("--seed", type=int, help="the number that decides the examples; new ones without it")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    logging.disable(logging.CRITICAL)  # tools and models fail on purpose
    for name in given.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            found = fuzz(watched(PARTS[name]), given.examples, given.seed, Path(folder))
        faulthandler.cancel_dump_traceback_later()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(  # noqa: T201 - the report of a script
            f"{name:10} {found.examples:6} examples, {found.seconds:6.1f} s, longest pause of the event loop "
            f"{found.longest_pause * 1000:6.1f} ms, memory up to {memory:.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    sys.setrecursionlimit(1000)
    main()
