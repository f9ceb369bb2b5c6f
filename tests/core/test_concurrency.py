"""The contract of `supervise` and of its smaller relatives, and the pauses of a `Backoff`."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from retinue.core import concurrency
from retinue.core.concurrency import (
    Backoff,
    CancellationToken,
    CancelScope,
    Cause,
    Jobs,
    WorkEnd,
    cancel_all,
    helpers,
    join,
    running,
    supervise,
    until_stopped,
    wait_for_first,
)

from .. import inside

HOUR = 3600.0


@pytest_asyncio.fixture(autouse=True)
async def complaints() -> AsyncIterator[list[dict[str, Any]]]:
    """What asyncio says of tasks that were forgotten: nothing, after every test of this file."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: found.append(problem))
    yield found
    await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0)
    assert found == []


class Stubborn:
    """Work that ends only when it is allowed to, however often it is cancelled."""

    def __init__(self, result: object = "done") -> None:
        self.started, self.allowed = asyncio.Event(), asyncio.Event()
        self.cancels = 0
        self._result = result

    async def run(self) -> Any:
        self.started.set()
        while not self.allowed.is_set():
            try:
                await self.allowed.wait()
            except asyncio.CancelledError:
                self.cancels += 1
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


async def for_ever() -> None:
    await asyncio.Event().wait()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# --- work that ends by itself


async def test_work_that_ends_gives_its_result() -> None:
    async def work() -> int:
        return 7

    end = await supervise(work(), token=CancellationToken(), deadline=HOUR)
    assert (end.result(), end.cause, end.is_left, end.is_cancelled, end.error) == (7, None, False, False, None)


async def test_an_exception_of_the_work_comes_out_as_it_is() -> None:
    problem = ValueError("mine")

    async def work() -> None:
        raise problem

    end = await supervise(work())
    assert end.error is problem
    with pytest.raises(ValueError, match="mine") as caught:
        end.result()
    assert caught.value is problem


async def test_work_that_cancels_itself_is_told_apart_from_a_caller_that_is_cancelled() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    end = await supervise(work())
    assert (end.is_cancelled, end.cause, end.is_left, end.error) == (True, None, False, None)


async def test_a_given_task_is_supervised() -> None:
    task = asyncio.create_task(asyncio.sleep(0, "slept"))
    assert (await supervise(task)).result() == "slept"


# --- work that is told to stop


@pytest.mark.parametrize("late", range(-3, 4))
async def test_a_token_that_is_set_while_the_work_ends_still_gives_the_result(late: int) -> None:
    """The token is set so many turns of the event loop after the work may end, or before."""
    gate, token = asyncio.Event(), CancellationToken()
    returned = False

    async def work() -> str:
        nonlocal returned
        await gate.wait()
        returned = True
        return "result"

    supervised = asyncio.create_task(supervise(work(), token=token))
    await turns(3)
    first, then = (gate.set, token.set) if late >= 0 else (token.set, gate.set)
    first()
    await turns(abs(late))
    then()
    end = await supervised
    assert end.is_cancelled is not returned
    if returned:
        assert end.result() == "result"
    assert returned or late <= 0, "work that had ended keeps its result"


async def test_a_token_that_is_set_before_the_work_begins_stops_it() -> None:
    token = CancellationToken()
    token.set("no")
    end = await supervise(for_ever(), token=token)
    assert (end.cause, end.is_cancelled) == ("token", True)


async def test_a_token_may_be_set_by_another_thread_and_forgets_the_work_afterwards() -> None:
    token, started = CancellationToken(), asyncio.Event()

    async def work() -> None:
        started.set()
        await for_ever()

    supervised = asyncio.create_task(supervise(work(), token=token, deadline=HOUR))
    await started.wait()
    await asyncio.to_thread(token.set, "from outside")
    assert (await supervised).cause == "token"
    other = CancellationToken()
    await supervise(asyncio.sleep(0), token=other)
    assert not inside.waits_for_token(other)


async def test_work_that_ends_within_its_grace_gives_its_result() -> None:
    async def work() -> str:
        try:
            await for_ever()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "cleaned up"

    end = await supervise(work(), deadline=0.0, grace=HOUR)
    assert (end.cause, end.result()) == ("deadline", "cleaned up")


