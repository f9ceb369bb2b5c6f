"""Consent: a person at the terminal is asked before an agent writes, edits or executes."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from ..core.errors import ConfigurationError
from ..core.functions import in_thread
from ..core.hooks import BeforeToolContext, Registrar
from ..core.plugins import Block
from ..plugins.permissions import Permissions, Verdict
from ..workspace.tools import READ_ONLY_TOOLS
from .text import clean, complain, count
from .view import View

READING = (*sorted(READ_ONLY_TOOLS), "agent_*", "task_*")
"""Calls that are never asked about: they change nothing, or start an agent that is asked about itself."""
_SHOWN = 4000
"""Characters of an argument that are shown; more of it is counted."""


class Consent(Permissions):
    """Asks inside the process, so that sub-agents and background tasks are asked about too. One question at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(allow=(*READING, *args.allow), default=_default(args))
        self.terminal = asyncio.Lock()
        """Held while a question is on the terminal: nothing else is shown then."""
        self.view: View | None = None
        self._always: set[str] = set()
        self._unasked: dict[str, int] = {}
        """The number of refused calls by tool, where nobody could be asked."""

    def register(self, r: Registrar) -> None:
        r.hook("before_inference", self._hide, priority=10)
        r.hook("before_tool", self._ask, priority=10)

    async def _ask(self, ctx: BeforeToolContext) -> Block | None:
        call, verdict = ctx.call, self.verdict(ctx.call, ctx.tool)
        if verdict == "allow":
            return None
        if verdict == "deny":
            return Block(f"{call.name} is not permitted with these arguments")
        if not sys.stdin.isatty():
            self._unasked[call.name] = self._unasked.get(call.name, 0) + 1
            return Block(f"{call.name} needs the consent of the user, who cannot be asked: do not try again")
        async with self.terminal:
            if call.name in self._always:
                return None
            answer = await self._question(ctx.agent.name, call.name, call.args)
        if answer in ("a", "all"):
            self._always.add(call.name)
        return None if answer in ("y", "yes", "a", "all") else Block("the user said no")

    async def _question(self, agent: str, tool: str, args: dict[str, Any]) -> str:
        if self.view is not None:
            self.view.pause()
        lines = [f"{clean(agent)} wants to call {clean(tool)}:", *_argument_lines(args)]
        print("\n".join(lines), file=sys.stderr)
        _drop_typed_ahead()
        print(f"Allow it? [y]es, [n]o, [a]ll calls of {clean(tool)}: ", end="", file=sys.stderr, flush=True)
        try:
            # os.read holds no lock of sys.stdin, so a question that nobody answers does not hinder the exit.
            given = await in_thread(partial(os.read, sys.stdin.fileno(), 1024), {})
        finally:
            if self.view is not None:
                self.view.proceed()
        return given.decode(errors="replace").strip().lower()

    def report(self) -> bool:
        """Name the options that would have allowed the calls nobody was asked about; return whether there were any."""
        if not self._unasked:
            return False
        options = " ".join([f"--allow {tool}" for tool in self._unasked])
        refused = count(sum(self._unasked.values()), "call")
        self._unasked.clear()
        complain(f"{refused} refused, as there is no terminal to ask at: allow them with {options}, or all with --yes")
        return True


def _drop_typed_ahead() -> None:
    """Drop what was typed, or pasted, before a question: it is no answer to it."""
    with suppress(ImportError, OSError):
        import termios  # not on Windows

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


def make_permissions(args: argparse.Namespace) -> Permissions:
    """Return what the same options mean without a terminal: a call that needs consent waits for a decision."""
    return Permissions(allow=(*READING, *args.allow), default=_default(args))


def _default(args: argparse.Namespace) -> Verdict:
    if args.read_only and (args.yes or args.allow or getattr(args, "shell", False)):
        raise ConfigurationError("--read-only allows nothing else: leave --yes, --allow and --shell out")
    return "deny" if args.read_only else "allow" if args.yes else "ask"


def _argument_lines(args: dict[str, Any]) -> list[str]:
    """Return the arguments, indented on every line, so that none looks like a question of ours."""
    lines: list[str] = []
    for name, value in args.items():
        text = value if isinstance(value, str) else repr(value)
        more = f"\n[{count(len(text) - _SHOWN, 'more character')}]" if len(text) > _SHOWN else ""
        first, *others = clean(text[:_SHOWN] + more).split("\n")
        lines += [f"  {clean(name)}: {first}", *[f"  | {line}" for line in others]]
    return lines
