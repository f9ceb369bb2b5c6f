"""Readers of a log give each event once and in order, wherever the log is and whoever owns it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from retinue import RunStatus
from retinue.core.concurrency import Jobs
from retinue.core.events import ErrorRaised, Event, RunFinished, RunStarted, StepStarted, TextDelta
from retinue.core.rows import Private
from retinue.core.runs import RunIdentity
from retinue.core.stores import DurableStore
from retinue.log.fanout import Budget, Fanout
from retinue.log.fold import fold_all
from retinue.log.owned import LiveLog, LogWriter
from retinue.log.read import Reader, StoreLog
from retinue.storage.stores import open_store
from retinue.testing.stores import stored_run
from retinue.testing.threads import LONG, begin

from ..effort import share

ROOT, CHILD = "r1", "c1"
AGENT: dict[str, Any] = {"agent": "agent"}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """The store of the log; None for a log in memory."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path}/app.db" if request.param == "sqlite" else None


class Follower:
    """Reads a log to its end, at a pace of its own, and notes the events and notices."""

    def __init__(self, reader: Reader, run_id: str, rng: random.Random) -> None:
        self.reader, self.run_id, self.after, self.is_live = reader, run_id, reader.seq, False
        self.seen: list[Event] = []
        self._rng = random.Random(rng.random())

    async def follow(self) -> None:
        while not self.reader.ended:
            before, found = self.reader.seq, await self.reader.take(self._rng.choice([1, 2, 7, 1000]))
            assert not found or (found[0].seq > before and found[-1].seq <= self.reader.seq)
            self.seen += found
            if (notice := await self.reader.notice()) is not None:
                self.seen.append(notice)
            for _ in range(self._rng.choice([0, 0, 1, 5])):
                await asyncio.sleep(0)
        await self.reader.aclose()

    def check(self, events: Sequence[Event]) -> None:
        wanted = [event for event in events if event.seq > self.after and self.run_id in ("", event.run_id)]
        kept: dict[int, Event] = {}
        for event in self.seen:
            if event.seq:
                assert event.seq > max(kept, default=0), "an event came again, or out of order"
                kept[event.seq] = event
            else:  # what comes after the last stored event is given again
                assert isinstance(event, ErrorRaised)
                assert (self.is_live, event.code) == (True, "owner_lost")
                stored = int(event.message.split("after event ")[1].split()[0])
                kept = {seq: old for seq, old in kept.items() if seq <= stored}
        assert list(kept.values()) == wanted


