"""What one run works with: its agent, state, conversation, journal and place in the log."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from msgspec.structs import force_setattr

from ..core.agents import Agent, Toolbox
from ..core.context import CancellationToken
from ..core.errors import IllegalMove
from ..core.events import ErrorRaised, Event, Namespace, RunFinished, StepFinished
from ..core.journal import Journal
from ..core.lifecycle import CALL_MOVES, RUN_MOVES, RunStatus, ToolCallStatus
from ..core.messages import Message, Role, ToolCall
from ..core.model import Model
from ..core.runs import RunIdentity, RunResult, Usage
from ..core.statestore import StateStore
from .limits import Budget
from .log import EventLog

_LEGAL_CALL_ID = re.compile(r"[^:|~\0\s]{1,256}")


class OpenCall:
    """A call that has not ended. Its message has an id from the start, so that ids do not depend on who is first."""

    __slots__ = ("call", "message_id", "status")

    def __init__(self, call: ToolCall, message_id: str) -> None:
        self.call, self.message_id, self.status = call, message_id, ToolCallStatus.NEW

    def move(self, wanted: ToolCallStatus) -> None:
        if wanted not in CALL_MOVES[self.status]:
            raise IllegalMove(f"call {self.call.id!r}", self.status, wanted)
        self.status = wanted


class RunScope:
    """One run in progress. Only the loop changes it."""

    def __init__(
        self,
        *,
        agent: Agent,
        identity: RunIdentity,
        model: Model,
        toolbox: Toolbox,
        state: StateStore,
        journal: Journal,
        log: EventLog,
        budget: Budget,
        cancellation: CancellationToken,
        history: tuple[Message, ...] = (),
        ns: Namespace = (),
        context: Mapping[str, Any] | None = None,
        resolver: Any = None,
    ) -> None:
        self.agent, self.identity, self.model, self.toolbox = agent, identity, model, toolbox
        self.state, self.journal, self.log, self.budget = state, journal, log, budget
        self.cancellation, self.context, self.resolver, self.ns = cancellation, context or {}, resolver, ns
        self.run_id, self.parent_run_id = identity.run_id, identity.parent_run_id
        self.descriptors = tuple([bound.descriptor for bound in toolbox.values()])
        system = [Message.system(agent.instructions)] if agent.instructions else []
        self.history = history
        self.conversation: list[Message] = [*system, *history]
        self.own_from = len(self.conversation)
        """Where this run's own messages begin in the conversation."""
        self.used_call_ids = {call.id for message in history for call in message.tool_calls}
        self.open_calls: dict[str, OpenCall] = {}
        self.partial_text: list[str] = []
        """What the model has said in a turn that is not finished."""
        self.status = RunStatus.RUNNING
        self.usage = Usage()
        self.step = 0
        self.step_is_open = False
        self.refused_limit: str | None = None
        """The limit for which calls were refused once; the next time ends the run."""
        self.sealed = False
        self._message_count = self._made_call_ids = 0
        self._thread = threading.get_ident()
        self._event_loop = asyncio.get_running_loop()

    def emit(self, event: Event) -> None:
        """Put a fresh event at the end of the log as this run's. After `run_finished` nothing is put there any more."""
        if self.sealed:
            return
        log = self.log
        # In place: nobody else has the event yet, and a copy would cost as much as making it.
        force_setattr(event, "seq", len(log.events) + 1)
        force_setattr(event, "at", time.time())
        force_setattr(event, "run_id", self.run_id)
        force_setattr(event, "parent_run_id", self.parent_run_id)
        force_setattr(event, "agent", self.agent.name)
        force_setattr(event, "ns", self.ns)
        log.append(event)

    def report(self, event: Event) -> None:
        """As `emit`, from any thread."""
        if threading.get_ident() == self._thread:
            self.emit(event)
        else:
            self._event_loop.call_soon_threadsafe(self.emit, event)

    def stop_if_cancelled(self) -> None:
        """A tool may have swallowed the cancellation; the loop does not."""
        if self.cancellation.reason is not None:
            raise asyncio.CancelledError(self.cancellation.reason)

    def next_message_id(self) -> str:
        self._message_count += 1
        return f"{self.run_id}-m{self._message_count}"

    def claim_call_id(self, wanted: str | None) -> str:
        """The model's id if it may be used, else a fresh one: ids are unique in a thread and safe in a namespace."""
        call_id = wanted or ""
        if call_id in self.used_call_ids or not _LEGAL_CALL_ID.fullmatch(call_id):
            self._made_call_ids += 1
            call_id = f"call_{self.run_id}_{self._made_call_ids}"
        self.used_call_ids.add(call_id)
        return call_id

    def open_call(self, call: ToolCall) -> None:
        self.open_calls[call.id] = OpenCall(call, self.next_message_id())

    @property
    def own_messages(self) -> tuple[Message, ...]:
        return tuple(self.conversation[self.own_from :])

    @property
    def response(self) -> str | None:
        """The last text the assistant said in this run."""
        for message in reversed(self.conversation[self.own_from :]):
            if message.role is Role.ASSISTANT and (text := message.text):
                return text
        return None

    def close_step(self) -> None:
        if self.step_is_open:
            self.step_is_open = False
            self.emit(StepFinished(step=self.step))

    def finish(self, status: RunStatus, termination: str, error: str | None = None, output: Any = None) -> RunResult:
        """End the run: its last events, and its result."""
        if status not in RUN_MOVES[self.status]:
            raise IllegalMove(f"run {self.run_id!r}", self.status, status)
        self.status = status
        if self.partial_text:
            said = Message.assistant("".join(self.partial_text), id=self.next_message_id())
            self.conversation.append(said)
            self.partial_text = []
        self.close_step()
        if status is RunStatus.FAILED:
            self.emit(ErrorRaised(message=error or termination, code=termination, fatal=True))
        result = RunResult(
            status=status,
            run_id=self.run_id,
            thread_id=self.identity.thread_id,
            response=self.response,
            output=output,
            steps=self.step,
            state=self.state.export_persisted(),
            usage=self.usage,
            error=error,
            termination=termination,
            messages=self.own_messages,
        )
        self.emit(
            RunFinished(
                status=status,
                termination=termination,
                response=result.response,
                error=error,
                steps=self.step,
                usage=self.usage,
                output=output,
            )
        )
        self.sealed = True
        return result
