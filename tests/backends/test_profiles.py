"""What the profile of a backend says holds: a run is treated as its backend says, and refused before it is sent."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    BackendProfile,
    CancellationToken,
    Limits,
    PersistedState,
    RunResult,
    RunStatus,
    Runtime,
    SuspendTicket,
    ToolContext,
    tool,
)
from retinue.backends import RunRequest
from retinue.events import RunFinished
from retinue.testing import ScriptedModel, call, say

AT_LEAST = BackendProfile.remote_stateless_text()


class Deaf:
    """Works for ever, or waits, and notes what it was asked."""

    def __init__(self, profile: BackendProfile, waits: RunStatus | None = None) -> None:
        self._profile, self._waits = profile, waits
        self.requests: list[RunRequest] = []
        self.aborted: list[str] = []
        self.is_at_work = asyncio.Event()

    def profile(self) -> BackendProfile:
        return self._profile

    async def abort(self, run_id: str) -> None:
        self.aborted.append(run_id)

    async def run(self, request: RunRequest) -> RunResult:
        self.requests.append(request)
        if request.accepted is not None:
            request.accepted()
        self.is_at_work.set()
        if self._waits is None:
            await asyncio.Event().wait()
        return RunResult(
            status=self._waits or RunStatus.COMPLETED,
            run_id=request.identity.run_id,
            thread_id=request.identity.thread_id,
            state=PersistedState(),
            suspended={"q": SuspendTicket("q1", "input", "Which colour?", path=("q",))},
        )


class Stage:
    """A parent whose tool starts a child on a backend, and the outcomes."""

    def __init__(self, backend: Deaf, store: str = "memory:", limits: Limits | None = None, **options: Any) -> None:
        self.backend, self.outcomes, self.store = backend, list[Any](), store
        self.token = CancellationToken()

        @tool
        async def delegate(ctx: ToolContext) -> str:
            """Delegate."""
            outcome = await ctx.run_child("far", "go", cancellation=self.token, limits=limits, **options)
            self.outcomes.append(outcome)
            return str(outcome.status)

        script = ScriptedModel([call("delegate", id="c1"), say("done")])
        self.agents = [Agent("parent", script, tools=[delegate]), Agent("far", backend="there")]

    async def run(self) -> list[str]:
        """Run the parent; return what its model read."""
        async with Runtime.open(self.store, self.agents, backends={"there": self.backend}) as runtime:
            result = await runtime.run("parent", "go")
        return [message.text for message in result.messages if message.role == "tool"]


def test_a_profile_is_changed_by_the_functions_for_records() -> None:
    changed = dataclasses.replace(AT_LEAST, waits="input")
    assert (changed.waits, changed.decisions) == ("input", "none")
    if sys.version_info >= (3, 13):
        assert copy.replace(AT_LEAST, waits="input") == changed
    assert {changed, dataclasses.replace(AT_LEAST, waits="input")} == {changed}


async def test_a_run_that_cannot_be_stopped_is_left_at_once_and_said_to_go_on() -> None:
    backend = Deaf(AT_LEAST)
    stage = Stage(backend)
    work = asyncio.create_task(stage.run())
    await backend.is_at_work.wait()
    stage.token.set("not wanted")
    assert await work == ["cancelled"]
    (outcome,) = stage.outcomes
    assert outcome.error == "not wanted; its backend cannot stop it, so it may go on there"
    assert not backend.requests[0].cancellation.is_set(), "it was asked for what it cannot do"
    assert backend.aborted == []


@pytest.mark.parametrize(
    ("options", "status", "error"),
    [
        ({"timeout": 0.01}, RunStatus.TIMEOUT, "it took longer than 0.01 s"),
        ({"limits": Limits(seconds=0.01)}, RunStatus.FAILED, "the limit on seconds is reached"),
    ],
)
async def test_a_run_that_cannot_be_stopped_is_left_when_its_time_is_over(
    options: dict[str, Any], status: RunStatus, error: str
) -> None:
    stage = Stage(Deaf(AT_LEAST), **options)
    await stage.run()
    (outcome,) = stage.outcomes
    assert outcome.status is status
    assert outcome.error.startswith(error)
    assert outcome.error.endswith("; its backend cannot stop it, so it may go on there")


async def test_a_run_that_cannot_be_stopped_is_not_sent_after_a_cancel() -> None:
    backend = Deaf(AT_LEAST)
    stage = Stage(backend)
    stage.token.set("not wanted")
    (text,) = await stage.run()
    assert "it was cancelled before it was sent" in text
    assert backend.requests == []


async def test_a_question_of_a_run_that_cannot_be_stopped_is_closed_without_its_backend() -> None:
    profile = dataclasses.replace(AT_LEAST, waits="input", decisions="durable")
    backend = Deaf(profile, RunStatus.WAITING_INPUT)
    note = "[Cancelled at the end of this call, still waiting for a human: 'far'. Nobody can answer any more.]"
    assert await Stage(backend).run() == [f"waiting_input\n{note}"]
    assert len(backend.requests) == 1


@pytest.mark.parametrize(
    ("fields", "status", "lacks"),
    [
        ({}, RunStatus.SUSPENDED, "waits: needs 'input', has 'none'; decisions: needs 'durable', has 'none'"),
        ({"waits": "input"}, RunStatus.WAITING_INPUT, "decisions: needs 'durable', has 'none'"),
        (
            {"waits": "input", "decisions": "durable"},
            RunStatus.WAITING_AUTH,
            "waits: needs 'input_and_auth', has 'input'",
        ),
        ({"decisions": "durable"}, RunStatus.WAITING_INPUT, "waits: needs 'input', has 'none'"),
    ],
)
async def test_a_run_that_may_not_wait_fails_with_its_question(
    fields: dict[str, Any], status: RunStatus, lacks: str
) -> None:
    backend = Deaf(dataclasses.replace(AT_LEAST, cancellation="cooperative", **fields), status)
    stage = Stage(backend)
    assert await stage.run() == ["failed"]
    (outcome,) = stage.outcomes
    assert outcome.error == f"it is {status} (Which colour?), and its backend cannot do this: {lacks}"
    assert outcome.suspended == {}
    assert backend.aborted == [outcome.run_id]


async def test_a_run_that_dies_with_the_process_is_no_background_task_of_a_stored_log(tmp_path: Path) -> None:
    backend = Deaf(AT_LEAST, RunStatus.COMPLETED)
    (text,) = await Stage(backend, f"sqlite:///{tmp_path}/app.db", detached=True).run()
    assert (
        "its backend cannot do this: persistence: needs 'stored', has 'ephemeral': "
        "wait for its answer, without a background task"
    ) in text
    assert backend.requests == []


@pytest.mark.parametrize(("persistence", "store"), [("stored", "sqlite"), ("ephemeral", "memory:")])
async def test_a_background_task_lives_as_long_as_its_log(persistence: Any, store: str, tmp_path: Path) -> None:
    backend = Deaf(dataclasses.replace(AT_LEAST, persistence=persistence), RunStatus.COMPLETED)
    url = f"sqlite:///{tmp_path}/app.db" if store == "sqlite" else store
    assert await Stage(backend, url, detached=True).run() == ["completed"]


@dataclasses.dataclass
class Report:
    pages: int


class Reporter(Deaf):
    """Completes at once with an answer."""

    def __init__(self, output: Any, response: str, termination: str = "natural") -> None:
        super().__init__(BackendProfile(transcript="full", output="text_and_artifacts"))
        self._answer = {"output": output, "response": response, "termination": termination}

    async def run(self, request: RunRequest) -> RunResult:
        if request.accepted is not None:
            request.accepted()
        ids = {"run_id": request.identity.run_id, "thread_id": request.identity.thread_id}
        return RunResult(status=RunStatus.COMPLETED, state=PersistedState(), **ids, **self._answer)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("output", "response", "answer"),
    [
        ({"pages": 3}, "", Report(3)),
        (Report(3), "", Report(3)),
        (None, '{"pages": 3}', Report(3)),
        (None, "three", None),
        ({"pages": "three"}, "three", None),
        (object(), "three", None),
    ],
    ids=["json", "typed", "text", "only words", "wrong field", "no value"],
)
async def test_an_answer_has_the_output_type_or_the_run_fails(
    output: Any, response: str, answer: Any, stored: bool, tmp_path: Path
) -> None:
    outcomes: list[RunResult[Any]] = []

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        outcomes.append(await ctx.run_child("far", "Report."))
        return "ok"

    agents = [
        Agent("boss", ScriptedModel([call("delegate", {}), say("done")]), tools=[delegate]),
        Agent("far", backend="there", output=Report),
    ]
    backends = {"there": Reporter(output, response)}
    url = f"sqlite:///{tmp_path}/app.db"
    runtime = Runtime.open(url, agents, backends=backends) if stored else Runtime(agents, backends=backends)
    async with runtime:
        run = runtime.stream("boss", "go")
        events = [event async for event in run if event.ns]
    (outcome,), end = outcomes, events[-1]
    assert isinstance(end, RunFinished)
    assert (outcome.output, outcome.response) == (answer, response)
    if answer is not None:
        assert (outcome.unwrap(), end.output) == (answer, {"pages": 3})
        return
    assert outcome.status is end.status is RunStatus.FAILED
    assert "does not fit the output type" in (outcome.error or "")
