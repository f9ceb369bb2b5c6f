"""`retinue chat`: a conversation. On a terminal it has a line editor below the agents at work; else it reads lines."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from ..core.concurrency import wait_for_first
from ..core.errors import ConfigurationError, ThreadBusy
from ..core.functions import in_thread
from ..core.runs import unique
from .interrupt import Interrupt, converse, is_drawn, make_view
from .parsers import COMPLETED, FAILED, INTERRUPTED
from .session import Session, open_session
from .text import complain

if TYPE_CHECKING:
    from .view import View

_LEAVE = "/exit"
_PROMPT = "> "


async def chat(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Answer messages until there are no more."""
    async with open_session(args) as session:
        thread_id = await _thread(args, session)
        if is_drawn(args):
            from .talk import Talk

            thread_id = await Talk(session, args, interrupt, thread_id).run()
            code = interrupt.code if interrupt.happened and interrupt.code != INTERRUPTED else COMPLETED
        else:
            code = await _read_lines(session, args, interrupt, thread_id)
        if session.is_stored and not (interrupt.happened and not sys.stdin.isatty()):
            where = f" --server {args.server}" if args.server is not None else session.database
            complain(f"continue with: retinue chat --thread {thread_id}{where}")
    return code


async def _thread(args: argparse.Namespace, session: Session) -> str:
    """Return the id of the conversation: a given one, the last one, or a new one."""
    if not args.goes_on:
        return f"thread_{unique()}" if args.thread is None else args.thread
    if args.thread is not None:
        raise ConfigurationError("--continue goes on with the last conversation: leave --thread out")
    if not session.is_stored:
        raise ConfigurationError("--continue needs the database that kept the conversation: give --db URL")
    known = await session.threads()
    if not known:
        raise ConfigurationError("there is no conversation to go on with: leave --continue out")
    return known[0].thread_id


async def _read_lines(session: Session, args: argparse.Namespace, interrupt: Interrupt, thread_id: str) -> int:
    """Answer line by line. On a terminal Ctrl-C stops the present run only."""
    is_terminal, code = sys.stdin.isatty(), COMPLETED
    lines = Lines(is_terminal)
    if is_terminal:
        complain(f"Ctrl-C stops an answer, Ctrl-D or {_LEAVE} leaves")
    async with make_view(args) as view:
        while (line := await lines.read(interrupt)) is not None and line.strip() != _LEAVE:
            if line.strip():
                code = await _answer(session, line, thread_id, view, interrupt) or code
            if interrupt.happened:
                if not is_terminal or interrupt.code != INTERRUPTED:
                    return interrupt.code
                interrupt.forget()  # only one that was seen: another may come at any time
            interrupt.lost_tasks = 0
    return COMPLETED if is_terminal else code


async def _answer(session: Session, line: str, thread_id: str, view: View, interrupt: Interrupt) -> int:
    try:
        run = session.ask(line, thread_id)
        result = await converse(run, session.answer, view, interrupt, session.consent)
    except ThreadBusy as exc:
        complain(str(exc))
        return FAILED
    return session.exit_code(result, interrupt)


class Lines:
    """The lines of standard input."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._left = b""
        self._reading: asyncio.Task[bytes] | None = None
        """A read that a signal has not ended: the next line comes from it."""

    async def read(self, interrupt: Interrupt) -> str | None:
        """Ask for a line and return it, "" at an interrupt, or None at the end of the input."""
        if self._is_terminal:
            print(_PROMPT, end="", file=sys.stderr, flush=True)
        while b"\n" not in self._left:
            # os.read holds no lock of sys.stdin, so a read that never ends does not hinder the exit.
            if self._reading is None:
                self._reading = asyncio.create_task(in_thread(partial(os.read, sys.stdin.fileno(), 65_536), {}))
            await wait_for_first(asyncio.shield(self._reading), interrupt.wait())
            if not self._reading.done():
                print(file=sys.stderr)
                return ""
            piece, self._reading = self._reading.result(), None
            if not piece and not self._left:
                if self._is_terminal:
                    print(file=sys.stderr)
                return None
            self._left += piece or b"\n"
        line, _, self._left = self._left.partition(b"\n")
        return line.decode(errors="replace")
