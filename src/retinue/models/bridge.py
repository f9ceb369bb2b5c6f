"""The bridge to models of pydantic-ai. The only module that imports pydantic-ai."""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from pydantic_ai import exceptions as errors
from pydantic_ai import messages as theirs
from pydantic_ai.direct import model_request_stream
from pydantic_ai.models import Model as TheirModel
from pydantic_ai.models import ModelRequestParameters, infer_model
from pydantic_ai.providers import infer_provider_class
from pydantic_ai.tools import ToolDefinition

from ..core.content import to_json_text
from ..core.errors import (
    ConfigurationError,
    ContextOverflow,
    ModelAccessDenied,
    ModelError,
    ModelNotFound,
    ModelRateLimited,
    ModelRefused,
    ModelRequestInvalid,
    ModelResponseInvalid,
    ModelStreamBroken,
    ModelTimeout,
    ModelUnavailable,
)
from ..core.messages import DataPart, FilePart, ImagePart, Message, ReasoningPart, ReceiptPart, Role, TextPart
from ..core.model import CallChunk, Model, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from ..core.runs import Usage
from ..core.secrets import sort_secrets
from .http import redact_message
from .profiles import profile
from .refusals import retry_after
from .resilience import ResilientModel, RetryPolicy
from .wire import chosen_tool, rename_settings

SIGNED = "bridge:"
_STOPS = {"stop": "stop", "length": "length", "content_filter": "refusal", "tool_call": "tool_calls"}
_NAMES = {"stop": "stop_sequences", "reasoning_effort": "thinking"}


def bridge(model: Any, retry: RetryPolicy | None = None) -> Model:
    """Wrap a model object of pydantic-ai."""
    kind: type[Any] = TheirModel
    if not isinstance(model, kind):
        raise ConfigurationError(f"bridge_model takes a model of pydantic-ai, not {type(model).__name__}")
    name = f"{model.system}:{model.model_name}"
    return ResilientModel(BridgedModel(model, name), retry, profile(name).context_window)


def make_bridged(
    name: str, retry: RetryPolicy | None = None, context_window: int | None = None, **options: Any
) -> Model | None:
    """Return the pydantic-ai model of a "provider:model" string, None if pydantic-ai does not know the provider either."""
    try:
        infer_provider_class(name.partition(":")[0])
    except ValueError:
        return None
    except ImportError as exc:
        raise ConfigurationError(f"{name} needs a package that is not installed: {exc}") from None
    if options:
        raise ConfigurationError(
            f"{name} is asked through pydantic-ai and takes no {', '.join(options)}: use bridge_model"
        )
    try:
        window = context_window or profile(name).context_window
        return ResilientModel(BridgedModel(infer_model(name), name), retry, window)
    except (errors.UserError, ImportError, ValueError) as exc:
        raise ConfigurationError(f"{name}: {exc}") from None


class BridgedModel:
    """A model of pydantic-ai behind our contract."""

    def __init__(self, model: TheirModel, name: str) -> None:
        self._model, self.name = model, name

    def __repr__(self) -> str:
        return f"<model {self.name} through pydantic-ai>"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        settings: Any = _settings(request)
        reader = _Reader()
        try:
            async with model_request_stream(
                self._model,
                _messages(request.rendered().messages),
                model_settings=settings,
                model_request_parameters=_tools(request),
            ) as stream:
                async for event in stream:
                    for chunk in reader.decode(event):
                        yield chunk
                usage, finish = stream.usage, stream.finish_reason
                # A model without address, as for tests, says no end.
                whole = _is_whole(stream) or self._model.base_url is None
            if not whole:
                raise ModelStreamBroken("the answer ended before it was complete")
            yield reader.end(usage() if callable(usage) else usage, finish)
        except ModelError as exc:
            raise self._told(exc) from None
        except (errors.AgentRunError, errors.UserError) as exc:
            raise self._told(_error(exc)) from None
        except OSError as exc:
            raise self._told(ModelUnavailable(f"the connection failed ({exc})")) from None

    def _told(self, error: ModelError) -> ModelError:
        message = redact_message(error.message, _secrets_of(self._model))
        return type(error)(message, self.name, error.status, error.retry_after)


