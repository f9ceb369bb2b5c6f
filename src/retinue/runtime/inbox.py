"""The inbox of a log in the process that owns it: commands of this process, and wishes that others have stored.

- The inbox belongs to its LiveRun: one event loop uses it, the one that works on the run. Another loop may put a command
  only while no leg is at work there.
- Commands are carried out in order of arrival, with two exceptions. Decisions that fit only the next leg wait for it, and
  let others pass. While a cancel of the root stops the run, everything else waits.
- Nothing is carried out while the end of a leg or the release of the log is being stored. If the log is released then, or
  lost, a command is not failed: its reply is None, and whoever asks puts it into the inbox of the next owner. A wish stays
  in the store for that owner.
- So a release cannot overlook a command of this process: it is carried out before the release begins, or asked again after.
- The rows of a command and its reply are one transaction. A command of this process that changes the log at once is not
  stored as a wish. A cancel is, because it takes time: if this process dies meanwhile, the next owner stops the run.
- When the process stops, runs are released or lost, so every open command gets None.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ..core.concurrency import wait_for_first
from ..core.decisions import Decision
from ..core.errors import DecisionRefused, OwnershipLost, RetinueError
from ..core.rows import Private
from ..core.runs import REMOTE_KEY
from ..core.stores import DurableStore, RunRecord, Wish
from ..core.stores import Reply as StoredReply
from ..log.ask import (
    NOT_FOUND,
    RUN_ENDED,
    Cancel,
    CancelTask,
    Command,
    Decide,
    Reply,
    Say,
    WidenGrant,
    make_wish,
    read_wish,
    stored,
)
from ..log.state import RunState
from ..loop.grants import falls_short, grant, wanted_with_child
from ..loop.steering import add_messages, refusal
from .cancel import cancel_run, forward

if TYPE_CHECKING:
    from .live import LiveRun

_log = logging.getLogger(__name__)

Replied = asyncio.Future["Reply | None"]
"""The reply to a command; None if this process gave the log up first."""


class _Asked:
    """A command that was asked for, and its reply. `wish_id` is empty if this process asks."""

    __slots__ = ("command", "replied", "wish_id")

    def __init__(self, command: Command, wish_id: str = "") -> None:
        self.command, self.wish_id = command, wish_id
        self.replied: Replied = asyncio.get_running_loop().create_future()

    def resolve(self, reply: Reply | None) -> None:
        if not self.replied.done():  # else whoever asked has left
            self.replied.set_result(reply)


class Inbox:
    """The commands to the owner of a log."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._waiting: list[_Asked] = []
        self._cancels = 0
        """The cancels of the root that are being carried out."""
        self._wishes: dict[str, Replied] = {}
        """The replies to all wishes that were delivered."""

    def put(self, command: Command) -> Replied:
        """Ask for a command of this process. If it can be carried out without waiting, the reply is there on return."""
        asked = _Asked(command)
        self._take(asked)
        return asked.replied

    def deliver(self, wish: Wish) -> Replied:
        """Ask for what a stored wish says, once; return the reply."""
        if (known := self._wishes.get(wish.wish_id)) is not None:
            return known
        try:
            asked = _Asked(read_wish(wish), wish.wish_id)
        except (ValueError, msgspec.MsgspecError) as exc:
            asked = _Asked(Decide(wish.run_id, {}), wish.wish_id)
            self._reply(asked, Reply(str(exc)))
        else:
            self._take(asked)
        self._wishes[wish.wish_id] = asked.replied
        return asked.replied

    def store_cancel(self, store: DurableStore, command: Cancel) -> None:
        """Store a cancel of the root that this process carries out already, for the next owner."""
        wish, run = make_wish(self._run.run_id, command), self._run
        self._wishes[wish.wish_id] = asyncio.get_running_loop().create_future()
        run.replies.append(stored(wish.wish_id, Reply()))
        run.spawn(_put(store, wish))

    async def _cancel_below(self, asked: _Asked, command: Cancel) -> Reply:
        """Cancel one run below the root. The cancel is stored first: if this process dies, the next owner carries it out."""
        run = self._run
        if not asked.wish_id and run.home.owner is not None and run.writer is not None:
            wish = make_wish(run.run_id, command)
            asked.wish_id, self._wishes[wish.wish_id] = wish.wish_id, asked.replied
            await _put(run.home.owner.store, wish)
        return await cancel_run(run, command)

    def go_on(self) -> None:
        """Carry out what had to wait: a leg has ended, a release is stored, or the log is lost."""
        waiting, self._waiting = self._waiting, []
        for asked in waiting:
            self._take(asked)

    def _take(self, asked: _Asked) -> None:
        """Carry out a command now, or let it wait."""
        run, command = self._run, asked.command
        if run.is_storing or (self._cancels and not isinstance(command, Cancel)):
            self._waiting.append(asked)
        elif run.is_given_up:
            asked.resolve(None)
        elif isinstance(command, Cancel) and command.ns:
            run.spawn(self._work(asked, self._cancel_below(asked, command)))
        elif isinstance(command, Cancel):
            self._cancels += 1
            run.spawn(
                self._work(asked, self._cancel(command, run.cancel(command.reason, command.grace)), is_known=True)
            )
        elif isinstance(command, Say):
            self._say(asked, command)
        elif isinstance(command, CancelTask):
            run.spawn(self._work(asked, self._cancel_task(command), is_known=command.task_id in run.log.holders))
        elif isinstance(command, WidenGrant):
            run.spawn(self._work(asked, self._grant(command)))
        elif command.run_id == run.run_id and run.is_queueing(command.decisions):
            self._waiting.append(asked)
        else:
            self._decide(asked, command)

    def _decide(self, asked: _Asked, command: Decide) -> None:
        """Start a leg of a run with decisions, or refuse them."""
        run, tree = self._run, self._run.log.tree
        reply = Reply(place=tree.seq)
        replies = (stored(asked.wish_id, reply),) if asked.wish_id else ()
        accept = run.accept if command.run_id == run.run_id else partial(self._accept_child, command.run_id)
        try:
            is_new = accept(command.decisions, replies)
        except Exception as exc:
            self._reply(asked, self._refusal(exc))
            return
        if is_new:
            asked.resolve(reply)
        else:
            self._reply(asked, Reply(place=tree.runs[command.run_id].leg_from))

    def _accept_child(self, run_id: str, decisions: Mapping[str, Decision], replies: tuple[StoredReply, ...]) -> bool:
        """Start a leg of a background child; return False if its decisions were accepted before."""
        run = self._run
        record = run.home.background.accept(run.log, run_id, decisions)
        if record is not None:
            self.continue_child(record, replies)
        return record is not None

    def continue_child(self, record: RunRecord, replies: tuple[StoredReply, ...] = ()) -> None:
        """Store the leg that was begun for a background child, then let the child continue."""
        self._run.spawn(self._continue_child(record, replies))

    async def _continue_child(self, record: RunRecord, replies: tuple[StoredReply, ...]) -> None:
        run = self._run
        if run.writer is not None:
            await run.writer.settle(runs=(record,), replies=replies)
        run.home.background.go_on(record.identity.run_id)

    def _refusal(self, exc: Exception) -> Reply:
        if not isinstance(exc, DecisionRefused | msgspec.MsgspecError):
            _log.error("run %s: a command to it was refused: %s", self._run.run_id, exc, exc_info=exc)
        return Reply(str(exc) or type(exc).__name__)

    def _reply(self, asked: _Asked, reply: Reply) -> None:
        """Give a reply to what has changed nothing."""
        asked.resolve(reply)
        if asked.wish_id:
            self._run.replies.append(stored(asked.wish_id, reply))
            self._run.spawn(self._store_replies())

    async def _store_replies(self) -> None:
        """Store the replies that no other transaction has stored meanwhile."""
        run = self._run
        if run.replies and run.writer is not None and not run.writer.is_released:
            await run.writer.settle(replies=run.pop_replies())
        await run.release_if_idle()

    async def _work(self, asked: _Asked, work: Coroutine[Any, Any, Reply], *, is_known: bool = False) -> None:
        """Carry out a command that takes time. With `is_known`, its reply is that it was carried out, whatever happens."""
        reply, run = None, self._run
        if is_known and asked.wish_id:  # at once: the log may end with the run, and nothing can be stored after that
            run.replies.append(stored(asked.wish_id, Reply()))
        try:
            reply = await work
        except OwnershipLost:
            pass
        except Exception as exc:  # a run that broke down has stopped
            reply = Reply() if is_known else self._refusal(exc)
        finally:
            self._cancels -= isinstance(asked.command, Cancel) and not asked.command.ns
            asked.resolve(reply)
            self.go_on()
        if reply is not None and asked.wish_id and not is_known:
            run.replies.append(stored(asked.wish_id, reply))
        await self._store_replies()

    def _say(self, asked: _Asked, command: Say) -> None:
        """Give a run messages. They are accepted once their rows are stored, in one transaction with the reply."""
        run, tree = self._run, self._run.log.tree
        if run.state is None and not run.end.done():  # it has not begun
            run.spawn(self._say_later(asked))
            return
        for depth in range(len(command.ns) + 1):
            found = next((one for one in tree.runs.values() if one.ns == command.ns[:depth]), None)
            if found is not None and depth and self._is_elsewhere(found):
                run.spawn(self._work(asked, forward(run, found, replace(command, ns=command.ns[depth:]))))
                return
        found = next((one for one in tree.runs.values() if one.ns == command.ns), None)
        if found is None:
            where = "|".join((run.run_id, *command.ns))
            self._reply(asked, Reply(f"there is no run at {where}", code=NOT_FOUND))
            return
        name = found.identity.agent
        x, agent = run.log.executions.get(found.run_id), run.home.registry.agents.get(name)
        agent = x.agent if x is not None else run.request.agent if run.request.agent.name == name else agent
        if why := refusal(run.log, found, None if agent is None else agent.max_steps):
            self._reply(asked, Reply(why, code=RUN_ENDED))
            return
        add_messages(run.log, found, command.messages)
        if run.writer is None:
            asked.resolve(Reply())
            return
        replies = (stored(asked.wish_id, Reply()),) if asked.wish_id else ()
        run.spawn(self._accepted(asked, run.writer.settle(replies=replies)))

    async def _say_later(self, asked: _Asked) -> None:
        run = self._run
        while run.state is None and not run.end.done():
            await wait_for_first(run.log.changed(), asyncio.shield(run.end))
        self._take(asked)

    async def _accepted(self, asked: _Asked, storing: asyncio.Future[None]) -> None:
        """Reply once the messages are stored."""
        reply = None
        try:
            await storing
            reply = Reply()
        except OwnershipLost:
            pass
        finally:
            asked.resolve(reply)
        await self._run.release_if_idle()

    def _is_elsewhere(self, child: RunState) -> bool:
        """Return whether a child works in another log: on another worker, or on a server."""
        is_remote = child.remote_seq or child.tickets or REMOTE_KEY in child.values
        return child.request.queue is not None or bool(is_remote) or child.run_id in self._run.home.backend.elsewhere

    async def _cancel(self, command: Cancel, stopping: Coroutine[Any, Any, object]) -> Reply:
        await stopping
        if command.tasks:
            await self._run.cancel_tasks()
        return Reply()

    async def _cancel_task(self, command: CancelTask) -> Reply:
        """Stop a background task, and store its end."""
        run = self._run
        cancel = run.log.holders.get(command.task_id)
        if cancel is None:
            return Reply(f"task {command.task_id!r} is not at work")
        await cancel("cancelled")
        if run.writer is not None:
            await run.writer.flush()
        return Reply()

    async def _grant(self, command: WidenGrant) -> Reply:
        """Grant a placed child more of the limits above it, as far as they allow."""
        log, child_id, wanted = self._run.log, command.run_id, command.wanted
        tree, dispatching = log.tree, log.dispatching
        known = tree.grants.get(child_id)
        parent = None if known is None else tree.runs.get(known.run_id)
        if known is None:
            return Reply(f"run {child_id!r} is not at work for this run")
        if parent is None:
            return Reply()
        more = grant(tree, parent, child_id, wanted, dispatching)
        if log.widen is not None and falls_short(more.limits, wanted):
            await log.widen(lambda: wanted_with_child(tree, child_id, wanted, dispatching))
            more = grant(tree, parent, child_id, wanted, dispatching)
        if more != known and child_id in tree.grants:
            log.append_private(Private(kind="commit", run_id=parent.run_id, grants={child_id: more}))
        return Reply(granted=more.limits)


async def _put(store: DurableStore, wish: Wish) -> None:
    with contextlib.suppress(RetinueError):
        await store.put_wish(wish)
