"""Passthrough: a child's text appears as the output of the call that started it, and nothing else does."""

from __future__ import annotations

from msgspec import Struct

from ..core.agents import Agent
from ..core.children import ChildErrorForwarding, ParentContext
from ..core.context import ToolContext
from ..core.errors import ExecutionBackendError, ExecutionFailed
from ..core.events import ErrorRaised, Event, Sink, StepStarted, TextDelta, ToolCallStreamDelta
from ..core.lifecycle import RunStatus
from .child import run_child_agent


class StreamingPassthroughSink:
    """Give it to a child as its sink. `buffer` is the child's text so far; errors are never part of it."""

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
                del self._pieces[self._step_from :]  # only what the broken answer had said is taken back
            self._forward_error(event)
        elif isinstance(event, StepStarted):
            self._step_from = len(self._pieces)

    def retell(self, text: str) -> None:
        """Take in what the child had said, and this call had shown, before its process ended: no step takes it back."""
        self._pieces.append(text)
        self._step_from = len(self._pieces)

    def _forward_error(self, event: ErrorRaised) -> None:
        if self._errors is ChildErrorForwarding.WRAP:
            code = f" {event.code}" if event.code else ""
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
