"""Budgets: what a tree of runs may use together."""

from __future__ import annotations

from ..core.journal import Journal
from ..core.runs import Limits, Usage


class Budget:
    """Counts what was used against the limits."""

    __slots__ = ("cost", "deadline", "limits", "started_at", "steps", "tokens")

    def __init__(self, limits: Limits, started_at: float) -> None:
        self.limits, self.started_at = limits, started_at
        self.steps = self.tokens = 0
        self.cost = 0.0
        self.deadline = None if limits.seconds is None else started_at + limits.seconds

    def spend(self, usage: Usage) -> None:
        """Count one model call."""
        self.steps += 1
        self.tokens += usage.tokens
        self.cost += usage.cost

    def exhausted(self, journal: Journal) -> str | None:
        """The name of the first limit that is reached, or None."""
        limits = self.limits
        if limits.steps is not None and self.steps >= limits.steps:
            return "steps"
        if limits.tokens is not None and self.tokens >= limits.tokens:
            return "tokens"
        if limits.cost is not None and self.cost >= limits.cost:
            return "cost"
        if self.deadline is not None and journal.now() >= self.deadline:
            return "seconds"
        return None
