"""Structured answers: what an agent's output type asks of the model, and how its text is read."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .codec import codec_for, to_json_text
from .errors import ConfigurationError

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
        """The typed answer in a text; ValueError says what is wrong with it."""
        if self.kind is str:
            return text
        fenced = _FENCED.search(text)
        try:
            value = msgspec.json.decode((fenced[1] if fenced else text).strip())
        except ValueError as exc:
            raise ValueError(f"it is not JSON: {exc}") from None
        try:
            return self._codec.decode(value)
        except (TypeError, ValueError) as exc:
            raise ValueError(str(exc)) from None

    def encode(self, value: Any) -> Any:
        return None if value is None else self._codec.encode(value)

    def decode(self, value: Any) -> Any:
        """Return the value that `encode` was given; ValueError or TypeError says why it does not fit."""
        return None if value is None else self._codec.decode(value)
