"""A model with fallbacks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from math import isfinite
from typing import Any

from msgspec.structs import replace

from ..core.errors import ConfigurationError, ModelError
from ..core.gate import Caller
from ..core.model import Model, ModelChunk, ModelRequest, Retrying, TurnEnd
from .gates import AccountGates, Alone
from .profiles import profile
from .registry import resolve_model
from .resilience import close_model, make_retrying


class FallbackModel:
    """Calls the first model and, if it fails for any reason, the next one; raises the error of the last.

    A model whose request waits at the gate of its account for more than `after` seconds, or is expected to, counts as
    failed; the last model is waited for. A refusal in an answer, and an answer cut at its limit, do not count as failures:
    they were delivered and paid for.
    """

    def __init__(self, *models: Model | str, after: float = 10.0) -> None:
        if len(models) < 2:
            raise ConfigurationError("FallbackModel needs at least two models: a first choice and a fallback")
        if not (isfinite(after) and after >= 0):
            raise ConfigurationError(f"FallbackModel: after is a number of seconds, 0 or more, not {after!r}")
        self._after = after
        self._models: Sequence[Model] = [resolve_model(model, "FallbackModel") for model in models]
        self._alone = Alone(AccountGates())
        self.name = self._models[0].name
        windows = [
            getattr(model, "context_window", None) or profile(model.name).context_window for model in self._models
        ]
        self.context_window = min([window for window in windows if window is not None], default=None)
        """The smallest window that is known, because each of the models may be asked."""

    def __repr__(self) -> str:
        return f"<fallback {' → '.join(model.name for model in self._models)}>"

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        return self._stream(request, self._alone)

    def stream_for(
        self, request: ModelRequest, caller: Caller, after: float | None = None
    ) -> AsyncIterator[ModelChunk]:
        """Ask for a run, through the gates of its runtime; with `after`, wait for the last model only so many seconds too."""
        return self._stream(request, caller, after)

    async def _stream(
        self, request: ModelRequest, caller: Caller, after: float | None = None
    ) -> AsyncIterator[ModelChunk]:
        for model, following in zip(self._models, (*self._models[1:], None), strict=True):
            seconds, stream_for = after if following is None else self._after, getattr(model, "stream_for", None)
            chunks: Any = model.stream(request) if stream_for is None else stream_for(request, caller, seconds)
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
        await self._alone.gates.close()
        for model in self._models:
            await close_model(model)
