"""Followers of one log share its reader and a ring of its last events, which is bounded in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from retinue.core.concurrency import Jobs
from retinue.core.errors import StoreError
from retinue.core.events import Event, TextDelta
from retinue.core.rows import Private
from retinue.core.runs import RunIdentity
from retinue.events import ErrorRaised, RunStarted
from retinue.log.fanout import AT_ONCE, Budget, Fanout, Follower, make_frame
from retinue.log.owned import LiveLog
from retinue.log.read import Reader

from ..waiting import until

SIZE = 1000


def new_log() -> LiveLog:
    log, identity = LiveLog(), RunIdentity("r", "t", "agent")
    log.append_stamped(RunStarted(run_id="r", agent="agent", thread_id="t"), Private(identity=identity))
    return log


def say(log: LiveLog, texts: Iterable[str]) -> None:
    for text in texts:
        log.append(log.tree.runs["r"], TextDelta(delta=text, message_id="m"))


async def read(follower: Follower, last: int) -> list[int]:
    found: list[int] = []
    while not found or found[-1] < last:
        found += [event.seq for event in await follower.take()]
    return found


@pytest.fixture
async def jobs():
    made = Jobs()
    yield made
    await made.close()


async def test_a_ring_keeps_no_more_than_its_bytes(jobs: Jobs) -> None:
    log = new_log()
    fanout = Fanout(log, 0, Budget(ring_bytes=20 * SIZE), jobs.start)
    still, moving = fanout.attach(0), fanout.attach(0)
    for _ in range(10):
        say(log, ["x" * SIZE] * 50)
        await read(moving, log.tree.seq)
        assert sum(len(frame.data) for frame in fanout.since(fanout.before)) <= 20 * SIZE
        assert fanout.before > log.tree.seq - 20
    assert await read(still, log.tree.seq) == list(range(1, 502))
    assert await read(fanout.attach(490), log.tree.seq) == list(range(491, 502))
    say(log, ["y" * SIZE * 100])  # larger than the ring: kept until the next one comes
    assert await read(moving, log.tree.seq) == await read(still, log.tree.seq) == [502]
    assert fanout.before == 501


async def test_rings_share_the_bytes_of_the_process(jobs: Jobs) -> None:
    log, budget = new_log(), Budget(ring_bytes=100 * SIZE, all_bytes=200 * SIZE)
    say(log, ["x" * SIZE] * 200)
    fanouts = [Fanout(log, 0, budget, jobs.start)]
    await read(fanouts[0].attach(0), 201)
    alone = fanouts[0].before
    for _ in range(9):
        fanouts.append(Fanout(log, 0, budget, jobs.start))
        await read(fanouts[-1].attach(0), 201)
    kept = [201 - fanout.before for fanout in fanouts]
    assert 201 - alone > 80
    assert all(10 < count <= 20 for count in kept)
    for fanout in fanouts[1:]:
        fanout.close()
    assert budget.share == 100 * SIZE


async def test_a_follower_gives_a_bounded_piece_at_once(jobs: Jobs) -> None:
    log = new_log()
    say(log, ["x" * SIZE] * 500)
    fanout = Fanout(log, 0, Budget(ring_bytes=50 * SIZE), jobs.start)
    late, early = fanout.attach(470), fanout.attach(0)
    await read(late, 501)
    for follower in (early, fanout.attach(460)):
        while frames := await follower.available():
            assert sum(len(frame.data) for frame in frames) <= AT_ONCE
        assert follower.seq == 501


async def test_a_follower_knows_when_it_has_all(jobs: Jobs) -> None:
    log = new_log()
    say(log, "abc")
    follower = Fanout(log, 0, Budget(), jobs.start).attach(0)
    assert follower.ready
    assert await read(follower, 4) == [1, 2, 3, 4]
    assert (await follower.take(), follower.ready, follower.ended) == ((), False, False)
    waiting = asyncio.create_task(follower.take())
    await asyncio.sleep(0)
    say(log, "d")
    assert [event.seq for event in await waiting] == [5]
    log.close()
    while not follower.ended:
        assert not await follower.take()


async def test_nobody_reads_a_log_that_nobody_follows(jobs: Jobs) -> None:
    log = new_log()
    fanout = Fanout(log, 0, Budget(), jobs.start)
    first = fanout.attach(0)
    await read(first, 1)
    await first.aclose()
    await first.aclose()
    say(log, "ab")
    await until(lambda: not len(jobs))
    assert (fanout.followers, fanout.last) == (0, 1)
    assert await read(fanout.attach(1), 3) == [2, 3]


class Failing:
    """A log whose store fails, for a while or for good."""

    def __init__(self, log: LiveLog, *problems: Exception) -> None:
        self.log, self.problems = log, list(problems)

    def read(self, after: int = 0) -> Reader:
        if self.problems:
            raise self.problems.pop(0)
        return self.log.read(after)


async def test_a_short_failure_is_bridged_and_a_long_one_is_told_to_all(jobs: Jobs) -> None:
    log = new_log()
    failing = Failing(log, *[StoreError("db", "busy", transient=True)] * 2)
    assert await read(Fanout(failing, 0, Budget(), jobs.start).attach(0), 1) == [1]
    broken = Fanout(Failing(log, StoreError("db", "gone")), 0, Budget(), jobs.start)
    for follower in (broken.attach(0), broken.attach(0)):
        with pytest.raises(StoreError, match="gone"):
            await read(follower, 1)


class Silent:
    """A log that has nothing but a notice."""

    seq, ended, ready = 0, False, True

    def read(self, after: int = 0) -> Reader:
        return self

    async def take(self, most: int = 0) -> list[Event]:
        if not self.ready:
            await asyncio.Event().wait()
        self.ready = False
        return []

    async def notice(self) -> Event | None:
        return ErrorRaised(run_id="r", agent="a", message="gone", code="owner_lost")

    async def rests(self) -> bool:
        return False

    async def aclose(self) -> None:
        return


async def test_each_follower_gets_a_notice_once(jobs: Jobs) -> None:
    fanout = Fanout(Silent(), 0, Budget(), jobs.start)
    for follower in (fanout.attach(0), fanout.attach(0)):
        assert not await follower.take()
        notice = await follower.notice()
        assert isinstance(notice, ErrorRaised)
        assert notice.code == "owner_lost"
        assert await follower.notice() is None


def test_a_frame_has_the_json_of_its_event() -> None:
    frame = make_frame(TextDelta(seq=3, delta="x", run_id="r", agent="a"))
    assert (frame.seq, b'"delta":"x"' in frame.data) == (3, True)
