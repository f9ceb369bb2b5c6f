"""Workers and engines, for runs on many machines."""

# fmt: off
from .core.engine import Engine, Leg, LegEnd, LegSlots, Schedule, WorkerInfo
from .core.stores import Placement
from .runtime.worker import Worker

__all__ = ["Engine", "Leg", "LegEnd", "LegSlots", "Placement", "Schedule", "Worker", "WorkerInfo"]
