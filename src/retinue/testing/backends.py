"""The conformance suite of the `Backend` port, for backends that are not local."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Any, Protocol

from ..core.agents import Agent
from ..core.backend import Backend, BackendProfile, RunRequest
from ..core.concurrency import CancellationToken, Jobs, join, running
from ..core.errors import ExecutionBackendError
from ..core.events import Event
from ..core.messages import Message, Visibility
from ..core.runs import RunIdentity, RunResult, RunStatus, unique
from .suite import Suite

PATIENCE = 10.0
"""Seconds after which a check fails."""
SLOW = 0.3
"""Seconds that `slow` takes."""


async def example_work(text: str) -> str:
    """Do what the agent at the other end must do with a message, so that the suite can check it.

    `echo <text>` answers the text, `slow <text>` too but takes a while, `fail <text>` raises it, and `hang` never ends
    by itself.
    """
    verb, _, rest = text.partition(" ")
    if verb == "hang":
        await asyncio.Event().wait()
    if verb == "slow":
        await asyncio.sleep(SLOW)
    if verb == "fail":
        raise RuntimeError(rest)
    return rest


class BackendHarness(Protocol):
    """A backend under test, and a view of its other end, which answers messages with `example_work`."""

    backend: Backend
    broken: Backend
    """A backend of the same kind that cannot dispatch: its server is down or refuses."""

    def starts(self, run_id: str) -> int:
        """Return the number of times a run was started."""
        ...

    def is_at_work(self, run_id: str) -> bool:
        """Return True while a run is in progress."""
        ...

    def sent(self, run_id: str) -> Sequence[str]:
        """Return the texts that were sent for a run."""
        ...


class _Asked:
    """A request, and what the backend reported about it."""

    def __init__(self, *messages: Message | str, **fields: Any) -> None:
        self.accepted = 0
        self.events: list[Event] = []
        self.early: list[Event] = []
        """Events that came before the run was accepted."""
        self.is_accepted = asyncio.Event()
        self.token = CancellationToken()
        made = unique()
        identity = RunIdentity(f"run_{made}", f"thread_{made}", "worker", "run_parent", "thread_parent", "call_1")
        given: dict[str, Any] = {"identity": identity, "accepted": self._accept, "emit": self._emit, **fields}
        said = [Message.user(one) if isinstance(one, str) else one for one in messages]
        self.request = RunRequest(agent=Agent("worker"), messages=tuple(said), cancellation=self.token, **given)

    @property
    def run_id(self) -> str:
        return self.request.identity.run_id

    def again(self) -> _Asked:
        """Return the request of a process that continues this run and knows that it was dispatched."""
        return _Asked(*self.request.messages, identity=self.request.identity, is_dispatched=True)

    def _accept(self) -> None:
        self.accepted += 1
        self.is_accepted.set()

    def _emit(self, event: Event) -> None:
        (self.events if self.accepted else self.early).append(event)

    def check(self, result: RunResult, status: RunStatus) -> None:
        """Check what holds for every ended run."""
        assert isinstance(result, RunResult), f"it returned {result!r}"
        assert result.status is status, f"{result.status}: {result.error}"
        assert (result.run_id, result.thread_id) == (self.run_id, self.request.identity.thread_id), "ids are local"
        assert self.accepted == 1, f"it said {self.accepted} times that the run was accepted"
        assert self.early == [], "it emitted events of a run that was not accepted yet"
        assert status is RunStatus.COMPLETED or result.error, "it does not say why"


class BackendSuite(Suite[AbstractAsyncContextManager[BackendHarness]]):
    """The contract of Backend. Features that a profile does not claim are not checked."""

    async def _run(self, check: Callable[..., Any]) -> None:
        async with self._make() as harness:
            await check(self, harness)

    async def check_the_profile_says_something_and_stays(self, harness: BackendHarness) -> None:
        profile = harness.backend.profile()
        assert isinstance(profile, BackendProfile)
        assert profile.check(asdict(profile)) == []
        await _run(harness.backend, _Asked("echo hello"))
        assert harness.backend.profile() == profile

    async def check_an_answer_is_a_result(self, harness: BackendHarness) -> None:
        asked = _Asked("echo hello")
        result = await _run(harness.backend, asked)
        asked.check(result, RunStatus.COMPLETED)
        assert result.response == "hello"
        assert harness.starts(asked.run_id) == 1
        assert harness.sent(asked.run_id) == ["echo hello"]

    async def check_a_failure_is_a_result(self, harness: BackendHarness) -> None:
        asked = _Asked("fail it broke there")
        result = await _run(harness.backend, asked)
        asked.check(result, RunStatus.FAILED)
        assert "it broke there" in (result.error or "")

    async def check_what_cannot_be_dispatched_raises_and_leaves_nothing(self, harness: BackendHarness) -> None:
        asked = _Asked("echo hello")
        await _refused(harness.broken, asked)
        assert harness.starts(asked.run_id) == 0

    async def check_a_request_that_says_nothing_to_all_is_refused(self, harness: BackendHarness) -> None:
        if harness.backend.profile().transcript == "full":
            return
        asked = _Asked(Message.system("rules"), Message.user("echo hidden", visibility=Visibility.INTERNAL))
        await _refused(harness.backend, asked)
        assert harness.starts(asked.run_id) == 0

    async def check_only_visible_user_messages_are_sent(self, harness: BackendHarness) -> None:
        asked = _Asked(
            Message.system("secret rules"),
            Message.assistant("an earlier answer"),
            Message.tool("a result", tool_call_id="c1"),
            Message.user("echo hidden", visibility=Visibility.INTERNAL),
            "echo hello",
        )
        asked.check(await _run(harness.backend, asked), RunStatus.COMPLETED)
        if harness.backend.profile().transcript == "full":
            assert harness.sent(asked.run_id) == [message.text for message in asked.request.messages]
            return
        assert harness.sent(asked.run_id) == ["echo hello"]
        if harness.backend.profile().transcript != "single_prompt":
            several = _Asked("echo one", "and two")
            await _run(harness.backend, several)
            sent = "\n".join(harness.sent(several.run_id))
            assert "echo one" in sent
            assert "and two" in sent

    async def check_the_callbacks_need_not_be_there(self, harness: BackendHarness) -> None:
        result = await _run(harness.backend, _Asked("echo hello", accepted=None, emit=None))
        assert result.response == "hello"

    async def check_a_token_stops_a_run_and_its_end_is_waited_for(self, harness: BackendHarness) -> None:
        if harness.backend.profile().cancellation == "none":
            return
        asked = _Asked("hang")
        work = await _at_work(harness, asked)
        asked.token.set("not wanted")
        asked.check(await _within(work), RunStatus.CANCELLED)
        assert not harness.is_at_work(asked.run_id), "it returned before the run had ended"

    async def check_a_token_that_was_set_before_leaves_nothing_at_work(self, harness: BackendHarness) -> None:
        if harness.backend.profile().cancellation == "none":
            return
        asked = _Asked("hang")
        asked.token.set("not wanted")
        try:
            result = await _run(harness.backend, asked)
        except ExecutionBackendError:
            assert (asked.accepted, asked.events, asked.early) == (0, [], [])
        else:
            asked.check(result, RunStatus.CANCELLED)
        assert not harness.is_at_work(asked.run_id)

    async def check_a_caller_that_leaves_does_not_stop_the_run(self, harness: BackendHarness) -> None:
        asked = _Asked("slow hello")
        work = await _at_work(harness, asked)
        work.cancel()
        await join([work], PATIENCE)
        assert work.cancelled(), "it swallowed the cancellation"
        again = asked.again()
        found = await _run(harness.backend, again)
        again.check(found, RunStatus.COMPLETED)
        assert found.response == "hello"
        assert harness.starts(asked.run_id) == 1

    async def check_abort_stops_a_run(self, harness: BackendHarness) -> None:
        if harness.backend.profile().cancellation == "none":
            return
        asked, other = _Asked("hang"), _Asked("slow other")
        work = await _at_work(harness, asked)
        async with running(harness.backend.run(other.request)) as beside:
            await harness.backend.abort("run_unknown")
            await asyncio.wait_for(harness.backend.abort(asked.run_id), PATIENCE)
            asked.check(await _within(work), RunStatus.CANCELLED)
            assert not harness.is_at_work(asked.run_id)
            other.check(await _within(beside), RunStatus.COMPLETED)
        await harness.backend.abort(asked.run_id)

    async def check_a_run_that_was_dispatched_is_not_started_again(self, harness: BackendHarness) -> None:
        first = _Asked("slow hello")
        work = await _at_work(harness, first)
        again = first.again()
        found = await _run(harness.backend, again)
        again.check(found, RunStatus.COMPLETED)
        assert found.response == "hello"
        assert (await _within(work)).response == "hello"
        if harness.backend.profile().persistence == "stored":
            later = first.again()
            assert (await _run(harness.backend, later)).response == "hello"
        assert harness.starts(first.run_id) == 1

    async def check_a_dispatched_run_that_is_gone_has_failed(self, harness: BackendHarness) -> None:
        asked = _Asked("echo hello", is_dispatched=True)
        asked.check(await _run(harness.backend, asked), RunStatus.FAILED)
        assert harness.starts(asked.run_id) == 0, "it was started again"

    async def check_nothing_is_emitted_after_the_end(self, harness: BackendHarness) -> None:
        asked = _Asked("slow hello")
        await _run(harness.backend, asked)
        told = len(asked.events)
        await asyncio.sleep(SLOW)
        assert len(asked.events) == told

    async def check_runs_at_once_do_not_mix(self, harness: BackendHarness) -> None:
        asked = [_Asked(f"slow {number}") for number in range(6)]
        failing = _Asked("fail alone")
        jobs = Jobs()
        works = [jobs.start(harness.backend.run(one.request)) for one in (*asked, failing)]
        *results, failed = [await _within(work) for work in works]
        for number, (one, result) in enumerate(zip(asked, results, strict=True)):
            one.check(result, RunStatus.COMPLETED)
            assert result.response == str(number)
            assert harness.sent(one.run_id) == [f"slow {number}"]
        failing.check(failed, RunStatus.FAILED)


async def _run(backend: Backend, asked: _Asked) -> RunResult:
    return await asyncio.wait_for(backend.run(asked.request), PATIENCE)


async def _within(work: asyncio.Task[RunResult]) -> RunResult:
    return await asyncio.wait_for(work, PATIENCE)


async def _at_work(harness: BackendHarness, asked: _Asked) -> asyncio.Task[RunResult]:
    """Start a run, and return when the other end works on it."""
    work = asyncio.create_task(harness.backend.run(asked.request))
    async with asyncio.timeout(PATIENCE):
        await asked.is_accepted.wait()
        while not harness.is_at_work(asked.run_id):  # noqa: ASYNC110 - the other end tells nobody
            await asyncio.sleep(0.01)
    return work


async def _refused(backend: Backend, asked: _Asked) -> None:
    try:
        result = await _run(backend, asked)
    except ExecutionBackendError as exc:
        assert str(exc), "it does not say why"
        assert asked.accepted == 0, "it said that the run was accepted"
        assert asked.events == asked.early == [], "a run that does not exist has events"
    else:
        raise AssertionError(f"it was not refused: {result!r}")
