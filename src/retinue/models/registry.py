"""Models by "provider:model". Providers are imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..core.errors import ConfigurationError
from ..core.model import Model
from .resilience import RetryPolicy, close_model

_PROVIDERS = {"offline": "retinue.cli.offline"}
"""Modules with a function `make_model(name) -> Model`."""


def open_model(
    name: str,
    *,
    api_key: str | None = None,
    base_url: str | None = None,
    headers: Mapping[str, str] | None = None,
    retry: RetryPolicy | None = None,
    idle_timeout: float | None = None,
    context_window: int | None = None,
) -> Model:
    """Return the model of a "provider:model" string, with its own key, address, headers, retries, idle timeout or window."""
    window: Any = context_window
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigurationError(f"open_model: context_window is a number of tokens, at least 1, not {window!r}")
    given = {"api_key": api_key, "base_url": base_url, "headers": headers, "retry": retry, "idle_timeout": idle_timeout}
    given["context_window"] = context_window
    return _open(name, "open_model", {option: value for option, value in given.items() if value is not None})


def bridge_model(model: Any, retry: RetryPolicy | None = None) -> Model:
    """Wrap a model object of pydantic-ai."""
    if not _has_bridge():
        raise ConfigurationError('models of pydantic-ai need: pip install "retinue[providers]"')
    from .bridge import bridge

    return bridge(model, retry)


def resolve_model(given: str | Model | None, owner: str) -> Model:
    """Return the model an agent names; errors name the owner and the known providers."""
    if given is None:
        raise ConfigurationError(f"{owner} has no model: give Agent(model=…) or run(…, model=…)")
    if not isinstance(given, str):
        return given
    return _open(given, owner, {})


class OpenModels:
    """The models named by strings, each made once: runs share their connections."""

    def __init__(self) -> None:
        self._made: dict[str, Model] = {}

    def resolve(self, given: str | Model | None, owner: str) -> Model:
        """Return the model as `resolve_model` does, made once for each name."""
        if not isinstance(given, str):
            return resolve_model(given, owner)
        model = self._made.get(given)
        if model is None:
            model = self._made[given] = resolve_model(given, owner)
        return model

    async def close(self) -> None:
        """Close the models made here; a model given as an object belongs to its maker."""
        for model in self._made.values():
            await close_model(model)


def _open(given: str, owner: str, options: dict[str, Any]) -> Model:
    provider, colon, name = given.partition(":")
    if not colon or not name:
        raise ConfigurationError(f"{owner}: model {given!r} is not of the form 'provider:model'")
    if provider in _PROVIDERS:
        module: Any = import_module(_PROVIDERS[provider])
        return module.make_model(name)
    from .providers import PROVIDERS, make_model

    if provider in PROVIDERS:
        return _with_owner(owner, make_model, provider, name, **options)
    if _has_bridge():
        from .bridge import make_bridged

        if (model := _with_owner(owner, make_bridged, given, **options)) is not None:
            return model
    known = ", ".join(sorted((*PROVIDERS, *_PROVIDERS)))
    more = ", and those of pydantic-ai" if _has_bridge() else '. For more: pip install "retinue[providers]"'
    raise ConfigurationError(f"{owner}: unknown model provider {provider!r} in {given!r}; known: {known}{more}")


def _has_bridge() -> bool:
    return find_spec("pydantic_ai") is not None


def _with_owner(owner: str, make: Any, *args: Any, **options: Any) -> Any:
    try:
        return make(*args, **options)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{owner}: {exc}") from None
