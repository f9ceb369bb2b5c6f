"""The contract of backends that are not local."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from retinue import RunResult
from retinue.backends import RunRequest
from retinue.core.events import Custom
from retinue.testing import BackendSuite

from .example import ExampleBackend, ExampleHarness, example, over_http

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.mark.parametrize("make", [example, over_http])
@pytest.mark.parametrize("check", BackendSuite.names())
async def test_contract(make: Any, check: str) -> None:
    await getattr(BackendSuite(make), check)()


def test_the_suite_runs_all_of_its_checks() -> None:
    assert [check.__name__ for check in BackendSuite(example).checks()] == BackendSuite.names()
    assert len(BackendSuite.names()) == 15


class Raising(ExampleBackend):
    """Raises how a run ended."""

    async def run(self, request: RunRequest) -> RunResult:
        result = await super().run(request)
        if result.error:
            raise RuntimeError(result.error)
        return result


class Restarting(ExampleBackend):
    """Starts a run again that was dispatched before."""

    async def run(self, request: RunRequest) -> RunResult:
        request.is_dispatched = False
        return await super().run(request)


class Leaky(ExampleBackend):
    """Sends what nobody may see."""

    async def run(self, request: RunRequest) -> RunResult:
        request.messages = tuple([type(one).user(one.text) for one in request.messages])
        return await super().run(request)


class Hasty(ExampleBackend):
    """Says that it has a run before it does."""

    async def run(self, request: RunRequest) -> RunResult:
        if request.accepted is not None:
            request.accepted()
            request.accepted = None
        return await super().run(request)


class Late(ExampleBackend):
    """Tells more after the end."""

    async def run(self, request: RunRequest) -> RunResult:
        result = await super().run(request)
        if request.emit is not None:
            asyncio.get_running_loop().call_later(0.05, request.emit, Custom(data={"late": True}))
        return result


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Raising, "check_a_failure_is_a_result"),
        (Restarting, "check_a_run_that_was_dispatched_is_not_started_again"),
        (Restarting, "check_a_dispatched_run_that_is_gone_has_failed"),
        (Leaky, "check_only_visible_user_messages_are_sent"),
        (Leaky, "check_a_request_that_says_nothing_to_all_is_refused"),
        (Hasty, "check_what_cannot_be_dispatched_raises_and_leaves_nothing"),
        (Late, "check_nothing_is_emitted_after_the_end"),
    ],
)
async def test_the_suite_finds_a_fault(kind: Callable[..., ExampleBackend], check: str) -> None:
    @asynccontextmanager
    async def faulty() -> AsyncIterator[ExampleHarness]:
        harness = ExampleHarness()
        harness.backend, harness.broken = kind(harness.workshop), kind(None)
        yield harness

    with pytest.raises((AssertionError, RuntimeError)):
        await getattr(BackendSuite(faulty), check)()
