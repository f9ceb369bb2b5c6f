"""Operations: an event log read as work that begins and ends, with what each piece was part of.

A run (each leg of one that was suspended), a model call and a tool call are operations. Spans, metrics and log lines are
made from them and from nothing else, so a stored log gives the same ones as the live run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from ..core.events import Event, RunStarted, StepStarted, ToolCallReady, ToolCallResumed
from ..core.lifecycle import RunStatus, ToolCallStatus
from ..core.messages import Message, Role
from ..core.runs import Usage

CANCELLED = "cancelled"
"""The error type of what was stopped: nothing went wrong, but it did not get to its end."""


class Operation:
    """Work that takes time. `handle` is for the observer that needs one."""

    __slots__ = ("agent", "began", "detail", "earlier", "ended", "error", "handle", "parent", "run_id")

    kind: ClassVar[str] = ""

    def __init__(self, event: Event, parent: Operation | None, earlier: Operation | None = None) -> None:
        self.run_id, self.agent, self.began, self.ended = event.run_id, event.agent, event.at, 0.0
        self.parent, self.earlier = parent, earlier
        self.error: str | None = None
        """What kind of thing went wrong, in few words that do not vary."""
        self.detail: str | None = None
        """What went wrong, in words that may quote anything."""
        self.handle: Any = None

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 0.0)


class RunOperation(Operation):
    """One leg of a run."""

    __slots__ = (
        "chat",
        "inferences",
        "messages",
        "model",
        "ns",
        "pending",
        "response",
        "results",
        "resumed",
        "said",
        "status",
        "termination",
        "thread_id",
        "tool_calls",
        "tools",
        "usage",
        "waiting",
    )

    kind = "invoke_agent"

    def __init__(self, event: RunStarted, parent: Operation | None, earlier: RunOperation | None) -> None:
        super().__init__(event, parent, earlier)
        self.thread_id, self.ns, self.model = event.thread_id, event.ns, ""
        self.status, self.termination = RunStatus.RUNNING, ""
        self.usage = Usage()
        """What this leg and the children in it used."""
        self.inferences = self.tool_calls = 0
        self.chat: ChatOperation | None = None
        self.tools: dict[str, ToolOperation] = {}
        self.waiting: dict[str, ToolOperation] = {}
        """Calls that wait for a human, as this leg left them."""
        self.resumed = earlier is not None or (event.continues and not event.messages)
        self.pending: StepStarted | None = None
        """The first step of a resumed leg, which may ask the model or may not."""
        self.messages: tuple[Message, ...] = ()
        self.response: str | None = None
        self.said: list[Message] = []
        self.results: dict[str | None, Message] = {}

    def conversation(self) -> tuple[Message, ...]:
        """What was said so far, the results of a step in the order of its calls."""
        asked = next((at for at in reversed(range(len(self.said))) if self.said[at].tool_calls), None)
        if asked is not None:
            after = self.said[asked + 1 :]
            results = {message.tool_call_id: message for message in after if message.role is Role.TOOL} | self.results
            ordered = [results[call.id] for call in self.said[asked].tool_calls if call.id in results]
            self.said[asked + 1 :] = ordered + [message for message in after if message.role is not Role.TOOL]
            self.results = {}
        return tuple(self.said)


class ChatOperation(Operation):
    """One model call."""

    __slots__ = ("answered_by", "first_chunk", "message", "messages", "model", "named", "step", "stop_reason", "usage")

    kind = "chat"

    def __init__(self, event: StepStarted, parent: RunOperation) -> None:
        super().__init__(event, parent)
        self.step, self.model, self.answered_by = event.step, event.model, ""
        self.named = bool(event.model)
        """Whether it was known from the beginning which model is asked."""
        self.first_chunk: float | None = None
        self.stop_reason = ""
        self.usage = Usage()
        self.messages: tuple[Message, ...] = ()
        self.message: Message | None = None


class ToolOperation(Operation):
    """One tool call, or what followed when a suspended one went on."""

    __slots__ = ("args", "call_id", "result", "status", "tool_name")

    kind = "execute_tool"

    def __init__(
        self, event: ToolCallReady | ToolCallResumed, parent: RunOperation, earlier: ToolOperation | None = None
    ) -> None:
        super().__init__(event, parent, earlier)
        self.call_id, self.tool_name = event.call_id, event.tool_name
        self.status = ToolCallStatus.RUNNING
        self.args: dict[str, Any] | None = None
        self.result: str | None = None


class Observer(Protocol):
    """Is told of operations."""

    def began(self, operation: Operation) -> None: ...

    def ended(self, operation: Operation) -> None: ...

    def noted(self, operation: Operation, name: str, at: float, facts: Mapping[str, str]) -> None:
        """Something happened in the course of it."""
        ...
