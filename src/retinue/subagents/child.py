"""Starting a child run: there is this one way, and everything else uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Literal

from ..core.agents import Agent
from ..core.backend import Resolver, RunRequest
from ..core.children import Child, ParentContext
from ..core.context import CancellationToken, ToolContext
from ..core.errors import ChildAgentError, ExecutionBackendError, RetinueError
from ..core.events import Sink
from ..core.ids import unique
from ..core.lifecycle import RunStatus
from ..core.messages import Message, as_messages
from ..core.model import Model
from ..core.runs import Limits, Out, RunIdentity, RunResult
from ..core.sinks import NullSink
from ..core.state import PersistedState, Seed, as_persisted
from ..core.together import run_together

OnError = Literal["collect", "cancel_siblings"]


async def run_child_agent(
    resolver: Resolver,
    agent: str | Agent[Out],
    messages: str | Message | Iterable[Message],
    *,
    parent: ParentContext,
    sink: Sink | None = None,
    seed: Seed | None = None,
    cancellation: CancellationToken | None = None,
    timeout: float | None = None,
    limits: Limits | None = None,
    model: str | Model | None = None,
    thread_id: str | None = None,
    detached: bool = False,
    run_id: str | None = None,
) -> RunResult[Out]:
    """Run another agent to its end and return how it ended, whatever that is.

    With a `thread_id` it goes on with that conversation and leaves it stored; without, it starts fresh.
    Raises ExecutionBackendError where the run could not be set up or dispatched; then no event of it exists.
    """
    try:
        plan = resolver.resolve(agent)
        given, said = PersistedState() if seed is None else as_persisted(seed), as_messages(messages)
    except (RetinueError, TypeError, AttributeError) as exc:
        raise ExecutionBackendError(_name(agent), str(exc)) from exc
    if given.extensions and not plan.is_local:
        reason = "its backend is not local and takes no state seed: write what it needs into the prompt"
        raise ExecutionBackendError(plan.agent.name, reason)
    made = unique()
    identity = RunIdentity(
        run_id=run_id or f"run_{made}",
        thread_id=thread_id or f"thread_{made}",
        agent=plan.agent.name,
        parent_run_id=parent.parent_run_id,
        parent_thread_id=parent.parent_thread_id,
        parent_tool_call_id=parent.parent_tool_call_id,
        user_id=parent.user_id,
        depth=parent.depth,
    )
    request = RunRequest(
        agent=plan.agent,
        identity=identity,
        messages=said,
        seed=given,
        limits=limits or plan.agent.limits,
        cancellation=cancellation or CancellationToken(),
        context=parent.context,
        model=model,
        sink=None if isinstance(sink, NullSink) else sink,  # a sink that does nothing need not be called
        timeout=timeout,
        keeps_thread=thread_id is not None,
        detached=detached,
    )
    return await plan.backend.run(request)


async def run_child_agent_checked(
    resolver: Resolver,
    agent: str | Agent[Out],
    messages: str | Message | Iterable[Message],
    *,
    parent: ParentContext,
    sink: Sink | None = None,
    seed: Seed | None = None,
    cancellation: CancellationToken | None = None,
    timeout: float | None = None,
) -> RunResult[Out]:
    """As `run_child_agent`; anything but a completed child raises ChildAgentError, which carries the result."""
    outcome = await run_child_agent(
        resolver,
        agent,
        messages,
        parent=parent,
        sink=sink,
        seed=seed,
        cancellation=cancellation,
        timeout=timeout,
    )
    if outcome.status is not RunStatus.COMPLETED:
        raise ChildAgentError(outcome)
    return outcome


async def run_children(
    ctx: ToolContext, children: Sequence[Child], *, limit: int | None = None, on_error: OnError = "collect"
) -> list[RunResult]:
    """Run several children of one call side by side; results in the order in which they were given."""
    if on_error not in ("collect", "cancel_siblings"):
        raise ValueError(f"on_error is 'collect' or 'cancel_siblings', not {on_error!r}")
    slots = asyncio.Semaphore(limit) if limit is not None else None
    together = CancellationToken()
    stop = together.set if on_error == "cancel_siblings" else None

    async def one(child: Child) -> RunResult:
        async with slots or _Free():
            try:
                outcome = await ctx.run_child(
                    child.agent,
                    child.input,
                    seed=child.seed,
                    timeout=child.timeout,
                    limits=child.limits,
                    cancellation=together,
                )
            except ExecutionBackendError as exc:
                outcome = _not_started(str(exc))
        if stop is not None and outcome.status not in (RunStatus.COMPLETED, RunStatus.SUSPENDED):
            stop("a sibling did not complete")
        return outcome

    def stop_all() -> None:
        together.set(ctx.cancellation.reason or "cancelled")

    ctx.cancellation.on_set(stop_all)
    try:
        return await run_together([one(child) for child in children])
    finally:
        ctx.cancellation.forget(stop_all)


def _not_started(reason: str) -> RunResult:
    """The result of a child that could not be set up, among siblings that could."""
    return RunResult(
        status=RunStatus.FAILED, run_id="", thread_id="", state=PersistedState(), error=reason, termination="error"
    )


class _Free:
    """A limit that never makes anybody wait."""

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *exc: object) -> None:
        return None


def _name(agent: object) -> str:
    return agent.name if isinstance(agent, Agent) else str(agent)
