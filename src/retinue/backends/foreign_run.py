"""A run elsewhere, as the log of its parent knows it."""

from __future__ import annotations

from msgspec.structs import replace

from ..core.backend import RunRequest
from ..core.events import (
    ActivityDelta,
    ActivitySnapshot,
    Custom,
    ErrorRaised,
    Event,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    TextDelta,
)
from ..core.lifecycle import RunStatus
from ..core.messages import Message
from ..core.rows import Private, StoredRequest
from ..core.runs import RunResult
from ..loop.execution import Execution
from ..loop.state import ChildRef, RunState, message_id
from .local import LocalBackend, tell_finished

_FOR_WATCHING = (TextDelta, ReasoningDelta, ActivitySnapshot, ActivityDelta, Custom)


class ForeignRun:
    """Begins in the log when the backend has accepted it, and counts against the limits before that."""

    def __init__(
        self,
        request: RunRequest,
        parent: Execution,
        local: LocalBackend,
        ref: ChildRef | None,
        state: RunState | None = None,
    ) -> None:
        self.request, self.parent, self._local, self.state = request, parent, local, state
        self._is_closed = self._has_text = False
        self._is_counted = ref is None
        if self._is_counted:
            parent.log.dispatching.append(parent.state)
        if state is not None and request.sink is not None:
            parent.log.listen(state.run_id, request.sink)

    def accept(self) -> None:
        """The backend has it."""
        if not self._is_closed:
            self._begin()

    def emit(self, event: Event) -> None:
        """Append an event for those who watch; what comes too late is dropped."""
        if self._is_closed:
            return
        if not isinstance(event, _FOR_WATCHING):
            raise TypeError(f"a backend emits what is for watching only, not {event.kind!r}")
        run = self._begin()
        if run.status is not RunStatus.RUNNING:
            return
        if isinstance(event, TextDelta):
            self._has_text = True
        if isinstance(event, TextDelta | ReasoningDelta):
            event = replace(event, message_id=message_id(run, run.message_count + 1))
        self.parent.log.append(run, event)

    def finish(self, result: RunResult) -> RunResult:
        """Tell how it ended, once."""
        run, log = self._begin(), self.parent.log
        self._is_closed = True
        log.results[run.run_id] = result
        if run.is_over:
            return result
        said = ()
        if result.response:
            said = (Message.assistant(result.response, id=message_id(run, run.message_count + 1)),)
            if not self._has_text:
                log.append(run, TextDelta(delta=result.response, message_id=message_id(run, run.message_count + 1)))
        if result.status is RunStatus.FAILED:
            log.append(run, ErrorRaised(message=result.error or "", code=result.termination, fatal=True))
        log.append(
            run,
            RunFinished(
                status=result.status,
                termination=result.termination,
                response=result.response,
                error=result.error,
                steps=result.steps,
                usage=result.usage,
                output=result.output,
            ),
            Private(
                messages=said,
                writes=result.state.extensions,
                revision=max(1, result.state.revision),
                usage=result.usage,
            ),
        )
        tell_finished(self.parent, run, result)
        return result

    def close(self) -> None:
        """Take nothing more from the backend."""
        self._is_closed = True
        self._count_no_more()

    def _count_no_more(self) -> None:
        if self._is_counted:
            self._is_counted = False
            waiting = self.parent.log.dispatching
            del waiting[next(place for place, one in enumerate(waiting) if one is self.parent.state)]

    def _begin(self) -> RunState:
        if self.state is not None:
            return self.state
        request, log = self.request, self.parent.log
        identity, ref = request.identity, self._local.announce(self.parent, request)
        self._count_no_more()
        stored = StoredRequest(timeout=request.timeout, keeps_thread=request.keeps_thread, detached=request.detached)
        self.state = run = RunState(identity, ref.ns, stored)
        if request.sink is not None:
            log.listen(identity.run_id, request.sink)
        named = [replace(one, id=one.id or message_id(run, n)) for n, one in enumerate(request.messages, 1)]
        log.append(
            run,
            RunStarted(
                thread_id=identity.thread_id,
                parent_tool_call_id=identity.parent_tool_call_id,
                messages=tuple(named),
            ),
            Private(identity=identity, request=stored),
        )
        return run
