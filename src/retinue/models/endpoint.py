"""An endpoint: where a model is asked, with which key, and how neither gets into a message."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from ..core.errors import ConfigurationError

_SECRET_HEADER = re.compile(r"auth|key|token|cookie|secret", re.I)


class Endpoint:
    """A base address and the headers every request carries. Its repr shows no secret."""

    __slots__ = ("_secrets", "base_url", "headers", "name")

    def __init__(self, name: str, base_url: str, headers: Mapping[str, str]) -> None:
        self.name, self.base_url, self.headers = name, base_url.rstrip("/"), dict(headers)
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{name}: base_url {_without_password(base_url)!r} is not an http(s) address")
        if "@" in parts.netloc:
            raise ConfigurationError(
                f"{name}: base_url has a password in it: pass it in headers={{'Authorization': …}}"
            )
        for header, value in self.headers.items():
            if not value.isascii() or not value.isprintable():
                raise ConfigurationError(
                    f"{name}: the value of the header {header!r} has characters that cannot be sent"
                )
        self._secrets = _secrets_of(self.headers)

    def __repr__(self) -> str:
        return f"<endpoint {self.base_url} of {self.name}>"

    def redact(self, text: str) -> str:
        """The text without any secret of this endpoint."""
        for secret in self._secrets:
            text = text.replace(secret, "[redacted]")
        return text


def _secrets_of(headers: Mapping[str, str]) -> tuple[str, ...]:
    found: set[str] = set()
    for header, value in headers.items():
        if _SECRET_HEADER.search(header):
            found |= {value, value.removeprefix("Bearer ")}
    return tuple(sorted((secret for secret in found if len(secret) > 3), key=len, reverse=True))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def find_key(name: str, given: str | None, variable: str | None, *, required: bool = True) -> str | None:
    """The key that was passed, else the one in the environment; a missing one is an error that names the variable."""
    if given:
        return given.strip()
    found = os.environ.get(variable, "").strip() if variable else ""
    if found:
        return found
    if required:
        raise ConfigurationError(f"{name} needs a key: set {variable} in the environment or pass api_key=…")
    return None
