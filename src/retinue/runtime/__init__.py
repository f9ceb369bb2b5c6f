"""Runtime: holds agents and runs them."""

from .registry import AgentRegistry
from .run import Run
from .runtime import Runtime

__all__ = ["AgentRegistry", "Run", "Runtime"]
