"""The model of a run that calls none: one that is only cancelled, or that is a single tool call."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ..core.errors import UnknownAgent
from ..core.model import ModelChunk, ModelRequest


class NoModel:
    """Raises if it is called."""

    name = "none"

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        raise UnknownAgent("of a run without a model")
