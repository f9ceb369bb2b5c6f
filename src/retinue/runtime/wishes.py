"""Wishes: what is in the inbox of a log that this process owns becomes a fact, or is refused, and gets a reply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec

from ..core.decisions import Decision
from ..core.errors import DecisionRefused, OwnershipLost, RetinueError
from ..core.ids import unique
from ..core.stores import DurableStore, Reply, Wish
from .requests import CancelWish, Refusal

if TYPE_CHECKING:
    from .live import Home, LiveRun

_log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_decisions = msgspec.json.Decoder(dict[str, Decision]).decode
_cancel = msgspec.json.Decoder(CancelWish | str).decode


class Wishes:
    """The wishes for one run, and the replies that are stored with its next transaction."""

    def __init__(self, run: LiveRun, home: Home) -> None:
        self._run, self._home = run, home
        self._replies: list[Reply] = []

    def take_replies(self) -> tuple[Reply, ...]:
        """Return the replies that are to be stored, once."""
        replies, self._replies = tuple(self._replies), []
        return replies

    def hear(self, wish: Wish) -> None:
        """Do what somebody wants, or refuse it."""
        self._run.spawn(self._stop(wish) if wish.kind == "cancel" else self._decide(wish))

    async def _stop(self, wish: Wish) -> None:
        run = self._run
        await run.stored()
        if run.is_done:  # whoever wants it claims the log
            return
        wanted = _read_cancel(wish)
        self._replies.append(Reply(wish.wish_id, _encode(Refusal())))
        await run.cancel(wanted.reason, wanted.grace)
        if wanted.tasks:
            await run.cancel_tasks()
        if self._replies and run.writer is not None and not run.writer.is_released:
            await run.writer.settle(replies=self.take_replies())
        await run.release_if_idle()

    async def _decide(self, wish: Wish) -> None:
        run = self._run
        await run.stored()
        if run.is_done:  # whoever wants it claims the log
            return
        try:
            decisions = _decisions(wish.body)
            reply = (Reply(wish.wish_id, _encode(Refusal())),)
            if wish.run_id != run.run_id:
                await self._home.background.answer(run.log, wish.run_id, decisions)
            elif run.accept(decisions, reply):
                return
        except (OwnershipLost, asyncio.CancelledError):
            raise
        except Exception as exc:
            if not isinstance(exc, DecisionRefused | msgspec.MsgspecError):
                _log.error("run %s: a decision on it was refused: %s", run.run_id, exc, exc_info=exc)
            reply = (Reply(wish.wish_id, _encode(Refusal(str(exc) or type(exc).__name__))),)
        if run.writer is not None:
            await run.writer.settle(replies=reply)
        await run.release_if_idle()

    def note_cancel(self, reason: str) -> None:
        """Put a cancel into the inbox as well: where this process ends first, the next owner carries it out."""
        run, store = self._run, self._home.durable
        if store is None or run.request.cancellation.is_set():
            return
        wish = Wish(
            log_id=run.run_id,
            wish_id=f"cancel_{unique()}",
            run_id=run.run_id,
            kind="cancel",
            body=_encode(CancelWish(reason)),
        )
        self._replies.append(Reply(wish.wish_id, _encode(Refusal())))
        run.spawn(self._put(store, wish))

    async def _put(self, store: DurableStore, wish: Wish) -> None:
        assert self._home.owner is not None
        self._home.owner.hears(wish)  # it is carried out here already
        with contextlib.suppress(RetinueError):
            await store.put_wish(wish)


def _read_cancel(wish: Wish) -> CancelWish:
    """What a cancel says; one that cannot be read is a cancel all the same."""
    try:
        said = _cancel(wish.body)
    except (msgspec.MsgspecError, ValueError):
        return CancelWish()
    return CancelWish(said) if isinstance(said, str) else said
