"""The built-in providers: address, key and wire of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from msgspec import Struct

from ..core.model import Model
from .anthropic import VERSION, AnthropicWire
from .chat import ChatWire
from .endpoint import Endpoint, find_key
from .http import IDLE_TIMEOUT, HttpClient
from .resilience import ResilientModel, RetryPolicy
from .responses import ResponsesWire
from .wire import Wire, WireModel

OPENAI = "https://api.openai.com/v1"


class Provider(Struct, frozen=True, kw_only=True):
    """Address, environment variables and wire of a provider."""

    wire: Callable[[], Wire]
    base_url: str
    url_variable: str
    key_variable: str
    needs_key: bool = True


def _openai_chat() -> Wire:
    return ChatWire("max_completion_tokens")


PROVIDERS: dict[str, Provider] = {
    "openai": Provider(
        wire=ResponsesWire, base_url=OPENAI, url_variable="OPENAI_BASE_URL", key_variable="OPENAI_API_KEY"
    ),
    "openai-chat": Provider(
        wire=_openai_chat, base_url=OPENAI, url_variable="OPENAI_BASE_URL", key_variable="OPENAI_API_KEY"
    ),
    "openai-responses": Provider(
        wire=ResponsesWire, base_url=OPENAI, url_variable="OPENAI_BASE_URL", key_variable="OPENAI_API_KEY"
    ),
    "anthropic": Provider(
        wire=AnthropicWire,
        base_url="https://api.anthropic.com",
        url_variable="ANTHROPIC_BASE_URL",
        key_variable="ANTHROPIC_API_KEY",
    ),
    "openrouter": Provider(
        wire=ChatWire,
        base_url="https://openrouter.ai/api/v1",
        url_variable="OPENROUTER_BASE_URL",
        key_variable="OPENROUTER_API_KEY",
    ),
    "ollama": Provider(
        wire=ChatWire,
        base_url="http://localhost:11434/v1",
        url_variable="OLLAMA_BASE_URL",
        key_variable="OLLAMA_API_KEY",
        needs_key=False,
    ),
    "vllm": Provider(
        wire=ChatWire,
        base_url="http://localhost:8000/v1",
        url_variable="VLLM_BASE_URL",
        key_variable="VLLM_API_KEY",
        needs_key=False,
    ),
    "llamacpp": Provider(
        wire=ChatWire,
        base_url="http://localhost:8080/v1",
        url_variable="LLAMACPP_BASE_URL",
        key_variable="LLAMACPP_API_KEY",
        needs_key=False,
    ),
}


def make_model(
    provider: str,
    model: str,
    *,
    api_key: str | None = None,
    base_url: str | None = None,
    headers: Mapping[str, str] | None = None,
    retry: RetryPolicy | None = None,
    idle_timeout: float = IDLE_TIMEOUT,
) -> Model:
    """Return the model behind "provider:model". This sends nothing."""
    known, name = PROVIDERS[provider], f"{provider}:{model}"
    given_url = base_url or os.environ.get(known.url_variable)
    elsewhere = given_url is not None and given_url.rstrip("/") != known.base_url
    # A server that is not OpenAI's own gets chat completions, which all of them understand, and may need no key.
    wire = ChatWire() if provider == "openai" and elsewhere else known.wire()
    key = find_key(name, api_key, known.key_variable, required=known.needs_key and not elsewhere)
    endpoint = Endpoint(name, given_url or known.base_url, {**_auth(wire, key), **(headers or {})})
    return ResilientModel(WireModel(model, wire, HttpClient(endpoint, idle_timeout)), retry)


def _auth(wire: Wire, key: str | None) -> dict[str, str]:
    made = {"anthropic-version": VERSION} if isinstance(wire, AnthropicWire) else {}
    if key is not None and isinstance(wire, AnthropicWire):
        made["x-api-key"] = key
    elif key is not None:
        made["authorization"] = f"Bearer {key}"
    return made
