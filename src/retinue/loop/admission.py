"""The admission of model calls: what a run must pass before its model is asked.

`admit_call` is the one place that refuses a call, before it is sent. A call that was admitted may still wait at the gate of
the provider's account (`core/gate.py`); `RunCaller` shows that.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from ..core.content import clean_text
from ..core.events import InferenceWaiting
from ..core.gate import Gates, Wait
from ..core.model import ModelRequest
from ..core.rows import Ending
from ..core.runs import NO_USAGE, RunStatus, Usage
from .budget import limits_cost, refuse_first_call
from .execution import Execution
from .grants import widen_for_first_call
from .spending import hold_call


async def admit_call(x: Execution, request: ModelRequest) -> Ending | None:
    """Admit a model call; return an ending if it would pass a limit, or if no budget is left for it."""
    if x.is_limited and x.state.last_call is NO_USAGE and (ending := await _refuse_first(x, request)) is not None:
        return ending
    if x.spending is None and not x.resolver.budgets.may_apply():
        return None
    return await hold_call(x, request)


async def _refuse_first(x: Execution, request: ModelRequest) -> Ending | None:
    """Return an ending if the first request would pass a limit. Later requests are estimated by the last answer."""
    usage = Usage(requests=1, input_tokens=request.estimate_tokens())
    if limits_cost(x.log.tree, x.state):
        usage = replace(usage, cost=x.resolver.price(x.model.name, usage) or 0.0)
    if x.log.widen is not None:
        await widen_for_first_call(x, usage)
    if (refused := refuse_first_call(x.log.tree, x.state, usage)) is None:
        return None
    return Ending(RunStatus.FAILED, f"limit:{refused[0]}", refused[1])


class RunCaller:
    """A run at the gate of an account, for one model call."""

    __slots__ = ("_shown", "_x")

    def __init__(self, x: Execution) -> None:
        self._x = x
        self._shown: str | None = None
        """The reason that the run has shown for its waiting."""

    @property
    def user(self) -> str:
        return self._x.identity.user_id or ""

    @property
    def gates(self) -> Gates:
        return self._x.resolver.gates

    @asynccontextmanager
    async def waiting(self, wait: Wait) -> AsyncGenerator[None]:
        """Show that the run waits, once for each reason, and lend its slot of a worker meanwhile."""
        x = self._x
        if self._shown != wait.reason:
            self._shown = wait.reason
            message = clean_text(wait.message)
            x.emit(InferenceWaiting(reason=wait.reason, position=wait.position, until=wait.until, message=message))
        async with x.log.waiting_at_gate(x.run_id):
            yield
