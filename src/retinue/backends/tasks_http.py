"""Runs on a server that speaks the task protocol."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from msgspec.structs import replace

from ..core.backend import BackendProfile, RunRequest
from ..core.context import CancellationToken
from ..core.errors import ExecutionBackendError, LimitReached
from ..core.events import ChildStarted, Custom, ErrorRaised, Event, Namespace, RunFinished, RunStarted, TextDelta
from ..core.lifecycle import RunStatus
from ..core.messages import Message
from ..core.runs import RunIdentity, RunResult
from ..core.state import PersistedState
from ..loop import children
from ..loop.children import child_ns, enter_child, find_again, give_slot_back, next_number, tell_child_finished
from ..loop.limits import child_refusal
from ..loop.scope import RunScope
from ..tasks.client import RemoteState, TaskClient
from .local import LocalBackend

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
PATIENCE = 60.0
"""Seconds for which a server may be unreachable before a run there is given up on."""
SUBMIT_PATIENCE = 10.0
DEADLINE = 7200.0
"""Seconds a remote run may take where nobody says otherwise."""
REMOTE_KEY = "retinue.remote"
"""Where a result's state says what the run is called elsewhere."""

_STATUS = {"success": RunStatus.COMPLETED, "error": RunStatus.FAILED, "cancelled": RunStatus.CANCELLED}
_TERMINATION = {RunStatus.COMPLETED: "natural", RunStatus.CANCELLED: "cancelled", RunStatus.TIMEOUT: "timeout"}


class TaskHttpBackend:
    """Executes runs through a task client. A run has a local id, under which its events are in its parent's log."""

    def __init__(
        self, client: TaskClient, agent_id: str, local: LocalBackend, *, patience: float | None = None
    ) -> None:
        self.client, self._agent_id, self._local = client, agent_id, local
        self._patience = PATIENCE if patience is None else patience
        self._tokens: dict[str, CancellationToken] = {}

    def profile(self) -> BackendProfile:
        return BackendProfile(cancellation="remote_abort", transcript="user_messages")

    def run(self, request: RunRequest) -> Coroutine[Any, Any, RunResult]:
        return self._run(request)

    async def abort(self, run_id: str) -> None:
        if (token := self._tokens.get(run_id)) is not None:
            token.set("aborted")

    async def watch(self, run_id: str, thread_id: str, token: CancellationToken, seconds: float | None) -> RunResult:
        """The end of a run that was submitted before, perhaps by another process."""
        status, state = await self._to_the_end(run_id, token, seconds or DEADLINE, lambda state: None)
        return self._result(run_id, thread_id, (), status, state)

    async def _run(self, request: RunRequest) -> RunResult:
        identity = request.identity
        parent = self._parent(request)
        if parent is not None:
            open_call = parent.open_calls.get(identity.parent_tool_call_id or "")
            if open_call is not None and open_call.resumes:
                earlier = find_again(open_call, children.asked_for(request))
                if isinstance(earlier, RemoteRun) and earlier.result is not None:
                    return earlier.result
        await self._submit(request)
        voice = RemoteRun(request, parent)
        try:
            if parent is None or request.detached:
                return await self._conduct(request, voice)
            give_slot_back(parent, identity.parent_tool_call_id or "")
            key = f"child:{voice.ns[-1]}:0"
            return await parent.journal.record("child", key, identity.agent, self._conduct, request, voice)
        finally:
            if parent is not None and voice.result is not None:
                tell_child_finished(parent, identity, voice.result)

    def _parent(self, request: RunRequest) -> RunScope | None:
        """The run that asks, if it may; depth and number of children count as for any child."""
        identity = request.identity
        if identity.parent_run_id is None:
            return None
        parent = self._local.scope_of(identity.parent_run_id)
        if parent is None:
            raise ExecutionBackendError(identity.agent, "the run that asks for it has ended")
        depth = parent.identity.depth + 1
        if (refusal := parent.budget.refuse_child(depth)) is not None:
            raise LimitReached(identity.agent, refusal[0], child_refusal(*refusal))
        request.identity = replace(identity, depth=depth)
        return parent

    async def _submit(self, request: RunRequest) -> None:
        """Give the server the run; until it has taken it nothing has happened."""
        identity = request.identity
        text = "\n\n".join([message.text for message in request.remote_messages() if message.text])
        if not text:
            raise ExecutionBackendError(identity.agent, "there is no text to send: a remote agent reads user messages")
        known = {
            "user_id": identity.user_id,
            "session_id": identity.thread_id,
            "parent_session_id": identity.parent_thread_id,
        }
        context = {name: value for name, value in known.items() if value is not None}
        # A task can wait for its server; a call that waits itself should know soon.
        patience = self._patience if request.detached else min(SUBMIT_PATIENCE, self._patience)
        try:
            await _patiently(
                lambda: self.client.submit(identity.run_id, self._agent_id, text, context),
                patience,
                request.cancellation,
            )
        except ConnectionError as exc:
            raise ExecutionBackendError(identity.agent, str(exc)) from exc

    async def _conduct(self, request: RunRequest, voice: RemoteRun) -> RunResult:
        identity, token = request.identity, request.cancellation
        self._tokens[identity.run_id] = token
        voice.start()
        seconds = DEADLINE if request.timeout is None else request.timeout
        try:
            status, state = await self._to_the_end(identity.run_id, token, seconds, voice.progress)
        except asyncio.CancelledError:
            await self._stop(identity.run_id)
            voice.finish(self._result_of(request, RunStatus.CANCELLED, RemoteState("cancelled", None, token.reason)))
            raise
        finally:
            del self._tokens[identity.run_id]
        return voice.finish(self._result_of(request, status, state))

    async def _to_the_end(
        self, task_id: str, token: CancellationToken, seconds: float, tell: Callable[[RemoteState], None]
    ) -> tuple[RunStatus, RemoteState]:
        """Ask until the task has ended, is to be stopped, or takes too long. A server may be away for a while."""
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(stopped.set)

        token.on_set(stop)
        try:
            while True:
                try:
                    state = await _patiently(lambda: self.client.state(task_id), self._patience, token)
                except (ConnectionError, ExecutionBackendError) as exc:
                    return RunStatus.FAILED, RemoteState("error", None, str(exc))
                tell(state)
                if state.has_ended:
                    return _STATUS[state.status], await self._whole(task_id, state)
                if token.is_set():
                    return RunStatus.CANCELLED, await self._stop(task_id, token.reason)
                if (left := deadline - time.monotonic()) <= 0:
                    return RunStatus.TIMEOUT, await self._stop(task_id, f"it took longer than {seconds:.0f} s")
                await _either(stopped, min(pause, left))
                pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            token.forget(stop)

    async def _whole(self, task_id: str, state: RemoteState) -> RemoteState:
        """A state with its result; some servers tell it only to those who wait."""
        if state.status != "success" or state.result is not None:
            return state
        try:
            waited = await self.client.wait(task_id, 30)
        except (ConnectionError, ExecutionBackendError):
            return state
        return waited if waited.status == "success" else state

    async def _stop(self, task_id: str, reason: str | None = None) -> RemoteState:
        try:
            await asyncio.wait_for(self.client.cancel(task_id), 5)
        except (ConnectionError, ExecutionBackendError, TimeoutError) as exc:
            reason = f"{reason or 'cancelled'}; the server could not be told ({exc})"
        return RemoteState("cancelled", None, reason)

    def _result_of(self, request: RunRequest, status: RunStatus, state: RemoteState) -> RunResult:
        identity = request.identity
        return self._result(identity.run_id, identity.thread_id, request.messages, status, state)

    def _result(
        self, run_id: str, thread_id: str, said: tuple[Message, ...], status: RunStatus, state: RemoteState
    ) -> RunResult:
        answer = (Message.assistant(state.result),) if state.result else ()
        elsewhere = {"task_id": run_id, "status": state.status}
        return RunResult(
            status=status,
            run_id=run_id,
            thread_id=thread_id,
            response=state.result,
            state=PersistedState(extensions={REMOTE_KEY: elsewhere}),
            error=None if status is RunStatus.COMPLETED else state.error or "the server gave no reason",
            termination=_TERMINATION.get(status, "error"),
            messages=(*said, *answer),
        )


