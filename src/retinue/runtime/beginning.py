"""The start of a root run in a store: stores its record, and takes its thread or waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..core.concurrency import wait_for_first
from ..core.errors import RetinueError, ThreadBusy
from ..core.stores import WhenBusy
from ..log.ownership import Owner
from .inbox import encode_start

if TYPE_CHECKING:
    from .live import LiveRun


async def take_thread(run: LiveRun, owner: Owner, when_busy: WhenBusy | None) -> None:
    """Store a new run and take its thread when it is free; `when_busy` is None for a run that is stored already."""
    store, token = owner.store, run.request.cancellation
    if when_busy is not None:
        assert run.x is not None
        owner.register()
        request = encode_start(run.request, run.x.state.request)
        begun = store.begin_run(run.record, request, owner.id, owner.lease, when_busy, saved_at=run.thread_saved_at)
        if run.is_new_thread:
            # No other run can have a new thread, so do not wait: later writes are ordered after this one.
            run.spawn(_store_start(run, begun, owner))
            return
        holder = await begun
        if holder is not None and when_busy == "reject":
            raise ThreadBusy(run.record.identity.thread_id, holder)
        run.begun.set_result(None)
        owner.add(run.run_id, run)  # only once it is stored, else a heartbeat would treat it as lost
        if holder is None:
            return
    elif not run.record.queued:
        return  # it has had its thread from the start
    run.record.queued = True
    owner.check_inboxes()
    while not token.is_set():
        with store.watch(run.record.identity.thread_id) as watch:
            if await store.take_thread(run.run_id) is None:
                run.record.queued = False
                return
            await wait_for_first(watch.wait(1.0), token.wait())


async def _store_start(run: LiveRun, begun: asyncio.Future[str | None], owner: Owner) -> None:
    try:
        await begun
        run.begun.set_result(None)
        if not run.is_done:
            owner.add(run.run_id, run)
    except RetinueError as exc:
        run.begun.set_exception(exc)
        run.begun.exception()  # mark the exception as retrieved
        if run.writer is not None:
            run.writer.stop(exc)
