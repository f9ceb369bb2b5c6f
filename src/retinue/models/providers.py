"""The built-in providers: address, key and wire of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct

from ..core.model import Model
from .anthropic import VERSION, AnthropicWire
from .chat import ChatWire
from .http import IDLE_TIMEOUT, Endpoint, HttpClient, find_key
from .profiles import profile
from .resilience import ResilientModel, RetryPolicy
from .responses import ResponsesWire
from .wire import Wire, WireModel

OPENAI = "https://api.openai.com/v1"


class Provider(Struct, frozen=True):
    """The wire and the address of a provider. Its environment variables are `<prefix>_BASE_URL` and `<prefix>_API_KEY`."""

    wire: Callable[[], Wire]
    base_url: str
    prefix: str
    needs_key: bool = True


PROVIDERS: dict[str, Provider] = {
    "openai": Provider(ResponsesWire, OPENAI, "OPENAI"),
    "openai-chat": Provider(partial(ChatWire, "max_completion_tokens"), OPENAI, "OPENAI"),
    "openai-responses": Provider(ResponsesWire, OPENAI, "OPENAI"),
    "anthropic": Provider(AnthropicWire, "https://api.anthropic.com", "ANTHROPIC"),
    "openrouter": Provider(ChatWire, "https://openrouter.ai/api/v1", "OPENROUTER"),
    "ollama": Provider(ChatWire, "http://localhost:11434/v1", "OLLAMA", needs_key=False),
    "vllm": Provider(ChatWire, "http://localhost:8000/v1", "VLLM", needs_key=False),
    "llamacpp": Provider(ChatWire, "http://localhost:8080/v1", "LLAMACPP", needs_key=False),
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
    context_window: int | None = None,
) -> Model:
    """Return the model behind "provider:model". This sends nothing."""
    known, name = PROVIDERS[provider], f"{provider}:{model}"
    given_url = base_url or os.environ.get(f"{known.prefix}_BASE_URL")
    elsewhere = given_url is not None and given_url.rstrip("/") != known.base_url
    # A server that is not OpenAI's own gets chat completions, which all of them understand, and may need no key.
    wire = ChatWire() if provider == "openai" and elsewhere else known.wire()
    key = find_key(name, api_key, f"{known.prefix}_API_KEY", required=known.needs_key and not elsewhere)
    endpoint = Endpoint(name, given_url or known.base_url, {**_auth(wire, key), **(headers or {})})
    window = context_window or profile(name).context_window
    return ResilientModel(WireModel(model, wire, HttpClient(endpoint, idle_timeout)), retry, window)


def _auth(wire: Wire, key: str | None) -> dict[str, str]:
    if isinstance(wire, AnthropicWire):
        return {"anthropic-version": VERSION} | ({} if key is None else {"x-api-key": key})
    return {} if key is None else {"authorization": f"Bearer {key}"}
