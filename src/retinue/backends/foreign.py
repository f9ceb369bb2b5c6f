"""Children on backends that are not local.

The backend only executes. Lineage, limits, events, matching after a restart and cancellation are the same for every
backend, and are here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from math import inf
from typing import Any

from msgspec import convert
from msgspec.structs import replace

from ..core.agents import Agent
from ..core.backend import Backend, BackendProfile, RunRequest
from ..core.concurrency import GRACE, CancellationToken, Cause, WorkEnd, supervise
from ..core.context import OUT_OF_TIME, TIMED_OUT
from ..core.errors import ExecutionBackendError
from ..core.events import (
    ActivityDelta,
    ActivitySnapshot,
    Custom,
    ErrorRaised,
    Event,
    InferenceFinished,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    TaskUpdated,
    TextDelta,
)
from ..core.receipts import Receipt, reported
from ..core.rows import Ending, Private, StoredRequest
from ..core.runs import REMOTE_KEY, Limits, RunResult, RunStatus
from ..core.state import PersistedState
from ..core.stores import ThreadRecord
from ..log.call_ids import local_path, remote_path
from ..log.owned import LiveLog
from ..log.state import ChildRef, RunState, message_id
from ..loop.budget import deadline, exceeded, limit_reached
from ..loop.execution import Execution, result_of, start_leg
from ..loop.grants import first_grant, widen_for_child
from .capabilities import can_stop, left_alone, missing, refuse_wait
from .local import LocalBackend, append_child_finished, check_child, held_thread, inherit, seconds_left
from .mirror import Heard, Rest, append_event, close, give_up, has_rest, host_of, last_seen, streamed_text
from .outcome import answer_in, bare_result, outcome_of, typed

MOST_WAITING = 10_000
"""Runs of one server that wait for a human, and that a process remembers."""
_FOR_WATCHING = (TextDelta, ReasoningDelta, ActivitySnapshot, ActivityDelta, Custom, ErrorRaised)


class ForeignBackend:
    """Runs children through a backend that is not local, with their events in their parent's log.

    An `own` backend gives them to another process on this runtime's store. It accepts a state seed and every message,
    stores the conversation itself, and its runs can ask for a larger grant.
    """

    def __init__(self, backend: Backend, local: LocalBackend, *, own: bool = False) -> None:
        self.backend, self._local, self._is_own = backend, local, own
        self.waiting: dict[str, Agent] = {}
        """The runs that wait elsewhere as far as this process knows, with their agents, which may be known only as objects."""

    def note_waiting(self, run_id: str, agent: Agent) -> None:
        """Remember that a run waits, to stop it if its parent does not go on. Runs that others continue are forgotten later."""
        if not self._is_own:
            self.waiting[run_id] = agent
        while len(self.waiting) > MOST_WAITING:
            del self.waiting[next(iter(self.waiting))]

    def profile(self) -> BackendProfile:
        return self.backend.profile()

    async def abort(self, run_id: str) -> None:
        await self.backend.abort(run_id)

    async def run(self, request: RunRequest) -> RunResult:
        """Execute a run that is new, or wait again for one that was dispatched before, perhaps by another process."""
        identity = request.identity
        if identity.parent_run_id is None:
            return typed(await self._run_alone(request), request.agent)
        parent = self._local.execution_of(identity.parent_run_id)
        if parent is None:
            raise ExecutionBackendError(identity.agent, "the run that asks for it has ended")
        inherit(parent, request)
        ref = self._local.find(parent, request)
        state = None if ref is None else parent.log.tree.runs.get(ref.run_id)
        if state is not None:
            request.identity, request.is_dispatched = state.identity, True
            request.detached = request.detached or state.request.detached
            if state.is_over:
                return typed(_result_again(parent, state), request.agent)
            if state.waits and not state.pending and not request.cancellation.is_set():
                return await self._waiting_again(request, parent, state)
            if state.status is not RunStatus.RUNNING:
                start_leg(parent.log, state)
            request.decisions = {
                "/".join(remote_path(state, tuple(path.split("/")))): decision
                for path, decision in state.pending.items()
                if decision is not None
            }
            request.seen = await last_seen(parent.log, state)
            request.remote = state.values.get(REMOTE_KEY, {})
            request.streamed = await streamed_text(parent.log, state)
            if parent.log.writer is not None:
                await parent.log.writer.flush()  # it raises if another process owns the log
        elif ref is None:
            await widen_for_child(parent)
            check_child(parent, request)
        request.may_be_sent = ref is not None and state is None
        host = None if self._is_own else host_of(self.backend)
        child = ForeignRun(request, parent, self._local, self.backend, ref, state, host)
        try:
            thread = None if self._is_own else await held_thread(self._local.store, request, parent.log)
            if state is None:
                request.remote = {} if thread is None else thread.state.extensions.get(REMOTE_KEY, {})
                await self._reserve(request, parent, thread, child.limits)
            parent.give_slot_back(request.identity.parent_tool_call_id or "")
            request.accepted, request.emit, request.emit_remote = child.accept, child.emit, child.emit_remote
            request.note_remote = child.note_remote
            async with self._waiting(parent.log, request):
                ended = await self._attend(request, child)
            self.waiting.pop(request.identity.run_id, None)
            result = await child.end(ended)
            if result.status.is_waiting:
                self.note_waiting(request.identity.run_id, request.agent)
            if not parent.log.lost:
                await self._save(child, thread, result)
            return typed(result, request.agent)
        finally:
            child.close()

    def _waiting(self, log: LiveLog, request: RunRequest) -> AbstractAsyncContextManager[None]:
        """Lend the slot of a worker while it waits for a run on another machine. A backend that cannot stop one there may
        work in this process."""
        if not self._is_own and self.profile().cancellation != "remote_abort":
            return nullcontext()
        return log.waiting_for(request.identity.run_id, lambda: not request.detached)

    async def _waiting_again(self, request: RunRequest, parent: Execution, state: RunState) -> RunResult:
        """Return the result of a run that is still suspended."""
        result = _known_result(parent, state, Ending(state.status, "suspended"))
        await self._local.save_child(request, parent.log, state, result, None, 0)
        return result

    async def _run_alone(self, request: RunRequest) -> RunResult:
        """Execute a run without a parent; it has no log, and only its caller's sink gets its events."""
        if request.is_dispatched:
            return await self.backend.run(request)  # follow only: cancelling this does not stop the run
        self._check(request, None, is_stored=False)
        if request.sink is None:
            return await self._attend(request, None)
        heard = Heard(request, request.sink)
        request.emit = request.emit_remote = heard.emit
        result = await self._attend(request, None)
        if result.response and not heard.has_text:
            heard.emit(TextDelta(delta=result.response, message_id=""))
        return result

    async def _reserve(
        self, request: RunRequest, parent: Execution, thread: ThreadRecord | None, own: Limits | None
    ) -> None:
        """Check a new run, grant it a part of the limits, and store its id before it is sent, so that retries use that id."""
        self._check(request, thread, is_stored=parent.log.writer is not None)
        log, run_id = parent.log, request.identity.run_id
        if log.writer is not None:
            self._local.announce(parent, request, reserve=True)
        granted = log.tree.grants.get(run_id)  # an earlier process may have granted it
        if granted is None:
            granted = first_grant(parent, request.identity, own, can_ask=self._is_own)
            log.append_private(Private(kind="commit", run_id=parent.run_id, grants={run_id: granted}))
        if request.above is not None:
            request.above = replace(request.above, limits=granted.limits)
        else:
            end = deadline(log.tree, parent.state, parent.now())
            seconds = None if end is None else max(end - parent.now(), 0.0)
            request.limits = replace(granted.limits, seconds=seconds).narrowed(own)
        if log.writer is not None:
            await log.writer.flush()

    def _check(self, request: RunRequest, thread: ThreadRecord | None, *, is_stored: bool) -> None:
        """Raise if the backend lacks something that the request needs; the error names every reason."""
        profile = self.profile()
        problems = missing(profile, request, thread, is_stored=is_stored)
        if request.cancellation.is_set() and not can_stop(profile):
            problems.append("it was cancelled before it was sent")
        if request.seed.extensions and not self._is_own:
            problems.append("it is not local and takes no state seed")
        if not request.remote_messages() and not self._is_own:
            problems.append("there is no user message that it may be sent")
        if problems:
            raise ExecutionBackendError(request.agent.name, f"its backend cannot do this: {'; '.join(problems)}")

    def _visible(self, request: RunRequest) -> RunRequest:
        """Return the request as the backend may see it: with the messages that leave this process, and no others."""
        sent = request.remote_messages()
        if self._is_own or len(sent) == len(request.messages) or self.profile().transcript == "full":
            return request
        return replace(request, messages=sent)

    async def _attend(self, request: RunRequest, child: ForeignRun | None) -> RunResult:
        """Execute a run in its own asyncio task, so that on a cancel it gets time to stop."""
        given, token, loop = request.cancellation, CancellationToken(), asyncio.get_running_loop()
        request.cancellation = token
        seconds, late = _time_left(request, child)
        sent, profile = self._visible(request), self.profile()
        if not can_stop(profile):
            sent = replace(sent, cancellation=CancellationToken())  # it is not asked for what it cannot do
            if given.is_set():  # the run waits there
                reason = given.reason or "cancelled"
                return left_alone(bare_result(request, RunStatus.CANCELLED, "cancelled", reason))
        if child is not None:
            child.sent = sent
        # A task made here: if the call is cancelled, the end of the work is still stored.
        work = asyncio.create_task(self.backend.run(sent), name=request.identity.run_id)

        def stop() -> None:
            if child is not None and child.parent.log.lost:  # another process waits for it now
                loop.call_soon_threadsafe(work.cancel)
            else:
                token.set(given.reason or "cancelled")

        def ask(_: asyncio.Task[RunResult], cause: Cause) -> None:
            stop() if cause == "cancelled" else token.set(late)

        self._local.begin_elsewhere(request.identity.run_id, token, child and child.detach, child and child.parent.log)
        try:
            with given.calling(stop):
                end = await supervise(work, token=token, deadline=seconds, grace=GRACE * can_stop(profile), stop=ask)
        except asyncio.CancelledError:  # the call is cancelled, not only this child
            if child is not None and child.state is not None:
                await child.end(self._result_of(WorkEnd(work, "cancelled"), request, child))
            raise
        finally:
            self._local.elsewhere.pop(request.identity.run_id, None)
        if child is None or child.state is None:
            _raise_error(end, request)
        result = self._result_of(end, request, child)
        if not result.status.is_waiting:
            return result
        checked = refuse_wait(profile, result)
        if checked is not result and can_stop(profile):
            await self.backend.abort(request.identity.run_id)
        return checked

    def _result_of(self, end: WorkEnd[RunResult], request: RunRequest, child: ForeignRun | None) -> RunResult:
        """Return the result of a run that has ended, or that is not waited for any more."""
        result = outcome_of(end, request)
        if result.termination == OUT_OF_TIME and child is not None:
            log = child.parent.log
            result = replace(result, error=limit_reached(log.tree, child.begin(), "seconds", log.clock()).text)
        return left_alone(result) if end.has_no_outcome and not can_stop(self.profile()) else result

    async def follow_rest(self, agent: Agent, log: LiveLog, run: RunState) -> None:
        """Follow the background tasks that an ended run still has elsewhere; report them as failed if that is impossible."""
        host = None if self._is_own else host_of(self.backend)
        if not hasattr(self.backend, "follow_rest"):
            await give_up(log, run)
            return close(log, run)
        request = RunRequest(
            agent=agent,
            identity=run.identity,
            messages=(),
            cancellation=CancellationToken(),
            remote=run.values.get(REMOTE_KEY, {}),
        )
        Rest(self.backend, self._local, log, run, await last_seen(log, run), host).start(request)

    async def _save(self, child: ForeignRun, thread: ThreadRecord | None, result: RunResult) -> None:
        request, state, kept = child.request, child.state, None
        assert state is not None
        before = () if thread is None else thread.messages
        if request.keeps_thread and result.status.is_terminal and not self._is_own:
            kept = ThreadRecord(
                thread_id=state.identity.thread_id,
                user_id=state.identity.user_id,
                messages=(*before, *state.messages),
                state=_thread_state(thread, result),
            )
        await self._local.save_child(request, child.parent.log, state, result, kept, len(before))


