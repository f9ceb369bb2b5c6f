"""For your tests: a scripted model, a sink that remembers, and suites that an implementation of a port must pass."""

from .model import ScriptedModel, ScriptError, call, fail, say, think
from .sinks import RecordingSink

__all__ = ["RecordingSink", "ScriptError", "ScriptedModel", "call", "fail", "say", "think"]
