"""A model behind a wire: a request becomes JSON, the events of the answer become chunks. And what the wires share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
from msgspec import Struct

from ..core.content import to_json_text
from ..core.errors import ModelRequestInvalid, ModelResponseInvalid, ModelStreamBroken, ModelTimeout
from ..core.messages import DataPart, FilePart, ImagePart, Message, Role, TextPart, ToolCall
from ..core.model import CallChunk, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from ..core.runs import Usage
from ..wire.sse import EventDecoder, EventTooLong
from .http import Heard, HttpClient

Block = dict[str, Any]


def data_url(part: ImagePart | FilePart) -> str:
    """Return the URL of a part, or its data as a data URL."""
    if part.url is not None:
        return part.url
    if part.data is not None:
        return f"data:{part.media_type};base64,{part.data}"
    raise ModelRequestInvalid(f"an {part.__struct_config__.tag} part has neither url nor data")


def blocks_of(
    message: Message, text: Callable[[str], Block], other: Callable[[ImagePart | FilePart], Block]
) -> list[Block]:
    """Return the parts that a provider reads, as its blocks; reasoning is not one of them.

    A part of a tool result that the provider cannot read becomes an error in its place, which model and author see.
    """
    made: list[Block] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            if part.text:
                made.append(text(part.text))
        elif isinstance(part, ImagePart | FilePart):
            try:
                made.append(other(part))
            except ModelRequestInvalid as exc:
                if message.role is not Role.TOOL:
                    raise
                made.append(text(f"[error: this part of the result cannot be shown: {exc}]"))
        elif isinstance(part, DataPart):
            made.append(text(to_json_text(part.data)))
    return made


def is_text_only(message: Message) -> bool:
    return all(isinstance(part, TextPart) for part in message.parts)


def content_of(
    message: Message, text: Callable[[str], Block], other: Callable[[ImagePart | FilePart], Block]
) -> str | list[Block]:
    """Return the text of a message or, if it has more than text, its blocks."""
    return message.text if is_text_only(message) else blocks_of(message, text, other)


def arguments_of(call: ToolCall) -> str:
    """Return the arguments as JSON text. Malformed ones are left out: servers refuse them, and the result quotes them."""
    return msgspec.json.encode(call.args).decode()


def chosen_tool(choice: Any) -> str | None:
    """Return the tool that a `tool_choice` setting names, in our form {"name": …} or that of a provider."""
    if not isinstance(choice, dict):
        return None
    fields = cast("dict[str, Any]", choice)
    function: dict[str, Any] = fields.get("function") or {}
    name = fields.get("name") or function.get("name")
    return name if isinstance(name, str) else None


def rename_settings(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings under the provider's names, without those that are None; unknown ones pass unchanged."""
    return {names.get(name, name): value for name, value in settings.items() if value is not None}


def sent_settings(settings: Mapping[str, Any], left_out: tuple[str, ...], *, has_tools: bool) -> dict[str, Any]:
    """Return the settings that go into a request: those on tools only if there are some."""
    if not has_tools:
        left_out = (*left_out, "tool_choice", "parallel_tool_calls")
    return {name: value for name, value in settings.items() if name not in left_out}


class CountDetails(Struct, gc=False):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


class Counts(Struct, gc=False):
    """The usage of an answer as OpenAI's wires report it: chat completions and Responses name tokens differently."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: CountDetails | None = None
    input_tokens_details: CountDetails | None = None
    completion_tokens_details: CountDetails | None = None
    output_tokens_details: CountDetails | None = None
    cost: float | None = None
    """In dollars; OpenRouter reports it."""

    def total(self) -> Usage:
        read = self.prompt_tokens_details or self.input_tokens_details or CountDetails()
        made = self.completion_tokens_details or self.output_tokens_details or CountDetails()
        return Usage(
            requests=1,
            input_tokens=self.prompt_tokens or self.input_tokens or 0,
            output_tokens=self.completion_tokens or self.output_tokens or 0,
            cached_tokens=read.cached_tokens or 0,
            cache_write_tokens=read.cache_write_tokens or 0,
            reasoning_tokens=made.reasoning_tokens or 0,
            cost=self.cost or 0.0,
        )


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


def _ignore(headers: Mapping[str, str], *, is_accepted: bool) -> None:
    """Learn nothing from the head of a response."""


class WireModel:
    """A model behind HTTP. It makes one attempt; ResilientModel adds retries."""

    def __init__(self, model: str, wire: Wire, client: HttpClient) -> None:
        self._model, self._wire, self._client = model, wire, client
        self.name, self.account = client.endpoint.name, client.endpoint.account

    def __repr__(self) -> str:
        return f"<model {self.name} at {self._client.endpoint.base_url}>"

    async def stream(self, request: ModelRequest, on_head: Heard = _ignore) -> AsyncIterator[ModelChunk]:
        decoder, events = self._wire.decoder(), EventDecoder()
        decode, feed = decoder.decode, events.feed
        now = asyncio.get_running_loop().time
        heard = now()
        with self._client.endpoint.own_errors():
            answer: Any = self._client.post(self._wire.path, self._body(request), lambda: decoder.done, on_head)
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
            except (ModelStreamBroken, ModelTimeout):
                # If the end has arrived, the answer is complete and only the close of the stream is missing.
                if decoder.end() is None:
                    raise
            except (ValueError, RecursionError) as exc:
                problem = "is too long" if isinstance(exc, EventTooLong) else "cannot be read"
                raise ModelResponseInvalid(f"{self._where} sent an event that {problem} ({exc})") from None
            finally:
                await answer.aclose()
            end = decoder.end()
            if end is None:
                raise ModelStreamBroken(f"the answer of {self._where} ended before it was complete")
            yield end

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    @property
    def _where(self) -> str:
        return self._client.endpoint.base_url

    def _body(self, request: ModelRequest) -> bytes:
        try:
            return encode_json(self._wire.encode(request.rendered(), self._model))
        except (TypeError, ValueError, RecursionError, UnicodeError) as exc:
            raise ModelRequestInvalid(f"the request has no JSON form: {exc}") from None


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
