"""Structured answers: the type that an agent has for its output, and what is wrong with an answer."""

from __future__ import annotations

import re
from reprlib import repr as shown
from typing import Any

import msgspec

from .content import parse_json, to_json_text
from .errors import ConfigurationError
from .schema import codec_for, where_in

_MOST_ERRORS, _MOST_READ = 20, 2_000
"""The errors of an answer that are shown, and those that are read for it."""


def _shortened(exc: Exception) -> str:
    """Return what is wrong with a value; of the many errors that pydantic may find, the first ones."""
    error: Any = exc
    count: int = error.error_count() if hasattr(exc, "error_count") else 0
    if count <= _MOST_ERRORS:
        return str(exc)
    if count > _MOST_READ:
        return f"it has {count:,} errors"
    found = error.errors(include_url=False, include_context=False)[:_MOST_ERRORS]
    return "\n".join(
        [*[f"{where_in(one['loc'])}{one['msg']}" for one in found], f"and {count - _MOST_ERRORS:,} more errors"]
    )


def _not_json(given: str, exc: msgspec.DecodeError) -> str:
    """Return why a text is not JSON. The decoder says of a text such as `no` only that it is truncated."""
    if "truncated" not in str(exc):
        return f"it is not JSON: {exc}"
    came = shown(given) if given else "empty"
    return f"it is not JSON: the answer is {came}, expected is JSON that fits the schema"


OUTPUT_TRIES = 3
"""The number of times that the model reads what is wrong with its answer before the run fails."""

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.S)


class OutputFormat:
    """A type as the shape of an answer."""

    def __init__(self, kind: Any, owner: str) -> None:
        self.kind = kind
        self._codec = codec_for(kind)
        try:
            self.schema = self._codec.schema()
        except (TypeError, ValueError, NameError) as exc:
            raise ConfigurationError(f"{owner}: output type {kind!r} has no JSON Schema: {exc}") from exc

    @property
    def instructions(self) -> str:
        """The instructions for the model."""
        return f"Give your final answer as JSON only, fitting this JSON Schema:\n{to_json_text(self.schema)}"

    def read(self, text: str) -> Any:
        """Return the typed answer in a text; ValueError says what is wrong with it."""
        if self.kind is str:
            return text
        fenced = _FENCED.search(text)
        given = (fenced[1] if fenced else text).strip()
        try:
            value = parse_json(given)
        except msgspec.DecodeError as exc:
            raise ValueError(_not_json(given, exc)) from None
        try:
            return self._codec.decode(value)
        except (TypeError, ValueError) as exc:
            raise ValueError(_shortened(exc)) from None

    def encode(self, value: Any) -> Any:
        return None if value is None else self._codec.encode(value)

    def decode(self, value: Any) -> Any:
        """Return the value that `encode` was given; ValueError or TypeError says why it does not fit."""
        return None if value is None else self._codec.decode(value)
