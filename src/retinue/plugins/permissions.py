"""Permissions: rules on tools and their arguments that allow a call, ask a human, or deny it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

from ..core.content import to_json_text
from ..core.decisions import Decision
from ..core.errors import ConfigurationError, ToolError, as_tuple
from ..core.hooks import BeforeToolContext, InferenceContext, Registrar
from ..core.messages import ToolCall
from ..core.plugins import AddContextMessage, Block, ExcludeTools, Plugin, Suspend
from ..core.results import SuspendTicket
from ..core.rules import Rule, Rules, Verdict
from ..core.state import StateCommand
from ..core.tools import Tool

APPROVAL = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "args": {"type": "object"}, "message": {"type": "string"}},
    "required": ["approved"],
    "additionalProperties": False,
}


class Permissions(Plugin):
    """`deny` beats `ask` beats `allow`; what no rule names gets `default`.

    A tool that is denied whatever its arguments is not shown to the model. `ask` suspends the call: answer with
    `Decision.approve(args)` or `Decision.reject(message)`. New arguments are checked against the rules again.
    The rules hold for every agent below too; a child's own rules can only narrow them.
    """

    name = "permissions"
    inherited = True

    def __init__(
        self,
        *,
        allow: Iterable[str] = (),
        ask: Iterable[str] = (),
        deny: Iterable[str] = (),
        default: Verdict = "allow",
    ) -> None:
        if default not in get_args(Verdict):
            raise ConfigurationError(f"permissions: default is 'allow', 'ask' or 'deny', not {default!r}")
        self.rules = Rules(_parsed("deny", deny), _parsed("ask", ask), _parsed("allow", allow), default)

    def verdict(self, call: ToolCall, tool: Tool | None = None) -> Verdict:
        """Return the verdict on a call. The tool knows the defaults of the arguments that were omitted."""
        return self.rules.verdict(call, _completed(call, tool))

    def register(self, r: Registrar) -> None:
        r.hook("before_inference", self._hide, priority=10)
        r.hook("before_tool", self._judge, priority=10, rules=self.rules)

    def _hide(self, ctx: InferenceContext) -> StateCommand | None:
        hidden = tuple([offered.name for offered in ctx.request.tools if self.rules.hides(offered.name)])
        return StateCommand().schedule(ExcludeTools(hidden)) if hidden else None

    def _judge(self, ctx: BeforeToolContext) -> StateCommand | Block | Suspend | None:
        call, answer = ctx.call, answer_in(ctx.decision)
        verdict = self.verdict(call, ctx.tool)
        if verdict == "deny":
            return Block(f"{call.name} is not permitted with these arguments")
        if answer is not None:
            return judgement(call, answer)
        if verdict == "allow":
            return None
        text = f"May {ctx.agent.name} call {call.name}?"
        ticket = SuspendTicket(f"permission_{call.id}", f"tool:{call.name}", text, call.args, APPROVAL, editable=True)
        return Suspend(ticket)


def _parsed(name: str, rules: Iterable[str]) -> tuple[Rule, ...]:
    return tuple([Rule.parse(text) for text in as_tuple(rules, "Permissions", name)])


def answer_in(decision: Decision | None) -> dict[str, Any] | None:
    """Return the payload of a decision on an approval; None if there is none, or it is on another hook's ticket."""
    payload = None if decision is None else decision.payload
    return cast("dict[str, Any]", payload) if isinstance(payload, dict) and "approved" in payload else None


def judgement(call: ToolCall, answer: dict[str, Any]) -> StateCommand | Block | None:
    """Return what a human's answer does to a call; the model reads the message and the changed arguments."""
    if not answer["approved"]:
        return Block(answer.get("message") or "a human said no")
    said = [f"A human changed the arguments of {call.name} to {to_json_text(call.args)}."] if "args" in answer else []
    if answer.get("message"):
        said.append(f"A human said of the call of {call.name}: {answer['message']}")
    return StateCommand().schedule(AddContextMessage(" ".join(said))) if said else None


def _completed(call: ToolCall, tool: Tool | None) -> Mapping[str, Any]:
    try:
        return call.args if tool is None else tool.complete_args(call.args)
    except ToolError:
        return call.args  # the tool will refuse them too
