"""Errors of values that do not have the shape that a request needs: what is wrong, and what may be written there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec.inspect as shapes

_ID = "an id without white space and `/`, other than `.` and `..`"


def explain(problem: str, kind: Any) -> str:
    """Return an error of msgspec with the fields or values that are allowed at its place, and the rule of ids in words."""
    problem = re.sub(r"`str` matching regex '.*'(?= - at |$)", lambda _: _ID, problem)
    if not problem.startswith(("Object contains unknown field", "Invalid enum value")):
        return problem
    steps = re.findall(r"\.(\w+)|(\[)", problem.partition(" - at `$")[2])
    allowed = dict.fromkeys(name for found in _at(shapes.type_info(kind), steps) for name in _names_of(found))
    return f"{problem}; known here: {', '.join(allowed)}" if allowed else problem


def _at(kind: shapes.Type, steps: list[tuple[str, str]]) -> Iterator[shapes.Type]:
    """Yield the types of the values at a place."""
    if isinstance(kind, shapes.Metadata):
        kind = kind.type
    if isinstance(kind, shapes.UnionType):
        for one in kind.types:
            yield from _at(one, steps)
    elif not steps:
        yield kind
    elif steps[0][1]:
        if isinstance(kind, shapes.DictType):
            yield from _at(kind.value_type, steps[1:])
        elif isinstance(kind, shapes.CollectionType):
            yield from _at(kind.item_type, steps[1:])
    elif isinstance(kind, shapes.StructType | shapes.DataclassType | shapes.TypedDictType):
        for field in kind.fields:
            if field.encode_name == steps[0][0]:
                yield from _at(field.type, steps[1:])


def _names_of(kind: shapes.Type) -> list[str]:
    """Return the fields of an object, or the values of an enumeration."""
    if isinstance(kind, shapes.StructType | shapes.DataclassType | shapes.TypedDictType):
        return sorted(field.encode_name for field in kind.fields)
    if isinstance(kind, shapes.EnumType):
        return [str(one.value) for one in kind.cls]
    return [str(value) for value in kind.values] if isinstance(kind, shapes.LiteralType) else []
