"""Logs of random trees are followed over HTTP while their owner changes: each reader sees each event once, in order, and every
snapshot with what comes after it is the snapshot of the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from retinue import Runtime
from retinue.client import Client
from retinue.core.events import Event, event_from_json, event_to_json
from retinue.core.processes import process_identity
from retinue.core.rows import LogRow
from retinue.core.runs import RunIdentity
from retinue.core.stores import LogBatch, RunRecord
from retinue.storage.stores import open_store
from retinue.wire.snapshot import SnapshotTree

from ..effort import share
from ..prefix.generate import make
from ..prefix.tape import undisturbed
from .serving import TOKEN, Site, serving
from .test_snapshots import babble, taken, tree_json

RUNS = "/api/v1/runs"
LONG = 3600.0


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/a.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


async def by_client(site: Site, log_id: str, after: int, chance: Random) -> list[Any]:
    async with Client(site.url, token=TOKEN) as client:
        return [event_to_json(event) async for event in client.events(log_id, after)]


async def by_broken_sockets(site: Site, log_id: str, after: int, chance: Random) -> list[Any]:
    """Read some events from each of many sockets, which are left without a word."""
    found: list[Any] = []
    while True:
        at = found[-1]["seq"] if found else after
        async with site.socket(f"{RUNS}/{log_id}/events?after={at}") as socket:
            for _ in range(chance.choice([1, 5, 40, 10_000])):
                try:
                    found.append(await socket.news())
                except StopAsyncIteration:
                    return found


async def by_merged_stream(site: Site, log_id: str, after: int, chance: Random) -> list[Any]:
    merge = chance.choice([1, 20, 5000])
    return [event.data for event in await site.all_events(f"{RUNS}/{log_id}/events?after={after}&merge={merge}")]


READERS = (by_client, by_broken_sockets, by_merged_stream)


class Followed:
    """One log, written by one owner after the other, and those who follow it."""

    def __init__(self, site: Site, store: Any, log_id: str, events: Sequence[Event], chance: Random) -> None:
        self.site, self.store, self.log_id, self.events, self.chance = site, store, log_id, events, chance
        self.snapshots: list[dict[str, Any]] = []
        self.readers: list[tuple[Any, int, asyncio.Task[list[Any]]]] = []

    async def follow(self) -> None:
        identity = RunIdentity(run_id=self.log_id, thread_id=self.log_id, agent="a")
        record = RunRecord(identity=identity, started_at=1.0, log_id=self.log_id)
        owner, epoch, done = f"{process_identity()}/1", 1, 0
        await self.store.begin_run(record, b"{}", owner, LONG)
        while done < len(self.events):
            size = self.chance.choice([1, 2, 3, self.chance.randint(1, 60)])
            rows = [LogRow(event.seq, 0, event) for event in self.events[done : done + size]]
            done += len(rows)
            ended = done == len(self.events)
            await self.store.write(LogBatch(log_id=self.log_id, epoch=epoch, rows=rows, ended=ended))
            if ended or self.chance.random() < 0.3:
                self.snapshots.append(await taken(self.site, self.log_id))
            if len(self.readers) < 9 and self.chance.random() < 0.6:
                self.begin_reader(READERS[len(self.readers) % len(READERS)], done)
            if not ended and self.chance.random() < 0.2:
                epoch += 1
                following = f"{process_identity()}/{epoch}"
                assert await self.store.claim(self.log_id, following, LONG, gone=owner) == epoch
                owner = following
        for reader in READERS:
            self.begin_reader(reader, done)

    def begin_reader(self, reader: Any, done: int) -> None:
        after = self.chance.choice([0, self.chance.randint(0, done)])
        work = reader(self.site, self.log_id, after, Random(self.chance.random()))
        self.readers.append((reader, after, asyncio.create_task(work)))

    async def check(self) -> int:
        """Check what was read; return how many readers and snapshots there were."""
        shown, last = [event_to_json(event) for event in self.events], tree_json(SnapshotTree(self.events))
        for reader, after, work in self.readers:
            found = await work
            if reader is by_merged_stream:  # what it had before, and what came
                seqs = [event["seq"] for event in found]
                assert seqs == sorted(set(seqs))
                got = [*self.events[:after], *[event_from_json(event) for event in found]]
                assert tree_json(SnapshotTree(got)) | {"seq": 0} == last | {"seq": 0}
            else:
                assert found == shown[after:], (reader.__name__, after)
        for snapshot in self.snapshots:
            assert snapshot == tree_json(SnapshotTree(self.events[: snapshot["seq"]]))
            tree = SnapshotTree.of(snapshot)
            for event in self.events[snapshot["seq"] :]:
                tree(event)
            assert tree_json(tree) == last
        return len(self.readers) + len(self.snapshots)


async def test_every_reader_over_http_sees_each_event_once_while_the_owner_changes(url: str) -> None:
    seeds = range(share(40, 2))
    runs: list[Sequence[Event]] = []
    for seed in seeds:
        scene = make(Random(seed))
        runs += [(await undisturbed(scene.plan, scene.limits)).events, await babble(Random(seed))]
    async with serving(Runtime.open(url)) as site:
        store: Any = open_store(url)
        await store.open()
        try:
            all_of_them = [
                Followed(site, store, f"log-{number}", events, Random(number)) for number, events in enumerate(runs)
            ]
            await asyncio.gather(*[one.follow() for one in all_of_them])
            assert sum([await one.check() for one in all_of_them]) > 20 * len(seeds)
        finally:
            await store.close()
