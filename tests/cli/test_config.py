"""Limits of accounts in the file of `--config`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from retinue import ConfigurationError, Rate, Runtime
from retinue.cli.config import apply_config
from tests.models.gated import Provider


async def test_limits_of_accounts_are_read(tmp_path: Path) -> None:
    file = tmp_path / "retinue.toml"
    file.write_text(
        '[rates]\n"openai:*" = { requests_per_minute = 500, parallel = 8 }\n[rates."a:b"]\ntokens_per_minute = 1e6\n'
    )
    runtime = apply_config(Namespace(config=str(file)), Runtime(rates={"openai:*": Rate(parallel=1)}))
    given = runtime.gates.gate_of(Provider().account).limits.given
    assert given == Rate(requests_per_minute=500, parallel=8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"openai:*" = 5', "needs named limits"),
        ('"openai:*" = { rpm = 5 }', "has no limit 'rpm'"),
        ('"openai:*" = { parallel = 0 }', "Rate.parallel is a number above 0"),
        ('"openai:*" = {}', "limits nothing"),
        ("openai = { parallel = 1 }", "is not of the form"),
    ],
)
def test_a_mistake_says_what_and_where(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "retinue.toml"
    file.write_text(f"[rates]\n{text}\n")
    with pytest.raises(ConfigurationError, match=problem) as caught:
        apply_config(Namespace(config=str(file)), Runtime())
    assert f"--config {file}" in str(caught.value)
