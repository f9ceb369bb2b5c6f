"""The budget of a tree of agents over A2A, as an extension of the protocol. Pure.

What the tree has left of its limits goes with the first message of a task; what the task has used is in its metadata, and in
that of each status in which it has ended or waits. Both are under the name of the extension.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from ..core.runs import Limits, Usage, bounded

BUDGET = "urn:retinue:a2a:budget:1"
EXTENSION = {"uri": BUDGET, "description": "Takes the limits of the caller's tree, and reports usage."}
_EXACT = 2**53 - 1
"""The largest whole number that is exact in protobuf, which has only floats."""
_USAGE = {re.sub("_(.)", lambda found: found[1].upper(), name): name for name in Usage.__struct_fields__}
"""The fields of a usage, by their names in A2A, which are in camel case."""


class _Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limits: Limits


def limits_json(limits: Limits) -> dict[str, Any]:
    """Return limits as the metadata of a message."""
    given = {name: value for name in limits.__struct_fields__ if (value := limits.get(name)) is not None}
    return {BUDGET: {"limits": {name: min(value, _EXACT) for name, value in given.items()}}}


def read_limits(metadata: Mapping[str, Any]) -> Limits | None:
    """Return the limits in the metadata of a message, None if it has none; ValueError if they are not valid."""
    if BUDGET not in metadata:
        return None
    try:
        return msgspec.convert(with_integers(metadata[BUDGET]), _Budget).limits
    except msgspec.ValidationError as exc:
        raise ValueError(f"the limits in the metadata of the message, under {BUDGET}: {exc}") from None


def usage_json(usage: Usage, steps: int) -> dict[str, Any]:
    """Return usage as the metadata of a task."""
    return {BUDGET: {"usage": {name: getattr(usage, own) for name, own in _USAGE.items()}, "steps": steps}}


def read_usage(metadata: Mapping[str, Any]) -> tuple[Usage, int] | None:
    """Return the usage and the steps in the metadata of a task; None if there are none that make sense."""
    given: Any = with_integers(metadata.get(BUDGET))
    try:
        known = {own: given["usage"][name] for name, own in _USAGE.items() if name in given["usage"]}
        used, steps = msgspec.convert(known, Usage), msgspec.convert(given.get("steps", 0), int)
    except (msgspec.ValidationError, TypeError, KeyError, AttributeError):
        return None
    is_as_said = all(getattr(used, name) == value for name, value in known.items()) and bounded(steps) == steps
    return (used, steps) if is_as_said else None


def with_integers(value: Any) -> Any:
    """Return a JSON value whose whole numbers are integers: protobuf has only floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    if isinstance(value, list):
        return [with_integers(one) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: with_integers(one) for name, one in cast("dict[str, Any]", value).items()}
    return value
