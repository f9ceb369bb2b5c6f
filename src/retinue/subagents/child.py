"""Child runs: the one way to start them, and the sink that streams a child as the output of its call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

from msgspec import Struct

from ..core.agents import Agent
from ..core.backend import Resolver, RunRequest
from ..core.concurrency import CancellationToken, run_together
from ..core.context import ToolContext
from ..core.errors import (
    ChildAgentError,
    ConfigurationError,
    ExecutionBackendError,
    ExecutionFailed,
    RetinueError,
    as_tuple,
)
from ..core.events import ErrorRaised, Event, NullSink, Sink, StepStarted, TextDelta, ToolCallStreamDelta, is_sink
from ..core.messages import Message, as_messages
from ..core.model import Model
from ..core.runs import (
    Child,
    ChildErrorForwarding,
    Limits,
    Out,
    ParentContext,
    RunIdentity,
    RunResult,
    RunStatus,
    check_limits,
    limits_of_run,
    unique,
)
from ..core.state import PersistedState, Seed, as_persisted

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
    """Run another agent until it ends or is suspended, and return its result, with any status.

    With a `thread_id` it continues that stored conversation; without, it starts a new one.
    Raises ExecutionBackendError if the run could not be set up or dispatched; then it has no events.
    """
    _check(resolver, agent, parent, sink, cancellation, timeout)
    try:
        plan = resolver.resolve(agent)
        given, said = PersistedState() if seed is None else as_persisted(seed), as_messages(messages)
    except (RetinueError, TypeError, AttributeError) as exc:
        raise ExecutionBackendError(_name(agent), str(exc)) from exc
    if given.extensions and not plan.is_local:
        reason = "its backend is not local and takes no state seed: write what it needs into the prompt"
        raise ExecutionBackendError(plan.agent.name, reason)
    if limits is not None:
        check_limits(limits)
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
        limits=limits_of_run(plan.agent.limits, limits, over_network=False),
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
        resolver, agent, messages, parent=parent, sink=sink, seed=seed, cancellation=cancellation, timeout=timeout
    )
    if outcome.status is not RunStatus.COMPLETED:
        raise ChildAgentError(outcome)
    return outcome


async def run_children(
    ctx: ToolContext, children: Sequence[Child], *, limit: int | None = None, on_error: OnError = "collect"
) -> list[RunResult]:
    """Run several children of one call concurrently; return their results in the given order."""
    if on_error not in ("collect", "cancel_siblings"):
        raise ConfigurationError(f"on_error is 'collect' or 'cancel_siblings', not {on_error!r}")
    given: Any = limit
    if given is not None and (not isinstance(given, int) or given < 1):
        raise ConfigurationError(f"limit is the number of children at a time, at least 1, not {given!r}")
    for child in as_tuple(children, "run_children", "children"):
        if not isinstance(child, Child):
            raise ConfigurationError(f"run_children takes Child(agent, input), not {child!r:.80}")
    slots = asyncio.Semaphore(limit) if limit is not None else None
    together = CancellationToken()
    stop = together.set if on_error == "cancel_siblings" else None

    async def one(child: Child) -> RunResult:
        async with slots or nullcontext():
            try:
                given: dict[str, Any] = {"seed": child.seed, "timeout": child.timeout, "limits": child.limits}
                outcome = await ctx.run_child(child.agent, child.input, **given, cancellation=together)
            except ExecutionBackendError as exc:
                state = PersistedState()
                outcome = RunResult(
                    status=RunStatus.FAILED, run_id="", thread_id="", state=state, error=str(exc), termination="error"
                )
        if stop is not None and outcome.status is not RunStatus.COMPLETED and not outcome.status.is_waiting:
            stop("a sibling did not complete")
        return outcome

    def stop_all() -> None:
        together.set(ctx.cancellation.reason or "cancelled")

    ctx.cancellation.on_set(stop_all)
    try:
        return await run_together([one(child) for child in children])
    finally:
        ctx.cancellation.forget(stop_all)


def _check(resolver: Any, agent: object, parent: Any, sink: Any, cancellation: Any, timeout: Any) -> None:
    """Raise for arguments that cannot work; the error says what to write."""
    problem = None
    if isinstance(resolver, ToolContext):
        problem = "the first argument is ctx.resolver, not ctx; or write ctx.run_child(agent, input)"
    elif not hasattr(resolver, "resolve"):
        problem = f"the first argument is ctx.resolver, not {resolver!r:.80}"
    elif not isinstance(parent, ParentContext):
        problem = f"parent is a ParentContext, not {type(parent).__name__}: write ParentContext.of(ctx)"
    elif (parent.parent_run_id is None) is not (parent.parent_tool_call_id is None):
        problem = "a child belongs to a call of a run: give parent_run_id and parent_tool_call_id, or neither"
    elif sink is not None and not is_sink(sink):
        problem = "sink is a function of one event, which is not async"
    elif cancellation is not None and not isinstance(cancellation, CancellationToken):
        problem = f"cancellation is a CancellationToken, such as ctx.cancellation, not {cancellation!r:.80}"
    elif timeout is not None and (not isinstance(timeout, int | float) or not timeout >= 0):  # also not NaN
        problem = f"timeout is a number of seconds, not {timeout!r}"
    if problem is not None:
        raise ExecutionBackendError(_name(agent), problem)


def _name(agent: object) -> str:
    return agent.name if isinstance(agent, Agent) else str(agent)


class StreamingPassthroughSink:
    """The sink of a child that streams into its call. `buffer` is the child's text so far, without errors."""

    def __init__(
        self,
        call_id: str,
        tool_name: str,
        parent_sink: Sink,
        errors: ChildErrorForwarding | str = ChildErrorForwarding.WRAP,
    ) -> None:
        self._call_id, self._tool_name, self._parent = call_id, tool_name, parent_sink
        self._errors = ChildErrorForwarding(errors)
        self._pieces: list[str] = []
        self._step_from = 0

    @property
    def buffer(self) -> str:
        return "".join(self._pieces)

    def __call__(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._pieces.append(event.delta)
            self._show(event.delta)
        elif isinstance(event, ErrorRaised):
            if event.dropped_message_id is not None:
                del self._pieces[self._step_from :]  # drop only the text of the broken answer
            self._forward_error(event)
        elif isinstance(event, StepStarted):
            self._step_from = len(self._pieces)

    def restore_text(self, text: str) -> None:
        """Add the text that the child had streamed before its process ended. No later step removes it."""
        self._pieces.append(text)
        self._step_from = len(self._pieces)

    def _forward_error(self, event: ErrorRaised) -> None:
        if self._errors is ChildErrorForwarding.WRAP:
            code = f" {event.code}" if event.code not in (None, "", "error") else ""
            self._show(f"[child error{code}: {event.message}]")
        elif self._errors is ChildErrorForwarding.RAW:
            self._parent(ErrorRaised(message=event.message, code=event.code))

    def _show(self, text: str) -> None:
        self._parent(ToolCallStreamDelta(call_id=self._call_id, tool_name=self._tool_name, delta=text))


class StreamedChild(Struct, frozen=True):
    """The text of a streamed child, and its number of steps."""

    content: str
    steps: int


async def run_streaming_subagent(ctx: ToolContext, agent: str | Agent, prompt: str) -> StreamedChild:
    """Stream a child into this call's output; anything but a completed child fails the call."""
    sink = StreamingPassthroughSink(ctx.call_id, ctx.tool_name, ctx.sink)
    try:
        outcome = await run_child_agent(
            ctx.resolver, agent, prompt, parent=ParentContext.of(ctx), sink=sink, cancellation=ctx.cancellation
        )
    except ExecutionBackendError as exc:
        raise ExecutionFailed(f"sub-agent failed: {exc}") from exc
    if outcome.status is not RunStatus.COMPLETED:
        raise ExecutionFailed(f"sub-agent did not complete: {outcome.status}")
    return StreamedChild(sink.buffer, outcome.steps)
