"""An endpoint: the address and the key of a model, both kept out of messages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit, urlunsplit

from ..core.errors import ConfigurationError, ModelError
from ..core.secrets import redact, secrets_of, sort_secrets

SHOWN = 500
"""The longest error message in characters; the quoted words of the server come last."""

_KEYLESS = "models of ollama, vllm and llamacpp need no key"


class Endpoint:
    """A base address and the headers of every request. Its repr shows no secret."""

    __slots__ = ("_secrets", "base_url", "headers", "name")

    def __init__(self, name: str, base_url: str, headers: Mapping[str, str]) -> None:
        self.name, self.base_url, self.headers = name, base_url.rstrip("/"), dict(headers)
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{name}: base_url {_without_secrets(base_url)!r} is not an http(s) address")
        if "@" in parts.netloc:
            raise ConfigurationError(
                f"{name}: base_url has a password in it: pass it in headers={{'Authorization': …}}"
            )
        if parts.query or parts.fragment:
            raise ConfigurationError(
                f"{name}: base_url has a '?' or '#' in it: end it before that, and pass a key as api_key=… or in headers"
            )
        for header, value in self.headers.items():
            if not value.isascii() or not value.isprintable():
                raise ConfigurationError(
                    f"{name}: the value of the header {header!r} has characters that cannot be sent"
                )
        self._secrets = secrets_of(self.headers)

    def __repr__(self) -> str:
        return f"<endpoint {self.base_url} of {self.name}>"

    def hide(self, *secrets: str) -> None:
        """Redact these in messages too, URL-quoted or not."""
        self._secrets = sort_secrets([*self._secrets, *secrets])

    def redact_error(self, error: ModelError) -> ModelError:
        """Return the error with the name of this endpoint, without its secrets, and then cut."""
        if error.model == self.name:
            return error
        return type(error)(redact_message(error.message, self._secrets), self.name, error.status, error.retry_after)


def redact_message(text: str, secrets: Iterable[str]) -> str:
    """Return a text for a message: without secrets, then cut."""
    text = redact(text, secrets)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def find_key(name: str, given: str | None, variable: str | None, *, required: bool = True) -> str | None:
    """Return the given key, else the one in the environment; raise an error that names the variable if there is none."""
    if given:
        return given.strip()
    found = os.environ.get(variable, "").strip() if variable else ""
    if found:
        return found
    if required:
        raise ConfigurationError(f"{name} needs a key: set {variable} in the environment or pass api_key=…; {_KEYLESS}")
    return None
