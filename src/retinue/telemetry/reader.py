"""The sink that reads events as operations, and tells observers of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.events import (
    ChildStarted,
    ErrorRaised,
    Event,
    Handoff,
    InferenceFinished,
    MessagesSnapshot,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TaskUpdated,
    TextDelta,
    ToolCallFinished,
    ToolCallReady,
    ToolCallResumed,
    ToolCallStarted,
)
from ..core.lifecycle import RunStatus, ToolCallStatus
from .operations import CANCELLED, ChatOperation, Observer, Operation, RunOperation, ToolOperation
from .remembered import Remembered

_log = logging.getLogger(__name__)

_STOPPED = {RunStatus.CANCELLED: CANCELLED, RunStatus.TIMEOUT: "timeout"}


class OperationReader:
    """A sink that tells observers what begins and ends. What they do wrong is logged, and hurts nobody."""

    def __init__(self, observers: Sequence[Observer], *, content: bool = False) -> None:
        self._observers, self._content = tuple(observers), content
        self._runs: dict[str, RunOperation] = {}
        self._left: Remembered[RunOperation] = Remembered()
        """Legs that ended in waiting, by run id."""
        self._announced: Remembered[Operation] = Remembered()
        """The calls of children that have not begun, by run id: such a call may end before its child begins."""
        self._tasks: Remembered[Operation] = Remembered()
        """The calls that started background tasks, by run and call id: their children may begin when the run has ended."""
        self._complained = False
        chunk = self._take_chunk
        self._readers: dict[type[Event], Callable[[Any], None]] = {
            RunStarted: self._run_started,
            RunFinished: self._run_finished,
            MessagesSnapshot: self._messages_snapshot,
            StepStarted: self._step_started,
            StepFinished: self._step_finished,
            TextDelta: chunk,
            ReasoningDelta: chunk,
            ToolCallStarted: chunk,
            InferenceFinished: self._inference_finished,
            ToolCallReady: self._tool_call_ready,
            ToolCallResumed: self._tool_call_resumed,
            ToolCallFinished: self._tool_call_finished,
            ChildStarted: self._child_started,
            TaskUpdated: self._task_updated,
            Handoff: self._handoff,
            ErrorRaised: self._error,
        }

    def __call__(self, event: Event) -> None:
        read = self._readers.get(type(event))
        if read is not None:
            read(event)

    def _run_started(self, event: RunStarted) -> None:
        earlier = self._left.take(event.run_id)
        run = RunOperation(event, self._parent_of(event, earlier), earlier)
        if self._content:
            run.messages = event.messages
            if not event.continues:
                run.said.extend(event.messages)
        self._runs[event.run_id] = run
        self._begin(run)

    def _parent_of(self, event: RunStarted, earlier: RunOperation | None) -> Operation | None:
        """The call that started a child: at work, ended before the child began, or ended before it went on."""
        announced = self._announced.take(event.run_id) or self._tasks.find(_call_key(event, event.parent_tool_call_id))
        parent = self._runs.get(event.parent_run_id or "")
        if parent is not None:
            return parent.tools.get(event.parent_tool_call_id or "") or announced or parent
        if announced is None and earlier is not None and event.parent_run_id is not None:
            return earlier.parent
        return announced

    def _messages_snapshot(self, event: MessagesSnapshot) -> None:
        run = self._runs.get(event.run_id)
        if run is not None and self._content and run.inferences == 0:
            run.said.extend([*event.messages, *run.messages])

    def _step_started(self, event: StepStarted) -> None:
        run = self._runs.get(event.run_id)
        if run is None:
            return
        if run.resumed:
            run.resumed, run.pending = False, event
        else:
            self._begin_chat(run, event)

    def _begin_chat(self, run: RunOperation, event: StepStarted) -> None:
        run.pending, run.model = None, event.model or run.model
        chat = run.chat = ChatOperation(event, run)
        if self._content:
            chat.messages = run.conversation()
        self._begin(chat)

    def _chat_of(self, run_id: str) -> ChatOperation | None:
        """The model call in progress; a resumed leg's first step is one when the model says something."""
        run = self._runs.get(run_id)
        if run is None:
            return None
        if run.pending is not None:
            self._begin_chat(run, run.pending)
        return run.chat

    def _take_chunk(self, event: Event) -> None:
        chat = self._chat_of(event.run_id)
        if chat is not None and chat.first_chunk is None:
            chat.first_chunk = event.at

    def _inference_finished(self, event: InferenceFinished) -> None:
        chat = self._chat_of(event.run_id)
        if chat is None:
            return
        run = self._runs[event.run_id]
        run.chat, run.model = None, event.model or run.model
        run.inferences += 1
        run.usage += event.usage
        chat.model, chat.answered_by = chat.model or event.model, event.model
        chat.stop_reason, chat.usage = event.stop_reason, event.usage
        if self._content:
            chat.message = event.message
            run.said.append(event.message)
        self._end(chat, event.at)

    def _step_finished(self, event: StepFinished) -> None:
        run = self._runs.get(event.run_id)
        if run is not None:
            run.pending = None

    def _tool_call_ready(self, event: ToolCallReady) -> None:
        run = self._runs.get(event.run_id)
        if run is None:
            return
        tool = run.tools[event.call_id] = ToolOperation(event, run)
        run.tool_calls += 1
        if self._content:
            tool.args = event.args
        self._begin(tool)

    def _tool_call_resumed(self, event: ToolCallResumed) -> None:
        run = self._runs.get(event.run_id)
        if run is None:
            return
        run.pending = None
        before = run.earlier.waiting.get(event.call_id) if isinstance(run.earlier, RunOperation) else None
        tool = run.tools[event.call_id] = ToolOperation(event, run, before)
        run.tool_calls += 1
        self._begin(tool)

    def _tool_call_finished(self, event: ToolCallFinished) -> None:
        run = self._runs.get(event.run_id)
        tool = None if run is None else run.tools.pop(event.call_id, None)
        if run is None or tool is None:
            return
        tool.status = event.status
        if event.status is ToolCallStatus.SUSPENDED:
            run.waiting[event.call_id] = tool
        elif event.status is ToolCallStatus.FAILED:
            tool.error, tool.detail = _kind_of(event.result.data), event.message.text
        elif event.status is ToolCallStatus.CANCELLED:
            tool.error = CANCELLED
        if self._content:
            tool.result = event.message.text
            if event.status is not ToolCallStatus.SUSPENDED:
                run.results[event.call_id] = event.message
        self._end(tool, event.at)
        tool.args = tool.result = None

    def _child_started(self, event: ChildStarted) -> None:
        run = self._runs.get(event.run_id)
        if run is not None:
            self._announced.keep(event.child_run_id, run.tools.get(event.call_id, run))

    def _task_updated(self, event: TaskUpdated) -> None:
        run = self._runs.get(event.parent_run_id or "")
        call = None if run is None else run.tools.get(event.call_id or "")
        if call is not None:
            self._tasks.keep(_call_key(event, event.call_id), call)

    def _handoff(self, event: Handoff) -> None:
        run = self._runs.get(event.run_id)
        if run is not None:
            self._note(run, "handoff", event.at, {"to_agent": event.to_agent})

    def _error(self, event: ErrorRaised) -> None:
        run = self._runs.get(event.run_id)
        if run is None or event.fatal:
            return
        facts = {"code": event.code or "unknown"}
        if self._content:
            facts["message"] = event.message
        self._note(run.chat or run, "error", event.at, facts)

    def _run_finished(self, event: RunFinished) -> None:
        run = self._runs.pop(event.run_id, None)
        if run is None:
            return
        run.status, run.termination = event.status, event.termination
        run.error, run.detail = _error_of(event), event.error
        if self._content:
            run.response = event.response
        self._end_what_is_open(run, event.at)
        parent = self._runs.get(event.parent_run_id or "")
        if parent is not None:
            parent.usage += run.usage
        self._end(run, event.at)
        run.said, run.results, run.messages, run.response = [], {}, (), None
        if event.status is RunStatus.SUSPENDED:
            self._left.keep(event.run_id, run)

    def _end_what_is_open(self, run: RunOperation, at: float) -> None:
        """A model that failed or was stopped has no last event of its own."""
        chat, run.chat = run.chat, None
        if chat is not None:
            chat.error, chat.detail = run.error or CANCELLED, run.detail
            self._end(chat, at)
        for tool in run.tools.values():
            tool.status, tool.error = ToolCallStatus.CANCELLED, CANCELLED
            self._end(tool, at)
        run.tools = {}

    def _begin(self, operation: Operation) -> None:
        for observer in self._observers:
            try:
                observer.began(operation)
            except Exception:
                self._complain()

    def _end(self, operation: Operation, at: float) -> None:
        operation.ended = at
        for observer in self._observers:
            try:
                observer.ended(operation)
            except Exception:
                self._complain()
        operation.earlier = None  # else every leg would keep all before it

    def _note(self, operation: Operation, name: str, at: float, facts: Mapping[str, str]) -> None:
        for observer in self._observers:
            try:
                observer.noted(operation, name, at, facts)
            except Exception:
                self._complain()

    def _complain(self) -> None:
        """The first failure is told in full; an exporter that is down would fill the log."""
        level = logging.DEBUG if self._complained else logging.ERROR
        self._complained = True
        _log.log(level, "telemetry failed and goes on; further failures are logged at DEBUG", exc_info=True)


def _call_key(event: Event, call_id: str | None) -> str:
    """A call of the run above this one."""
    return f"{event.parent_run_id} {call_id}"


def _error_of(event: RunFinished) -> str | None:
    """What kind of thing ended a run that did not complete."""
    if event.status in _STOPPED:
        return _STOPPED[event.status]
    if event.status is not RunStatus.FAILED:
        return None
    named = (event.error or "").partition(":")[0]
    return named if event.termination == "error" and named.isidentifier() else event.termination


def _kind_of(data: Any) -> str:
    """The kind or code of a failed call; what has neither is a failure as the tool told it."""
    error = data.get("error") if isinstance(data, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(error, dict):
        return str(error.get("kind") or error.get("code") or "tool_error")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return "tool_error"
