"""A sink that keeps its events."""

from __future__ import annotations

from typing import Any

from ..core.events import Event


class RecordingSink:
    """Keeps every event it receives, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def of(self, *kinds: str) -> list[Any]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.kind in kinds]