def _is_whole(stream: Any) -> bool:
    """Return True if the provider said how the answer ended; for OpenAI's wire pydantic-ai may invent a "stop"."""
    finish = stream.finish_reason
    if finish is None or (finish == "stop" and getattr(stream, "_has_finish_reason", True) is False):
        details: dict[str, Any] = stream.provider_details or {}
        return bool(details.get("finish_reason"))
    return True


def _secrets_of(model: Any) -> tuple[str, ...]:
    """Return what must not get into a message: the key of their client and every key in the environment."""
    key: Any = getattr(getattr(model, "client", None), "api_key", None)
    found = [value for name, value in os.environ.items() if name.endswith(("_KEY", "_TOKEN", "_SECRET"))]
    return sort_secrets([*found, key] if isinstance(key, str) else found)


class _Reader:
    """Turns their events into our chunks. Their part indexes become our call indexes."""

    def __init__(self) -> None:
        self._calls = False

    def decode(self, event: Any) -> Sequence[ModelChunk]:
        match event:
            case theirs.PartDeltaEvent(delta=theirs.TextPartDelta(content_delta=text)):
                return (TextChunk(text),)
            case theirs.PartDeltaEvent(delta=theirs.ThinkingPartDelta() as delta):
                return self._thought(delta.content_delta, delta.signature_delta)
            case theirs.PartDeltaEvent(delta=theirs.ToolCallPartDelta() as delta):
                return (CallChunk(event.index, None, delta.tool_name_delta, _arguments(delta.args_delta)),)
            case theirs.PartStartEvent(part=theirs.TextPart(content=text)):
                return (TextChunk(text),) if text else ()
            case theirs.PartStartEvent(part=theirs.ThinkingPart() as part):
                return self._thought(part.content, part.signature)
            case theirs.PartStartEvent(part=theirs.ToolCallPart() as part):
                self._calls = True
                return (CallChunk(event.index, part.tool_call_id, part.tool_name, _arguments(part.args)),)
            case _:
                return ()

    def _thought(self, text: str | None, signature: str | None) -> Sequence[ModelChunk]:
        if not text and not signature:
            return ()
        return (ReasoningChunk(text or "", SIGNED + signature if signature else None),)

    def end(self, usage: Any, finish: str | None) -> TurnEnd:
        if finish == "error":
            raise ModelUnavailable("the provider ended the answer with an error")
        stop = _STOPS.get(finish or "stop", "stop")
        used = Usage(
            requests=1,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cache_read_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            reasoning_tokens=getattr(usage, "output_reasoning_tokens", 0) or usage.details.get("reasoning_tokens", 0),
        )
        return TurnEnd("tool_calls" if stop == "stop" and self._calls else stop, used)


def _arguments(given: Any) -> str:
    if given is None:
        return ""
    return given if isinstance(given, str) else msgspec.json.encode(given).decode()


def _settings(request: ModelRequest) -> dict[str, Any]:
    settings = rename_settings(request.settings, _NAMES)
    settings.pop("cache", None)
    choice = settings.pop("tool_choice", None)
    if request.tools and choice is not None:
        name = chosen_tool(choice)
        settings["tool_choice"] = [name] if name is not None else "required" if choice == "any" else choice
    if isinstance(settings.get("stop_sequences"), str):
        settings["stop_sequences"] = [settings["stop_sequences"]]
    return settings


def _tools(request: ModelRequest) -> Any:
    tools = [
        ToolDefinition(name=tool.name, description=tool.description, parameters_json_schema=tool.parameters)
        for tool in request.tools
    ]
    return ModelRequestParameters(function_tools=tools, allow_text_output=True)


