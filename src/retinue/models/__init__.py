"""Language models by name, the contract of a model, retries, fallbacks and prices."""

# fmt: off
from ..core.gate import Rate
from ..core.model import (
    CallChunk, Model, ModelChunk, ModelRequest, PartChunk, ReasoningChunk, Retrying, TextChunk, TurnEnd,
)
from .fallback import FallbackModel
from .prices import prices
from .profiles import ModelProfile, profile
from .registry import bridge_model, open_model
from .resilience import RetryPolicy

__all__ = [
    "CallChunk", "FallbackModel", "Model", "ModelChunk", "ModelProfile", "ModelRequest", "PartChunk", "Rate", "ReasoningChunk", "RetryPolicy",
    "Retrying", "TextChunk", "TurnEnd", "bridge_model", "open_model", "prices", "profile",
]
