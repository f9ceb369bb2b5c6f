"""What one run works with: its agent, state, conversation, journal and place in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Mapping
from time import time
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.agents import Toolbox
from ..core.decisions import Decision
from ..core.errors import IllegalMove
from ..core.events import ErrorRaised, Event, Namespace, RunFinished, StepFinished, StepStarted
from ..core.journal import Journal
from ..core.lifecycle import CALL_MOVES, RUN_MOVES, RunStatus, ToolCallStatus
from ..core.messages import Message, Role, ToolCall, Visibility
from ..core.model import Model, ModelRequest
from ..core.plugins import AddMessage, Compact, HandOff, Hook, HookContext, Phase, RunAction, StepAction, StopRun
from ..core.results import SuspendTicket, ToolResult
from ..core.runs import NO_USAGE, RunResult
from ..core.state import Snapshot
from ..core.statestore import StateStore
from .commands import digest_of
from .limits import Budget
from .log import EventLog
from .phases import HookTable

if TYPE_CHECKING:
    from ..core.backend import Resolver, RunRequest
    from .calls import CallGroup
    from .children import ChildRun
    from .handoff import Equip

_log = logging.getLogger(__name__)

_NOTHING: Mapping[str, Any] = {}
"""What most runs have of some things: shared, and never changed in place."""

_LEGAL_CALL_ID = re.compile(r"[^:|~\0\s]{1,256}")


def _is_legal(call_id: str) -> bool:
    # Most ids are identifiers, which is quicker to see and stricter.
    return (call_id.isidentifier() and len(call_id) <= 256) or _LEGAL_CALL_ID.fullmatch(call_id) is not None


class Ending(Struct, frozen=True):
    """How a run ends, or why it waits."""

    status: RunStatus
    termination: str
    error: str | None = None
    code: str | None = None
    """What the error event says, where it knows more than the termination."""


class OpenCall(Struct, eq=False):
    """A call that has not ended. Its message has an id from the start, so that ids do not depend on who is first."""

    call: ToolCall
    message_id: str
    status: ToolCallStatus = ToolCallStatus.NEW
    ticket: SuspendTicket | None = None
    resumes: int = 0
    admitted: bool = False
    """Whether the hooks before the tool have let it pass."""
    asked_by: Hook | None = None
    """The hook that suspended it."""
    answered: frozenset[Hook] = frozenset()
    """The hooks that suspended it and have their answer."""
    holds_slot: bool = False
    children: dict[int, ChildRun] = {}
    """The children it started, by their number."""
    children_started: int = 0
    child_base: int = 0
    found_again: frozenset[int] = frozenset()
    """The children that the tool, running again, has asked for again."""
    kept: str = ""
    """Where the whole result is, in words, where the model reads only a part."""

    def move(self, wanted: ToolCallStatus) -> None:
        if wanted not in CALL_MOVES[self.status]:
            raise IllegalMove(f"call {self.call.id!r}", self.status, wanted)
        self.status = wanted


class RunScope:
    """One run in progress. Only the loop changes it."""

    __slots__ = (
        "_event_loop",
        "_events",
        "_made_call_ids",
        "_message_count",
        "_own_messages",
        "_suspended_at",
        "_thread",
        "agent",
        "blocked",
        "budget",
        "cancellation",
        "compacted",
        "context",
        "conversation",
        "dead_letters",
        "decided",
        "descriptors",
        "effects",
        "equip",
        "group",
        "handoffs",
        "has_hooks",
        "history",
        "hooks",
        "identity",
        "journal",
        "late_children",
        "log",
        "model",
        "next_agent",
        "ns",
        "offered",
        "open_calls",
        "output",
        "output_tries",
        "own_from",
        "parent_run_id",
        "partial_id",
        "partial_text",
        "pending",
        "refused_limit",
        "resolver",
        "result",
        "run_id",
        "sealed",
        "sink",
        "started",
        "started_at",
        "state",
        "status",
        "step",
        "step_actions",
        "step_is_open",
        "stopping",
        "system",
        "toolbox",
        "usage",
        "used_call_ids",
    )

    def __init__(
        self,
        request: RunRequest,
        model: Model,
        toolbox: Toolbox,
        state: StateStore,
        journal: Journal,
        log: EventLog,
        budget: Budget,
        started_at: float,
        hooks: HookTable,
        equip: Equip,
        resolver: Resolver,
        history: tuple[Message, ...] = (),
        ns: Namespace = (),
    ) -> None:
        agent, identity = request.agent, request.identity
        self.agent, self.identity, self.model, self.toolbox = agent, identity, model, toolbox
        self.state, self.journal, self.log, self.budget = state, journal, log, budget
        self._events, self.started_at = log.events, started_at
        self.hooks, self.has_hooks, self.equip, self.resolver = hooks, hooks.has_any, equip, resolver
        self.sink, self.cancellation, self.context, self.ns = request.sink, request.cancellation, request.context, ns
        self.run_id, self.parent_run_id = identity.run_id, identity.parent_run_id
        self.descriptors, self.system = toolbox.descriptors, agent.system
        self.history = history
        self.conversation: list[Message] = list(history)
        self.own_from = len(history)
        """Where this run's own messages begin in the conversation."""
        self.used_call_ids: set[str] = set()
        for message in history:
            self.used_call_ids.update([call.id for call in message.tool_calls])
        self.open_calls: dict[str, OpenCall] = {}
        self.late_children: Mapping[str, int] = _NOTHING
        """How many children were started for calls that had ended."""
        self.pending: Mapping[str, Decision] = _NOTHING
        """Decisions that were taken in and are to be carried out when the run goes on."""
        self.group: CallGroup | None = None
        """The calls of the step in progress."""
        self.decided: frozenset[tuple[str, str]] = frozenset()
        """The decisions that were taken in: what each was on, and its id."""
        self.effects: Mapping[str, int] = _NOTHING
        """How often each effect was asked for, where that is recorded."""
        self.blocked: str | None = None
        """Why a hook wants the run to end."""
        self.step_actions: tuple[StepAction, ...] = ()
        """What hooks asked for, for the next request."""
        self.next_agent: HandOff | None = None
        """Who goes on after this step."""
        self.handoffs: tuple[str, ...] = ()
        self.stopping: StopRun | None = None
        """Why a plugin wants the run to end."""
        self.compacted: Compact | None = None
        """What the model reads in place of the beginning of the conversation."""
        self.output: Any = None
        self.output_tries = 0
        self.dead_letters: tuple[Any, ...] = ()
        """Actions and effects that failed."""
        self.offered: frozenset[str] | None = None
        """The tools the model was offered in this step, where not all."""
        self.partial_id = ""
        self.partial_text: list[str] = []
        """What the model has said in a turn that is not finished."""
        self.status = RunStatus.RUNNING
        self.usage = NO_USAGE
        self.started = False
        self.result: RunResult | None = None
        """How its last leg ended."""
        self.step = 0
        self.step_is_open = False
        self.refused_limit: str | None = None
        """The limit for which calls were refused once; the next time ends the run."""
        self.sealed = False
        self._suspended_at = 0.0
        self._own_messages: tuple[Message, ...] = ()
        self._message_count = self._made_call_ids = 0
        self._thread = threading.get_ident()
        self._event_loop = asyncio.get_running_loop()

    def emit(self, event: Event) -> None:
        """Put an event at the end of the log as this run's. After `run_finished` nothing is put there any more."""
        if self.sealed:
            return
        events = self._events
        stamped = replace(
            event,
            seq=len(events) + 1,
            at=time(),
            run_id=self.run_id,
            parent_run_id=self.parent_run_id,
            agent=self.identity.agent,
            ns=self.ns,
        )
        events.append(stamped)
        if self.log.watched:
            self.log.tell(stamped)
        if self.sink is not None:
            self._tell_sink(stamped)

    def _tell_sink(self, event: Event) -> None:
        try:
            assert self.sink is not None
            self.sink(event)
        except Exception:
            _log.exception("the sink of run %s failed at event %d and is not called again", self.run_id, event.seq)
            self.sink = None

    def report(self, event: Event) -> None:
        """As `emit`, from any thread."""
        if threading.get_ident() == self._thread:
            self.emit(event)
        else:
            self._event_loop.call_soon_threadsafe(self.emit, event)

    def hook_context(
        self,
        phase: Phase,
        snapshot: Snapshot,
        messages: tuple[Message, ...] = (),
        request: ModelRequest | None = None,
        call: ToolCall | None = None,
        result: ToolResult | None = None,
        decision: Decision | None = None,
    ) -> HookContext:
        return HookContext(
            phase=phase,
            run=self.identity,
            agent=self.agent,
            snapshot=snapshot,
            messages=messages,
            request=request,
            call=call,
            result=result,
            decision=decision,
            step=self.step,
            usage=self.usage,
            compacted=self.compacted.count if self.compacted else 0,
            elapsed=self._elapsed,
        )

    def _elapsed(self) -> float:
        return self.journal.now() - self.started_at

    def take_action(self, action: RunAction) -> None:
        """Remember what is to happen to the run itself; the first handoff and the first stop count."""
        if isinstance(action, HandOff):
            self.next_agent = self.next_agent or action
        elif isinstance(action, StopRun):
            self.stopping = self.stopping or action
        elif isinstance(action, AddMessage):
            said = Message.user(action.text, id=self.next_message_id(), visibility=Visibility.INTERNAL)
            self.conversation.append(said)
        else:
            self.compacted = action

    def model_messages(self) -> tuple[Message, ...]:
        """What the model reads: the system message, a summary where there is one, and the conversation."""
        if self.compacted is None:
            return tuple(self.conversation) if self.system is None else (self.system, *self.conversation)
        system = () if self.system is None else (self.system,)
        summary = Message.user(self.compacted.summary, visibility=Visibility.INTERNAL)
        return (*system, summary, *self.conversation[self.compacted.count :])

    def tell(self, message: str, code: str) -> None:
        """An error event for something that does not end the run."""
        self.emit(ErrorRaised(message=message, code=code))

    def stop_if_cancelled(self) -> None:
        """A tool may have swallowed the cancellation; the loop does not."""
        if self.cancellation.reason is not None:
            raise asyncio.CancelledError(self.cancellation.reason)

    def next_message_id(self) -> str:
        self._message_count += 1
        return f"{self.run_id}-m{self._message_count}"

    def next_effect(self, what: str, given: Any) -> str:
        """What an effect or action is known by: what it asks for, and how often that was asked for before."""
        name = f"{what}:{type(given).__name__}:{digest_of(given)}"
        count = self.effects.get(name, 0)
        self.effects = {**self.effects, name: count + 1}
        return f"{name}:{count}"

    def claim_call_id(self, wanted: str | None) -> str:
        """The model's id if it may be used, else a fresh one: ids are unique in a thread and safe in a namespace."""
        call_id, used = wanted or "", self.used_call_ids
        while call_id in used or not _is_legal(call_id):
            self._made_call_ids += 1
            call_id = f"call_{self.run_id}_{self._made_call_ids}"
        used.add(call_id)
        return call_id

    def own_messages(self) -> tuple[Message, ...]:
        """This run's part of the conversation; made anew only when it has grown, because hooks ask often."""
        if len(self._own_messages) != len(self.conversation) - self.own_from:
            self._own_messages = tuple(self.conversation[self.own_from :])
        return self._own_messages

    def response(self, own: tuple[Message, ...]) -> str | None:
        """The last text the assistant said in this run."""
        for message in reversed(own):
            if message.role is Role.ASSISTANT and (text := message.text):
                return text
        return None

    def needs_attention(self) -> bool:
        """Whether anything but the next step may follow this one."""
        return bool(self.open_calls or self.has_hooks or self.blocked is not None or self.stopping or self.next_agent)

    def open_step(self, number: int) -> None:
        self.step, self.step_is_open = number, True
        self.emit(StepStarted(step=number, model=self.model.name))

    def close_step(self) -> None:
        if self.step_is_open:
            self.step_is_open = False
            self.emit(StepFinished(step=self.step))

    def _move(self, status: RunStatus) -> None:
        if status not in RUN_MOVES[self.status]:
            raise IllegalMove(f"run {self.run_id!r}", self.status, status)
        self.status = status

    def reopen(self) -> None:
        """Go on with a run that was suspended. The time a human took does not count."""
        self._move(RunStatus.RUNNING)
        self.sealed = False
        if self.budget.deadline is not None:
            self.budget.deadline += self.journal.now() - self._suspended_at

    def finish(self, ending: Ending) -> RunResult:
        """End the run, or this leg of it: its last events, and its result."""
        self._move(ending.status)
        if ending.status is RunStatus.SUSPENDED and self.budget.deadline is not None:
            self._suspended_at = self.journal.now()
        if self.partial_text:
            self.conversation.append(Message.assistant("".join(self.partial_text), id=self.partial_id))
            self.partial_text = []
        self._answer_last_calls(ending.status)
        self.close_step()
        if ending.status is RunStatus.FAILED:
            code = ending.code or ending.termination
            self.emit(ErrorRaised(message=ending.error or ending.termination, code=code, fatal=True))
        own = self.own_messages()
        result = RunResult(
            status=ending.status,
            run_id=self.run_id,
            thread_id=self.identity.thread_id,
            response=self.response(own),
            output=self.output,
            steps=self.step,
            state=self.state.export_persisted(),
            usage=self.usage,
            error=ending.error,
            termination=ending.termination,
            messages=own if self.group is None else (*own, *self.group.results()),
            suspended=self.tickets() if self.open_calls else {},
        )
        self.log.results[self.run_id] = result
        self.emit(
            RunFinished(
                status=ending.status,
                termination=ending.termination,
                response=result.response,
                error=ending.error,
                steps=self.step,
                usage=self.usage,
                output=None if self.agent.output_format is None else self.agent.output_format.encode(self.output),
            )
        )
        self.sealed = True
        return result

    def take_result(self, result: RunResult) -> None:
        """Have ended as a process before has told."""
        self.result = self.log.results[self.run_id] = result
        self.status, self.usage, self.step = result.status, result.usage, result.steps
        self.started = self.sealed = True
        for message in result.messages:
            if message.role is Role.ASSISTANT:
                self.retell(message.text)

    def retell(self, text: str) -> None:
        """Nothing: only a run that goes on after its process ended has said something before."""

    def count_call(self, call_id: str) -> None:
        """Count what the children of a call used that is not made again. Nothing: as for `retell`."""

    def _answer_last_calls(self, status: RunStatus) -> None:
        """A conversation that ends with calls nobody made cannot be continued: say that they were not made."""
        last = self.conversation[-1] if self.conversation else None
        if last is None or last.role is not Role.ASSISTANT or status is RunStatus.SUSPENDED:
            return
        for call in last.tool_calls:
            text = "cancelled: the run ended before this call was made"
            made = Message.tool(text, tool_call_id=call.id, name=call.name, id=self.next_message_id())
            self.conversation.append(made)

    def tickets(self) -> dict[str, SuspendTicket]:
        """What the run waits for, by call id or, where one id waits in several places, by its path."""
        waiting = self.waiting()
        ids = [ticket.path[-1].partition("~")[0] for ticket in waiting]
        return {
            name if ids.count(name) == 1 else "/".join(ticket.path): ticket
            for name, ticket in zip(ids, waiting, strict=True)
        }

    def waiting(self) -> list[SuspendTicket]:
        """The tickets of the run and of its children, each with its path."""
        found: list[SuspendTicket] = []
        for call_id, open_call in self.open_calls.items():
            below: list[SuspendTicket] = []
            for number, child in open_call.children.items():
                name = call_id if number == 1 else f"{call_id}~{number}"
                inner = [] if child.scope is None else child.scope.waiting()
                below.extend([replace(ticket, path=(name, *ticket.path)) for ticket in inner])
            if not below and open_call.ticket is not None and open_call.status is ToolCallStatus.SUSPENDED:
                below = [replace(open_call.ticket, path=(call_id,))]
            found.extend(below)
        return found