class World:
    """A log whose owner changes, and its followers."""

    def __init__(self, store: DurableStore | None, rng: random.Random) -> None:
        self.store, self.rng, self.owners = store, rng, 1
        self.stored = None if store is None else StoreLog(store, ROOT, time.time)
        self.followers: list[Follower] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.fanouts: list[Fanout] = []
        self.budget, self.jobs = Budget(rng.choice([300, 3000, 1 << 20]), 1 << 20), Jobs()
        self.said = 0

    async def begin(self) -> None:
        if self.store is not None:
            await begin(self.store, stored_run(ROOT), "owner 1", LONG)
        self.own(1)
        self.start_run(ROOT)
        if self.log.writer is not None:
            await self.log.writer.flush()

    def own(self, epoch: int, tree: Any = None, stored_seq: int = 0) -> None:
        writer = None
        if self.store is not None:
            writer = LogWriter(ROOT, self.store, epoch)
            writer.stored_seq = stored_seq
        log = self.log = LiveLog((), tree, writer, store=self.stored)
        if writer is not None:
            writer.on_lost = lambda problem: log.drop()

    def start_run(self, run_id: str) -> None:
        parent = None if run_id == ROOT else ROOT
        identity = RunIdentity(run_id, f"t {run_id}", "agent", parent_run_id=parent)
        event = RunStarted(thread_id=identity.thread_id, run_id=run_id, parent_run_id=parent, **AGENT)
        self.log.append_stamped(event, Private(identity=identity))

    def say(self) -> None:
        """Append some events, each with a text of its own."""
        runs = list(self.log.tree.runs.values())
        for _ in range(self.rng.randint(1, 30)):
            self.said += 1
            event: Event = TextDelta(delta=f"{self.said} by {self.owners}", message_id="m")
            if self.rng.random() < 0.1:
                event = StepStarted(step=self.said)
            self.log.append(self.rng.choice(runs), event)
        if self.log.writer is not None and self.rng.random() < 0.3:
            self.log.append_private(Private(kind="commit", run_id=ROOT))

    def follow(self) -> None:
        """Have somebody follow the log: here or through the store, all of it or one run, from some place on."""
        run_id, is_live = self.rng.choice(["", "", ROOT, CHILD]), self.rng.random() < 0.4
        log: Any = self.log if self.stored is None or self.rng.random() < 0.7 else self.stored
        # A reader knows only numbers that are stored.
        after = self.rng.choice([0, self.rng.randint(0, self.log.stored_seq)])
        if self.rng.random() < 0.4:
            run_id, is_live, reader = "", False, self.attach(log, after)
        else:
            reader = log.read(after, live=is_live, run_id=run_id)
        one = Follower(reader, run_id, self.rng)
        one.is_live = is_live and log is self.log
        self.followers.append(one)
        self.tasks.append(asyncio.create_task(one.follow()))

    def attach(self, log: Any, after: int) -> Reader:
        """Follow the log together with others, also with some who began while another process owned it."""
        if not self.fanouts or self.rng.random() < 0.3:
            self.fanouts.append(Fanout(log, after, self.budget, self.jobs.start))
        return self.rng.choice(self.fanouts).attach(after)

    async def change_owner(self) -> None:
        """Have another process own the log: this one has appended more than it has stored, and learns of it later."""
        store, log, writer = self.store, self.log, self.log.writer
        assert store is not None
        assert writer is not None
        self.owners += 1
        epoch = await store.claim(ROOT, f"owner {self.owners}", LONG, gone=f"owner {self.owners - 1}")
        assert epoch is not None
        found = await store.read_log(ROOT)
        assert found is not None
        tree = fold_all(found.rows, "", ROOT)
        tree.seq, tree.sub = found.seq, found.sub
        is_told = self.rng.random() < 0.5
        if not is_told:
            self.say()  # nobody will store it
        self.own(epoch, tree, found.seq)
        if is_told:
            log.drop()
        for _ in range(self.rng.randint(0, 3)):
            self.say()
            await self.pause()
        log.drop()

    async def wait_for_a_human(self) -> None:
        """Release the log while its run waits; then another process continues it."""
        self.log.append_stamped(RunFinished(status=RunStatus.SUSPENDED, termination="suspended", run_id=ROOT, **AGENT))
        writer = self.log.writer
        if writer is not None:
            await writer.settle(runs=(stored_run(ROOT, 1.0, RunStatus.SUSPENDED),), released=True, rests=True)
        self.log.close()
        await self.pause()
        if writer is not None:
            await self.change_owner()
        self.log.ended = False
        self.start_run(ROOT)

    async def pause(self) -> None:
        writer = self.log.writer
        if writer is not None and self.rng.random() < 0.3:
            await writer.flush()
        for _ in range(self.rng.randint(0, 4)):
            await asyncio.sleep(0)

    async def end(self) -> list[Event]:
        self.log.append_stamped(RunFinished(status=RunStatus.COMPLETED, termination="natural", run_id=ROOT, **AGENT))
        if self.store is None or self.log.writer is None:
            self.log.close()
            return self.log.events
        await self.log.writer.settle(runs=(stored_run(ROOT, 1.0, RunStatus.COMPLETED),), ended=True)
        self.log.close()
        found = await self.store.read_events(ROOT, 0, 10_000, 2**40)
        assert found is not None
        assert found[1]
        return list(found[0])


@pytest.mark.parametrize("seed", range(share(300, 12)))
async def test_each_reader_gets_each_event_once_and_in_order(url: str | None, seed: int) -> None:
    rng = random.Random(f"{seed}")
    async with AsyncExitStack() as stack, asyncio.timeout(90):
        store: Any = None if url is None else open_store(url)
        if store is not None:
            await store.open()
            stack.push_async_callback(store.close)
        world = World(store, rng)
        await world.begin()
        for step in range(rng.randint(3, 20)):
            what = rng.random()
            if what < 0.5:
                world.say()
            elif what < 0.75 or step < 3:
                world.follow()
            elif what < 0.85 and store is not None:
                await world.change_owner()
            elif what < 0.9:
                await world.wait_for_a_human()
            elif CHILD not in world.log.tree.runs:
                world.start_run(CHILD)
            await world.pause()
        world.follow()
        events = await world.end()
        await asyncio.gather(*world.tasks)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        for follower in world.followers:
            follower.check(events)