async def test_an_exception_within_the_grace_comes_out_as_it_is() -> None:
    async def work() -> None:
        try:
            await for_ever()
        finally:
            raise ValueError("while it stopped")

    end = await supervise(work(), deadline=0.0, grace=HOUR)
    with pytest.raises(ValueError, match="while it stopped"):
        end.result()


@pytest.mark.parametrize("result", ["late", ValueError("late")])
async def test_a_grace_that_runs_out_is_told_apart_from_an_error(result: object) -> None:
    """The work is left behind: it is no error, its later end is seen by nothing, and it is not forgotten before."""
    work = Stubborn(result)
    end = await supervise(work.run(), deadline=0.0, grace=0.0)
    assert (end.is_left, end.is_cancelled, end.error, end.cause) == (True, False, None, "deadline")
    await work.started.wait()
    gc.collect()
    (left,) = inside.left_behind()
    work.allowed.set()
    await join([left])
    await asyncio.sleep(0)
    assert not inside.left_behind()
    assert end.is_left, "what was told once stays"


async def test_work_that_is_only_asked_is_cancelled_when_its_grace_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    causes: list[Cause] = []
    for grace, cancelled in ((HOUR, False), (0.0, True)):
        asked = asyncio.Event()

        async def work(asked: asyncio.Event = asked) -> str:
            await asked.wait()
            return "stopped as asked"

        def ask(_: asyncio.Task[Any], cause: Cause, asked: asyncio.Event = asked) -> None:
            causes.append(cause)
            asked.set()

        end = await supervise(work(), deadline=0.0, grace=grace, stop=ask)
        assert end.is_cancelled is cancelled
    assert causes == ["deadline", "deadline"]


async def test_work_without_a_limit_on_its_grace_is_waited_for() -> None:
    work, token = Stubborn(), CancellationToken()
    supervised = asyncio.create_task(supervise(work.run(), token=token, grace=None))
    await work.started.wait()
    token.set()
    await turns(5)
    assert (work.cancels, supervised.done()) == (1, False)
    work.allowed.set()
    assert (await supervised).result() == "done"


# --- a caller that is cancelled


@pytest.mark.parametrize("result", ["done", ValueError("as it was cancelled")])
async def test_a_cancelled_caller_stops_the_work_and_stays_cancelled(result: object) -> None:
    work, told = Stubborn(result), list[Cause]()

    def stop(task: asyncio.Task[Any], cause: Cause) -> None:
        told.append(cause)
        task.cancel()
        work.allowed.set()

    supervised = asyncio.create_task(supervise(work.run(), grace=HOUR, stop=stop))
    await work.started.wait()
    supervised.cancel()
    with pytest.raises(asyncio.CancelledError):
        await supervised
    assert (told, work.cancels, supervised.cancelled()) == (["cancelled"], 1, True)


@pytest.mark.parametrize("order", ["work first", "cancel first"])
async def test_a_cancel_is_not_swallowed_by_work_that_ends_at_the_same_moment(order: str) -> None:
    work = Stubborn(ValueError("unread"))
    supervised = asyncio.create_task(supervise(work.run(), grace=HOUR))
    await work.started.wait()
    steps: list[Callable[[], object]] = [work.allowed.set, supervised.cancel]
    for step in steps if order == "work first" else reversed(steps):
        step()
    with pytest.raises(asyncio.CancelledError):
        await supervised


async def test_a_second_cancel_ends_the_grace() -> None:
    work = Stubborn()
    supervised = asyncio.create_task(supervise(work.run(), grace=HOUR))
    await work.started.wait()
    supervised.cancel()
    await turns(3)
    assert work.cancels == 1
    supervised.cancel()
    with pytest.raises(asyncio.CancelledError):
        await supervised
    (left,) = inside.left_behind()
    work.allowed.set()
    await join([left])


async def test_a_caller_that_is_cancelled_while_the_work_stops_stays_cancelled() -> None:
    work, token = Stubborn(), CancellationToken()
    supervised = asyncio.create_task(supervise(work.run(), token=token, grace=HOUR))
    await work.started.wait()
    token.set()
    await turns(3)
    supervised.cancel()
    await turns(3)
    work.allowed.set()
    with pytest.raises(asyncio.CancelledError):
        await supervised


