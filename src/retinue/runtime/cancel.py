"""Cancel one run below the root of a log, in the process that owns the log. Its parent reads a cancelled result and continues.

The run may be in any state: its call waits for a slot, it is being sent to another place, it works, it waits for a human, it
is a background task, or it is below a run that has a log of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..core.errors import OwnershipLost
from ..core.events import Namespace
from ..core.rows import Ending
from ..core.runs import RunStatus
from ..log.ask import NOT_FOUND, NOT_REACHABLE, Cancel, Reply, Say
from ..log.call_ids import remote_path
from ..log.read import leg_of, read_until
from ..log.state import ChildRef, LogState, RunState
from ..loop.execution import close_run

if TYPE_CHECKING:
    from .live import LiveRun


async def cancel_run(run: LiveRun, command: Cancel) -> Reply:
    """Stop the run at the namespace of a command, and wait for its end for as long as its grace."""
    log, tree, parent = run.log, run.log.tree, run.state
    missing = Reply(f"run {run.run_id!r} has no sub-agent at {'|'.join(command.ns)}", code=NOT_FOUND)
    ref: ChildRef | None = None
    for depth, part in enumerate(command.ns):
        if ref is not None:
            parent = tree.runs.get(ref.run_id)
        if parent is None:
            return missing
        found = next((one for one in parent.children.values() if one.ns == command.ns[: depth + 1]), None)
        if found is None and parent.remote_seq:
            return await forward(run, parent, replace(command, ns=command.ns[depth:]))
        if found is None:
            x = log.executions.get(parent.run_id)
            is_last = depth + 1 == len(command.ns)
            is_queued = is_last and x is not None and x.leave_queue(part.removeprefix("tools:"), command.reason)
            return Reply() if is_queued else missing
        ref = found
    assert parent is not None
    assert ref is not None
    await _stop(run, parent, ref, command)
    return Reply()


async def _stop(run: LiveRun, parent: RunState, ref: ChildRef, command: Cancel) -> None:
    log = run.log
    while run.is_storing:
        await run.stored()
    if run.is_given_up:
        raise OwnershipLost("", run.run_id)
    child = log.tree.runs.get(ref.run_id)
    if child is not None and child.is_over:
        return
    if command.tasks and child is not None:
        below = {one.run_id for one in _below(log.tree, child)}
        await _cancel_tasks(run, {task_id for task_id, task in log.tree.tasks.items() if task.run_id in below})
    if child is not None and child.request.detached:
        task_ids = {name for name, task in log.tree.tasks.items() if ref.ns == (*parent.ns, f"tools:{task.call_id}")}
        if await _cancel_tasks(run, task_ids):
            return
    if child is not None and child.waits:
        await _give_up(run, child, command.reason)
        return
    place = log.tree.seq
    await run.home.backend.stop(log, ref.run_id, command.reason)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(command.grace):
            if (child := log.tree.runs.get(ref.run_id)) is None or not child.is_over:
                async for _ in read_until(log.read(place, live=True), leg_of(ref.run_id)):
                    pass


async def _cancel_tasks(run: LiveRun, task_ids: set[str]) -> bool:
    """Stop those of these background tasks that are at work; return whether there was one."""
    cancels = [cancel for task_id, cancel in list(run.log.holders.items()) if task_id in task_ids]
    await asyncio.gather(*[cancel("cancelled") for cancel in cancels])
    return bool(cancels)


async def _give_up(run: LiveRun, child: RunState, reason: str) -> None:
    """End a child that waits for a human, and continue the runs above that wait only for it."""
    tree, below = run.log.tree, list(_below(run.log.tree, child))
    elsewhere = [one for one in below if one.tickets and one.waits]
    close_run(run.log, child, Ending(RunStatus.CANCELLED, "cancelled", reason))
    top = child
    while (above := tree.parent_of(top)) is not None and not top.request.detached:
        top = above
    if top.waits and top.pending:
        if top.run_id == run.run_id:
            run.begin_leg()
        else:
            run.inbox.continue_child(run.home.background.begin_leg(run.log, top))
    await run.home.registry.stop_runs(tree, elsewhere, reason)


def _below(tree: LogState, run: RunState) -> Iterator[RunState]:
    """Yield a run and all runs below it."""
    yield run
    for child in tree.children_of(run):
        yield from _below(tree, child)


async def forward(run: LiveRun, above: RunState, command: Cancel | Say) -> Reply:
    """Pass a command on to the log of a run elsewhere. Its call ids may have other names there."""
    if above.request.queue is None:
        where = f"run {above.run_id!r}, which works on a server"
        return Reply(f"{'|'.join(command.ns)} is below {where}: no command reaches it", code=NOT_REACHABLE)
    from .placed import placed_id

    path = remote_path(above, tuple([part.removeprefix("tools:") for part in command.ns]))
    ns: Namespace = tuple([f"tools:{part}" for part in path])
    reply, _ = await run.home.ask(placed_id(above.run_id), replace(command, ns=ns))
    return reply
