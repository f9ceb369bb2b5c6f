"""The summary of a log is what the tree of its events shows, at every row."""

from __future__ import annotations

from random import Random

import pytest

from retinue.core.runs import Usage
from retinue.core.stores import LogSummary
from retinue.log.fold import fold
from retinue.log.owned import CHANGING
from retinue.log.state import LogState
from retinue.wire.snapshot import SnapshotTree

from ..effort import share
from ..prefix.generate import make
from ..prefix.scenes import SCENES, Scene
from ..prefix.tape import undisturbed


def shown(tree: SnapshotTree) -> tuple[int, int, Usage]:
    """Return the open questions, the children that have not ended, and the usage that a tree shows."""
    root = tree.root
    assert root is not None
    children = [run for run in tree.runs.values() if run is not root and not run.status.is_terminal]
    return len(tree.questions()), len(children), tree.total_usage(root)


async def check(scene: Scene) -> list[LogSummary]:
    """Check the summary at every row; return those that differ from the one before."""
    end = await undisturbed(scene.plan, scene.limits)
    state, tree = LogState(), SnapshotTree()
    found: list[LogSummary] = []
    for row in end.tape.rows:
        fold(state, row)
        if row.event is None:
            continue
        tree(row.event)
        summary = state.summary()
        assert (summary.questions, summary.children, summary.usage) == shown(tree), row.event
        counts = summary.status, summary.questions, summary.children
        if not found or counts != (found[-1].status, found[-1].questions, found[-1].children):
            assert row.event.__class__ in CHANGING
            found.append(summary)
    return found


@pytest.mark.parametrize("name", sorted(SCENES))
async def test_a_summary_is_what_the_tree_shows(name: str) -> None:
    found = await check(SCENES[name])
    assert found[0].status == "running"
    assert found[-1].status in ("completed", "failed")
    assert (found[-1].questions, found[-1].children) == (0, 0)


async def test_a_summary_is_what_the_tree_shows_in_random_programs() -> None:
    for seed in range(share(100, 6)):
        await check(make(Random(seed)))
