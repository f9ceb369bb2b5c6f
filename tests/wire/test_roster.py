"""The rows of a roster say of each run what the tree of the same events says."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from retinue.core.events import Event, InferenceFinished
from retinue.wire.roster import TAIL, Roster
from retinue.wire.snapshot import SnapshotTree

from ..effort import share
from ..prefix.generate import make
from ..prefix.scenes import SCENES
from ..prefix.tape import undisturbed


def check(events: list[Event]) -> None:
    tree, roster = SnapshotTree(events), Roster(events)
    rows = {row.run_id: row for row in roster.rows()}
    begun = {run_id: run for run_id, run in tree.runs.items() if run_id in rows}
    assert roster.seq == tree.seq
    for run_id, run in begun.items():
        row, shown = rows[run_id], tree.run_json(run, deep=False)
        for name in ("run_id", "agent", "started_at", "ended_at"):
            assert getattr(row, name) == shown[name], (run_id, name)
        assert (row.ns, row.status) == ("|".join(run.ns), run.status.value)
        assert row.tokens == run.own_usage.input_tokens + run.own_usage.output_tokens
        assert row.task == run.task.strip().partition("\n")[0][:160]
        assert row.steps == max((step.number for step in run.steps), default=0)
        # A tree has no words of a run that goes on until its messages come again; a roster keeps its last ones.
        assert roster.tail(run_id) == run.tail[-TAIL:] or not run.tail
    assert roster.counts(()) == Counter(run.status.value for run in begun.values() if run.ns)


@pytest.mark.parametrize("name", sorted(SCENES)[:: share(1, 6)])
async def test_rows_of_recorded_runs(name: str) -> None:
    scene = SCENES[name]
    await check_prefixes(list((await undisturbed(scene.plan, scene.limits)).events))


@pytest.mark.parametrize("seed", range(share(60, 6)))
async def test_rows_of_random_runs(seed: int) -> None:
    scene = make(Random(seed))
    await check_prefixes(list((await undisturbed(scene.plan, scene.limits)).events))


async def check_prefixes(events: list[Event]) -> None:
    assert any(isinstance(event, InferenceFinished) for event in events)
    for place in range(1, len(events) + 1, 1 + len(events) // 40):
        check(events[:place])
    check(events)
