"""Decisions on runs that another process works on: given to it through the store, and what it says to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec

from ..core.decisions import Decision
from ..core.errors import DecisionRefused, ExecutionBackendError, RetinueError, RunElsewhere
from ..core.ids import unique
from ..core.runs import RunResult
from ..core.stores import Asked, AskStatus, DurableStore
from ..loop.records import decode_result, encode_result
from .node import Node, is_gone

_log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds in which a process that lives begins to do what it is asked."""
_LOOK_EVERY = 1.0


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of decisions."""

    result: bytes = b""
    refused: str = ""
    failed: str = ""


class Home(Protocol):
    """The runtime that is asked."""

    def awaits(self, run_id: str) -> bool | None:
        """Whether a run waits for a human here; None where it is not here."""
        ...

    async def resume(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult: ...


_encode = msgspec.json.Encoder().encode
_decisions = msgspec.json.Decoder(dict[str, Decision]).decode
_reply = msgspec.json.Decoder(Reply).decode


class Asking:
    """Asks other nodes, and does what they ask."""

    def __init__(self, store: DurableStore, node: Node, home: Home) -> None:
        self._store, self._node, self._home = store, node, home
        node.hear = self._hear

    async def ask(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult | None:
        """Have the process that works on a run take decisions in, and wait for what comes of them.

        None where there is none, or none any more: then it is for this one, if for any.
        """
        if not await self._is_heard(run_id):
            return None
        ask_id = f"ask_{unique()}"
        await self._store.ask(Asked(ask_id, run_id, _encode(decisions)))
        try:
            reply = await self._wait(ask_id, run_id)
        finally:
            await asyncio.shield(self._store.withdraw(ask_id))
        if reply is None:
            return None
        if reply.refused:
            raise DecisionRefused(reply.refused)
        if reply.failed:
            raise ExecutionBackendError(run_id, reply.failed)
        if not reply.result:
            raise RunElsewhere(run_id, await self._store.owner_of(run_id) or "another process")
        return decode_result(reply.result, None)

    async def _wait(self, ask_id: str, run_id: str) -> Reply | None:
        now = asyncio.get_running_loop().time
        end = now() + PATIENCE
        taker: str | None = None
        with self._store.watch(ask_id) as watch:
            while True:
                if taker is None:
                    is_hopeless = now() > end or not await self._is_heard(run_id)
                else:
                    is_hopeless = taker not in await self._others()
                status = await self._store.ask_status(ask_id) or AskStatus(taker, None)
                if status.reply is not None:
                    return _reply(status.reply)
                if is_hopeless and status.taker == taker:
                    return None
                taker = status.taker
                await watch.wait(_LOOK_EVERY)

    async def _is_heard(self, run_id: str) -> bool:
        """Whether there is a process to ask: the one that has the run, or any where nobody knows who has it."""
        others, owner = await self._others(), await self._store.owner_of(run_id)
        return owner in others or (owner is None and bool(others) and await self._store.load_run(run_id) is None)

    async def _others(self) -> set[str]:
        """The other owners that live."""
        owners = {log.owner for log in await self._store.owned_logs() if not log.expired}
        return {owner for owner in owners if owner != self._node.owner and not is_gone(owner)}

    async def _hear(self) -> None:
        """Begin to do what others ask of runs that are here."""
        for asked in await self._store.asked():
            waits = self._home.awaits(asked.run_id)
            if waits is not None and await self._store.take_ask(asked.ask_id, self._node.owner):
                self._node.start(self._do(asked, waits))

    async def _do(self, asked: Asked, waits: bool) -> None:
        try:
            reply = await self._answer(asked) if waits else Reply()
            await self._store.reply(asked.ask_id, _encode(reply))
        except RetinueError as exc:
            _log.warning("who asked about run %s could not be told: %s", asked.run_id, exc)

    async def _answer(self, asked: Asked) -> Reply:
        try:
            result = await self._home.resume(asked.run_id, _decisions(asked.body))
            return Reply(result=encode_result(result, None))
        except (DecisionRefused, msgspec.MsgspecError) as exc:
            return Reply(refused=str(exc))
        except RunElsewhere:
            return Reply()
        except RetinueError as exc:
            return Reply(failed=str(exc))
