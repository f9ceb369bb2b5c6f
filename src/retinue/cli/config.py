"""The settings file of a server or a worker: `--config FILE`, in TOML.

[budgets]
"user/day" = { cost = 5.0 }
"runtime/hour" = { tokens = 20_000_000 }

[rates]
"openai:*" = { requests_per_minute = 500, tokens_per_minute = 200_000, parallel = 64 }
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, cast

from ..core.budgets import Budget, parse_name
from ..core.errors import ConfigurationError
from ..core.gate import Rate, check_rates
from ..runtime import Runtime


def apply_config(args: argparse.Namespace, runtime: Runtime) -> Runtime:
    """Give a runtime the settings of the file that the command line names, and return it."""
    path: str | None = args.config
    if path is None:
        return runtime
    for name, table in _read(path).items():
        if name not in _SECTIONS:
            known = ", ".join(f"[{one}]" for one in _SECTIONS)
            raise ConfigurationError(f"--config {path}: there is no section [{name}]: write {known}")
        if not isinstance(table, Mapping):
            raise ConfigurationError(f"--config {path}: {name} is a section: write [{name}]")
        try:
            _SECTIONS[name](runtime, cast("Mapping[str, Any]", table))
        except ConfigurationError as exc:
            raise ConfigurationError(f"--config {path}: [{name}]: {exc}") from None
    return runtime


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigurationError(f"--config {path}: {reason}") from None


def _use_budgets(runtime: Runtime, table: Mapping[str, Any]) -> None:
    """Add the budgets of a file; one that the program sets under the same name is replaced."""
    found: list[Budget] = []
    for name, given in table.items():
        per, window = parse_name(name)
        fields: dict[str, Any] = dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else {"": given}
        if odd := sorted(fields.keys() - {"cost", "tokens"}):
            raise ConfigurationError(f"{name}: {odd[0]!r} is not known: write {{ cost = 5.0, tokens = 1_000_000 }}")
        found.append(Budget(per=per, window=window, **fields))
    runtime.budgets.use(found)


def _use_rates(runtime: Runtime, table: Mapping[str, Any]) -> None:
    """Add the limits of accounts at providers; those that the program sets for the same models are replaced."""
    found: dict[str, Rate] = {}
    for pattern, given in table.items():
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f'{pattern!r} needs named limits: write "{pattern}" = {{ requests_per_minute = 500 }}'
            )
        fields = dict(cast("Mapping[str, Any]", given))
        if odd := [name for name in fields if name not in Rate.__struct_fields__]:
            known = ", ".join(Rate.__struct_fields__)
            raise ConfigurationError(f"{pattern!r} has no limit {odd[0]!r}; there are {known}")
        try:
            found[pattern] = Rate(**fields)
        except ConfigurationError as exc:
            raise ConfigurationError(f"{pattern!r}: {exc}") from None
    runtime.gates.use(check_rates(found))


_SECTIONS: dict[str, Callable[[Runtime, Mapping[str, Any]], None]] = {
    "budgets": _use_budgets,
    "rates": _use_rates,
}
