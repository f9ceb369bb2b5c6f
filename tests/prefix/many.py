"""The prefix test: random programs, each cut at every row and continued; and chains of cuts."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
import traceback
from collections import Counter
from random import Random

from .generate import make
from .scenes import SCENES
from .trying import WrongEnd, try_program


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/prefix-test", description=__doc__)
    parser.add_argument("--programs", type=int, default=100, metavar="N", help="random programs (100)")
    parser.add_argument("--cuts", type=int, metavar="N", help="prefixes of each (all)")
    parser.add_argument("--chains", type=int, default=5, metavar="N", help="chains of three cuts of each (5)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first program")
    parser.add_argument("--scenes", action="store_true", help="also the fixed scenes, at every row")
    asked = parser.parse_args()
    logging.disable(logging.ERROR)  # programs fail on purpose
    tell(f"seed {asked.seed}")
    total: Counter[str] = Counter(wrong=0)
    began = time.monotonic()
    work = [(f"seed {seed}", make(Random(seed)), seed) for seed in range(asked.seed, asked.seed + asked.programs)]
    if asked.scenes:
        work = [*[(f"scene {name!r}", scene, 0) for name, scene in SCENES.items()], *work]
    for number, (name, scene, seed) in enumerate(work, 1):
        try:
            total += asyncio.run(try_program(scene, Random(seed), asked.cuts, asked.chains))
        except (WrongEnd, TimeoutError, AssertionError) as exc:
            total["wrong"] += 1
            tell(f"WRONG: {name}: {exc}")
            traceback.print_exc()
        if number % 10 == 0 or number == len(work):
            tell(f"{number}/{len(work)}, {time.monotonic() - began:.0f} s: {dict(total)}")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
