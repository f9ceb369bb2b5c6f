"""Requests, wishes and replies as they are stored for another process."""

from __future__ import annotations

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.codec import to_json_bytes
from ..core.context import GRACE, CancellationToken
from ..core.errors import ConfigurationError
from ..core.messages import Message
from ..core.rows import StoredRequest
from ..core.runs import RunIdentity
from ..core.state import PersistedState


class StoredStart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run that has not begun: who it is, its input and its state."""

    identity: RunIdentity
    request: StoredRequest
    messages: tuple[Message, ...] = ()
    seed: PersistedState = field(default_factory=PersistedState)


class Refusal(Struct, frozen=True, omit_defaults=True):
    """The reply to a wish: empty where it was granted."""

    refused: str = ""


class CancelWish(Struct, frozen=True, omit_defaults=True):
    """The body of a cancel."""

    reason: str = "cancelled"
    tasks: bool = False
    grace: float = GRACE


_decode = msgspec.json.Decoder(StoredStart).decode


def encode_start(request: RunRequest, stored: StoredRequest) -> bytes:
    """Encode a run before it begins. `problem` names what has no JSON form and is left out."""
    start = StoredStart(identity=request.identity, request=stored, messages=request.messages, seed=request.seed)
    try:
        data = to_json_bytes(start)
        _decode(data)
        return data
    except Exception as exc:
        problem = f"its messages or its seed cannot be written as JSON ({exc})"
        return to_json_bytes(replace(start, messages=(), seed=PersistedState(), request=_with(stored, problem)))


def decode_start(data: bytes) -> StoredStart:
    return _decode(data)


def _with(stored: StoredRequest, problem: str) -> StoredRequest:
    return replace(stored, problem="; ".join([one for one in (stored.problem, problem) if one]))


def restored(
    agent: Agent,
    identity: RunIdentity,
    stored: StoredRequest,
    messages: tuple[Message, ...] = (),
    seed: PersistedState | None = None,
) -> RunRequest:
    """The request of a run that is begun or continued in this process; raises where something of it was not stored."""
    if stored.problem is not None:
        raise ConfigurationError(stored.problem)
    return RunRequest(
        agent=agent,
        identity=identity,
        messages=messages,
        seed=seed or PersistedState(),
        limits=stored.limits,
        cancellation=CancellationToken(),
        context=stored.context,
        model=stored.model,
        timeout=stored.timeout,
    )
