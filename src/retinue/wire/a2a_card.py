"""The A2A card of an agent, as JSON. Pure."""

from __future__ import annotations

from typing import Any

from ..core.agents import Agent
from .a2a_budget import EXTENSION

INPUT_MODES = (
    "text/plain", "application/json", "application/pdf", "image/png", "image/jpeg", "image/gif", "image/webp"
)  # fmt: skip
OUTPUT_MODES = ("text/plain", "application/json")


def card_json(agent: Agent, url: str, version: str, *, grpc: str | None = None, secured: bool = True) -> dict[str, Any]:
    """Return the card of an agent that is served at `url`, and at the address `grpc` if given.

    `secured`: it asks for a token.
    """
    bindings = [("JSONRPC", "1.0"), ("HTTP+JSON", "1.0"), ("JSONRPC", "0.3"), ("HTTP+JSON", "0.3")]
    interfaces = [{"url": url, "protocolBinding": binding, "protocolVersion": of} for binding, of in bindings]
    if grpc is not None:
        more = {"url": grpc, "protocolBinding": "GRPC", "protocolVersion": "1.0", "tenant": agent.name}
        interfaces.insert(2, more)
    card: dict[str, Any] = {
        "name": agent.name,
        "description": agent.description or f"The agent {agent.name}.",
        "version": version,
        "supportedInterfaces": interfaces,
        "capabilities": {
            "streaming": True,
            "pushNotifications": True,
            "extendedAgentCard": True,
            "extensions": [EXTENSION],
        },
        "defaultInputModes": list(INPUT_MODES),
        "defaultOutputModes": list(OUTPUT_MODES),
        "skills": _skills(agent),
    }
    if secured:
        card["securitySchemes"] = {
            "bearer": {"httpAuthSecurityScheme": {"scheme": "Bearer"}},
            "key": {"apiKeySecurityScheme": {"location": "header", "name": "x-api-key"}},
        }
        card["securityRequirements"] = [{"schemes": {name: {"list": []}}} for name in ("bearer", "key")]
    return card


def _skills(agent: Agent) -> list[dict[str, Any]]:
    """The agent itself, its sub-agents and its tools."""
    found = [(agent.name, agent.description, "agent")]
    for child in (*agent.subagents, *agent.handoffs):
        name, description = (child, "") if isinstance(child, str) else (child.name, child.description)
        found.append((name, description, "sub-agent"))
    found += [(name, tool.descriptor.description, "tool") for name, tool in agent.toolbox.items()]
    skills: dict[str, dict[str, Any]] = {}
    for name, description, tag in found:
        skills.setdefault(name, {"id": name, "name": name, "description": description or name, "tags": [tag]})
    return list(skills.values())
