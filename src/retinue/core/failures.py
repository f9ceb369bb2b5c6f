"""Failures of models, each with its own code.

ModelError
├── ModelAccessDenied         the key is wrong or may not use this model
├── ModelNotFound             the server does not have this model, or is not where we asked
├── ModelRequestInvalid       the server does not take the request
│   └── ContextOverflow       the conversation is longer than the model can read
├── ModelRateLimited          too many requests; `retry_after` where the server said how long
├── ModelUnavailable          no connection, overloaded, or a fault of the server
│   ├── ModelTimeout          it was silent for too long
│   └── CircuitOpen           it failed so often that it is left alone for a while
├── ModelStreamBroken         the answer ended before its end
├── ModelResponseInvalid      what came back is not an answer: HTML, broken JSON, a line without end
├── ModelRefused              the model or its provider declines to answer
└── OutputTruncated           the answer reached the limit on its length
"""

from __future__ import annotations

from typing import ClassVar

from .errors import ModelError


class ModelAccessDenied(ModelError):
    """The key is wrong, or it may not use this model."""

    code: ClassVar[str] = "access_denied"


class ModelNotFound(ModelError):
    """The server does not have this model, or it is not the server that was meant."""

    code: ClassVar[str] = "model_not_found"


class ModelRequestInvalid(ModelError):
    """The server does not take the request; asking again would not help."""

    code: ClassVar[str] = "request_invalid"


class ContextOverflow(ModelRequestInvalid):
    """The conversation is longer than the model can read."""

    code: ClassVar[str] = "context_overflow"


class ModelRateLimited(ModelError):
    """Too many requests; `retry_after` is how many seconds the server wants to be left alone, where it said so."""

    code: ClassVar[str] = "rate_limited"
    retryable: ClassVar[bool] = True


class ModelUnavailable(ModelError):
    """No connection, an overloaded server, or a fault of its own."""

    code: ClassVar[str] = "unavailable"
    retryable: ClassVar[bool] = True


class ModelTimeout(ModelUnavailable):
    """The server was silent for longer than it may be."""

    code: ClassVar[str] = "timeout"


class CircuitOpen(ModelUnavailable):
    """The model failed so often in a row that it is left alone for a while; it was not asked."""

    code: ClassVar[str] = "circuit_open"
    retryable: ClassVar[bool] = False


class ModelStreamBroken(ModelError):
    """The answer ended before its end."""

    code: ClassVar[str] = "stream_broken"
    retryable: ClassVar[bool] = True


class ModelResponseInvalid(ModelError):
    """The response is not an answer."""

    code: ClassVar[str] = "response_invalid"


class ModelRefused(ModelError):
    """The model, or a filter of its provider, declines to answer."""

    code: ClassVar[str] = "refused"


class OutputTruncated(ModelError):
    """The answer reached the limit on its length; what there is of it is kept."""

    code: ClassVar[str] = "output_truncated"
