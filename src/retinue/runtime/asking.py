"""Decisions on runs that another process works on: given to it through the store, and what it says to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from ..core.decisions import Decision
from ..core.errors import DecisionRefused, ExecutionBackendError, RetinueError, RunElsewhere
from ..core.ids import unique
from ..core.runs import RunResult
from ..core.stores import Asked, DurableStore
from ..loop.records import decode_result, encode_result
from .node import Node, is_gone

_log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds in which a process that lives begins to do what it is asked."""
_LOOK_EVERY = 1.0
_LAST_WORDS = 1.0


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


def _encoded(decisions: Mapping[str, Decision]) -> bytes:
    try:
        return _encode(dict(decisions))
    except (TypeError, ValueError) as exc:
        raise DecisionRefused(f"a decision for another process must have a JSON form: {exc}") from exc


class Asking:
    """Asks other nodes, and does what they ask."""

    def __init__(self, store: DurableStore, node: Node, home: Home) -> None:
        self._store, self._node, self._home = store, node, home
        self._jobs: set[asyncio.Task[None]] = set()
        node.hear = self._hear

    async def close(self) -> None:
        """Let those who asked know what came of it, as far as that is known."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=_LAST_WORDS)
        for job in self._jobs:
            job.cancel()

    async def ask(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult | None:
        """Have the process that works on a run take decisions in, and wait for what comes of them.

        None where there is none, or none any more: then it is for this one, if for any.
        """
        if not await self._is_heard(run_id):
            return None
        ask_id = f"ask_{unique()}"
        await self._store.ask(Asked(ask_id, run_id, _encoded(decisions)))
        try:
            reply = await self._wait(ask_id, run_id)
        finally:
            with suppress(RetinueError):  # what is left behind goes in an hour
                await asyncio.shield(self._store.forget_ask(ask_id))
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
                status = await self._store.ask_status(ask_id)
                if status is not None and status.reply is not None:
                    return _reply(status.reply)
                if taker is None and is_hopeless and await self._store.withdraw(ask_id):
                    return None
                if status is None or (taker is not None and is_hopeless):
                    return await self._without_reply(run_id, taker)
                taker = status.taker
                await watch.wait(_LOOK_EVERY)

    async def _without_reply(self, run_id: str, taker: str | None) -> None:
        """Who took it is gone. A run of its own is found again by its id, with what was decided."""
        if await self._store.load_run(run_id) is None:
            problem = f"the decision was given to {taker}, which is gone: see how its task stands"
            raise ExecutionBackendError(run_id, problem)

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
                job = asyncio.create_task(self._do(asked, waits))
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)

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
        except asyncio.CancelledError:
            present = asyncio.current_task()
            if present is not None and present.cancelling():
                raise
            return Reply(failed="it was stopped before it went on")
        except Exception as exc:  # whoever asked waits for an answer
            return Reply(failed=str(exc) if isinstance(exc, RetinueError) else repr(exc))
