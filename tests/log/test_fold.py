"""The log is the run: at every row, the live state is the fold of the rows so far; every prefix can be folded."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from retinue import Runtime
from retinue.core.rows import LogRow, Private
from retinue.log.fold import fold, fold_all
from retinue.log.owned import LiveLog
from retinue.log.state import LogState

from ..folding import FoldBroken, FoldCheck, checked_folds, differences
from ..prefix.generate import make
from ..prefix.program import World
from ..prefix.scenes import CANCELS, SCENES, Scene
from ..prefix.tape import Recorder, Tasks, a_store, answer_all, answer_tasks, needs_tasks, recorded, see_through

ALL = SCENES | CANCELS
SEEDS = range(12)


async def play_in_memory(scene: Scene, check: FoldCheck) -> list[LogRow]:
    """Run a scene without a store, to the end of its last background task; its rows."""
    world = World(scene.plan, Tasks() if needs_tasks(scene.plan) else None)
    async with Runtime(world.agents()) as runtime:
        run = runtime.stream("boss", f"do {scene.plan.label}", limits=scene.limits)
        world.cancel = lambda: runtime.cancel(run.run_id)
        tasks = asyncio.create_task(answer_tasks(runtime, world))
        await asyncio.wait_for(answer_all(runtime, run.run_id, world), 90)
        await asyncio.wait_for(_last_event(runtime, run.run_id), 90)
        tasks.cancel()
        log = next(shadow.log for shadow in check.shadows.values() if run.run_id in shadow.log.tree.runs)
        return log.rows()


async def _last_event(runtime: Runtime, run_id: str) -> None:
    async for _ in runtime.events(run_id):
        pass


@pytest.mark.parametrize("name", ALL)
async def test_the_live_state_is_the_fold_at_every_row(name: str, fold_check: FoldCheck) -> None:
    rows = await play_in_memory(ALL[name], fold_check)
    assert fold_check.rows >= len(rows) > 2
    check_prefixes(rows)


def check_prefixes(rows: list[LogRow]) -> None:
    """Fold every prefix; only deltas may be left out."""
    tree = LogState()
    for row in rows:
        fold(tree, row)
        tree.has_open_tasks()
        for run in tree.runs.values():
            run.response()
            run.own_messages()
    assert not differences(tree, fold_all([row for row in rows if not _is_delta(row)]))


def _is_delta(row: LogRow) -> bool:
    return row.event is not None and row.event.kind.endswith("_delta") and row.event.kind != "state_delta"


async def play_on_sqlite(scene: Scene, check: FoldCheck) -> int:
    """Run a scene on SQLite and fold what is stored after every batch; how many batches there were."""
    async with a_store() as store:
        tasks = Tasks() if needs_tasks(scene.plan) else None
        world, recorder = World(scene.plan, tasks), Recorder(store, tasks)
        reads: list[asyncio.Task[None]] = []
        write = store.write

        def write_and_read(batch: Any) -> Any:
            written = write(batch)
            reads.append(asyncio.create_task(check_stored(store, written, batch.log_id, recorder)))
            return written

        store.write = write_and_read
        with recorded(recorder):
            async with Runtime(world.agents(), store=store) as runtime:
                run = runtime.stream("boss", f"do {scene.plan.label}", limits=scene.limits)
                await see_through(runtime, run.run_id, world, recorder)
                await asyncio.gather(*reads)
                live = [shadow.log for shadow in check.shadows.values() if run.run_id in shadow.log.tree.runs]
                stored = await store.read_log(run.run_id)
                assert not differences(live[-1].tree, fold_all(stored.rows))
                assert (live[-1].tree.seq, live[-1].tree.sub) == (stored.seq, stored.sub)
        return len(reads)


async def check_stored(store: Any, written: asyncio.Future[None], log_id: str, recorder: Recorder) -> None:
    """Fold what is stored, and compare it with the fold of the rows that were appended up to there."""
    await written
    stored = await store.read_log(log_id)
    rows = [entry.row for entry in recorder.entries if (entry.row.seq, entry.row.sub) <= (stored.seq, stored.sub)]
    assert not differences(fold_all(rows), fold_all(stored.rows))


@pytest.mark.parametrize("name", ALL)
async def test_what_is_stored_folds_to_the_live_state_at_every_batch(name: str, fold_check: FoldCheck) -> None:
    assert await play_on_sqlite(ALL[name], fold_check)


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_programs_are_their_logs(seed: int, fold_check: FoldCheck) -> None:
    scene = make(Random(seed))
    check_prefixes(await play_in_memory(scene, fold_check))
    await play_on_sqlite(scene, fold_check)


async def test_a_tool_starts_when_the_store_has_its_call() -> None:
    """The answer of the model is stored before any of its calls starts, and a call's start before its tool runs."""
    for name in ("parallel calls", "hook asks", "tasks that wait", "by hand together", "spawn that waits"):
        scene = SCENES[name]
        async with a_store() as store:
            tasks = Tasks() if needs_tasks(scene.plan) else None
            world, recorder, seen = World(scene.plan, tasks), Recorder(store, tasks), list[str]()

            async def on_run(
                key: str, store: Any = store, recorder: Recorder = recorder, seen: list[str] = seen
            ) -> None:
                log_id = recorder.entries[0].row.event.run_id  # type: ignore[union-attr]
                tree = fold_all((await store.read_log(log_id)).rows)
                entered = [
                    call
                    for run in tree.runs.values()
                    for call in run.calls.values()
                    if call.entered and call.call.args.get("key") == key
                ]
                assert len(entered) == 1, key
                seen.append(key)

            world.on_run = on_run
            with recorded(recorder):
                async with Runtime(world.agents(), store=store) as runtime:
                    run = runtime.stream("boss", f"do {scene.plan.label}")
                    end = await see_through(runtime, run.run_id, world, recorder)
        assert len(seen) == sum(end.world.ran.values())


@pytest.mark.no_fold_check
async def test_the_check_notices_a_change_that_no_row_tells() -> None:
    with pytest.raises(FoldBroken, match="stop_reason"), checked_folds():
        await _cheat()


async def _cheat() -> None:
    append = LiveLog.append_private

    def cheat(self: LiveLog, private: Private) -> None:
        next(iter(self.tree.runs.values())).stop_reason = "cheated"
        append(self, private)

    LiveLog.append_private = cheat  # type: ignore[method-assign]
    try:
        world = World(SCENES["hidden state"].plan)
        await Runtime(world.agents()).run("boss", "do A")
    finally:
        LiveLog.append_private = append  # type: ignore[method-assign]