def _raise_error(end: WorkEnd[RunResult], request: RunRequest) -> None:
    """Raise the error of a backend that has not begun the run."""
    problem = end.error
    if isinstance(problem, ExecutionBackendError):
        raise problem
    if problem is not None:
        raise ExecutionBackendError(request.agent.name, f"{type(problem).__name__}: {problem}") from problem


class ForeignRun:
    """One child on another backend. It starts in the log once accepted, and counts against the limits before that."""

    def __init__(
        self,
        request: RunRequest,
        parent: Execution,
        local: LocalBackend,
        backend: Backend,
        ref: ChildRef | None,
        state: RunState | None = None,
        host: str | None = None,
    ) -> None:
        self.request, self.parent, self._local, self._backend, self.state = request, parent, local, backend, state
        self._host = host
        """Where its receipt comes from; None if from a worker of this runtime's store."""
        self._is_closed = False
        self._seen = request.seen
        self._has_text = request.seen > 0 or bool(request.streamed)
        self._may_have_tasks = request.seen > 0
        """True if events of background tasks elsewhere may be in the log."""
        self.sent = request
        """The request as the backend has it."""
        self.limits = request.limits
        """Its own, beside those of the runs above."""
        self._is_counted = ref is None
        if self._is_counted:
            parent.log.dispatching.append(parent.state)
        if state is not None and request.sink is not None:
            parent.log.listen(state.run_id, request.sink)

    def accept(self) -> None:
        """Append the start of the run: the backend has accepted it."""
        if not self._is_closed:
            self.begin()

    def emit(self, event: Event) -> None:
        """Append an event for readers; drop it if the run has ended."""
        if self._is_closed:
            return
        if not isinstance(event, _FOR_WATCHING) or (isinstance(event, ErrorRaised) and event.fatal):
            raise TypeError(f"a backend emits what is for watching only, not {event.kind!r}")
        run = self.begin()
        if run.status is not RunStatus.RUNNING:
            return
        if isinstance(event, TextDelta):
            self._has_text = True
        if isinstance(event, TextDelta | ReasoningDelta):
            event = replace(event, message_id=message_id(run, run.message_count + 1))
        self.parent.log.append(run, event)

    def emit_remote(self, event: Event) -> None:
        """Append an event of the run's log elsewhere. Starts and ends of the run itself are only noted."""
        if self._is_closed:
            return
        run, log = self.begin(), self.parent.log
        if run.status is not RunStatus.RUNNING:
            return
        append_event(log, run, event, self._seen, self._host)
        self._seen = event.seq
        self._has_text = self._has_text or (isinstance(event, TextDelta) and not event.ns)
        self._may_have_tasks = self._may_have_tasks or isinstance(event, TaskUpdated)
        is_counted = isinstance(event, InferenceFinished) and self.request.queue is None
        if is_counted and (over := exceeded(log.tree, run)) is not None:
            self.request.cancellation.set(over.text)

    def note_remote(self, ids: Mapping[str, Any]) -> None:
        """Store the ids that the run has elsewhere."""
        if not self._is_closed:
            run = self.begin()
            row = Private(kind="commit", run_id=run.run_id, writes={REMOTE_KEY: dict(ids)}, revision=run.revision + 1)
            self.parent.log.append_private(row)

    def detach(self) -> None:
        """Let the run outlive its call."""
        self.request.detached = self.sent.detached = True
        if self.state is not None and not self.state.request.detached:
            self.parent.log.append_private(Private(kind="commit", run_id=self.state.run_id, detached=True))

    async def end(self, result: RunResult) -> RunResult:
        """Append its end, unless it has one, and give up what it leaves open if that cannot be followed; return the result."""
        run = self.begin()
        was_over, result = run.is_over, self.finish(result)
        if self._may_have_tasks and run.is_over and not (was_over or has_rest(self._backend, result)):
            await give_up(self.parent.log, run)
        return result

    def finish(self, result: RunResult) -> RunResult:
        """Append its end, unless it has one; return the result."""
        run, log = self.begin(), self.parent.log
        self._is_closed = True
        if run.is_over:
            log.results[run.run_id] = result
            return result
        asked = [replace(ticket, path=local_path(run, ticket.path)) for ticket in result.suspended.values()]
        tickets = tuple(asked) or run.tickets if result.status.is_waiting else ()
        result = replace(
            result,
            receipt=self._receipt(result),
            usage=result.usage.at_least(run.total),  # its events may have said more
            suspended={"/".join(ticket.path): ticket for ticket in tickets},
        )
        log.results[run.run_id] = result
        said = ()
        if (answer := answer_in(result)) is not None and not tickets:
            said = (replace(answer, id=message_id(run, run.message_count + 1)),)
            if result.response and not self._has_text:
                log.append(run, TextDelta(delta=result.response, message_id=message_id(run, run.message_count + 1)))
        if result.status is RunStatus.FAILED:
            log.append(run, ErrorRaised(message=result.error or "", code=result.termination, fatal=True))
        log.append(
            run,
            convert(result, RunFinished, from_attributes=True),
            Private(
                messages=said,
                writes=result.state.extensions,
                revision=max(1, result.state.revision),
                usage=result.usage - run.total,
                tickets=tickets,
            ),
        )
        append_child_finished(self.parent, run, result)
        if has_rest(self._backend, result) and not log.lost:
            Rest(self._backend, self._local, log, run, self._seen, self._host).start(self.request)
        return result

    def _receipt(self, result: RunResult) -> Receipt:
        """Return the receipt of the run: that of another worker here, or what a server says of it."""
        if self._host is not None:
            return reported(result.receipt, result.status.value, result.steps, self._host)
        return result.receipt or Receipt(status=result.status.value, steps=result.steps)

    def close(self) -> None:
        """Ignore later callbacks from the backend, and give back what was reserved."""
        self._is_closed = True
        self._count_no_more()
        if self.state is not None:
            return
        run_id, log = self.request.identity.run_id, self.parent.log  # it could not be dispatched
        log.leave_thread(self.request.identity)
        if run_id in log.tree.grants:
            log.append_private(Private(kind="commit", run_id=self.parent.run_id, grants={run_id: None}))

    def _count_no_more(self) -> None:
        if self._is_counted:
            self._is_counted = False
            waiting = self.parent.log.dispatching
            del waiting[next(place for place, one in enumerate(waiting) if one is self.parent.state)]

    def begin(self) -> RunState:
        """Return the state of the run; append its start if the log does not have it."""
        if self.state is not None:
            return self.state
        request, log = self.request, self.parent.log
        identity, ref = request.identity, self._local.announce(self.parent, request)
        self._count_no_more()
        stored = StoredRequest(
            limits=self.limits,
            timeout=request.timeout,
            keeps_thread=request.keeps_thread,
            detached=request.detached,
            queue=request.queue,
        )
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


