"""Backends: the port that executes a run, here or elsewhere, and its capabilities."""

# fmt: off
from ..core.backend import Backend, BackendProfile, ExecutionPlan, Resolver, RunRequest

__all__ = [
    "Backend", "BackendProfile", "ExecutionPlan", "Resolver", "RunRequest",
]