def _messages(messages: Sequence[Message]) -> list[Any]:
    """Return alternating requests and responses, as pydantic-ai wants them."""
    made: list[Any] = []
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    for message in messages:
        if message.role is Role.ASSISTANT:
            made.append(theirs.ModelResponse(parts=_response_parts(message)))
            continue
        parts: list[Any] = _request_parts(message, names)
        if made and isinstance(made[-1], theirs.ModelRequest):
            made[-1] = theirs.ModelRequest(parts=[*made[-1].parts, *parts])
        else:
            made.append(theirs.ModelRequest(parts=parts))
    return made


def _request_parts(message: Message, names: dict[str, str]) -> list[theirs.ModelRequestPart]:
    if message.role is Role.SYSTEM:
        return [theirs.SystemPromptPart(message.text)]
    if message.role is Role.TOOL:
        call_id = message.tool_call_id or ""
        name = names.get(call_id) or message.name or "tool"
        content: Any = _contents(message)
        return [theirs.ToolReturnPart(tool_name=name, content=content, tool_call_id=call_id)]
    return [theirs.UserPromptPart(_contents(message))]


def _contents(message: Message) -> Any:
    made = [_content(part) for part in message.parts if not isinstance(part, ReasoningPart | ReceiptPart)]
    return "".join(made) if all(isinstance(each, str) for each in made) else made


def _content(part: TextPart | ImagePart | FilePart | DataPart) -> Any:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, DataPart):
        return to_json_text(part.data)
    if part.url is not None:
        return theirs.ImageUrl(part.url) if isinstance(part, ImagePart) else theirs.DocumentUrl(part.url)
    try:
        return theirs.BinaryContent(data=b64decode(part.data or "", validate=True), media_type=part.media_type)
    except ValueError:
        raise ModelRequestInvalid("the data of an image or file is not base64") from None


def _response_parts(message: Message) -> list[Any]:
    made: list[Any] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            made.append(theirs.TextPart(part.text))
        elif isinstance(part, ReasoningPart) and (part.signature or SIGNED).startswith(SIGNED):
            made.append(theirs.ThinkingPart(part.text, signature=(part.signature or "").removeprefix(SIGNED) or None))
    for call in message.tool_calls:
        made.append(theirs.ToolCallPart(call.name, call.malformed or call.args, call.id))
    return made


def _error(exc: Exception) -> ModelError:
    kinds: list[tuple[type[Exception], type[ModelError], str]] = [
        (errors.ModelRateLimitError, ModelRateLimited, "too many requests: send fewer at once or raise the limit"),
        (errors.ModelQuotaExceededError, ModelAccessDenied, "the account has no credit left"),
        (errors.ModelTimeoutError, ModelTimeout, "the server was silent for too long"),
        (errors.ModelContextWindowExceededError, ContextOverflow, "the conversation is too long for the model"),
        (errors.ModelAuthenticationError, ModelAccessDenied, "check the key and what it may use"),
        (errors.ModelNotFoundError, ModelNotFound, "check the name of the model"),
        (errors.ModelUnavailableError, ModelUnavailable, "try again later"),
        (errors.ModelServerError, ModelUnavailable, "try again later"),
        (errors.ModelConnectionError, ModelUnavailable, "is the server running?"),
        (errors.ContentFilterError, ModelRefused, "a filter of the provider refused: rephrase"),
        (errors.UnexpectedModelBehavior, ModelResponseInvalid, "what came back cannot be read"),
    ]
    status: Any = getattr(exc, "status_code", None)
    headers: Any = getattr(exc, "headers", None)
    for kind, ours, advice in kinds:
        if isinstance(exc, kind):
            return ours(f"{advice} ({_plain(exc)})", "", status, retry_after(headers) if headers else None)
    return ModelRequestInvalid(f"the provider does not take this request ({_plain(exc)})", "", status)


def _plain(exc: Exception) -> str:
    return " ".join(str(exc).split())