def _thread_state(thread: ThreadRecord | None, result: RunResult) -> PersistedState:
    """Return the state of a thread after a run, with the id that its conversation has elsewhere."""
    state = PersistedState() if thread is None else thread.state
    context_id = result.state.extensions.get(REMOTE_KEY, {}).get("context_id")
    if context_id is not None:
        state = replace(state, extensions={**state.extensions, REMOTE_KEY: {"context_id": context_id}})
    return state


def _time_left(request: RunRequest, child: ForeignRun | None) -> tuple[float | None, str]:
    """Return the seconds that a run may take, and the reason code when they are over."""
    state, limits = (None, request.limits) if child is None else (child.state, child.limits)
    timeout = seconds_left(request.timeout, state)
    limit = seconds_left(None if limits is None else limits.seconds, state)
    if child is not None and request.detached:  # it outlives its call, so no run above stops it
        now = child.parent.now()
        if (end := deadline(child.parent.log.tree, child.parent.state, now)) is not None:
            limit = max(0.0, min(end - now, inf if limit is None else limit))
    if limit is not None and (timeout is None or limit < timeout):
        return limit, OUT_OF_TIME
    return timeout, TIMED_OUT


def _result_again(parent: Execution, state: RunState) -> RunResult:
    """Return the result of a run that had ended; append `child_finished` if the parent lacks it."""
    result = _known_result(parent, state, state.ending or Ending(state.status, "error"))
    append_child_finished(parent, state, result)
    return result


def _known_result(parent: Execution, state: RunState, ending: Ending) -> RunResult:
    """Return the result of a run whose last leg is in the log."""
    result = parent.log.results.get(state.run_id)
    if result is None:
        result = result_of(parent.log, state, ending, state.response(), None, state.output)
        result.state.extensions.update(state.values)
    return result
