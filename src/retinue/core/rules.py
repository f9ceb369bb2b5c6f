"""Rules on tools and their arguments: a call is allowed, needs the consent of a human, or is denied."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, cast

from msgspec import Struct

from .content import to_json_text
from .errors import ConfigurationError
from .messages import ToolCall

Verdict = Literal["allow", "ask", "deny"]

_RULE = re.compile(r"([\w.*?\[\]-]+)(?:\((\w+)=(.*)\))?")


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


class Rules(Struct, frozen=True):
    """`deny` beats `ask` beats `allow`; what no rule names gets `default`."""

    deny: tuple[Rule, ...] = ()
    ask: tuple[Rule, ...] = ()
    allow: tuple[Rule, ...] = ()
    default: Verdict = "allow"

    def verdict(self, call: ToolCall, full: Mapping[str, Any]) -> Verdict:
        """Return the verdict on a call. `full` has its arguments as the tool gets them, with defaults."""
        if any(rule.fits(call, full) for rule in self.deny):
            return "deny"
        if any(rule.fits(call, full) for rule in self.ask):
            return "ask"
        if any(rule.fits(call, full, every_spelling=True) for rule in self.allow):
            return "allow"
        return self.default

    def hides(self, tool_name: str) -> bool:
        """Return whether no call of a tool can be allowed."""
        if any(rule.argument is None and fnmatchcase(tool_name, rule.tool) for rule in self.deny):
            return True
        return self.default == "deny" and not any(
            fnmatchcase(tool_name, rule.tool) for rule in (*self.ask, *self.allow)
        )


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
