"""The follower of an A2A task, with a server that is played: what it streams, what it costs, and how often it asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from random import Random
from typing import Any

import pytest
from a2a.types import a2a_pb2 as pb

from retinue import Agent, RunStatus
from retinue.backends import a2a_task
from retinue.backends.a2a import A2ABackend, A2AFollower
from retinue.backends.a2a_client import UnknownTask
from retinue.core.backend import RunRequest
from retinue.core.concurrency import CancellationToken
from retinue.core.events import Event, TextDelta
from retinue.core.messages import Message
from retinue.core.runs import RunIdentity
from retinue.testing import ScriptedModel

from ..effort import share

WORKING, COMPLETED = pb.TASK_STATE_WORKING, pb.TASK_STATE_COMPLETED


def task(state: pb.TaskState = WORKING, *artifacts: pb.Artifact) -> pb.Task:
    return pb.Task(id="t1", context_id="c1", status=pb.TaskStatus(state=state), artifacts=artifacts)


def artifact(text: str, name: str = "a") -> pb.Artifact:
    return pb.Artifact(artifact_id=name, parts=[pb.Part(text=text)])


def piece(text: str, name: str = "a", *, append: bool = True) -> pb.StreamResponse:
    update = pb.TaskArtifactUpdateEvent(task_id="t1", context_id="c1", artifact=artifact(text, name), append=append)
    return pb.StreamResponse(artifact_update=update)


def status(state: pb.TaskState) -> pb.StreamResponse:
    update = pb.TaskStatusUpdateEvent(task_id="t1", context_id="c1", status=pb.TaskStatus(state=state))
    return pb.StreamResponse(status_update=update)


class Client:
    """A client whose server answers a message with these updates, all at once."""

    url, name, can_stream = "http://127.0.0.1:9", "far", True

    def __init__(self, updates: Iterable[pb.StreamResponse] = ()) -> None:
        self.updates = updates

    async def open(self) -> None:
        return

    async def send(self, *given: Any) -> AsyncGenerator[pb.StreamResponse]:
        yield pb.StreamResponse(task=task())
        for update in self.updates:
            yield update

    async def subscribe(self, task_id: str) -> AsyncGenerator[pb.StreamResponse]:
        raise ConnectionError("no subscription")
        yield

    async def task(self, task_id: str) -> pb.Task:
        raise UnknownTask

    async def cancel(self, task_id: str) -> pb.Task:
        return task(pb.TASK_STATE_CANCELED)


def request(emitted: list[Event], **options: Any) -> RunRequest:
    return RunRequest(
        agent=Agent("far", ScriptedModel([])),
        identity=RunIdentity("run_1", "thread_1", "far"),
        messages=(Message.user("go"),),
        cancellation=CancellationToken(),
        emit=emitted.append,
        **options,
    )


def follower_of(client: Any, emitted: list[Event]) -> A2AFollower:
    return A2AFollower(A2ABackend(client, patience=0.0), request(emitted))


def text_in(events: list[Event]) -> list[str]:
    return [event.delta for event in events if isinstance(event, TextDelta)]


# --- after a break


class Breaking(Client):
    """A server that works on its task between any two awaits, and cuts its streams anywhere.

    A subscription may begin with the task or not, and gives again what snapshots had before it. A snapshot may be late."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        names = ["a"] * 3 + (["b"] if random.random() < 0.3 else [])
        self.pieces = [
            (random.choice(names), random.choice(["x", "xx", "xy", " "])) for _ in range(random.randint(1, 12))
        ]
        if random.random() < 0.7:  # one artifact after the other, as most servers do
            self.pieces.sort()
        self._done = self._shown = 0
        self._is_cut = False

    @property
    def final(self) -> str:
        return a2a_task.BETWEEN.join(self._texts(len(self.pieces)).values())

    def _texts(self, count: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, text in self.pieces[:count]:
            found[name] = found.get(name, "") + text
        return found

    def _snapshot(self) -> pb.Task:
        """The task as it is stored, which may be a while after its events went out, and never goes back."""
        self._shown = self._random.randint(self._shown, self._done)
        has_ended = self._shown == len(self.pieces) and self._random.random() < 0.5
        shown = [artifact(text, name) for name, text in self._texts(self._shown).items()]
        return task(COMPLETED if has_ended else WORKING, *shown)

    async def task(self, task_id: str) -> pb.Task:
        self._work()
        return self._snapshot()

    def _work(self) -> None:
        self._done = self._random.randint(self._done, len(self.pieces))

    async def send(self, *given: Any) -> AsyncGenerator[pb.StreamResponse]:
        yield pb.StreamResponse(task=task())
        async for update in self._stream(0):
            yield update

    async def subscribe(self, task_id: str) -> AsyncGenerator[pb.StreamResponse]:
        start = self._random.randint(0, self._done)
        if self._random.random() < 0.5:
            yield pb.StreamResponse(task=self._snapshot())
        async for update in self._stream(start):
            yield update

    async def _stream(self, place: int) -> AsyncGenerator[pb.StreamResponse]:
        for number, (name, text) in enumerate(self.pieces[place:], place + 1):
            if self._random.random() < 0.3:
                if self._random.random() < 0.5:
                    raise ConnectionError("cut")
                return
            self._done = max(self._done, number)
            yield piece(text, name)
            await asyncio.sleep(0)
        if self._random.random() < 0.5:
            self._shown = self._done = len(self.pieces)
            yield status(COMPLETED)


class Forgetful(Client):
    """A server that streams some text and goes on; what it shows of a stopped task has no text."""

    def __init__(self) -> None:
        super().__init__()
        self.has_spoken = asyncio.Event()

    async def send(self, *given: Any) -> AsyncGenerator[pb.StreamResponse]:
        yield pb.StreamResponse(task=task())
        yield piece("Half ", append=False)
        yield piece("an answer")
        self.has_spoken.set()
        await asyncio.Event().wait()


async def test_streamed_text_stays_when_the_server_stops_the_task_without_it() -> None:
    server, emitted = Forgetful(), list[Event]()
    client: Any = server
    asked = request(emitted)
    running = asyncio.create_task(A2ABackend(client, patience=0.0).run(asked))
    await server.has_spoken.wait()
    asked.cancellation.set("enough")
    result = await running
    assert (result.status, result.response) == (RunStatus.CANCELLED, "Half an answer")
    assert "".join(text_in(emitted)) == "Half an answer"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(f"retinue.core.concurrency.{name}", 0.0)


@pytest.mark.usefixtures("no_pauses")
async def test_nothing_is_streamed_twice_wherever_the_streams_are_cut() -> None:
    for seed in range(share(20_000, 400)):
        server, emitted = Breaking(Random(seed)), list[Event]()
        follower = follower_of(server, emitted)
        outcome, error = await follower.follow()
        assert (outcome, error) == (RunStatus.COMPLETED, None), seed
        assert follower.view.text() == server.final, seed
        streamed = "".join(text_in(emitted))
        if server.pieces == sorted(server.pieces):
            assert streamed == server.final, (seed, server.pieces, text_in(emitted))
        else:  # text that came between is in the answer, and in no delta
            assert server.final == streamed or not server.final.startswith(streamed), (seed, server.pieces, streamed)


# --- what an update costs


async def test_a_small_update_of_a_large_task_is_small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    handled, clean = 0, a2a_task.clean_text

    def counting(text: str) -> str:
        nonlocal handled
        handled += len(text)
        return clean(text)

    monkeypatch.setattr(a2a_task, "clean_text", counting)
    emitted, large, small = list[Event](), "x" * 1_000_000, 1000
    updates = [piece(large), *[piece("y", "ab"[number % 2]) for number in range(small)], status(COMPLETED)]
    follower = follower_of(Client(updates), emitted)
    await follower.follow()
    assert follower.view.text() == large + "y" * (small // 2) + a2a_task.BETWEEN + "y" * (small // 2)
    assert handled < 2 * (len(large) + small)
    assert sum(map(len, text_in(emitted))) < 2 * (len(large) + small)


async def test_a_question_is_read_once_and_not_with_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    handled, clean = 0, a2a_task.clean_text

    def counting(text: str) -> str:
        nonlocal handled
        handled += len(text)
        return clean(text)

    monkeypatch.setattr(a2a_task, "clean_text", counting)
    said = pb.Message(message_id="m", role=pb.ROLE_AGENT, parts=[pb.Part(text="w" * 1_000_000)])
    working = status(WORKING)
    working.status_update.status.message.CopyFrom(said)
    updates = [working, *[piece("y") for _ in range(1000)], status(COMPLETED)]
    await follower_of(Client(updates), list[Event]()).follow()
    assert handled < 2_100_000


async def test_a_stream_that_never_pauses_leaves_turns_to_other_work() -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def updates() -> Iterable[pb.StreamResponse]:
        before = turns
        for _ in range(500):
            yield piece("y")
        assert turns - before >= 499
        yield status(COMPLETED)

    working = asyncio.create_task(work())
    outcome = await follower_of(Client(updates()), list[Event]()).follow()
    working.cancel()
    assert outcome == (RunStatus.COMPLETED, None)


async def test_a_limit_in_seconds_holds_for_a_stream_that_never_pauses() -> None:
    def endless() -> Iterable[pb.StreamResponse]:
        while True:
            yield piece("")

    client: Any = Client(endless())
    result = await A2ABackend(client, patience=0.0).run(request([], timeout=0.0))
    assert result.status is RunStatus.TIMEOUT


# --- how often it asks


async def test_subscriptions_that_end_at_once_are_asked_for_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses, sleep = list[float](), asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)

    class OneEvent(Client):
        asked = 0

        async def subscribe(self, task_id: str) -> AsyncGenerator[pb.StreamResponse]:
            self.asked += 1
            yield status(WORKING) if self.asked % 2 else pb.StreamResponse(task=task())

        async def task(self, task_id: str) -> pb.Task:
            return task(COMPLETED if self.asked == 20 else WORKING)

    client = OneEvent()
    await follower_of(client, []).follow()
    assert client.asked == 20
    assert sum(pauses) > 20, "a minute of such a server may cost only a few requests"


async def test_text_that_comes_through_short_subscriptions_is_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, sleep = list[float](), asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)

    class Piecewise(Client):
        asked = 0

        async def subscribe(self, task_id: str) -> AsyncGenerator[pb.StreamResponse]:
            self.asked += 1
            yield pb.StreamResponse(task=await self.task(task_id))

        async def task(self, task_id: str) -> pb.Task:
            return task(COMPLETED if self.asked == 20 else WORKING, artifact("x" * self.asked))

    emitted = list[Event]()
    await follower_of(Piecewise(), emitted).follow()
    assert "".join(text_in(emitted)) == "x" * 20
    assert max(pauses) < 0.2
