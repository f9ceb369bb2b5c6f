"""Waking: starts a run on a conversation when a background task ended and no run was there to report it.

Invariant: ended tasks are looked up after a task's record has ended, and after the last run has left the thread. So the
later lookup finds the task. The log ends only after that: if its process dies first, the next owner looks again. The id of
the new run is derived from the task, so it is started once.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.concurrency import CancellationToken
from ..core.errors import OwnershipLost, RetinueError, ThreadBusy
from ..core.runs import RunIdentity
from ..core.stores import ThreadRecord, WhenBusy
from ..loop.execution import Execution

if TYPE_CHECKING:
    from .live import LiveRun
    from .runs import LocalRuns

_log = logging.getLogger(__name__)


def wake_id(task_id: str) -> str:
    """Return the id of the run that the end of a task starts."""
    return f"run_{hashlib.blake2b(f'wake/{task_id}'.encode(), digest_size=10).hexdigest()}"


def waking_agents(run: LiveRun) -> list[Agent]:
    """Return the agents of a root run that want to be woken."""
    state, known = run.state, run.home.registry.agents
    if state is None or run.request.above is not None:  # the parent reports the tasks of a placed child
        return []
    if not state.handoffs:
        return [run.request.agent] if run.request.agent.is_woken() else []
    names = dict.fromkeys((state.first_agent, *state.handoffs))
    agents = [run.request.agent if name == run.request.agent.name else known.get(name) for name in names]
    return [agent for agent in agents if agent is not None and agent.is_woken()]


async def has_news(x: Execution, thread: ThreadRecord | None) -> bool:
    """Return whether a run that was started by waking still has ended tasks to report."""
    try:
        return bool(await x.agent.ended_tasks(x.identity, {} if thread is None else thread.state.extensions))
    except RetinueError:
        return True  # its first step reports that they cannot be read


async def wake(run: LiveRun) -> bool:
    """Start a run for each agent of an ended run that has unreported ended tasks. Return False if that must wait."""
    try:
        done = [await _wake(run, agent) for agent in waking_agents(run)]
        return all(done)
    except OwnershipLost:
        raise
    except RetinueError as exc:
        _log.error("run %s: its conversation cannot be woken, and learns of its tasks later: %s", run.run_id, exc)
    return True


async def _wake(run: LiveRun, agent: Agent) -> bool:
    home, identity = run.home, run.record.identity
    store, thread_id = home.store, identity.thread_id
    of_agent = RunIdentity(run.run_id, thread_id, agent.name, user_id=identity.user_id)
    while True:
        saved_at = None if home.owner is None else await home.owner.store.saved_at(thread_id)
        thread = await store.load_thread(thread_id)
        tasks = await agent.ended_tasks(of_agent, {} if thread is None else thread.state.extensions)
        new = [task_id for task_id in tasks if not await _is_known(home, wake_id(task_id))]
        if not new:
            return True
        if home.is_closing and home.dispatcher is None:
            return False
        if home.owner is None and _length(await store.load_thread(thread_id)) != _length(thread):
            continue  # another run has ended on the thread meanwhile; a database checks that itself
        if await _start(run, agent, wake_id(new[0]), saved_at):  # one run reports all tasks
            return True


def _length(thread: ThreadRecord | None) -> int:
    return 0 if thread is None else len(thread.messages)


async def _is_known(home: LocalRuns, run_id: str) -> bool:
    return home.get(run_id) is not None or await home.store.load_run(run_id) is not None


async def _start(run: LiveRun, agent: Agent, run_id: str, saved_at: float | None) -> bool:
    """Start a run on the thread of another; return False if another run has ended on the thread since `saved_at`.

    If a run of the same agent has the thread, that run reports the tasks itself.
    """
    try:
        await _begin(run, agent, run_id, "reject", saved_at)
    except ThreadBusy as exc:
        if not exc.run_id:
            return False
        holder = await run.home.store.load_run(exc.run_id)
        if holder is not None and holder.identity.agent != agent.name:
            await _begin(run, agent, run_id, "enqueue", None)
    return True


async def _begin(run: LiveRun, agent: Agent, run_id: str, when_busy: WhenBusy, saved_at: float | None) -> None:
    """Store the new run, and start it here unless an engine does that."""
    identity, dispatcher = run.record.identity, run.home.dispatcher
    request = RunRequest(
        agent=agent,
        identity=RunIdentity(run_id, identity.thread_id, agent.name, user_id=identity.user_id),
        messages=(),
        limits=run.request.limits,
        cancellation=CancellationToken(),
        context=run.request.context,
        model=run.request.model,
        wakes=True,
    )
    if dispatcher is None:
        await run.home.start(request, (), when_busy, new_thread=False, saved_at=saved_at).stored()
    else:
        await dispatcher.begin_placed(request, await dispatcher.placement_of(run.run_id), when_busy, saved_at)
