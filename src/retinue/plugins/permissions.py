"""Permissions: rules on tools and their arguments that allow a call, ask a human, or deny it."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, cast

from msgspec import Struct

from ..core.content import to_json_text
from ..core.decisions import Decision
from ..core.errors import ConfigurationError, ToolError, as_tuple
from ..core.hooks import BeforeToolContext, InferenceContext, Registrar
from ..core.messages import ToolCall
from ..core.plugins import AddContextMessage, Block, ExcludeTools, Plugin, Suspend
from ..core.results import SuspendTicket
from ..core.state import StateCommand
from ..core.tools import Tool

Verdict = Literal["allow", "ask", "deny"]

_STRICTNESS: dict[Verdict, int] = {"allow": 0, "ask": 1, "deny": 2}
_RULE = re.compile(r"([\w.*?\[\]-]+)(?:\((\w+)=(.*)\))?")
_APPROVAL = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "args": {"type": "object"}, "message": {"type": "string"}},
    "required": ["approved"],
    "additionalProperties": False,
}


class Rule(Struct, frozen=True):
    """`tool` or `tool(argument=pattern)`, both with the wildcards * and ?. Values are JSON or Python: true, True, 1e3."""

    tool: str
    argument: str | None = None
    pattern: str = "*"

    @classmethod
    def parse(cls, text: str) -> Rule:
        match = _RULE.fullmatch(text.strip())
        if match is None:
            raise ConfigurationError(f"not a permission rule: {text!r}; write tool or tool(argument=pattern)")
        return cls(match[1], match[2], match[3] if match[2] else "*")

    def fits(self, call: ToolCall, full: Mapping[str, Any], *, every_spelling: bool = False) -> bool:
        """Return whether the rule matches a call as written or as the tool gets it (`full`), or both if all must match."""
        if not fnmatchcase(call.name, self.tool):
            return False
        if self.argument is None:
            return True
        values = [args[self.argument] for args in (call.args, full) if self.argument in args]
        fitting = [fits for value in values for fits in _fits(value, self.pattern)]
        return bool(fitting) and (all(fitting) if every_spelling else any(fitting))


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
        if default not in _STRICTNESS:
            raise ConfigurationError(f"permissions: default is 'allow', 'ask' or 'deny', not {default!r}")
        allow, ask, deny = (
            as_tuple(rules, "Permissions", name) for name, rules in (("allow", allow), ("ask", ask), ("deny", deny))
        )
        rules: dict[Verdict, Iterable[str]] = {"deny": deny, "ask": ask, "allow": allow}
        self._rules: dict[Verdict, list[Rule]] = {
            verdict: [Rule.parse(text) for text in texts] for verdict, texts in rules.items()
        }
        self._default: Verdict = default
        self._outer: Permissions | None = None

    def within(self, outer: Permissions) -> Permissions:
        """These rules under those of a parent: whatever either denies or asks for is denied or asked for."""
        made = Permissions(default=self._default)
        made._rules, made._outer = self._rules, outer if self._outer is None else self._outer.within(outer)
        return made

    def verdict(self, call: ToolCall, tool: Tool | None = None) -> Verdict:
        """Return the verdict on a call. The tool knows the defaults of the arguments that were omitted."""
        full = _completed(call, tool)
        fitting: list[Verdict] = [
            verdict
            for verdict, rules in self._rules.items()
            if any(rule.fits(call, full, every_spelling=verdict == "allow") for rule in rules)
        ]
        own: Verdict = fitting[0] if fitting else self._default
        if self._outer is None:
            return own
        outer = self._outer.verdict(call, tool)
        return own if _STRICTNESS[own] > _STRICTNESS[outer] else outer

    def hides(self, tool_name: str) -> bool:
        """Return whether no call of a tool can be allowed."""
        if any(rule.argument is None and fnmatchcase(tool_name, rule.tool) for rule in self._rules["deny"]):
            return True
        named = any(fnmatchcase(tool_name, rule.tool) for rule in (*self._rules["ask"], *self._rules["allow"]))
        if self._default == "deny" and not named:
            return True
        return self._outer is not None and self._outer.hides(tool_name)

    def register(self, r: Registrar) -> None:
        r.hook("before_inference", self._hide, priority=10)
        r.hook("before_tool", self._judge, priority=10)

    def _hide(self, ctx: InferenceContext) -> StateCommand | None:
        hidden = tuple([offered.name for offered in ctx.request.tools if self.hides(offered.name)])
        return StateCommand().schedule(ExcludeTools(hidden)) if hidden else None

    def _judge(self, ctx: BeforeToolContext) -> StateCommand | Block | Suspend | None:
        call, answer = ctx.call, _answer(ctx.decision)
        verdict = self.verdict(call, ctx.tool)
        if verdict == "deny":
            return Block(f"{call.name} is not permitted with these arguments")
        if answer is not None:
            return _judgement(call, answer)
        if verdict == "allow":
            return None
        text = f"May {ctx.agent.name} call {call.name}?"
        ticket = SuspendTicket(f"permission_{call.id}", f"tool:{call.name}", text, call.args, _APPROVAL, editable=True)
        return Suspend(ticket)


def _answer(decision: Decision | None) -> dict[str, Any] | None:
    """Return the payload of a decision on an approval; None if there is none, or it is on another hook's ticket."""
    payload = None if decision is None else decision.payload
    return cast("dict[str, Any]", payload) if isinstance(payload, dict) and "approved" in payload else None


def _judgement(call: ToolCall, answer: dict[str, Any]) -> StateCommand | Block | None:
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


def _fits(value: Any, pattern: str) -> list[bool]:
    """Return whether a pattern matches a value; for text also as the path it comes to: `./a` and `b/../a` are `a`."""
    if isinstance(value, str):
        path = posixpath.normpath(value.replace("\\", "/")).lstrip("/")
        return [fnmatchcase(text, pattern) for text in (value, path)]
    return [any(fnmatchcase(text, pattern) for text in _texts(value)) or _is_same(value, _parsed(pattern))]


def _texts(value: Any) -> set[str]:
    """Return the ways to write a value: as JSON, with and without spaces, and as Python."""
    if isinstance(value, float) and value.is_integer():
        return {str(value), str(int(value))}
    return {to_json_text(value), json.dumps(value, ensure_ascii=False), str(value)}


@cache
def _parsed(pattern: str) -> Any:
    """Return the value that a pattern writes, as JSON or Python; the pattern itself if it is neither."""
    try:
        return json.loads(pattern)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(pattern)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return pattern


def _is_same(one: Any, other: Any) -> bool:
    """Compare as JSON does: 1 is 1.0, and True is no number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        left, right = cast("dict[Any, Any]", one), cast("dict[Any, Any]", other)
        return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
    if isinstance(one, list) and isinstance(other, list):
        first, second = cast("list[Any]", one), cast("list[Any]", other)
        return len(first) == len(second) and all(map(_is_same, first, second))
    return one == other
