"""Remote sub-agents: what stands here for an agent that runs elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from ..core.agents import Agent
from ..core.model import ModelChunk, ModelRequest, TextChunk, TurnEnd
from .declarations import check_url


class _Elsewhere:
    """The model of an agent that does not think here."""

    name = "remote"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextChunk("This sub-agent runs on a server: spawn it with agent_spawn, it cannot be run here.")
        yield TurnEnd()


@dataclass(frozen=True, eq=False, slots=True)
class RemoteSubagentStub(Agent):
    """Holds the place of an agent on a server. A child run of it goes there; run here, it only says so."""

    url: str = field(default="", kw_only=True)
    headers: Mapping[str, str] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        check_url(self.url, f"agent {self.name!r}")
        if self.model is None:
            object.__setattr__(self, "model", _Elsewhere())
        Agent.__post_init__(self)
