"""`scripts/bench --against COMMIT`: this tree and another commit, the same workloads, interleaved.

Each round measures both sides, each in a fresh process, in alternating order. The minimum of the rounds is CPU time with the
least disturbance, so a busy machine changes the ratios little.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import ours, trees

ROOT = Path(__file__).resolve().parent.parent
STEPS, DELTAS = 200, 5_000


def measure() -> dict[str, float]:
    """Return microseconds of CPU for each workload, in this process."""
    taken = asyncio.run(ours.steps(STEPS))
    figures = {
        "a step with a tool call and a commit": statistics.median(taken) * 1e6,
        "a streamed delta to a consumer": asyncio.run(ours.deltas(DELTAS)) / DELTAS * 1e6,
        "an agent with five tools, built and run": asyncio.run(ours.build_and_run(100)) * 1e6,
    }
    return figures | trees.one_round("ours")


def find_commit(name: str) -> str:
    """Return the id of a commit. If git does not know one by that name, print so and exit with 2."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        print(
            f"scripts/bench: --against: git knows no commit {name!r} here: give a commit, branch or tag",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return found.stdout.strip()


def compare(name: str, rounds: int) -> bool:
    """Print the minimum of each workload on both sides. Return true if none is more than 5 % slower here."""
    commit = find_commit(name)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "other"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(place), commit], cwd=ROOT, check=True)
        try:
            least = _least({"then": place / "src", "now": ROOT / "src"}, rounds)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)
    print(f"{'':42}{commit[:10]:>12}{'now':>10}{'ratio':>8}")
    for name, then in least["then"].items():
        now = least["now"][name]
        print(f"{name:42}{then:>12.1f}{now:>10.1f}{now / then:>7.2f}x")
    return all(least["now"][name] <= 1.05 * then for name, then in least["then"].items())


def _least(sources: dict[str, Path], rounds: int) -> dict[str, dict[str, float]]:
    least: dict[str, dict[str, float]] = {side: {} for side in sources}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for side in sorted(sources, reverse=bool(number % 2)):
            for name, value in _measure_in_process(sources[side]).items():
                least[side][name] = min(value, least[side].get(name, value))
    return least


def _measure_in_process(source: Path) -> dict[str, float]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
    # Outside the tree: its `src` would be on the path before the other commit's.
    command = [sys.executable, "-m", "benchmarks.against", str(source)]
    out = subprocess.run(command, cwd=tempfile.gettempdir(), env=env, capture_output=True, text=True, check=False)
    if out.returncode:
        sys.exit(f"scripts/bench: the workloads cannot run on {source}: {out.stderr.strip().rpartition(chr(10))[2]}")
    return json.loads(out.stdout)


if __name__ == "__main__":
    import retinue

    assert Path(retinue.__file__).is_relative_to(sys.argv[1]), f"measured {retinue.__file__}"
    print(json.dumps(measure()))
