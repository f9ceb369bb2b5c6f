"""A model behind a wire: a request becomes JSON, the events of the answer become chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

from ..core.errors import ModelError, ModelRequestInvalid, ModelResponseInvalid, ModelStreamBroken, ModelTimeout
from ..core.model import CallChunk, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from ..wire.sse import EventDecoder, EventTooLong
from .http import HttpClient

encode_json = msgspec.json.Encoder().encode


class Decoder(Protocol):
    """Reads the events of one answer. The last event sets `done`."""

    done: bool

    def decode(self, data: bytes) -> Sequence[ModelChunk]:
        """Return the chunks of an event; raise a ModelError for an error, a ValueError for unreadable data."""
        ...

    def end(self) -> TurnEnd | None:
        """Return the end of the turn, None if it has not arrived."""
        ...


class Wire(Protocol):
    """The request and response format of a provider."""

    path: str

    def encode(self, request: ModelRequest, model: str) -> dict[str, Any]: ...

    def decoder(self) -> Decoder: ...


class WireModel:
    """A model behind HTTP. It makes one attempt; ResilientModel adds retries."""

    def __init__(self, model: str, wire: Wire, client: HttpClient) -> None:
        self._model, self._wire, self._client = model, wire, client
        self.name = client.endpoint.name

    def __repr__(self) -> str:
        return f"<model {self.name} at {self._client.endpoint.base_url}>"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        body = self._body(request)
        decoder, events = self._wire.decoder(), EventDecoder()
        decode, feed = decoder.decode, events.feed
        answer: Any = self._client.post(self._wire.path, body, lambda: decoder.done)
        now = asyncio.get_running_loop().time
        heard = now()
        try:
            async for piece in answer:
                for data in feed(piece):
                    for chunk in decode(data):
                        yield chunk
                        if not _is_empty(chunk):
                            heard = now()
                if now() - heard > self._client.idle_timeout:  # pings and empty pieces are silence
                    raise ModelTimeout(f"{self._where}: {self._client.silence()}")
            for chunk in _last_chunks(decoder, events):
                yield chunk
        except (ModelStreamBroken, ModelTimeout) as exc:
            # If the end has arrived, the answer is complete and only the close of the stream is missing.
            if self._end_of(decoder) is None:
                raise self._client.endpoint.redact_error(exc) from None
        except ModelError as exc:
            raise self._client.endpoint.redact_error(exc) from None
        except (ValueError, RecursionError) as exc:
            raise self._unreadable(exc) from None
        finally:
            await answer.aclose()
        end = self._end_of(decoder)
        if end is None:
            raise ModelStreamBroken(f"the answer of {self._where} ended before it was complete", self.name)
        yield end

    def _end_of(self, decoder: Decoder) -> TurnEnd | None:
        try:
            return decoder.end()
        except ModelError as exc:
            raise self._client.endpoint.redact_error(exc) from None

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
            raise self._client.endpoint.redact_error(exc) from None
        except (TypeError, ValueError, RecursionError, UnicodeError) as exc:
            raise ModelRequestInvalid(f"the request has no JSON form: {exc}", self.name) from None

    def _unreadable(self, exc: Exception) -> ModelError:
        problem = "is too long" if isinstance(exc, EventTooLong) else "cannot be read"
        return self._client.endpoint.redact_error(
            ModelResponseInvalid(f"{self._where} sent an event that {problem} ({exc})")
        )


def _is_empty(chunk: ModelChunk) -> bool:
    match chunk:
        case TextChunk(text):
            return not text
        case ReasoningChunk(text, signature):
            return not text and signature is None
        case CallChunk():
            return not (chunk.arguments or chunk.name or chunk.id)
        case _:
            return False


def _last_chunks(decoder: Decoder, events: EventDecoder) -> Sequence[ModelChunk]:
    """Return the chunks of a last event without its blank line; half an event is dropped."""
    try:
        return [chunk for data in events.finish() for chunk in decoder.decode(data)]
    except (ValueError, RecursionError):
        return ()
