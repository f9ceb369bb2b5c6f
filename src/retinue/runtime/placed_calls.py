"""Tool calls on other workers: a call of a tool with a queue is stored as a run of its own, which a worker of that queue
executes.

Invariant: the run's log says that a call is placed before the call is stored, and the id of the stored run is derived from
the call. So the call is made once, and the next owner of the run finds it again.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..backends.local import LocalBackend
from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.concurrency import GRACE, CancellationToken, supervise
from ..core.errors import ExecutionFailed, InternalError, RetinueError, ToolCancelled
from ..core.events import (
    ActivityDelta,
    ActivitySnapshot,
    Custom,
    ErrorRaised,
    Event,
    ToolCallReady,
    ToolCallResumed,
    ToolCallStreamDelta,
)
from ..core.messages import ToolCall
from ..core.rows import PlacedCall, Private
from ..core.runs import DEFAULT_LIMITS, Above, RunIdentity, RunResult, RunStatus
from ..core.tools import Tool, descriptor_of
from ..log.state import CallState
from ..loop.budget import deadline
from ..loop.calls import CallOutcome, failed
from ..loop.execution import Execution
from ..loop.placed_call import decode_outcome
from ..subagents.harness import StateOf
from .stored_start import NoModel

if TYPE_CHECKING:
    from .placed import PlacedBackend
    from .registry import AgentRegistry

_OF_CALL = (ToolCallStreamDelta, ActivitySnapshot, ActivityDelta, Custom)
"""The reports of a call, which name it."""


def queue_of(tool: Tool) -> str | None:
    """Return the queue whose workers make the calls of a tool."""
    return descriptor_of(tool).options.queue


def call_run_id(run_id: str, call_id: str, resumes: int) -> str:
    """Return the run id of a placed call; it is a new one each time the call is resumed."""
    made = hashlib.blake2b(f"{call_id}/{resumes}".encode(), digest_size=10).hexdigest()
    return f"{run_id}.call_{made}"


class PlacedCalls:
    """Gives calls to workers of other queues, and waits for their outcomes."""

    def __init__(self, backend: PlacedBackend, local: LocalBackend, registry: AgentRegistry) -> None:
        self._backend, self._local, self._registry = backend, local, registry
        self._agents: WeakKeyDictionary[Agent, dict[str, Agent]] = WeakKeyDictionary()

    def agent_for(self, owner: Agent, tool_name: str) -> Agent:
        """Return the agent of a placed call on its worker: it has one tool of the owner, its state keys and no hooks."""
        made = self._agents.setdefault(owner, {})
        if tool_name not in made:
            bound = self._local.toolbox_of(owner).get(tool_name)
            made[tool_name] = Agent(
                owner.name,
                NoModel(),
                tools=[] if bound is None else [bound.tool],
                plugins=[StateOf(plugin, lambda _: False) for plugin in owner.plugins],
                output=dict[str, Any],
            )
        return made[tool_name]

    def is_placed(self, tool: Tool, state: CallState) -> bool:
        """Return whether another worker makes a call, or has made it."""
        return bool(state.placed) or queue_of(tool) not in self._registry.served

    async def execute(
        self, x: Execution, tool: Tool, state: CallState, call: ToolCall, resume_input: Any
    ) -> CallOutcome:
        """Store a call for its queue, or find it again; wait for its outcome and return it."""
        owner = self._owner(x, tool)
        if owner is None:
            problem = "no agent that has it is known to the runtime by name"
            return failed(call, InternalError(f"tool {tool.name!r} has queue {queue_of(tool)!r}, and {problem}"))
        seen = await _reports_of(x, call.id) if state.placed else 0
        writer = x.log.writer
        assert writer is not None, "a runtime with an engine has a store"
        if not state.placed:
            made = call_run_id(x.run_id, call.id, state.resumes)
            x.log.append_private(Private(kind="entered", run_id=x.run_id, call_id=call.id, placed=made))
        await writer.flush()
        await writer.confirm()

        def copy_report(event: Event) -> None:
            """Append a report of the call to the log of its run, once: the log has the first ones."""
            nonlocal seen
            if seen and isinstance(event, _OF_CALL):
                seen -= 1
            elif not seen and (isinstance(event, _OF_CALL) or (isinstance(event, ErrorRaised) and not event.fatal)):
                x.emit(event)

        request = self._request(x, tool, owner, state, call, resume_input)
        request.emit, request.emit_remote = x.report, copy_report
        try:
            async with x.log.waiting_for(request.identity.run_id):
                result = await self._attend(x, request)
        except RetinueError as exc:
            return failed(call, InternalError(str(exc)))
        return _outcome(x, call, result)

    def _owner(self, x: Execution, tool: Tool) -> Agent | None:
        """Return the nearest agent above that has a tool and is known by name: a declared sub-agent inherits its tools."""
        above: Execution | None = x
        while above is not None:
            for agent in reversed(above.agents):
                bound = above.toolbox.get(tool.name) if agent is above.agent else agent.toolbox.get(tool.name)
                if bound is not None and bound.tool is tool and self._registry.agents.get(agent.name) is agent:
                    return agent
            above = self._local.execution_of(above.identity.parent_run_id or "")
        return None

    def _request(
        self, x: Execution, tool: Tool, owner: Agent, state: CallState, call: ToolCall, resume_input: Any
    ) -> RunRequest:
        run_id, of = state.placed, x.identity
        assert x.log.writer is not None
        snapshot = x.snapshot
        values = {name: key.encode(value) for name, value in snapshot.values().items() if (key := x.store.key(name))}
        return RunRequest(
            agent=owner,
            identity=RunIdentity(
                run_id, run_id, owner.name, of.run_id, of.thread_id, call.id, user_id=of.user_id, depth=of.depth
            ),
            messages=(),
            cancellation=CancellationToken(),
            context=x.request.context,
            queue=queue_of(tool),
            above=Above(log_id=x.log.writer.log_id, run_id=run_id, limits=DEFAULT_LIMITS),
            call=PlacedCall(
                call=call,
                run=of,
                values=values,
                revision=snapshot.revision,
                resume_input=resume_input,
                deadline=deadline(x.log.tree, x.state, x.now()) if x.is_limited else None,
            ),
        )

    async def _attend(self, x: Execution, request: RunRequest) -> RunResult:
        """Wait for the end of a placed call. If the wait is cancelled, cancel the call, unless another process owns the run."""
        loop, token = asyncio.get_running_loop(), request.cancellation
        work = asyncio.create_task(self._backend.run(request), name=request.identity.run_id)

        def stop(*_: object) -> None:
            if x.log.lost:
                loop.call_soon_threadsafe(work.cancel)
            else:
                token.set(x.cancellation.reason or "cancelled")

        with x.cancellation.calling(stop):
            return (await supervise(work, grace=GRACE, stop=stop)).result()


async def _reports_of(x: Execution, call_id: str) -> int:
    """Return the number of reports that the run's log has of a call since it was last started or resumed."""
    count = 0
    for event in await x.log.history():
        if event.run_id != x.run_id or getattr(event, "call_id", None) != call_id:
            continue
        if isinstance(event, ToolCallReady | ToolCallResumed):
            count = 0
        elif isinstance(event, _OF_CALL):
            count += 1
    return count


def _outcome(x: Execution, call: ToolCall, result: RunResult) -> CallOutcome:
    if result.status is RunStatus.COMPLETED:
        try:
            return decode_outcome(x, result.output)
        except RetinueError as exc:
            return failed(call, InternalError(f"what the worker returned cannot be used: {exc}"))
    reason = result.error or result.termination
    return failed(call, ToolCancelled(reason) if result.status is RunStatus.CANCELLED else ExecutionFailed(reason))
