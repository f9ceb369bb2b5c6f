"""`retinue budgets`, and the settings file of a server."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Budget, ConfigurationError, Runtime
from retinue.cli.config import apply_config

from .conftest import Cli


def test_the_command_line_sets_lists_and_resets(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    cli("budgets", "set", "user/day", "--cost", "5", "--tokens", "1000", "--db", url)
    cli("budgets", "set", "user/day", "--cost", "0", "--of", "ann", "--db", url)
    found = json.loads(cli("budgets", "list", "--json", "--db", url).out)
    assert [(one["budget"], one["key"], one["cost"], one["tokens"]) for one in found] == [
        ("user/day", None, 5.0, 1000), ("user/day", "ann", 0.0, None)
    ]  # fmt: skip
    assert "each user" in cli("budgets", "list", "--db", url).out
    assert cli("budgets", "reset", "user/day", "--db", url).out == "user/day: 0 accounts reset\n"
    cli("budgets", "set", "user/day", "--unset", "--db", url)
    assert [one["key"] for one in json.loads(cli("budgets", "list", "--json", "--db", url).out)] == ["ann"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[budget]", r"there is no section \[budget\]: write \[budgets\]"),
        ("budgets = 5", r"budgets is a section: write \[budgets\]"),
        ('[budgets]\n"user/year" = { cost = 1 }', "'user/year' is no budget: write"),
        ('[budgets]\n"user/day" = 5', "user/day: '' is not known: write"),
        ('[budgets]\n"user/day" = { dollars = 5 }', "user/day: 'dollars' is not known: write"),
        ('[budgets]\n"user/day" = { cost = "5" }', "Budget.cost is a number of dollars"),
        ('[budgets]\n"user/day" = {}', "the budget user/day limits nothing"),
        ("[budgets", "Expected"),
    ],
)
def test_mistakes_in_a_settings_file_are_named(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        apply_config(Namespace(config=str(file)), Runtime())
    assert str(file) in str(caught.value)


async def test_a_settings_file_replaces_what_the_program_sets(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[budgets]\n"user/day" = { cost = 5.0 }\n"runtime/hour" = { tokens = 2_000 }\n')
    given = [Budget(per="user", window="day", cost=1.0), Budget(per="agent", window="day", cost=1.0)]
    runtime = Runtime([Agent("a", "offline:rules")], budgets=given)
    apply_config(Namespace(config=str(file)), runtime)
    found: dict[str, Any] = {one.budget: (one.cost, one.tokens) for one in await runtime.budgets.list()}
    assert found == {"agent/day": (1.0, None), "runtime/hour": (None, 2000), "user/day": (5.0, None)}
