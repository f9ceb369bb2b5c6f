"""A model behind a wire: a request becomes JSON, the events of the answer become chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

from ..core.errors import ModelError
from ..core.failures import ModelRequestInvalid, ModelResponseInvalid, ModelStreamBroken, ModelTimeout
from ..core.model import ModelChunk, ModelRequest, TurnEnd
from .http import HttpClient
from .sse import EventDecoder, EventTooLong

encode_json = msgspec.json.Encoder().encode


class Decoder(Protocol):
    """Reads the events of one answer. `done` is set by the event after which nothing follows."""

    done: bool

    def take(self, data: bytes) -> Sequence[ModelChunk]:
        """The chunks an event makes; raises a ModelError for an error, a ValueError for what it cannot read."""
        ...

    def end(self) -> TurnEnd | None:
        """How the turn ended; None where its end has not come."""
        ...


class Wire(Protocol):
    """One provider's way to ask and to answer."""

    path: str

    def encode(self, request: ModelRequest, model: str) -> dict[str, Any]: ...

    def decoder(self) -> Decoder: ...


class WireModel:
    """A model that is asked over HTTP. It tries once: who wants more wraps it in a ResilientModel."""

    def __init__(self, model: str, wire: Wire, client: HttpClient) -> None:
        self._model, self._wire, self._client = model, wire, client
        self.name = client.endpoint.name

    def __repr__(self) -> str:
        return f"<model {self.name} at {self._client.endpoint.base_url}>"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        body = self._body(request)
        decoder, events = self._wire.decoder(), EventDecoder()
        take, feed = decoder.take, events.feed
        answer: Any = self._client.post(self._wire.path, body, lambda: decoder.done)
        try:
            async for piece in answer:
                for data in feed(piece):
                    for chunk in take(data):
                        yield chunk
            for chunk in _last_chunks(decoder, events):
                yield chunk
        except (ModelStreamBroken, ModelTimeout) as exc:
            # Where the end has been said, the answer is whole, and only what closes the stream is missing.
            if self._end_of(decoder) is None:
                raise self._client.endpoint.own(exc) from None
        except ModelError as exc:
            raise self._client.endpoint.own(exc) from None
        except EventTooLong as exc:
            raise ModelResponseInvalid(f"{self._where} sent a line without end ({exc})", self.name) from None
        except ValueError as exc:
            raise self._unreadable(exc) from None
        finally:
            await answer.aclose()
        end = self._end_of(decoder)
        if end is None:
            raise ModelStreamBroken(f"the answer of {self._where} ended before its end", self.name)
        yield end

    def _end_of(self, decoder: Decoder) -> TurnEnd | None:
        try:
            return decoder.end()
        except ModelError as exc:
            raise self._client.endpoint.own(exc) from None

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    @property
    def _where(self) -> str:
        return self._client.endpoint.base_url

    def _body(self, request: ModelRequest) -> bytes:
        try:
            return encode_json(self._wire.encode(request, self._model))
        except ModelError as exc:
            raise self._client.endpoint.own(exc) from None
        except (TypeError, ValueError, RecursionError, UnicodeError) as exc:
            raise ModelRequestInvalid(f"the request has no JSON form: {exc}", self.name) from None

    def _unreadable(self, exc: Exception) -> ModelError:
        return self._client.endpoint.own(
            ModelResponseInvalid(f"{self._where} sent an event that cannot be read ({exc})")
        )


def _last_chunks(decoder: Decoder, events: EventDecoder) -> Sequence[ModelChunk]:
    """What the end of the stream has cut: half an event is none."""
    try:
        return [chunk for data in events.finish() for chunk in decoder.take(data)]
    except ValueError:
        return ()
