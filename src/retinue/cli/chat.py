"""`retinue chat`: a conversation about a folder, with one run for each line."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial

from ..core.concurrency import wait_for_first
from ..core.errors import ThreadBusy
from ..core.functions import in_thread
from ..core.runs import unique
from .interrupt import Interrupt, make_view, watch
from .parsers import COMPLETED, FAILED, INTERRUPTED
from .run import open_folder
from .text import complain

_LEAVE = "/exit"
_PROMPT = "> "


async def chat(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Answer line by line until there are no more. On a terminal Ctrl-C stops the present run only."""
    is_terminal, code = sys.stdin.isatty(), COMPLETED
    thread_id = f"thread_{unique()}" if args.thread is None else args.thread
    lines = Lines(is_terminal)
    async with open_folder(args) as folder:
        if is_terminal:
            complain(f"Ctrl-C stops an answer, Ctrl-D or {_LEAVE} leaves")
        with make_view(as_json=args.json) as view:
            while (line := await lines.read(interrupt)) is not None and line.strip() != _LEAVE:
                if line.strip():
                    try:
                        result = await watch(folder.ask(line, thread_id), view, interrupt, consent=folder.consent)
                        code = folder.exit_code(result, interrupt) or code
                    except ThreadBusy as exc:
                        complain(str(exc))
                        code = FAILED
                if interrupt.happened:
                    if not is_terminal or interrupt.code != INTERRUPTED:
                        return interrupt.code
                    interrupt.forget()  # only one that was seen: another may come at any time
                interrupt.lost_tasks = 0
    if folder.is_stored:
        complain(f"continue with: retinue chat --thread {thread_id}{folder.database}")
    return COMPLETED if is_terminal else code


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
            # As in `Consent`: os.read holds no lock of sys.stdin, so a read that never ends does not hinder the exit.
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
