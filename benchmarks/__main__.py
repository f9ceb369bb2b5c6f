"""scripts/bench [--rounds N] [--json] [--trees] [--tasks] [--telemetry] [--harness] [--models] [--stores] [--storage] [--pauses] [--against COMMIT]: Retinue against a bare-asyncio floor, interleaved, medians of CPU time.

Ratios are what counts: both sides are measured in the same rounds, so a busy machine slows both. Times are scaled by a
calibration loop timed in the same round (10 ms is the reference), because the speed of a shared core wanders; ratios are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks import floor, ours, tasks, trees

REFERENCE_MS = 10.0
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
        [sys.executable, "-c", _IMPORT.format(statement=statement)],
        capture_output=True,
        text=True,
        check=True,
        # As users have it: compiled once, whatever this shell says.
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    )
    ms, mb = out.stdout.split()
    return float(ms), float(mb)


def slowness() -> float:
    """How much slower than the reference this core is right now."""
    taken: list[float] = []
    for _ in range(5):
        began = time.process_time()
        x = 0
        for i in range(150_000):
            x += i * i % 7
        taken.append((time.process_time() - began) * 1e3)
    return statistics.median(taken) / REFERENCE_MS


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


Round = tuple[dict[str, float], dict[str, float]]


def measure_round(with_trees: bool) -> Round:
    """The floor's figures and ours, one after the other."""
    before = slowness()
    base = one_round(floor, "import asyncio, json, dataclasses, jsonschema_rs")
    mine = one_round(ours, "import retinue")
    if with_trees:
        base.update(trees.one_round("floor"))
        mine.update(trees.one_round("ours"))
    scale = (before + slowness()) / 2
    return _scaled(base, scale), _scaled(mine, scale)


def _scaled(figures: dict[str, float], scale: float) -> dict[str, float]:
    return {name: value / (scale if _is_cpu(name) else 1) for name, value in figures.items()}


def _is_cpu(name: str) -> bool:
    return (GOALS | trees.GOALS)[name][1] in ("µs", "ms")


def collect(rounds: int, with_trees: bool, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    floors: list[dict[str, float]] = []
    mine: list[dict[str, float]] = []
    for number in range(rounds + 1):
        progress(f"round {number} of {rounds}" if number else "warming up")
        made = measure_round(with_trees)
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
    for name, (goal, unit) in (GOALS | (trees.GOALS if with_trees else {})).items():
        base, value = (statistics.median([each[name] for each in side]) for side in (floors, mine))
        ratio = statistics.median([b[name] / a[name] for a, b in zip(floors, mine, strict=True)])
        rows.append({"what": name, "unit": unit, "floor": base, "retinue": value, "ratio": ratio, "goal": goal})
    what = "ten plugins with a hook in every phase"
    rows.append({"what": what, "unit": "x", "floor": 1.0, "retinue": hooks, "ratio": hooks, "goal": 2})
    if with_trees and sys.platform == "linux":
        kilobytes = trees.peak_per_child(1_000)
        row = {"what": "memory a child, of 1,000", "unit": "KB", "floor": 0.0, "retinue": kilobytes, "ratio": 0.0}
        rows.append({**row, "goal": 15})
    return rows


def collect_tasks(rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Background tasks alone: there is no floor for them, so a figure is held against its goal."""
    taken: list[dict[str, float]] = []
    for number in range(rounds + 1):
        progress(f"tasks, round {number} of {rounds}" if number else "tasks, warming up")
        before = slowness()
        figures = tasks.one_round()
        scale = (before + slowness()) / 2
        if number:
            scales = {name: scale if tasks.GOALS[name][1] == "ms" else 1.0 for name in figures}
            taken.append({name: value / scales[name] for name, value in figures.items()})
    return [
        {
            "what": name,
            "unit": unit,
            "floor": 0.0,
            "retinue": statistics.median([each[name] for each in taken]),
            "ratio": 0.0,
            "goal": goal,
        }
        for name, (goal, unit) in tasks.GOALS.items()
    ]


def show_models(rounds: int, as_json: bool, end: str) -> int:
    from benchmarks import models  # it needs packages that nothing else here needs

    rows = models.collect(rounds, lambda text: print(text, end=end, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        models.show(rows)
    return 0


def show_alone(options: argparse.Namespace) -> int | None:
    """Run the one part that was asked for, and return the exit code. None: run what has a floor to compare with."""
    if options.against is not None:
        from benchmarks import against

        return 0 if against.compare(options.against, options.rounds) else 1
    for name in ("engines", "scale", "storage"):  # they need servers
        if getattr(options, name):
            import_module(f"benchmarks.{name}").show()
            return 0
    if options.rates is not None:
        from benchmarks import rates

        return rates.main(options.rates)
    for name in ("stores", "harness", "telemetry"):
        if getattr(options, name):
            import_module(f"benchmarks.{name}").show(options.rounds)
            return 0
    if options.pauses:
        from benchmarks import pauses  # it makes 200,000 files

        return 0 if pauses.main(rounds=options.rounds) else 1
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is measured (default 7)")
    parser.add_argument("--trees", action="store_true", help="also delegation and fan-out (about a minute a round)")
    parser.add_argument("--tasks", action="store_true", help="only background tasks (about half a minute a round)")
    parser.add_argument("--models", action="store_true", help="only this: streamed events over HTTP, beside others")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--telemetry", action="store_true", help="only what spans, metrics and log lines cost")
    parser.add_argument("--harness", action="store_true", help="only declarations in files, and spawning")
    parser.add_argument("--stores", action="store_true", help="only what keeping everything costs")
    parser.add_argument("--storage", action="store_true", help="only the bytes that databases keep (ten minutes)")
    parser.add_argument("--pauses", action="store_true", help="only the pauses that hostile input causes")
    parser.add_argument("--engines", action="store_true", help="only workers on PostgreSQL and Temporal (a minute)")
    parser.add_argument("--against", metavar="COMMIT", help="only this: another commit and this tree, interleaved")
    parser.add_argument("--scale", action="store_true", help="only the PostgreSQL engine with a million threads")
    about = "only providers that refuse (five minutes), or some cases of it by name"
    parser.add_argument("--rates", nargs="*", metavar="CASE", help=about)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    alone = show_alone(options)
    if alone is not None:
        return alone
    end = "\r" if sys.stderr.isatty() else "\n"
    if options.models:
        return show_models(options.rounds, options.json, end)

    def progress(text: str) -> None:
        print(text, end=end, file=sys.stderr, flush=True)

    if options.tasks:
        rows = collect_tasks(options.rounds, progress)
    else:
        rows = collect(options.rounds, options.trees, progress)
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
