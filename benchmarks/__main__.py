"""scripts/bench [--rounds N] [--json]: Retinue against a bare-asyncio floor, interleaved, medians of CPU time.

Ratios are what counts: both sides are measured in the same rounds, so a busy machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import floor, ours

STEPS, DELTAS = 200, 5_000

GOALS = {
    "a step with a tool call and a commit": (50, "µs"),
    "step 181-200 over step 1-20": (1.1, "x"),
    "a streamed delta to a consumer": (5, "µs"),
    "an agent with five tools, built and run": (400, "µs"),
    "import retinue": (250, "ms"),
    "memory after import retinue": (45, "MB"),
}

_IMPORT = """
import time; began = time.process_time()
{statement}
took = time.process_time() - began
pages = int(open("/proc/self/statm").read().split()[1]) if __import__("sys").platform == "linux" else 0
print(took * 1e3, pages * __import__("os").sysconf("SC_PAGE_SIZE") / 2**20)
"""


def measure_import(statement: str) -> tuple[float, float]:
    out = subprocess.run(
        [sys.executable, "-c", _IMPORT.format(statement=statement)], capture_output=True, text=True, check=True
    )
    ms, mb = out.stdout.split()
    return float(ms), float(mb)


def one_round(side: Any, statement: str) -> dict[str, float]:
    """One measurement of everything, on one side."""
    taken = asyncio.run(side.steps(STEPS))
    ms, mb = measure_import(statement)
    return {
        "a step with a tool call and a commit": statistics.median(taken) * 1e6,
        "step 181-200 over step 1-20": statistics.median(taken[-20:]) / statistics.median(taken[:20]),
        "a streamed delta to a consumer": asyncio.run(side.deltas(DELTAS)) / DELTAS * 1e6,
        "an agent with five tools, built and run": asyncio.run(side.build_and_run(100)) * 1e6,
        "import retinue": ms,
        "memory after import retinue": mb,
    }


def collect(rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    floors: list[dict[str, float]] = []
    mine: list[dict[str, float]] = []
    for number in range(rounds + 1):
        progress(f"round {number} of {rounds}" if number else "warming up")
        made = (
            one_round(floor, "import asyncio, json, dataclasses, jsonschema_rs"),
            one_round(ours, "import retinue"),
        )
        if number:  # the first round fills caches
            floors.append(made[0])
            mine.append(made[1])
    hooks = statistics.median(
        [
            statistics.median(asyncio.run(ours.hooked_steps(STEPS))) / statistics.median(asyncio.run(ours.steps(STEPS)))
            for _ in range(rounds)
        ]
    )
    rows: list[dict[str, Any]] = []
    for name, (goal, unit) in GOALS.items():
        base, value = (statistics.median([each[name] for each in side]) for side in (floors, mine))
        ratio = statistics.median([b[name] / a[name] for a, b in zip(floors, mine, strict=True)])
        rows.append({"what": name, "unit": unit, "floor": base, "retinue": value, "ratio": ratio, "goal": goal})
    what = "ten plugins with a hook in every phase"
    rows.append({"what": what, "unit": "x a step", "floor": 1.0, "retinue": hooks, "ratio": hooks, "goal": 2})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is measured (default 7)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    rows = collect(options.rounds, lambda text: print(text, end="\r", file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'':42}{'floor':>10}{'retinue':>10}{'ratio':>8}{'goal':>9}")
    for row in rows:
        goal = f"{row['goal']:g} {row['unit']}"
        print(f"{row['what']:42}{row['floor']:>10.1f}{row['retinue']:>10.1f}{row['ratio']:>7.1f}x{goal:>9}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
