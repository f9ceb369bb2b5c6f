"""The request of a run as it is stored before the run starts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.concurrency import CancellationToken
from ..core.content import to_json_bytes
from ..core.errors import ConfigurationError, UnknownAgent
from ..core.messages import Message
from ..core.model import ModelChunk, ModelRequest
from ..core.rows import StoredRequest
from ..core.runs import RunIdentity, limits_of_run
from ..core.state import PersistedState


class StoredStart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run that has not begun: its identity, its input and its state."""

    identity: RunIdentity
    request: StoredRequest
    messages: tuple[Message, ...] = ()
    seed: PersistedState = field(default_factory=PersistedState)
    digest: str = ""


decode_start = msgspec.json.Decoder(StoredStart).decode


def encode_start(request: RunRequest, stored: StoredRequest) -> bytes:
    """Encode a run before it starts. `problem` names a part that has no JSON form and is left out."""
    start = StoredStart(
        identity=request.identity,
        request=stored,
        messages=request.messages,
        seed=request.seed,
        digest=request.digest,
    )
    try:
        data = to_json_bytes(start)
        decode_start(data)
        return data
    except Exception as exc:
        problems = (stored.problem, f"its messages or its seed cannot be written as JSON ({exc})")
        stored = replace(stored, problem="; ".join([one for one in problems if one]))
        return to_json_bytes(replace(start, messages=(), seed=PersistedState(), request=stored))


def restored(
    agent: Agent, identity: RunIdentity, stored: StoredRequest, start: StoredStart | None = None
) -> RunRequest:
    """Return the request of a run to start or continue here. Raises if a part of it was not stored."""
    if stored.problem is not None:
        raise ConfigurationError(stored.problem)
    limits = stored.limits
    if start is not None and stored.above is None:  # its client may not have had the agent, whose limits hold too
        limits = limits_of_run(agent.limits, limits, over_network=False)
    return RunRequest(
        agent=agent,
        identity=identity,
        messages=() if start is None else start.messages,
        seed=PersistedState() if start is None else start.seed,
        limits=limits,
        cancellation=CancellationToken(),
        context=stored.context,
        model=stored.model,
        timeout=stored.timeout,
        keeps_thread=stored.keeps_thread,
        above=stored.above,
        wakes=stored.wakes,
        call=stored.call,
    )


class NoModel:
    """The model of a run that calls no model: a placed call, or a run that is only cancelled."""

    name = "none"

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        raise UnknownAgent("of a run without a model")
