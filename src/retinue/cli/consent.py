"""Consent: a person at the terminal is asked before an agent writes, edits or executes."""

from __future__ import annotations

import argparse
import os

from ..core.errors import ConfigurationError
from ..core.hooks import BeforeToolContext, Registrar
from ..core.plugins import Block, Suspend
from ..core.results import SuspendTicket
from ..core.state import StateCommand
from ..plugins.permissions import APPROVAL, Permissions, Verdict, answer_in, judgement
from ..workspace.tools import READ_ONLY_TOOLS
from .questions import Answer, Question, last_sentence
from .text import complain, count
from .view import View

READING = (*sorted(READ_ONLY_TOOLS), "agent_*", "task_*")
"""Calls that are never asked about: they change nothing, or start an agent that is asked about itself."""
_MOST_BYTES = 1 << 20
"""The largest file whose change is shown line by line."""


class Consent(Permissions):
    """Asks inside the process, so that sub-agents and background tasks are asked about too, while the others go on."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(allow=(*READING, *args.allow), default=_default(args))
        self.view: View | None = None
        self.rules_given: list[str] = []
        """The rules that a person has set by an answer."""
        self._always: list[Permissions] = []
        self._open: list[tuple[BeforeToolContext, Question]] = []
        self._unasked: dict[str, int] = {}
        """The number of refused calls by tool, where nobody could be asked."""
        self._folder = args.workspace or "."

    def register(self, r: Registrar) -> None:
        r.hook("before_inference", self._hide, priority=10)
        r.hook("before_tool", self._ask, priority=10)

    def allow(self, rule: str) -> None:
        """Ask no more about the calls of a rule, nor about those that wait now."""
        self._always.append(Permissions(allow=(rule,), default="ask"))
        self.rules_given.append(rule)
        for ctx, question in list(self._open):
            if self._is_allowed(ctx) and not question.answered.done():
                question.answered.set_result(Answer(True))

    def _is_allowed(self, ctx: BeforeToolContext) -> bool:
        return any(rule.verdict(ctx.call, ctx.tool) == "allow" for rule in self._always)

    async def _ask(self, ctx: BeforeToolContext) -> StateCommand | Block | Suspend | None:
        call, verdict = ctx.call, self.verdict(ctx.call, ctx.tool)
        if verdict == "deny":
            return Block(f"{call.name} is not permitted with these arguments")
        if (answered := answer_in(ctx.decision)) is not None:
            return judgement(call, answered)
        if verdict == "allow" or self._is_allowed(ctx):
            return None
        if self.view is None or not self.view.asks:
            self._unasked[call.name] = self._unasked.get(call.name, 0) + 1
            return Block(f"{call.name} needs the consent of the user, who cannot be asked: do not try again")
        said = next((message.text for message in reversed(ctx.messages) if message.role == "assistant"), "")
        question = Question(
            ctx.run.run_id, (ctx.agent.name,), call.name, call.args, said=last_sentence(said), read=self._read
        )
        self._open.append((ctx, question))
        try:
            answer = await self.view.ask(question)
        finally:
            self._open.remove((ctx, question))
        return self._carry_out(ctx, question, answer)

    def _carry_out(self, ctx: BeforeToolContext, question: Question, answer: Answer) -> Block | Suspend | None:
        call = ctx.call
        if not answer.approved:
            return Block(f"the user said no: {answer.message}" if answer.message else "the user said no")
        if answer.always:
            self.allow(question.rule)
        if answer.args is None or self.view is None:
            return None
        # Other arguments come with a decision on the waiting call: they are checked like those of a model.
        self.view.decide(ctx.run.run_id, call.id, answer)
        text = f"May {ctx.agent.name} call {call.name}?"
        return Suspend(
            SuspendTicket(f"permission_{call.id}", f"tool:{call.name}", text, call.args, APPROVAL, editable=True)
        )

    def _read(self, path: str) -> str | None:
        """Return the text of a file of the folder, for what a change would do to it."""
        try:
            place = os.path.join(self._folder, path)
            inside = os.path.realpath(place).startswith(os.path.realpath(self._folder) + os.sep)
            if not inside or os.path.getsize(place) > _MOST_BYTES:
                return None
            with open(place, encoding="utf-8") as file:
                return file.read()
        except (OSError, ValueError):
            return None

    def report(self) -> bool:
        """Name the options that would have allowed the calls nobody was asked about; return whether there were any."""
        if not self._unasked:
            return False
        options = " ".join([f"--allow {tool}" for tool in self._unasked])
        refused = count(sum(self._unasked.values()), "call")
        self._unasked.clear()
        complain(f"{refused} refused, as there is no terminal to ask at: allow them with {options}, or all with --yes")
        return True


def make_permissions(args: argparse.Namespace) -> Permissions:
    """Return what the same options mean without a terminal: a call that needs consent waits for a decision."""
    return Permissions(allow=(*READING, *args.allow), default=_default(args))


def _default(args: argparse.Namespace) -> Verdict:
    if args.read_only and (args.yes or args.allow or getattr(args, "shell", False)):
        raise ConfigurationError("--read-only allows nothing else: leave --yes, --allow and --shell out")
    return "deny" if args.read_only else "allow" if args.yes else "ask"
