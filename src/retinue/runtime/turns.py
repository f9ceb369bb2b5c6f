"""Turns: a run that begins takes its thread or waits for it, as the store decides."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from ..core.context import CancellationToken
from ..core.errors import RetinueError, ThreadBusy
from ..core.stores import DurableStore, WhenBusy
from ..loop.execution import Execution
from .owner import Owner
from .requests import encode_start

if TYPE_CHECKING:
    from .live import LiveRun

_LOOK_AGAIN = 1.0


async def take_turn(run: LiveRun, x: Execution, store: DurableStore, owner: Owner, when_busy: WhenBusy | None) -> None:
    """Store a new run and take its thread, when it is free; `when_busy` is None for a run that is stored already."""
    if when_busy is not None:
        request = encode_start(run.request, x.state.request)
        owner.show_life()
        begun = store.begin_run(run.record, request, owner.id, owner.lease, when_busy)
        if run.is_new_thread:
            # Nobody else can have the thread, so nothing is waited for: what is written next comes after it.
            run.spawn(_begin(run, begun, owner))
            return
        holder = await begun
        if holder is not None and when_busy == "reject":
            raise ThreadBusy(x.identity.thread_id, holder)
        owner.add(run.run_id, run)  # not before it is stored, or a heartbeat would take it for lost
        if holder is None:
            return
    run.record.queued = True
    owner.poke()
    while not run.request.cancellation.is_set():
        with store.watch(run.run_id) as watch:
            if await store.take_thread(run.run_id) is None:
                run.record.queued = False
                return
            await wait_or_stop(run.request.cancellation, asyncio.create_task(watch.wait(_LOOK_AGAIN)))


async def _begin(run: LiveRun, begun: Coroutine[Any, Any, str | None], owner: Owner) -> None:
    try:
        await begun
        if not run.is_done:
            owner.add(run.run_id, run)
    except RetinueError as exc:
        if run.writer is not None:
            run.writer.stop(exc)


async def wait_or_stop(token: CancellationToken, future: asyncio.Future[None]) -> None:
    """Wait for something, or until the token is set."""
    stopped = asyncio.create_task(token.wait())
    try:
        await asyncio.wait({future, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