class RemoteRun:
    """A remote run as its parent's loop and log know it."""

    scope: RunScope | None = None

    def __init__(self, request: RunRequest, parent: RunScope | None) -> None:
        self._request, self._parent = request, parent
        self.result: RunResult | None = None
        self.ns: Namespace = ()
        self._last_status = ""
        if parent is not None:
            call_id = request.identity.parent_tool_call_id or ""
            number = next_number(parent, call_id)
            self.ns = child_ns(parent, call_id, number)
            enter_child(parent, call_id, number, self)
            parent.budget.count_child()
            parent.emit(
                ChildStarted(
                    call_id=call_id,
                    child_run_id=request.identity.run_id,
                    child_agent=request.identity.agent,
                    child_ns=self.ns,
                )
            )

    @property
    def identity(self) -> RunIdentity:
        return self._request.identity

    @property
    def asked_for(self) -> Any:
        return children.asked_for(self._request)

    def abandon(self) -> RunResult | None:
        return self.result

    def start(self) -> None:
        identity = self.identity
        self._emit(
            RunStarted(
                thread_id=identity.thread_id,
                parent_tool_call_id=identity.parent_tool_call_id,
                messages=self._request.messages,
            )
        )

    def progress(self, state: RemoteState) -> None:
        if state.status != self._last_status:
            self._last_status = state.status
            data = {"type": "remote_task", "task_id": self.identity.run_id, "status": state.status}
            self._emit(Custom(data=data))

    def finish(self, result: RunResult) -> RunResult:
        self.result = result
        if result.response:
            self._emit(TextDelta(delta=result.response, message_id=f"{result.run_id}-m1"))
        if result.status is RunStatus.FAILED:
            self._emit(ErrorRaised(message=result.error or "", code=result.termination, fatal=True))
        self._emit(
            RunFinished(
                status=result.status,
                termination=result.termination,
                response=result.response,
                error=result.error,
                steps=0,
                usage=result.usage,
            )
        )
        return result

    def _emit(self, event: Event) -> None:
        identity = self.identity
        stamped = replace(
            event, run_id=identity.run_id, parent_run_id=identity.parent_run_id, agent=identity.agent, ns=self.ns
        )
        if self._parent is not None:
            self._parent.log.append(stamped)
        if self._request.sink is not None:
            self._request.sink(stamped)


async def _patiently(ask: Callable[[], Awaitable[T]], patience: float, token: CancellationToken) -> T:
    """Ask again while the server cannot be reached, for so long and unless told to stop."""
    deadline, pause = time.monotonic() + patience, FIRST_PAUSE
    while True:
        try:
            return await ask()
        except ConnectionError:
            if time.monotonic() >= deadline or token.is_set():
                raise
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 2, LONGEST_PAUSE)


async def _either(stopped: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stopped.wait(), seconds)
    except TimeoutError:
        return
