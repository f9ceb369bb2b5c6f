"""For your tests: a model that says what it is told, and a sink that remembers."""

from .model import ScriptedModel, ScriptError, call, fail, say, think
from .sinks import RecordingSink

__all__ = ["RecordingSink", "ScriptError", "ScriptedModel", "call", "fail", "say", "think"]
