"""Rules compare values, not spellings: no way of writing an argument gets around one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Permissions, Runtime, Tool, ToolDescriptor, tool
from retinue.core.errors import ConfigurationError
from retinue.messages import ToolCall
from retinue.testing import ScriptedModel, call, say


class Level(Enum):
    LOW = "low"
    HIGH = "high"


@dataclass
class Target:
    host: str
    port: int = 22


@tool
def pay(amount: int = 1000, flag: bool = True, note: str | None = None) -> str:
    """Pay."""
    return "paid"


@tool
def weigh(grams: float = 1.5) -> str:
    """Weigh."""
    return "weighed"


@tool
def connect(target: Target, level: Level = Level.HIGH, tags: list[str] = ["a"], home: Path = Path("x/y")) -> str:  # noqa: B006
    """Connect."""
    return "connected"


class Pay(Tool):
    descriptor = ToolDescriptor(
        "pay", "pay", "Pay.", {"type": "object", "properties": {"amount": {"type": "integer", "default": 1000}}}
    )

    async def execute(self, args: dict[str, Any], ctx: Any) -> str:
        return "paid"


DENIED = [
    (pay, "pay(amount=1000)", '{"amount": 1000}'),
    (pay, "pay(amount=1000)", '{"amount": 1000.0}'),
    (pay, "pay(amount=1000)", '{"amount": 1e3}'),
    (pay, "pay(amount=1000)", '{"amount": 10.0E+2}'),
    (pay, "pay(amount=1000)", "{}"),
    (pay, "pay(amount=1000.0)", '{"amount": 1000}'),
    (pay, "pay(amount=1e3)", "{}"),
    (pay, "pay(amount=1*)", '{"amount": 1e3}'),
    (pay, "pay(flag=true)", '{"flag": true}'),
    (pay, "pay(flag=True)", '{"flag": true}'),
    (pay, "pay(flag=true)", "{}"),
    (pay, "pay(flag=[Tt]rue)", "{}"),
    (pay, "pay(note=null)", "{}"),
    (pay, "pay(note=None)", '{"note": null}'),
    (weigh, "weigh(grams=1.50)", "{}"),
    (connect, "connect(level=high)", '{"target": {"host": "h"}}'),
    (connect, 'connect(tags=["a"])', '{"target": {"host": "h"}}'),
    (connect, "connect(tags=['a'])", '{"target": {"host": "h"}, "tags": ["a"]}'),
    (connect, "connect(home=x/y)", '{"target": {"host": "h"}}'),
    (connect, 'connect(target={"host": "h", "port": 22})', '{"target": {"host": "h"}}'),
    (connect, 'connect(target={"port": 22.0, "host": "h"})', '{"target": {"port": 22, "host": "h"}}'),
    (Pay(), "pay(amount=1000)", "{}"),
    (Pay(), "pay(amount=1000)", '{"amount": 1e3}'),
]


@pytest.mark.parametrize(("offered", "rule", "arguments"), DENIED, ids=[f"{r} {a}" for _, r, a in DENIED])
async def test_a_denied_value_is_denied_however_it_is_written(offered: Tool, rule: str, arguments: str) -> None:
    model = ScriptedModel([call(offered.name, arguments), say("done")])
    result = await Runtime([Agent("a", model, "", [offered], [Permissions(deny=[rule])])]).run("a", "go")
    told = [message.text for message in result.messages if message.role == "tool"]
    assert told == [f"blocked: {offered.name} is not permitted with these arguments"]


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        ("pay(amount=1000)", {"amount": 1001}),
        ("pay(amount=1)", {"amount": 1000}),
        ("pay(flag=1)", {"flag": True}),
        ("pay(flag=true)", {"flag": False}),
        ("pay(note=null)", {"note": "x"}),
    ],
)
def test_other_values_are_not_denied(rule: str, arguments: dict[str, Any]) -> None:
    assert Permissions(deny=[rule]).verdict(ToolCall("c", "pay", arguments), pay) == "allow"


@pytest.mark.parametrize("amount", [5, 5.0])
def test_an_allowed_value_is_allowed_however_it_is_written(amount: float) -> None:
    rules = Permissions(allow=["pay(amount=5)"], default="deny")
    assert rules.verdict(ToolCall("c", "pay", {"amount": amount}), pay) == "allow"
    assert rules.verdict(ToolCall("c", "pay", {}), pay) == "deny"


def test_invalid_arguments_are_judged_as_written() -> None:
    rules = Permissions(deny=["connect(level=low)"])
    assert rules.verdict(ToolCall("c", "connect", {"target": 3, "level": "low"}), connect) == "deny"


def test_a_rule_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a permission rule"):
        Permissions(deny=["pay(amount)"])
