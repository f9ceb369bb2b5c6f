"""A stage for recovery: a process that kills itself at an exact point of a scene, and what is there afterwards."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct

from retinue import Agent, Decision, Event, ModelRequest, RunResult, Runtime
from retinue.log.fold import fold_all
from retinue.log.owned import LogWriter
from retinue.models import ModelChunk
from retinue.storage.stores import open_store
from retinue.stores import ThreadRecord
from retinue.testing import ScriptedModel

from ..prepared import PYTHON
from ..waiting import let_others_run, until

ROOT = Path(__file__).parents[2]
PLAY = "import sys; from tests.durability.scene import play; play(*sys.argv[1:])"
"""A program that plays a scene."""

TELL_OF_DEATHS = ("interrupted", "worker_lost")
"""The codes of events that are there only because a process died."""


class Spot:
    """Where a scene is played, and at which of its points the process dies."""

    def __init__(self, folder: Path, die: str = "") -> None:
        self.folder, self.die = folder, die
        self._dying = False

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder}/app.db"

    def clock(self) -> float:
        """Return the time here: the real one and what `pass_time` added to it."""
        path = self.folder / "passed"
        return time.time() + (float(path.read_text()) if path.exists() else 0.0)

    def pass_time(self, seconds: float) -> None:
        (self.folder / "passed").write_text(str(seconds))

    def did(self, what: str) -> None:
        """Do something that can be counted, and cannot be taken back."""
        with (self.folder / "did.txt").open("a") as file:
            file.write(f"{what}\n")

    def done(self) -> dict[str, int]:
        """How often each thing was done."""
        path = self.folder / "did.txt"
        return dict(Counter(path.read_text().splitlines())) if path.exists() else {}

    async def point(self, name: str) -> None:
        """Die here, if this is the point, once everything that was told is in the store."""
        if self.die == name and not self._dying:
            self._dying = True
            await stored()
            self.at_once(name)

    def at_once(self, name: str) -> None:
        """Die here, if this is the point, with what is in the store by chance."""
        if self.die == name:
            os.kill(os.getpid(), signal.SIGKILL)


async def stored() -> None:
    """Return when this process has stored every row, and no task adds one while the caller waits."""
    quiet = 0
    while quiet < 3:
        writers = [it for it in gc.get_objects() if isinstance(it, LogWriter)]
        await asyncio.gather(*[writer.flush() for writer in writers], return_exceptions=True)
        await let_others_run()
        quiet = 0 if any(writer.rows for writer in writers) else quiet + 1


class Scene(Struct):
    """Agents of which the first is asked something, and how it is asked."""

    agents: Sequence[Agent]
    says: str = "go"
    options: dict[str, Any] = {}
    cancel_after: str = ""
    """What must have been done before the run is cancelled, where it is."""
    answers: bool = False
    """Whether what waits for a human is answered."""
    then: str = ""
    """What else is asked on the same thread meanwhile; it waits for its turn."""
    crowd: int = 0
    """How many such runs there are at once, where there are several."""


Play = Callable[[Spot], Scene]


class Model:
    """A model that dies at a point of its answer: `<name>:<turn>` before it, `<name>:<turn>:<chunk>` within."""

    def __init__(self, spot: Spot, name: str, script: Any) -> None:
        self._spot, self.name = spot, name
        self._inner = ScriptedModel(script)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        turn = turn_of(request)
        self._spot.did(f"{self.name}:{turn}")
        await self._spot.point(f"{self.name}:{turn}")
        number = 0
        async for chunk in self._inner.stream(request):
            yield chunk
            number += 1
            await self._spot.point(f"{self.name}:{turn}:{number}")


def turn_of(request: ModelRequest) -> int:
    """Which answer this will be in the conversation, from 1."""
    return 1 + sum(message.role == "assistant" for message in request.messages)


def turns(spot: Spot, name: str, *said: Any) -> Model:
    """A model that answers by how far the conversation is."""
    return Model(spot, name, lambda request: said[turn_of(request) - 1])


def kill(spot: Spot, where: str, die: str) -> None:
    """Play a scene, named `module:function`, in a process of its own that dies at a point."""
    with (spot.folder / "stderr.txt").open("a") as file:
        command = [PYTHON, "-c", PLAY, str(spot.folder), where, die]
        ended = subprocess.run(command, stderr=file, cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL, f"it did not die at {die!r}: {said(spot)}"


def said(spot: Spot) -> str:
    return (spot.folder / "stderr.txt").read_text()[-3000:]


def play(folder: str, where: str, die: str) -> None:
    asyncio.run(main(Path(folder), where, die))


class Played(Struct):
    """What a scene came to."""

    run_id: str
    result: RunResult
    events: Sequence[Event]
    thread: ThreadRecord
    done: dict[str, int]

    def of(self, ns: tuple[str, ...] = ()) -> list[Event]:
        """The events of one run, by its place; tasks are not runs."""
        return [event for event in self.events if event.ns == ns and event.kind != "task_updated"]

    def kinds(self, ns: tuple[str, ...] = ()) -> list[str]:
        """What happened to one run; that an answer was lost and asked for again is left out."""
        return [event.kind for event in self.of(ns) if getattr(event, "code", None) not in TELL_OF_DEATHS]

    def places(self) -> list[tuple[str, ...]]:
        return list(dict.fromkeys([event.ns for event in self.events]))

    def all(self, kind: str, ns: tuple[str, ...] | None = None) -> list[Any]:
        return [event for event in self.events if event.kind == kind and (ns is None or event.ns == ns)]

    def calls(self) -> dict[str, str]:
        """How each call ended."""
        return {event.call_id: event.status.value for event in self.all("tool_call_finished")}

    def texts(self) -> list[tuple[str, str]]:
        """The messages of the run: who said what."""
        return [(message.role.value, message.text) for message in self.result.messages]


@asynccontextmanager
async def recovering(spot: Spot, play: Play, **options: Any) -> AsyncIterator[Runtime]:
    """A runtime with the agents of a scene, on the store that a dead process left."""
    async with Runtime.open(spot.url, play(spot).agents, clock=spot.clock, max_takeovers=1000, **options) as runtime:
        yield runtime


async def recover(spot: Spot, play: Play, **options: Any) -> Played:
    """Go on with the run of a scene in this process, see it to its end, and check what must always hold."""
    async with recovering(spot, play, **options) as runtime:
        return await seen(spot, runtime)


def name_of(play: Play) -> str:
    return f"{play.__module__}:{play.__name__}"


async def died(spot: Spot, play: Play, *points: str) -> Played:
    """What came of a scene whose process died at these points, one after the other."""
    for point in points:
        kill(spot, name_of(play), point)
    return await recover(spot, play)


async def seen(spot: Spot, runtime: Runtime) -> Played:
    run_id = (spot.folder / "run_id").read_text()
    result = await runtime.result(run_id)
    events = [event async for event in runtime.events(run_id)]
    thread = await runtime.store.load_thread(result.thread_id)
    check(events)
    await check_store(spot.url, run_id, events)
    return Played(run_id, result, events, thread or ThreadRecord(thread_id=result.thread_id), spot.done())


async def undisturbed(spot: Spot, play: Play) -> Played:
    """The same scene, with nobody dying."""
    scene = play(spot)
    async with Runtime.open(spot.url, scene.agents, clock=spot.clock, max_takeovers=1000) as runtime:
        await start(spot, runtime, scene)
        return await seen(spot, runtime)


async def crowd(spot: Spot, runtime: Runtime, scene: Scene, size: int) -> None:
    """Run the same many times at once."""
    runs = [runtime.stream(scene.agents[0], scene.says) for _ in range(size)]
    (spot.folder / "run_ids").write_text("\n".join([run.run_id for run in runs]))
    await asyncio.gather(*[run.result() for run in runs])


async def start(spot: Spot, runtime: Runtime, scene: Scene) -> RunResult:
    options: Any = {"thread_id": "thread-1", **scene.options}
    run = runtime.stream(scene.agents[0], scene.says, **options)
    (spot.folder / "run_id").write_text(run.run_id)
    if scene.then:
        later = runtime.stream(scene.agents[0], scene.then, thread_id="thread-1", when_busy="enqueue")
        (spot.folder / "later_id").write_text(later.run_id)
        return await later.result()
    if not scene.cancel_after:
        return await run.result()
    await until(lambda: scene.cancel_after in spot.done())
    return await run.cancel("not wanted")


def check(events: Sequence[Event]) -> None:
    """What holds for every log: no hole, and every run and call begins once and ends once."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    runs: dict[str, list[Any]] = {}
    for event in events:
        if event.kind != "task_updated":
            runs.setdefault(event.run_id, []).append(event)
    for own in runs.values():
        kinds = Counter(event.kind for event in own)
        assert own[0].kind == "run_started", [event.kind for event in own]
        assert own[-1].kind == "run_finished", [event.kind for event in own]
        assert kinds["run_started"] == kinds["run_finished"] == 1
        assert len({event.ns for event in own}) == 1
        _check_calls(own)
        steps = [event.step for event in own if event.kind == "step_started"]
        assert steps == list(range(1, len(steps) + 1))
        inferences = [event.step for event in own if event.kind == "inference_finished"]
        assert inferences == sorted(set(inferences))
    assert len({own[0].ns for own in runs.values()}) == len(runs)
    started = Counter(event.child_run_id for event in events if event.kind == "child_started")  # type: ignore[attr-defined]
    ended = Counter(event.child_run_id for event in events if event.kind == "child_finished")  # type: ignore[attr-defined]
    assert set(started.values()) <= {1}
    assert set(ended.values()) <= {1}


