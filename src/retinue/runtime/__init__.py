"""Runtime: takes agents, gives runs."""

from .registry import AgentRegistry
from .run import Run
from .runtime import Runtime

__all__ = ["AgentRegistry", "Run", "Runtime"]
