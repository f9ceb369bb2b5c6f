"""From "provider:model" to a model. Providers are imported when they are first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..core.errors import ConfigurationError
from ..core.model import Model

_PROVIDERS = {"offline": "retinue.models.offline"}
"""Modules with a function `make_model(name) -> Model`."""


def resolve_model(given: str | Model | None, owner: str) -> Model:
    """The model an agent names; errors say whose model it is and what is known."""
    if given is None:
        raise ConfigurationError(f"{owner} has no model: give Agent(model=…) or run(…, model=…)")
    if not isinstance(given, str):
        return given
    provider, colon, name = given.partition(":")
    if not colon or not name:
        raise ConfigurationError(f"{owner}: model {given!r} is not of the form 'provider:model'")
    if provider not in _PROVIDERS:
        known = ", ".join(sorted(_PROVIDERS))
        raise ConfigurationError(f"{owner}: unknown model provider {provider!r} in {given!r}; known: {known}")
    module: Any = import_module(_PROVIDERS[provider])
    return module.make_model(name)