def _check_calls(own: list[Any]) -> None:
    begun = Counter(event.call_id for event in own if event.kind == "tool_call_started")
    ready = Counter(event.call_id for event in own if event.kind == "tool_call_ready")
    ended = Counter(event.call_id for event in own if event.kind == "tool_call_finished")
    assert set(begun.values()) | set(ready.values()) | set(ended.values()) <= {1}, (begun, ready, ended)
    assert set(ended) == set(begun), (ended, begun)


async def is_free(store: Any, run_id: str) -> bool:
    """Return whether nobody owns a run."""
    return await store.owner_of(run_id) is None


async def check_store(url: str, run_id: str, events: Sequence[Event]) -> None:
    """What another process finds: the same log, ended, nobody's, and one that folds to runs that are over."""
    store: Any = open_store(url)
    await store.open()
    try:
        await until(lambda: is_free(store, run_id))
        stored, ended = await store.read_events(run_id, 0, 100_000)
        assert list(stored) == events or [e.kind for e in stored] == [e.kind for e in events]
        assert ended
        tree = fold_all((await store.read_log(run_id)).rows)
        assert all(run.is_over for run in tree.runs.values())
        assert not tree.has_open_tasks()
    finally:
        await store.close()


def same(one: Played, other: Played, *, ordered: bool = True) -> None:
    """Nobody could tell, from what it came to, that a process had died."""
    assert [_bare(text) for text in other.texts()] == [_bare(text) for text in one.texts()]
    assert other.result.status == one.result.status
    assert other.result.state == one.result.state
    assert other.result.usage == one.result.usage
    assert other.result.steps == one.result.steps
    assert other.result.output == one.result.output
    assert [_bare(m.text) for m in other.thread.messages] == [_bare(m.text) for m in one.thread.messages]
    assert list(other.thread.state.extensions) == list(one.thread.state.extensions)
    assert sorted(other.places()) == sorted(one.places())
    in_order: Any = list if ordered else sorted
    for ns in one.places():
        assert in_order(other.kinds(ns)) == in_order(one.kinds(ns)), ns


def _bare(said: Any) -> str:
    """What was said, without what is made up anew each time."""
    return re.sub(r"[0-9a-f-]{12,}", "…", str(said))


async def main(folder: Path, where: str, die: str) -> None:
    module, _, name = where.partition(":")
    play: Play = getattr(import_module(module), name)
    spot = Spot(folder, die)
    scene = play(spot)
    async with Runtime.open(spot.url, scene.agents, clock=spot.clock, max_takeovers=1000) as runtime:
        known = folder / "run_id"
        if scene.crowd:
            await crowd(spot, runtime, scene, scene.crowd)
        elif known.exists():
            await runtime.result(known.read_text())
            async for _ in runtime.events(known.read_text()):
                pass
        else:
            result = await start(spot, runtime, scene)
            if scene.answers:
                await runtime.resume(result.run_id, {name: Decision.resume("yes") for name in result.suspended})
            async for _ in runtime.events(known.read_text()):
                pass
