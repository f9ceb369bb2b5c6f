"""For your tests: a model that says what it is told, a sink that remembers, and what a port's implementation must do."""

from .durable import DurableStoreSuite
from .filesystems import FilesystemSuite
from .model import ScriptedModel, ScriptError, call, fail, say, think
from .models import MODEL_CHECKS, HeardTurn, KnownCall, KnownTurn, ModelCheck, ModelHarness, hear
from .sinks import RecordingSink
from .stores import StoreSuite
from .tasks import TaskRepositorySuite

__all__ = [
    "DurableStoreSuite",
    "FilesystemSuite",
    "HeardTurn",
    "KnownCall",
    "KnownTurn",
    "MODEL_CHECKS",
    "ModelCheck",
    "ModelHarness",
    "RecordingSink",
    "ScriptError",
    "ScriptedModel",
    "StoreSuite",
    "TaskRepositorySuite",
    "call",
    "fail",
    "hear",
    "say",
    "think",
]