async def test_an_outer_time_limit_passes_through() -> None:
    """The timeout of a block around it must be able to count the cancel as its own."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await supervise(for_ever())


async def test_the_end_of_a_task_can_be_described_by_the_caller_that_was_cancelled() -> None:
    task = asyncio.create_task(asyncio.sleep(0, 1))
    await task
    assert (WorkEnd(task, "cancelled").result(), WorkEnd(task, "cancelled").is_left) == (1, False)


# --- a block of a task


async def test_a_block_is_cancelled_alone_and_its_task_goes_on() -> None:
    scopes, after = list[CancelScope](), list[str]()

    async def work() -> str:
        scopes.append(scope := CancelScope())
        with scope:
            await for_ever()
            after.append("in the block")
        await asyncio.sleep(0)
        return "after the block"

    task = asyncio.create_task(work())
    await turns(2)
    scopes[0].cancel()
    scopes[0].cancel()
    assert await task == "after the block"
    assert (after, task.cancelling()) == ([], 0)


@pytest.mark.parametrize("first", ["task", "block"])
async def test_a_task_that_is_cancelled_with_its_block_stays_cancelled(first: str) -> None:
    scopes = list[CancelScope]()

    async def work() -> None:
        scopes.append(scope := CancelScope())
        with scope:
            await for_ever()

    task = asyncio.create_task(work())
    await turns(2)
    cancels: list[Callable[[], object]] = [task.cancel, scopes[0].cancel]
    for cancel in cancels if first == "task" else reversed(cancels):
        cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_block_that_stops_by_itself_when_it_is_cancelled_keeps_its_result_and_its_errors() -> None:
    scopes = list[CancelScope]()

    async def work(problem: Exception | None) -> str:
        scopes.append(scope := CancelScope())
        with scope:
            try:
                await for_ever()
            except asyncio.CancelledError:
                if problem is not None:
                    raise problem from None
                return "stopped"
        return "never here"

    tasks = [asyncio.create_task(work(problem)) for problem in (None, ValueError("mine"))]
    await turns(2)
    for scope in scopes:
        scope.cancel()
    assert await tasks[0] == "stopped"
    with pytest.raises(ValueError, match="mine"):
        await tasks[1]


# --- smaller forms


async def test_a_block_gets_work_that_was_stopped_and_ends_with_it() -> None:
    stop, ended = asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    stop.set()
    async with until_stopped(work(), stop.wait()) as task:
        assert not task.done()
    assert ended == ["work"]
    async with until_stopped(asyncio.sleep(0, 5), for_ever(), HOUR) as slept:
        assert slept.result() == 5
    async with until_stopped(for_ever(), for_ever(), 0.0) as late:
        assert not late.done()


async def test_work_of_a_block_ends_with_it_and_the_block_may_read_its_result() -> None:
    async with running(asyncio.sleep(0, 7)) as quick:
        assert await quick == 7
    work = Stubborn()
    async with running(work.run()) as slow:
        await work.started.wait()
        work.allowed.set()
    assert slow.result() == "done", "it ended by itself while it was being cancelled"
    with pytest.raises(KeyError):
        await _raise_beside(for_ever())


async def _raise_beside(work: Coroutine[Any, Any, None]) -> None:
    async with running(work):
        raise KeyError


async def test_a_future_that_others_wait_for_is_shielded_from_the_end_of_a_wait() -> None:
    shared: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    await wait_for_first(asyncio.shield(shared), asyncio.sleep(0))
    assert not shared.cancelled()
    shared.set_result(1)
    await wait_for_first(asyncio.shield(shared), for_ever())


async def test_the_first_of_several_ends_the_others_and_raises_what_it_raised() -> None:
    cancelled = list[str]()

    async def waiting() -> None:
        try:
            await for_ever()
        except asyncio.CancelledError:
            cancelled.append("it")
            raise

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await wait_for_first(waiting(), failing())
    await wait_for_first(waiting(), seconds=0.0)
    assert cancelled == ["it", "it"]


async def test_joining_waits_however_works_end() -> None:
    async def failing() -> None:
        raise ValueError

    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(failing()), asyncio.create_task(asyncio.sleep(0))]
    assert await join(tasks)
    assert tasks[0].exception() is not None
    assert await join([])
    hung = asyncio.create_task(for_ever())
    assert not await join([hung], 0.0)
    assert await cancel_all([hung])


async def test_helpers_end_with_their_block_also_if_it_raises_or_they_have_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = list[str]()

    async def helping() -> None:
        state.append("begun")
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0)
            state.append("ended")

    async def failing() -> None:
        raise ValueError("a helper")

    async def with_helpers() -> None:
        async with helpers(helping(), failing()):
            await turns(2)
            assert state == ["begun"]
            raise KeyError

    with pytest.raises(KeyError):
        await with_helpers()
    assert state == ["begun", "ended"]
    assert "a helper" in caplog.text


async def test_jobs_report_failures_and_are_cancelled_together() -> None:
    problems = list[BaseException]()
    jobs = Jobs(report=problems.append)

    async def failing() -> None:
        raise ValueError("job")

    assert await join([jobs.start(failing())])
    assert [str(problem) for problem in problems] == ["job"]
    running = jobs.start(for_ever())
    assert list(jobs) == [running]
    await jobs.close()
    assert running.cancelled()
    assert not list(jobs)
    assert len(problems) == 1


@pytest.mark.parametrize(
    "make", [lambda: supervise(for_ever()), lambda: wait_for_first(for_ever()), lambda: _in_block()]
)
async def test_a_coroutine_that_is_closed_from_outside_raises_nothing(
    make: Callable[[], Coroutine[Any, Any, Any]],
) -> None:
    """As at the end of an event loop: nothing can be awaited then."""
    work = make()
    work.send(None)
    work.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await cancel_all([task])


async def _in_block() -> None:
    async with helpers(for_ever()):
        await for_ever()


# --- pauses


class Clock:
    """A clock that only sleeps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chance: float = 1.0) -> None:
        self.now, self.slept = 1000.0, list[float]()
        monkeypatch.setattr(concurrency, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(asyncio, "sleep", self.sleep)
        monkeypatch.setattr(concurrency.random, "uniform", lambda low, high: low + (high - low) * chance / 2)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


async def test_pauses_grow_to_the_longest_and_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    backoff = Backoff(1.0, 5.0)
    for _ in range(5):
        await backoff.wait()
    assert clock.slept == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff.is_longest
    backoff.reset()
    assert not backoff.is_longest
    await backoff.wait(at_least=3.0)
    await backoff.wait()
    assert clock.slept[5:] == [3.0, 2.0]


@pytest.mark.parametrize(("chance", "pauses"), [(0.0, [0.5, 1.0, 2.0]), (2.0, [1.5, 3.0, 6.0])])
async def test_half_of_a_pause_is_up_to_chance(
    monkeypatch: pytest.MonkeyPatch, chance: float, pauses: list[float]
) -> None:
    Clock(monkeypatch, chance)
    backoff = Backoff(1.0, 100.0)
    assert [backoff.next() for _ in range(3)] == pauses


async def test_a_problem_is_raised_before_a_pause_that_patience_does_not_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    backoff, problem = Backoff(1.0, 100.0, patience=4.0), ConnectionError("away")
    await backoff.wait(problem)
    await backoff.wait(problem)
    with pytest.raises(ConnectionError) as caught:
        await backoff.wait(problem)  # 3 of 4 s are over, the next pause is 4 s
    assert caught.value is problem
    backoff.extend()  # it was reached, though it gave nothing: patience begins again, the pauses do not
    clock.slept.clear()
    with pytest.raises(ConnectionError):
        await backoff.wait(problem)
    backoff.reset()
    await backoff.wait(problem)
    assert clock.slept == [1.0]


async def test_the_default_pauses_are_those_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(concurrency, "FIRST_PAUSE", 0.25)
    monkeypatch.setattr(concurrency, "LONGEST_PAUSE", 0.5)
    backoff = Backoff()
    for _ in range(3):
        await backoff.wait()
    assert clock.slept == [0.25, 0.5, 0.5]
