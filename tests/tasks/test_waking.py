"""A conversation is told of a task that ended when no run of it was there: a run is started, once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import Decision, RunStatus, Runtime
from retinue.runtime.live import wake_id
from retinue.stores import SqlTaskRepository

from .. import inside
from ..effort import share
from ..waiting import let_others_run, until
from .house import NEWS, House, answers, runs_of, told_of


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    urls = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/app.db"}
    return urls.get(request.param) or request.getfixturevalue("postgres_url")


@pytest.fixture
async def house(url: str, tmp_path: Path) -> AsyncIterator[House]:
    if url == "memory:":
        yield House(workspace=tmp_path)
        return
    async with SqlTaskRepository(url) as tasks:
        yield House(workspace=tmp_path, task_repository=tasks)


@pytest.fixture
async def runtime(url: str, house: House) -> AsyncIterator[Runtime]:
    async with Runtime.open(url, house.agents) as made:
        yield made


async def is_idle(runtime: Runtime) -> bool:
    """Return whether nothing is at work, or will be."""
    return inside.is_idle(runtime)


async def test_a_run_is_started_once_and_tells_of_the_task(runtime: Runtime, house: House) -> None:
    first = await runtime.run("boss", "do a", thread_id="t", context={"tenant": "blue"})
    assert (first.status, first.response) == (RunStatus.COMPLETED, "begun")
    await house.end("a")
    assert await answers(runtime, 2) == ["begun", "told of a"]
    await until(lambda: is_idle(runtime))
    _, woken = await runs_of(runtime)
    assert woken.identity.run_id == wake_id((await house.tasks())["a"].task_id)
    roles = [message.role for message in await runtime.messages("t")]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert (await runtime.run("boss", "news?", thread_id="t")).response == "nothing new"
    assert len(await runs_of(runtime)) == 3


async def test_it_is_opt_in(url: str, tmp_path: Path) -> None:
    house = House(workspace=tmp_path, wake_on_task_end=False)
    async with Runtime.open(url, house.agents) as runtime:
        run = runtime.stream("boss", "do a", thread_id="t")
        await run.result()
        await house.end("a")
        async for _ in runtime.events(run.run_id):
            pass
        await until(lambda: is_idle(runtime))
        assert len(await runs_of(runtime)) == 1


async def test_a_run_of_the_thread_tells_of_it_itself(runtime: Runtime, house: House) -> None:
    await runtime.run("boss", "do a", thread_id="t")
    second = runtime.stream("boss", "look", thread_id="t")
    await house.thinking.wait()
    await house.end("a")
    house.gates["looked"].set()
    assert (await second.result()).response == "told of a"
    await until(lambda: is_idle(runtime))
    assert len(await runs_of(runtime)) == 2


@pytest.mark.parametrize("is_own", [False, True])
async def test_a_run_that_ends_without_having_heard_of_it_wakes(runtime: Runtime, house: House, is_own: bool) -> None:
    """The task ends during the last turn of a run: the next one, or the one that has started it."""
    if is_own:
        run = runtime.stream("boss", "do a", thread_id="t")
        async for event in run:
            if event.kind == "step_started" and event.step == 2:
                await house.end("a")
    else:
        await runtime.run("boss", "do a", thread_id="t")
        run = runtime.stream("boss", "think", thread_id="t")
        await house.thinking.wait()
        await house.end("a")
        house.gates["thought"].set()
    await run.result()
    told = [text for text in await answers(runtime, 2 if is_own else 3) if "told" in (text or "")]
    assert told == ["told of a"]


async def test_one_run_tells_of_tasks_that_ended_together(runtime: Runtime, house: House) -> None:
    await runtime.run("boss", "do a b bad", thread_id="t")
    for name in ("a", "b", "bad"):
        house.gates[name].set()
    await house.end("a", "b", "bad")
    await until(lambda: is_idle(runtime))
    told = [text for text in await answers(runtime, 2) if "told" in (text or "")]
    assert sorted(word for text in told for word in (text or "").split()[2:]) == ["a", "b", "bad"]


async def test_each_of_many_tasks_is_told_of_once(runtime: Runtime, house: House) -> None:
    names = [f"task{number}" for number in range(25)]  # an announcement has ten
    await runtime.run("boss", f"do {' '.join(names)}", thread_id="t")
    await house.end(*names)

    async def are_told() -> bool:
        return sum(len((text or "").split()) - 2 for text in await answers(runtime, 2) if "told" in (text or "")) >= 25

    await until(are_told)
    await until(lambda: is_idle(runtime))
    told = [text for text in await answers(runtime, 2) if "told" in (text or "")]
    assert sorted(word for text in told for word in (text or "").split()[2:]) == sorted(names)


async def test_a_task_that_was_cancelled_does_not_wake(runtime: Runtime, house: House) -> None:
    run = runtime.stream("boss", "do a b", thread_id="t")
    await run.result()
    assert await runtime.cancel_task(run.run_id, (await house.tasks())["a"].task_id) == "cancelled"
    await runtime.cancel(run.run_id, tasks=True)
    await until(lambda: is_idle(runtime))
    assert len(await runs_of(runtime)) == 1


async def test_a_run_that_waits_for_a_human_tells_of_it_when_it_goes_on(runtime: Runtime, house: House) -> None:
    await runtime.run("boss", "do a", thread_id="t")
    asking = await runtime.run("boss", "ask", thread_id="t")
    assert asking.status is RunStatus.SUSPENDED
    await house.end("a")
    result = await runtime.resume(asking.run_id, {"ask_1": Decision.resume("yes")})
    assert result.response == "told of a"
    await until(lambda: is_idle(runtime))
    assert len(await runs_of(runtime)) == 2


async def test_it_waits_for_a_run_of_another_agent(runtime: Runtime, house: House) -> None:
    await runtime.run("boss", "do a", thread_id="t")
    other = runtime.stream("clerk", "think", thread_id="t")
    await house.thinking.wait()
    await house.end("a")
    await until(lambda: _count(runtime, 3))
    house.gates["thought"].set()
    assert (await other.result()).response == "nothing new"
    assert await answers(runtime, 3) == ["begun", "nothing new", "told of a"]


async def _count(runtime: Runtime, number: int) -> bool:
    return len(await runs_of(runtime)) == number


async def test_the_tasks_of_other_users_and_threads_stay_theirs(runtime: Runtime, house: House) -> None:
    await runtime.run("boss", "do a", thread_id="t")
    await runtime.run("boss", "do b", thread_id="other", user_id="ann")
    house.gates["b"].set()
    assert await answers(runtime, 2, "other") == ["begun", "told of b"]
    assert (await runs_of(runtime, "other"))[1].identity.user_id == "ann"
    await house.end("a")
    assert await answers(runtime, 2) == ["begun", "told of a"]


@pytest.mark.parametrize("seed", range(share(200, 6)))
async def test_whatever_the_order_each_task_is_told_of_once(runtime: Runtime, house: House, seed: int) -> None:
    chance, names, open_tasks = random.Random(seed), iter(range(100)), list[str]()
    users: list[asyncio.Task[Any]] = []
    for _ in range(12):
        match chance.choice(["do", "do", "end", "end", "say", "pause"]):
            case "do":
                started = [f"task{next(names)}" for _ in range(chance.randint(1, 3))]
                open_tasks += started
                users.append(asyncio.create_task(_talk(runtime, f"do {' '.join(started)}")))
            case "end" if open_tasks:
                house.gates[open_tasks.pop(chance.randrange(len(open_tasks)))].set()
            case "say":
                users.append(asyncio.create_task(_talk(runtime, "hello")))
            case _:
                await let_others_run(chance.randint(0, 200))
    for name in open_tasks:
        house.gates[name].set()
    await asyncio.gather(*users)
    records = await house.tasks()
    await house.end(*records)

    async def told() -> list[str]:
        texts = [message.text for message in await runtime.messages("t") if message.text.startswith(NEWS)]
        return sorted(name for text in texts for name in told_of(text).split())

    await until(lambda: _is_told(told, len(records)))
    await until(lambda: is_idle(runtime))
    assert await told() == sorted(records)
    assert {record.status for record in await runs_of(runtime)} == {"completed"}


async def _is_told(told: Callable[[], Awaitable[list[str]]], number: int) -> bool:
    return len(await told()) >= number


async def _talk(runtime: Runtime, text: str) -> None:
    await runtime.run("boss", text, thread_id="t", when_busy="enqueue")


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
async def test_what_a_closed_runtime_owes_the_next_process_does(url: str, house: House) -> None:
    """The runtime is closed just as the task has ended: nothing new begins, and nothing is lost."""
    async with Runtime.open(url, house.agents) as runtime:
        await runtime.run("boss", "do a", thread_id="t")
        inside.refuse_new_runs(runtime)
        await house.end("a")
        await asyncio.sleep(0)
    async with Runtime.open(url, house.agents) as runtime:
        assert await answers(runtime, 2) == ["begun", "told of a"]
        await until(lambda: is_idle(runtime))
        assert len(await runs_of(runtime)) == 2


async def test_a_run_with_nothing_to_tell_ends_without_the_model(
    runtime: Runtime, house: House, monkeypatch: Any
) -> None:
    """Another run tells of the task after it was looked for, and before the new run has the thread."""
    await runtime.run("boss", "do a", thread_id="t")
    other = runtime.stream("clerk", "think", thread_id="t")
    await house.thinking.wait()
    before = runtime.stream("boss", "hello", thread_id="t", when_busy="enqueue")
    await before.stored()
    await house.end("a")
    await until(lambda: _count(runtime, 4))
    house.gates["thought"].set()
    await other.result()
    assert (await before.result()).response == "told of a"
    await answers(runtime, 4)
    woken = (await runs_of(runtime))[-1].result
    assert woken is not None
    assert (woken.status, woken.usage.requests) == (RunStatus.CANCELLED, 0)
    assert woken.error == "what it was started to tell was told meanwhile"
