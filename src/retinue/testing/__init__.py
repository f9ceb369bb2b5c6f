"""For your tests: a model that says what it is told, a sink that remembers, and what a port's implementation must do."""

from .model import ScriptedModel, ScriptError, call, fail, say, think
from .sinks import RecordingSink
from .tasks import TaskRepositorySuite

__all__ = ["RecordingSink", "ScriptError", "ScriptedModel", "TaskRepositorySuite", "call", "fail", "say", "think"]
