"""A model with fallbacks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from msgspec.structs import replace

from ..core.errors import ConfigurationError, ModelError
from ..core.model import Model, ModelChunk, ModelRequest, Retrying, TurnEnd
from .registry import resolve_model
from .resilience import close_model, make_retrying


class FallbackModel:
    """Calls the first model and, if it fails for any reason, the next one; raises the error of the last.

    A refusal in an answer, and an answer cut at its limit, do not count as failures: they were delivered and paid for.
    """

    def __init__(self, *models: Model | str) -> None:
        if len(models) < 2:
            raise ConfigurationError("FallbackModel needs at least two models: a first choice and a fallback")
        self._models: Sequence[Model] = [resolve_model(model, "FallbackModel") for model in models]
        self.name = self._models[0].name

    def __repr__(self) -> str:
        return f"<fallback {' → '.join(model.name for model in self._models)}>"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        for model, following in zip(self._models, (*self._models[1:], None), strict=True):
            chunks: Any = model.stream(request)
            said = False
            try:
                async for chunk in chunks:
                    if type(chunk) is TurnEnd:
                        chunk = chunk if chunk.model else replace(chunk, model=model.name)
                    elif type(chunk) is Retrying:
                        said = said and not chunk.restarts
                    else:
                        said = True
                    yield chunk
                return
            except ModelError as exc:
                if following is None:
                    raise
                yield make_retrying(exc, following.name, 0.0, said)
            finally:
                await close_model(chunks)

    async def aclose(self) -> None:
        for model in self._models:
            await close_model(model)
