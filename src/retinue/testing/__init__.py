"""The test kit: a scripted model, a recording sink, and a conformance suite for each port."""

# fmt: off
from .backends import BackendHarness, BackendSuite, example_work
from .durable import DurableStoreSuite
from .filesystems import FilesystemSuite
from .model import RecordingSink, ScriptedModel, ScriptedTurn, ScriptError, call, fail, say, think
from .models import MODEL_CHECKS, HeardTurn, KnownCall, KnownTurn, ModelCheck, ModelHarness, hear
from .stores import StoreSuite
from .tasks import TaskRepositorySuite

__all__ = [
    "BackendHarness", "BackendSuite", "DurableStoreSuite", "FilesystemSuite", "HeardTurn", "KnownCall", "KnownTurn",
    "MODEL_CHECKS", "ModelCheck", "ModelHarness", "RecordingSink", "ScriptError", "ScriptedModel", "ScriptedTurn",
    "StoreSuite", "TaskRepositorySuite", "call", "example_work", "fail", "hear", "say", "think",
]
