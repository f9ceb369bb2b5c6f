"""The stored request of a run, and the wishes of its inbox (`log/ask.py`) as its owner carries them out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.concurrency import CancellationToken
from ..core.content import to_json_bytes
from ..core.errors import ConfigurationError, DecisionRefused, OwnershipLost, RetinueError, UnknownAgent
from ..core.messages import Message
from ..core.model import ModelChunk, ModelRequest
from ..core.rows import Private, StoredRequest
from ..core.runs import RunIdentity, limits_of_run
from ..core.state import PersistedState
from ..core.stores import DurableStore, Wish
from ..log.ask import decode_decisions, decode_wanted, encode_cancel, make_reply, make_wish, read_cancel
from ..loop.grants import falls_short, grant, wanted_with_child

if TYPE_CHECKING:
    from ..log.ownership import Owner
    from .live import LiveRun

_log = logging.getLogger(__name__)


class StoredStart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run that has not begun: its identity, its input and its state."""

    identity: RunIdentity
    request: StoredRequest
    messages: tuple[Message, ...] = ()
    seed: PersistedState = field(default_factory=PersistedState)
    digest: str = ""


decode_start = msgspec.json.Decoder(StoredStart).decode


def encode_start(request: RunRequest, stored: StoredRequest) -> bytes:
    """Encode a run before it starts. `problem` names a part that has no JSON form and is left out."""
    start = StoredStart(
        identity=request.identity,
        request=stored,
        messages=request.messages,
        seed=request.seed,
        digest=request.digest,
    )
    try:
        data = to_json_bytes(start)
        decode_start(data)
        return data
    except Exception as exc:
        problems = (stored.problem, f"its messages or its seed cannot be written as JSON ({exc})")
        stored = replace(stored, problem="; ".join([one for one in problems if one]))
        return to_json_bytes(replace(start, messages=(), seed=PersistedState(), request=stored))


def restored(
    agent: Agent, identity: RunIdentity, stored: StoredRequest, start: StoredStart | None = None
) -> RunRequest:
    """Return the request of a run to start or continue here. Raises if a part of it was not stored."""
    if stored.problem is not None:
        raise ConfigurationError(stored.problem)
    limits = stored.limits
    if start is not None and stored.above is None:  # its client may not have had the agent, whose limits hold too
        limits = limits_of_run(agent.limits, limits, over_network=False)
    return RunRequest(
        agent=agent,
        identity=identity,
        messages=() if start is None else start.messages,
        seed=PersistedState() if start is None else start.seed,
        limits=limits,
        cancellation=CancellationToken(),
        context=stored.context,
        model=stored.model,
        timeout=stored.timeout,
        keeps_thread=stored.keeps_thread,
        above=stored.above,
        wakes=stored.wakes,
        call=stored.call,
    )


class NoModel:
    """The model of a run that calls no model: a placed call, or a run that is only cancelled."""

    name = "none"

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        raise UnknownAgent("of a run without a model")


async def carry_out(run: LiveRun, wish: Wish) -> None:
    """Carry out a wish for a run that this process owns, or refuse it. The reply is stored with the outcome."""
    await run.stored()
    if run.is_done:  # its sender claims the log
        return
    if wish.kind == "cancel":
        await _cancel(run, wish)
    elif wish.kind == "cancel_task":
        await _cancel_task(run, wish)
    elif wish.kind == "grant":
        await _grant(run, wish)
    else:
        await _decide(run, wish)
    await run.release_if_idle()


async def _cancel(run: LiveRun, wish: Wish) -> None:
    wanted = read_cancel(wish)
    run.replies.append(make_reply(wish))
    await run.cancel(wanted.reason, wanted.grace)
    if wanted.tasks:
        await run.cancel_tasks()
    await _store_replies(run)


async def _cancel_task(run: LiveRun, wish: Wish) -> None:
    if wish.run_id in run.log.holders:
        # Before the cancel: the log may end with this task, and nothing can be stored after that.
        run.replies.append(make_reply(wish))
        await cancel_task(run, wish.run_id)
    else:
        run.replies.append(make_reply(wish, f"task {wish.run_id!r} is not at work"))
    await _store_replies(run)


async def _store_replies(run: LiveRun) -> None:
    """Store the replies that no other transaction has stored meanwhile."""
    if run.replies and run.writer is not None and not run.writer.is_released:
        await run.writer.settle(replies=run.pop_replies())


async def _decide(run: LiveRun, wish: Wish) -> None:
    reply = make_reply(wish)
    try:
        decisions = decode_decisions(wish.body)
        if wish.run_id != run.run_id:
            await run.home.background.answer(run.log, wish.run_id, decisions)
        else:
            while run.is_queueing(decisions):
                await asyncio.wait({run.end})  # the present leg continues with another answer
                await run.stored()
            if run.is_done or run.accept(decisions, (reply,)):
                return
    except (OwnershipLost, asyncio.CancelledError):
        raise
    except Exception as exc:
        if not isinstance(exc, DecisionRefused | msgspec.MsgspecError):
            _log.error("run %s: a decision on it was refused: %s", run.run_id, exc, exc_info=exc)
        reply = make_reply(wish, str(exc) or type(exc).__name__)
    if run.writer is not None:
        await run.writer.settle(replies=(reply,))


async def _grant(run: LiveRun, wish: Wish) -> None:
    """Grant a placed child more of the limits above it, as far as they allow."""
    log, child_id = run.log, wish.run_id
    tree, dispatching, wanted = log.tree, log.dispatching, decode_wanted(wish.body)
    known = tree.grants.get(child_id)
    parent = None if known is None else tree.runs.get(known.run_id)
    reply = make_reply(wish, "" if known else f"run {child_id!r} is not at work for this run")
    if known is not None and parent is not None:
        more = grant(tree, parent, child_id, wanted, dispatching)
        if log.widen is not None and falls_short(more.limits, wanted):
            await log.widen(lambda: wanted_with_child(tree, child_id, wanted, dispatching))
            more = grant(tree, parent, child_id, wanted, dispatching)
        if more != known and child_id in tree.grants:
            log.append_private(Private(kind="commit", run_id=parent.run_id, grants={child_id: more}))
        reply = make_reply(wish, granted=more.limits)
    if run.writer is not None:
        await run.writer.settle(replies=(reply,))


async def cancel_task(run: LiveRun, task_id: str) -> str:
    """Stop one background task of a run that this process owns, and store its end. Return the reason if it cannot."""
    cancel = run.log.holders.get(task_id)
    if cancel is None:
        return f"task {task_id!r} is not at work"
    await cancel("cancelled")
    if run.writer is not None:
        await run.writer.flush()
    return ""


def store_cancel(run: LiveRun, owner: Owner, reason: str) -> None:
    """Put a cancel of this process into the inbox too: if the process dies first, the next owner carries it out."""
    wish = make_wish(run.run_id, run.run_id, "cancel", encode_cancel(reason))
    run.replies.append(make_reply(wish))
    owner.is_new(wish)  # it is carried out here already
    run.spawn(_put(owner.store, wish))


async def _put(store: DurableStore, wish: Wish) -> None:
    with contextlib.suppress(RetinueError):
        await store.put_wish(wish)
