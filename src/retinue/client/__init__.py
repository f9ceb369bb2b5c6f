"""Run agents on a server: `Client(url, token=…)` has the methods of a `Runtime`, and its handles those of a `Run`."""

from .client import AgentInfo, Client

__all__ = ["AgentInfo", "Client"]
